"""`calibadv serve` over HTTP: OpenAI's client, refusals, limits, people at once, forged text."""

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import pytest
from packages import need

need("openai", "starlette", "uvicorn")

import openai  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from serving_rig import FORGED, MODEL, SCRIPTS, SEARCH, Shelf, served  # noqa: E402

from calibadv_jax.config import load_config  # noqa: E402
from calibadv_jax.contrib.cli import serve  # noqa: E402
from calibadv_jax.contrib.serving.examples import example_questions  # noqa: E402
from calibadv_jax.core.errors import EnvironmentFailure, RequestFailed, UserError  # noqa: E402
from calibadv_jax.services.retriever_client import RetrieverClient  # noqa: E402


@pytest.fixture
def agent():
    with served() as agent:
        yield agent


def as_role(content, role="user"):
    return {"role": role, "content": content}


def client_of(agent, key="none"):
    return openai.OpenAI(base_url=f"{agent.url}/v1", api_key=key, max_retries=0, timeout=250)


def ask(agent, question="who wrote it?", key="none", **more):
    fields = {"model": MODEL, "messages": [as_role(question)]} | more
    return client_of(agent, key).chat.completions.create(**fields)


def post(agent, **fields):
    body = {"model": MODEL, "messages": [as_role("who?")]} | fields
    return httpx.post(f"{agent.url}/v1/chat/completions", json=body, timeout=250)


def wait_until(condition):
    while not condition():  # bounded by pytest's limit
        time.sleep(0.01)


def test_answer_comes_with_thoughts_documents_and_usage(agent):
    neutral = {"n": 1, "tools": [], "response_format": {"type": "text"}}
    reply = ask(agent, extra_body=neutral | {"user": "me", "stop": None})
    message = reply.choices[0].message
    assert (message.content, message.refusal, reply.choices[0].finish_reason) == ("Ann", None, "stop")
    assert message.reasoning_content.startswith("look for Ann\n\nsearch: who\n\n[1] Ann: Ann wrote it.")
    assert [text["holds_answer"] for text in reply.calibadv["documents"]] == [True, False]
    assert reply.calibadv["ignored"] == ["user"]
    (first, _), (second, _) = agent.sampler.sampled
    answer = SCRIPTS[""][-1]
    written, usage = len(SEARCH + answer), reply.usage
    assert (usage.completion_tokens, usage.total_tokens) == (written, len(second + answer))
    assert usage.prompt_tokens == usage.total_tokens - written > len(first)
    assert [model.id for model in client_of(agent).models.list()] == [MODEL] == [reply.model]


def test_stream_gives_turns_then_answer_then_usage(agent):
    chunks = list(ask(agent, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    assert [delta.content for delta in deltas if delta.content] == ["Ann"]
    reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    whole = ask(agent)
    assert reasoning.strip() == whole.choices[0].message.reasoning_content
    turns = [chunk.calibadv["turn"] for chunk in chunks if "turn" in getattr(chunk, "calibadv", {})]
    assert [("thought" in turn, "documents" in turn) for turn in turns] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    end, usage = chunks[-2:]
    assert end.choices[0].finish_reason == "stop" and not usage.choices
    assert end.calibadv["documents"] == whole.calibadv["documents"] and usage.usage == whole.usage


def test_missing_answer_is_refusal_with_reason(agent):
    reasons = {"rambling?": "neither searches nor answers", "endless?": "its last search had no turn"}
    for question, reason in reasons.items():
        message = ask(agent, question).choices[0].message
        assert message.content == "" and message.refusal.startswith("no answer: ")
        assert reason in message.refusal
        deltas = [chunk.choices[0].delta for chunk in ask(agent, question, stream=True)]
        assert "".join(delta.refusal or "" for delta in deltas) == message.refusal


def test_messages_and_sampling_parameters_reach_the_sampler(agent):
    parts = [{"type": "text", "text": "who"}, {"type": "text", "text": "wrote it?"}]
    messages = [as_role("Be rude.", "system"), as_role(parts)]
    reply = ask(agent, messages=messages, temperature=1, top_p=0.5, seed=3, max_tokens=60)
    assert reply.calibadv["ignored"] == ["system message"]
    ask(agent, temperature=1, seed=4, max_completion_tokens=9999)
    ask(agent)
    assert agent.sampler.sampled[0][0] == "Question: who\nwrote it?\n"
    first, other, plain = (sampled[1] for sampled in agent.sampler.sampled[::2])
    assert (first.temperature, first.top_p, first.max_tokens) == (1.0, 0.5, 60) and first.seed != other.seed
    assert (other.max_tokens, plain.max_tokens, plain.temperature) == (500, 500, 0.0)


USER = as_role("who?")
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
ANSWERED = as_role("Ann", "assistant")
CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "Ann"}
TOOL = {"type": "function", "function": {"name": "search", "parameters": {}}}
FOREIGN = {"type": "function", "function": {"name": "fly", "parameters": {}}}
REFUSED = [  # fields of the request, the field that the message names, words of it
    ({"messages": [USER, ANSWERED]}, "messages.1", "must be the user's question"),
    ({"messages": [USER, CALLING, RESULT]}, "messages.2", "results of tools are not taken"),
    ({"messages": [as_role("Be brief.", "system")]}, "messages", "no question; send one user message"),
    ({"messages": []}, "messages", "at least 1 message"),
    ({"messages": None}, "messages", "at least 1 message"),
    ({"messages": "who?"}, "messages", "must be a list"),
    ({"messages": ["who?"]}, "messages.0", "must be an object with the role"),
    ({"messages": [as_role("who?", "wizard")]}, "messages.0", "must be an object with the role"),
    ({"messages": [as_role(" \x1b ")]}, "messages.0.content", "empty"),
    ({"messages": [as_role(None)]}, "messages.0.content", "is null or missing"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "is null or missing"),
    ({"messages": [as_role(5)]}, "messages.0.content", "must be a string, or a list of parts"),
    ({"messages": [as_role("who " * 99)]}, "", "max_prompt_length"),
    (
        {"messages": [as_role([PICTURE])]},
        "messages.0.content.0",
        "'image_url' is not read: the agent reads text",
    ),
    ({"messages": [as_role([{"type": "text"}])]}, "messages.0.content.0.text", "must be a string"),
    ({"n": 2}, "n", "must be 1"),
    ({"n": True}, "n", "must be 1"),
    ({"tools": [FOREIGN]}, "tools", "uses its own tools (search), and cannot call those of a request"),
    ({"tools": [FOREIGN], "tool_choice": "auto"}, "tools", 'set tool_choice to "none"'),
    ({"tools": None, "functions": [{"name": "f"}]}, "functions", "uses its own tools"),
    ({"tools": {}}, "tools", "must be a list"),
    ({"response_format": {"type": "json_object"}}, "response_format", "answers in plain text"),
    ({"temperature": "hot"}, "temperature", "must be a number from 0 to 2"),
    ({"temperature": 3}, "temperature", "must be a number from 0 to 2"),
    ({"temperature": 10**400}, "temperature", "must be a number from 0 to 2"),
    ({"top_p": 0}, "top_p", "above 0, up to 1"),
    ({"seed": 2**63}, "seed", "64 bits"),
    ({"seed": 0.5}, "seed", "64 bits"),
    ({"max_tokens": 0}, "max_tokens", "greater than 0"),
    ({"max_tokens": -1, "max_completion_tokens": 3}, "max_tokens", "greater than 0"),
    ({"max_completion_tokens": "3"}, "max_completion_tokens", "whole number"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": True}, "stream_options", "object"),
    ({"model": None}, "model", "missing; it is 'tiny/policy'"),
]


def test_request_that_is_no_single_question_is_refused(agent):
    for fields, place, words in REFUSED:
        reply = post(agent, **fields)
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith(place) and words in error["message"]
        assert "\n" not in error["message"] and not agent.sampler.sampled


CHAT, JSON = "/v1/chat/completions", {"Content-Type": "application/json"}
RUBBISH = [  # status, method, path, headers, body
    (400, "POST", CHAT, JSON, b"{"),
    (400, "POST", CHAT, JSON, b"[" * 100_000),
    (400, "POST", CHAT, JSON, b'{"model":"\xff"}'),
    (404, "POST", CHAT, JSON, b'{"model": "gpt", "messages": [{"role": "user", "content": "who?"}]}'),
    (413, "POST", CHAT, JSON, b"x" * 2**18 + b"x"),
    (415, "POST", CHAT, {"Content-Type": "text/plain"}, b"{}"),  # a page elsewhere can send it
    (405, "GET", CHAT, {}, b""),
    (404, "GET", "/v1/embeddings", {}, b""),
    (403, "GET", "/", {"Host": "evil.example"}, b""),
    (403, "GET", "/v1/models", {"Host": "localhost.evil.example:80"}, b""),
    (403, "GET", "/v1/models", {"Origin": "http://evil.example"}, b""),
    (403, "POST", CHAT, JSON | {"Origin": "null"}, b"{}"),
]


def test_rubbish_is_refused_in_openais_form(agent):
    for status, method, path, headers, body in RUBBISH:
        reply = httpx.request(method, agent.url + path, headers=headers, content=body)
        assert reply.status_code == status, (path, headers, body[:50])
        assert {*reply.json()["error"]} == {"message", "type"}
    with socket.create_connection(agent.url.removeprefix("http://").split(":")) as rubbish:
        rubbish.sendall(b"\x00\xff GARBAGE\r\n\r\n")  # beside HTTP
        assert b"400" in rubbish.recv(1000)
    assert ask(agent).choices[0].message.content == "Ann"


@pytest.mark.parametrize(
    ("fields", "length", "name"),
    [
        ({"max_completion_tokens": None, "max_tokens": 3}, 3, "max_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": None}, 3, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 60}, 3, "max_completion_tokens"),
        ({"max_tokens": 3.0}, 3, "max_tokens"),
        ({"max_completion_tokens": None, "max_tokens": None}, 500, ""),
    ],
)
def test_null_counts_as_absent(agent, fields, length, name):
    """As clients send that serialise all their fields."""
    nulls = dict.fromkeys(
        ("stream", "temperature", "top_p", "n", "tools", "functions", "stream_options", "seed")
    )
    agent.sampler.cuts = True
    reply = post(agent, **nulls, **fields).json()
    assert agent.sampler.sampled[0][1].max_tokens == length
    assert reply["calibadv"]["ignored"] == []
    choice = reply["choices"][0]
    if name:
        assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 3)
        reason = f"no answer: its last turn was cut at {name}=3 of the request: raise it, or leave it out"
        assert choice["message"]["refusal"] == reason
    else:
        assert choice["message"]["content"] == "Ann"


def test_earlier_messages_are_context_of_the_question(agent):
    """Chat clients send the whole conversation with each question."""
    earlier = [as_role("who wrote it?"), as_role("<think>hm</think>Ann", "assistant")]
    reply = ask(agent, messages=[as_role("Be brief.", "system"), *earlier, as_role("where?")])
    prompt = agent.sampler.sampled[0][0]
    text = "Conversation so far:\nUser: who wrote it?\nAssistant: Ann\n\nQuestion: where?"
    assert prompt == f"Question: {text}\n"
    assert reply.calibadv["question"] == text.replace("\n", " ").replace("  ", " ")
    assert reply.calibadv["ignored"] == ["system message"]


def test_earlier_messages_without_room_are_left_out(agent):
    long, short = as_role("w" * 70), as_role("who wrote it?")
    reply = ask(agent, messages=[long, ANSWERED, short, ANSWERED, as_role("where?")])
    assert "User: who" in agent.sampler.sampled[0][0] and "www" not in agent.sampler.sampled[0][0]
    assert reply.calibadv["ignored"] == ["earlier message"]
    reply = ask(agent, messages=[long, ANSWERED, as_role("where is it? " * 6)])
    assert agent.sampler.sampled[-1][0].startswith("Question: where is it? where")
    assert reply.calibadv["ignored"] == ["earlier message"] * 2


def test_earlier_messages_without_text_are_named(agent):
    """Pictures, calls of tools and their results; the question itself is answered."""
    picture = as_role([PICTURE, {"type": "text", "text": "what is it?"}])
    messages = [picture, as_role(None, "assistant"), as_role([PICTURE]), CALLING, RESULT, as_role(["where?"])]
    reply = post(agent, messages=messages, tools=[TOOL], tool_choice="none").json()
    assert "User: what is it?\n\nQuestion: where?" in agent.sampler.sampled[0][0]
    ignored = ["assistant message", "user message", "assistant message", "tool message"]
    assert reply["calibadv"]["ignored"] == [*ignored, "tools", "tool_choice"]


def test_model_is_found_by_its_name(agent):
    models = client_of(agent).models
    assert models.retrieve(MODEL).id == MODEL
    assert httpx.get(f"{agent.url}/v1/models/tiny%2Fpolicy").json()["object"] == "model"
    with pytest.raises(openai.NotFoundError, match="there is 'tiny/policy' only"):
        models.retrieve("gpt")


def test_examples_are_given_to_those_with_the_token():
    with served(token="secret-1") as agent:
        agent.service.examples = ["who wrote it?"]
        assert httpx.get(f"{agent.url}/v1/examples").status_code == 401
        header = {"Authorization": "Bearer secret-1"}
        assert httpx.get(f"{agent.url}/v1/examples", headers=header).json()["data"] == ["who wrote it?"]


def write_kept_step(run, step, rows):
    path = run / "rollouts" / f"step_{step}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"question": [row[0] for row in rows], "answer_score": [row[1] for row in rows]})
    pq.write_table(table.replace_schema_metadata({"schema_version": "1"}), path)
    return path


def test_examples_are_the_best_questions_of_the_newest_kept_step(tmp_path):
    run = tmp_path / "run"
    write_kept_step(run, 3, [("old?", 1.0)])
    rows = [("never\x1b[2J?", 0.0), ("half?", 1.0), ("half?", 0.0), ("always?", 1.0), ("w" * 141, 1.0)]
    rows += [("failed?", None), ("often?", 0.75), ("seldom?", 0.25)]
    path = write_kept_step(run, 12, rows)
    expected = ["always?", "often?", "half?", "seldom?"]
    for folder in (run, run / "checkpoints", run / "checkpoints" / "12"):
        folder.mkdir(exist_ok=True)
        assert example_questions(folder) == expected
    assert example_questions(tmp_path) == []
    path.write_bytes(b"PAR1")
    with pytest.raises(UserError, match="step_12.parquet: cannot be read"):
        example_questions(run)


def test_completions_answer_a_prompt(agent):
    completions = client_of(agent).completions
    whole = completions.create(model=MODEL, prompt="who wrote it?", max_tokens=60, seed=3)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Ann", "stop")
    assert whole.object == "text_completion" and whole.id.startswith("cmpl-")
    assert agent.sampler.sampled[0][0] == "Question: who wrote it?\n"
    assert agent.sampler.sampled[0][1].max_tokens == 60
    usage = {"include_usage": True}
    chunks = list(completions.create(model=MODEL, prompt=["who?"], stream=True, stream_options=usage))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Ann"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens
    missing = completions.create(model=MODEL, prompt="rambling?")
    assert missing.choices[0].text == "" and missing.choices[0].refusal.startswith("no answer: ")
    for prompt in (None, [], ["a", "b"], [1, 2], [[1, 2]], {}, " "):
        body = {"model": MODEL, "prompt": prompt}
        reply = httpx.post(f"{agent.url}/v1/completions", json=body)
        assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("prompt: ")


def test_large_body_is_read_to_its_end(agent):
    """A client that sends 20 MB before it reads gets the reply, not a broken connection."""
    reply = post(agent, messages=[as_role("w" * 20_000_000)])
    assert reply.status_code == 413
    assert f"but at most {2**18} are taken" in reply.json()["error"]["message"]
    parts = (b"x" * 2**16 for _ in range(50))  # without a length
    assert httpx.post(agent.url + CHAT, headers=JSON, content=parts).status_code == 413


def connected(agent, sent=b""):
    connection = socket.create_connection(("127.0.0.1", int(agent.url.rpartition(":")[2])), timeout=250)
    connection.sendall(sent)
    return connection


def test_health_says_that_the_retriever_is_away(agent):
    reasons = ["", "connection refused"]

    async def fault():
        return reasons[-1]

    agent.service.retriever_fault = fault
    reply = httpx.get(f"{agent.url}/health")
    assert (reply.status_code, reply.json()["status"]) == (503, "the retriever does not answer")
    assert reply.json()["retriever"] == "connection refused" and reply.json()["model"] == MODEL
    reasons.pop()
    reply = httpx.get(f"{agent.url}/health")
    assert (reply.status_code, reply.json()["status"]) == (200, "ready")


def test_health_asks_the_configured_retriever_alone():
    """A config without searches, and a retriever that is no service, are never away."""
    unused = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    unused.close()
    searching = load_config([], [f"retriever.url={url}"])
    without = load_config([], ["tools=[examples.own_tool:Calculator]"])

    async def reason(config, retriever):
        context = SimpleNamespace(retriever=retriever)
        check = serve._retriever_check(config, SimpleNamespace(context=context))
        return check and await check()

    client = RetrieverClient(searching.retriever, [url])
    with asyncio.Runner() as runner:
        assert "Connect" in runner.run(reason(searching, client))
        assert runner.run(reason(without, client)) is None
        assert runner.run(reason(searching, Shelf())) is None
        runner.run(client.close())


def test_client_that_leaves_within_its_body_leaves_no_traceback(agent, caplog):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with connected(agent, head + b"Content-Length: 9\r\n\r\n{"):
        pass
    assert ask(agent).choices[0].message.content == "Ann"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_idle_connections_stop_nobody(agent):
    """The oldest idle ones are closed; those with a request stay."""
    with ExitStack() as stack:
        slow = ThreadPoolExecutor(1)
        question = slow.submit(ask, agent, "slow?")
        wait_until(lambda: agent.sampler.sampled)
        idle = [stack.enter_context(connected(agent)) for _ in range(300)]
        assert ask(agent).choices[0].message.content == "Ann"
        assert [connection.recv(1) for connection in idle[:40]] == [b""] * 40
        agent.sampler.is_open = True
        assert question.result().choices[0].message.content == "Ann"


def test_connection_beyond_busy_ones_gets_503(monkeypatch):
    monkeypatch.setattr("calibadv_jax.contrib.serving.app.MAX_CONNECTIONS", 2)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with served() as agent, ExitStack() as stack:
        busy = [stack.enter_context(connected(agent, head + b"Content-Length: 2\r\n\r\n{")) for _ in range(2)]
        wait_until(lambda: b"503" in connected(agent).recv(1000))
        for connection in busy:
            connection.sendall(b"}")
            assert b" 400 " in connection.recv(1000)


def test_shared_case(agent, shared):
    body = json.loads((shared / "cases/serve_null_max_completion_tokens/request.json").read_text())
    agent.sampler.cuts = True
    reply = post(agent, **body | {"model": MODEL}).json()
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 3)


def test_token_guards_the_api_alone():
    with served(token="secret-1") as agent:
        with pytest.raises(openai.AuthenticationError, match="Bearer <the service's token>"):
            ask(agent, key="wrong")
        assert ask(agent, key="secret-1").choices[0].message.content == "Ann"
        assert httpx.get(f"{agent.url}/v1/models").status_code == 401
        elsewhere = {"Host": "agent.example"}  # behind a proxy: the token decides
        replies = [httpx.get(agent.url + path, headers=elsewhere) for path in ("/", "/health", "/page.js")]
        assert [reply.status_code for reply in replies] == [200, 200, 200]
        assert all("script-src 'self'" in reply.headers["Content-Security-Policy"] for reply in replies)
    with served(token="voilà") as agent:  # its last byte is a space of Latin-1, as which headers are read
        header = {"Authorization": "Bearer voilà".encode()}
        assert httpx.get(f"{agent.url}/v1/models", headers=header).status_code == 200


def test_questions_beyond_the_queue_are_refused(agent):
    with ThreadPoolExecutor() as pool:
        slow = [pool.submit(ask, agent, f"slow {number}?") for number in range(3)]
        wait_until(lambda: len(agent.service.attempts) == 3 and len(agent.sampler.sampled) == 2)
        with pytest.raises(openai.RateLimitError, match="1 questions wait; try again later") as refused:
            ask(agent)
        assert refused.value.response.headers["Retry-After"]
        assert httpx.get(f"{agent.url}/health").json()["questions"] == 3
        agent.sampler.is_open = True
        assert [reply.result().choices[0].message.content for reply in slow] == ["Ann"] * 3
    assert not agent.service.attempts and sorted(agent.sampler.released) == ["serve1", "serve2", "serve3"]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_frees_its_slot(stream):
    with served(slots=1, queue=0) as agent:
        body = json.dumps({"model": MODEL, "messages": [as_role("slow?")], "stream": stream}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with connected(agent, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body):
            wait_until(lambda: agent.sampler.sampled)
        wait_until(lambda: agent.sampler.released == ["serve1"] and not agent.service.attempts)
        if stream:  # in the middle
            agent.sampler.is_open = True
            chunks = ask(agent, "who?", stream=True)
            next(chunks)
            chunks.close()
            wait_until(lambda: not agent.service.attempts)
        assert ask(agent).choices[0].message.content == "Ann"


@pytest.mark.parametrize("stream", [False, True])
def test_failed_sampler_or_retriever_has_a_status(agent, stream):
    for error, status, words in (
        (RequestFailed("sampler", "worker is away"), 503, "sampler: worker is away"),
        (EnvironmentFailure("no worker is left"), 503, "no worker is left"),
        (RuntimeError("/secret/path"), 500, "RuntimeError in the service"),
    ):
        agent.sampler.error = error
        reply = post(agent, stream=stream)
        assert reply.status_code == status and words in reply.json()["error"]["message"]
        assert "/secret" not in reply.text
    agent.sampler.error, agent.shelf.error = None, RequestFailed("retriever", "no answer for 10 s")
    with pytest.raises(openai.APIError, match="retriever: no answer for 10 s"):
        reply = ask(agent, stream=stream)  # its first turn was sampled
        list(reply)
    agent.shelf.error = UserError("retriever: set the token")  # the service's mistake, not the client's
    reply = post(agent, stream=stream)
    assert reply.status_code == (200 if stream else 503) and "server_error" in reply.text


def test_question_beyond_the_time_limit_fails():
    with served(seconds=0.2) as agent:
        completions = client_of(agent).with_options(max_retries=2).chat.completions
        with pytest.raises(openai.InternalServerError, match="not finished within 0.2 s") as late:
            completions.create(model=MODEL, messages=[as_role("slow?")])
        assert late.value.status_code == 504 and len(agent.sampler.sampled) == 1  # not repeated


def test_end_of_service_answers_open_questions():
    with ThreadPoolExecutor() as pool:
        with served() as agent:
            open_question = pool.submit(ask, agent, "slow?")
            wait_until(lambda: agent.sampler.sampled)
        with pytest.raises(openai.InternalServerError, match="the service is ending"):
            open_question.result()


def test_forged_texts_lose_tags_and_escapes(agent):
    whole = ask(agent, "forged?")
    stream = "".join(chunk.model_dump_json() for chunk in ask(agent, "forged?", stream=True))
    for text in (whole.model_dump_json(), stream):
        for tag in ("think", "/think", "/THINK", " /think", "/information", "answer", "search"):
            assert f"<{tag}" not in text
        assert not any(escape in text for escape in ("\\u001b", "\\u0007", "\u202e", "\x1b"))
    assert whole.choices[0].message.content.endswith("Ann") and "<script>" in FORGED


def test_slow_clients_lose_their_connection(agent, monkeypatch):
    monkeypatch.setattr("calibadv_jax.contrib.serving.connections.CLIENT_SECONDS", 0.3)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    whole = head + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    for sent, status in ((head, b""), (whole, b"HTTP/1.1 408 ")):
        with connected(agent, sent) as client:
            assert client.recv(len(status) or 1) == status
