"""The client against real servers: the service itself, and servers that misbehave."""

import asyncio
import json
import socket
import time
from contextlib import suppress
from email.utils import formatdate

import pytest
from http_rig import Handler, serving
from search_rig import client_of, search

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.core.errors import QueryRefused, RequestFailed, UserError
from calibadv_jax.services import retriever_client
from calibadv_jax.services.retriever_client import RetrieverClient, RetrieverProcess

pytest.importorskip("aiohttp")


def good(body):
    def documents(query):
        return [{"document": {"id": query, "contents": f'"T {query}"\ntext'}, "score": 1.5}]

    return {"result": [documents(query) for query in body["queries"]]}


def replying(replies, requests=None, port=0):
    """A server that takes its replies (status, content, perhaps headers) from a list; the last one stays."""

    class Planned(Handler):
        def do_POST(self):
            body = json.loads(self.body())
            if requests is not None:
                requests.append(body)
            self.reply(*(replies.pop(0) if len(replies) > 1 else replies[0])(body))

    return serving(Planned, port)


@pytest.fixture
def server():
    replies, requests = [], []
    with replying(replies, requests) as url:
        yield url, replies, requests


def ok(body):
    return 200, good(body)


def test_query_that_comes_whenever_is_answered(server):
    url, replies, _ = server
    replies.append(ok)

    async def ask(client, number):
        for turn in range(10):
            await asyncio.sleep(0.0007 * ((number * 7 + turn * 3) % 11))
            ((document,),) = await client.search([f"{number} {turn}"])
            assert document.id == f"{number} {turn}"

    async def ask_all(client):
        await asyncio.wait_for(asyncio.gather(*(ask(client, number) for number in range(8))), 30)

    with client_of(url, timeout=2.0) as (client, run):
        run(ask_all(client))


def test_documents_are_parsed(server):
    url, replies, requests = server
    replies.append(ok)
    ((document,), _) = search(url, ["a", "b"])
    assert (document.id, document.title, document.text, document.score) == ("a", "T a", "text", 1.5)
    assert requests == [{"queries": ["a", "b"], "topk": 3, "return_scores": True}]


def test_concurrent_searches_share_a_request(server):
    url, replies, requests = server
    replies.append(ok)
    client = RetrieverClient(RetrieverConfig(), url)

    async def many():
        try:
            return await asyncio.gather(*(client.search([str(i)]) for i in range(50)))
        finally:
            await client.close()

    for _ in range(2):  # a second event loop: nothing may be bound to the first
        results = asyncio.run(many())
        assert [result[0][0].id for result in results] == [str(i) for i in range(50)]
    assert len(requests) == 2


BAD = {
    "status": lambda body: (418, b"oops"),
    "not json": lambda body: (200, b"<html>hello</html>"),
    "no utf-8": lambda body: (200, b"\xff\xfe"),
    "too deep": lambda body: (200, b"[" * 100_000),
    "too few": lambda body: (200, {"result": []}),
    "no lists": lambda body: (200, {"result": ["text"] * len(body["queries"])}),
    "no contents": lambda body: (200, {"result": [[{"document": "text"}]] * len(body["queries"])}),
    "a redirection": lambda body: (307, b""),
    **{
        f"score {score}": lambda body, score=score: (
            200,
            b'{"result": [[{"document": {"id": 1, "contents": "x"}, "score": %s}]]}' % score,
        )
        for score in (b'"high"', b"[1]", b"{}", b"NaN", b"Infinity", b"true", b"1e999", b'"1.5"')
    },
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_replies_fail_their_query_only(server, bad):
    url, replies, requests = server
    replies += [bad, ok]
    assert search(url, ["a"])[0][0].id == "a"
    replies[:] = [lambda body: bad(body) if "bad" in body["queries"] else ok(body)]
    requests.clear()
    good_one, failed = search_all(url, "good", "bad")
    assert good_one[0].id == "good"
    assert isinstance(failed, RequestFailed) and not isinstance(failed, QueryRefused)
    assert str(failed).startswith(f"retriever {url}: no usable answer in 3 attempts (")
    assert "\n" not in str(failed) and failed.service == "retriever"
    assert [body["queries"] for body in requests].count(["bad"]) == 3
    assert len(requests) == 5  # together, and then alone


def search_all(url, *queries):
    """One search a query, at the same time; documents or errors."""

    async def ask(client):
        return await asyncio.gather(*(client.search([query]) for query in queries), return_exceptions=True)

    with client_of(url, timeout=2.0, patience=5.0) as (client, run):
        results = run(ask(client))
    return [result if isinstance(result, Exception) else result[0] for result in results]


@pytest.mark.medium
@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
def test_absent_service_is_asked_until_patience_ends(server, status):
    url, replies, requests = server
    replies += [lambda body: (status, {"error": "busy"})] * 6 + [ok]
    assert search(url, ["a"], patience=30.0)[0][0].id == "a"
    assert len(requests) == 7
    replies[:] = [lambda body: (status, {"error": "busy"})]
    begun = time.monotonic()
    with pytest.raises(RequestFailed, match=f"no answer for 0.5 s .status {status}: .*busy.*patience"):
        search(url, ["a"], patience=0.5)
    assert 0.5 <= time.monotonic() - begun < 3


@pytest.mark.medium
def test_service_may_say_how_long_to_wait(server):
    url, replies, requests = server
    later = {"Retry-After": "1"}
    replies += [lambda body: (503, {}, later), ok]
    begun = time.monotonic()
    assert search(url, ["a"], patience=30.0)[0][0].id == "a"
    assert 1.0 <= time.monotonic() - begun < 3 and len(requests) == 2

    in_two_seconds = formatdate(time.time() + 2, usegmt=True)  # whole seconds: one to two from now
    replies[:] = [lambda body: (429, {}, {"Retry-After": in_two_seconds}), ok]
    begun = time.monotonic()
    assert search(url, ["a"], patience=30.0)[0][0].id == "a"
    assert 0.9 <= time.monotonic() - begun < 4

    replies[:] = [lambda body: (503, {}, {"Retry-After": "3600"})]  # not longer than the patience
    requests.clear()
    with pytest.raises(RequestFailed, match="no answer for 1 s"):
        search(url, ["a"], patience=1.0)
    assert len(requests) == 2  # the last one at its very end

    for nonsense in ("soon", "-5", "1e9"):
        replies[:] = [lambda body, wait=nonsense: (503, {}, {"Retry-After": wait}), ok]
        assert search(url, ["a"], patience=2.0)[0][0].id == "a"


def test_service_that_comes_back_answers_who_waited():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def ask(client):
        waiting = asyncio.gather(*(client.search([str(number)]) for number in range(20)))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        with replying([ok], port=port):
            return [result[0][0].id for result in await waiting]

    with client_of(f"http://127.0.0.1:{port}", timeout=2.0, patience=30.0) as (client, run):
        assert run(ask(client)) == [str(number) for number in range(20)]


def test_who_waits_can_be_cancelled(server):
    url, replies, _ = server
    replies.append(lambda body: (503, {}))

    async def ask(client):
        task = asyncio.create_task(client.search(["a"]))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with client_of(url, patience=600.0) as (client, run):
        run(ask(client))


@pytest.mark.parametrize("status", [400, 413, 422])
def test_refused_query_fails_no_other(server, status):
    url, replies, requests = server
    replies.append(
        lambda body: (status, {"error": "too long"}) if len(max(body["queries"], key=len)) > 9 else ok(body)
    )
    good_one, refused = search_all(url, "good", "x" * 100)
    assert good_one[0].id == "good"
    assert isinstance(refused, QueryRefused) and f'status {status}: \'{{"error": "too long' in str(refused)
    assert [body["queries"] for body in requests].count(["x" * 100]) == 1
    requests.clear()
    many = [f"q{number}" if number % 50 else "x" * (10 + number) for number in range(200)]
    results = search_all(url, *many)
    for query, result in zip(many, results, strict=True):
        assert isinstance(result, QueryRefused) if len(query) > 9 else result[0].id == query
    assert len(requests) < 60  # by halves, not one by one


def test_service_that_refuses_every_query_ends_the_run(server):
    url, replies, _ = server
    replies.append(lambda body: (422, {"detail": "field required: query"}))
    with pytest.raises(UserError, match="field required.*it refuses every query.*retriever.topk=3") as caught:
        search(url, ["a"])
    assert not isinstance(caught.value, RequestFailed)


@pytest.mark.parametrize("status", [403, 404, 405])
def test_wrong_address_ends_the_run_at_once(server, status):
    url, replies, requests = server
    replies.append(lambda body: (status, {"error": "no"}))
    with pytest.raises(UserError, match=f"status {status}: .*set retriever.url") as caught:
        search(url, ["a"])
    assert not isinstance(caught.value, RequestFailed) and len(requests) == 1
    with pytest.raises(UserError, match="localhost:port/retrieve: not a URL"):
        search("http://localhost:port", ["a"])


def test_slow_server_is_a_clear_error(server):
    url, replies, _ = server
    replies.append(lambda body: (time.sleep(0.5), ok(body))[1])
    with pytest.raises(RequestFailed, match="no whole reply in time"):
        search(url, ["a"], timeout=0.1, patience=0.3)


def test_nobody_listens():
    with pytest.raises(RequestFailed, match="start it with scripts/launch_retriever.sh, set retriever.url"):
        search("http://127.0.0.1:9", ["a"], patience=0.2)


def test_child_service_answers_and_ends(tmp_path):
    pytest.importorskip("faiss")
    pytest.importorskip("fastapi")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        json.dumps({"id": "0", "contents": '"red fox"\nthe red fox runs.'})
        + "\n"
        + json.dumps({"id": "1", "contents": '"blue whale"\nthe whale swims.'})
        + "\n"
    )
    config = RetrieverConfig(corpus=str(corpus), index=str(tmp_path / "index"), topk=1)
    with RetrieverProcess(config, tmp_path / "log.txt") as process:
        client = RetrieverClient(config, process.url)
        assert client.health()["documents"] == 2
        (documents,) = search(process.url, ["blue whale"], topk=1)
        assert [document.title for document in documents] == ["blue whale"]
    with pytest.raises(RequestFailed, match="no answer for 0.2 s"):
        search(process.url, ["a"], patience=0.2)


@pytest.mark.medium
def test_service_with_a_token(tmp_path, monkeypatch):
    """A child inherits it; without it, the run stops at once and says what to set."""
    pytest.importorskip("faiss")
    pytest.importorskip("fastapi")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"id": "0", "contents": '"red fox"\nthe red fox runs.'}) + "\n")
    config = RetrieverConfig(corpus=str(corpus), index=str(tmp_path / "index"), topk=1)
    monkeypatch.setenv("RETRIEVER_TOKEN", "secret\n")
    with RetrieverProcess(config, tmp_path / "log.txt") as process:
        ((document,),) = search(process.url, ["fox"], topk=1)
        assert document.title == "red fox"
        monkeypatch.setenv("RETRIEVER_TOKEN", "another")
        with pytest.raises(UserError, match="asks for a token; set the environment variable RETRIEVER_TOKEN"):
            search(process.url, ["fox"], topk=1)


@pytest.mark.medium
def test_child_that_cannot_start_says_why(tmp_path):
    pytest.importorskip("faiss")
    config = RetrieverConfig(corpus=str(tmp_path / "none.jsonl"), index=str(tmp_path / "index"))
    with pytest.raises(
        UserError, match=r"the retriever ended with status 2: .*none.jsonl: no such corpus.*; see .*log.txt"
    ):
        RetrieverProcess(config, tmp_path / "log.txt").__enter__()


def test_cancelled_search_leaves_the_request_to_others(server):
    url, replies, requests = server
    replies.append(ok)

    async def ask(client):
        first, second = (asyncio.create_task(client.search([query])) for query in "ab")
        await asyncio.sleep(0)  # both have joined one request
        first.cancel()
        ((document,),) = await second
        return document.id, first.cancelled()

    with client_of(url, timeout=2.0) as (client, run):
        assert run(ask(client)) == ("b", True)
    assert [body["queries"] for body in requests] == [["a", "b"]]


@pytest.mark.parametrize(
    ("searches", "sent"),
    [
        ([1, 1, 1, 1], [4]),
        ([2, 2, 1], [4, 1]),
        ([3, 2, 2], [3, 4]),
        ([4, 1], [4, 1]),
        ([5, 1], [5, 1]),  # one search is never divided
    ],
)
def test_requests_hold_at_most_max_batch_queries(server, monkeypatch, searches, sent):
    monkeypatch.setattr(retriever_client, "MAX_BATCH", 4)
    url, replies, requests = server
    replies.append(ok)
    queries = [[f"{number} {n}" for n in range(count)] for number, count in enumerate(searches)]

    async def ask(client):
        replies = await asyncio.gather(*map(client.search, queries))
        return [[documents[0].id for documents in reply] for reply in replies]

    with client_of(url, timeout=2.0) as (client, run):
        assert run(ask(client)) == queries
    assert [len(body["queries"]) for body in requests] == sent


def test_refusal_after_an_answer_asks_no_probe(server):
    url, replies, requests = server
    replies.append(lambda body: (422, {"error": "no"}) if "bad" in body["queries"] else ok(body))
    with client_of(url, timeout=2.0) as (client, run):
        for query in ("bad", "bad", "good", "bad"):
            with suppress(QueryRefused):
                run(client.search([query]))
    sent = [body["queries"][0] for body in requests]
    assert sent == ["bad", retriever_client.PROBE, "bad", "good", "bad"]


def test_service_that_names_no_reranker_has_none():
    client = RetrieverClient(RetrieverConfig(), "http://h")
    assert (
        client.check_reranker({})
        == client.check_reranker({"reranker": ""})
        == ("not reranked: the best 3 documents")
    )
    with pytest.raises(UserError, match="its reranker m would be without effect"):
        client.check_reranker({"reranker": "m"})


@pytest.mark.timeout(60)  # it would trickle for 200 s
def test_reply_that_trickles_is_given_up():
    class Trickling(Handler):
        def do_POST(self):
            self.body()
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(1000):
                try:
                    self.wfile.write(b" ")
                except OSError:
                    return  # the client has gone
                time.sleep(0.2)

    with serving(Trickling) as url, pytest.raises(RequestFailed, match="no answer for 0.5 s .no whole reply"):
        search(url, ["a"], timeout=0.4, patience=0.5)


@pytest.mark.parametrize("status", [500, 507])
def test_service_that_fails_over_everything_is_away(status):
    requests = []

    def answer(body):
        return (status, b"oops") if len(requests) < 8 else ok(body)

    with replying([answer], requests) as url:
        assert search(url, ["a"], patience=30.0)[0][0].id == "a"
        assert len(requests) >= 8
        requests.clear()
    reason = pytest.raises(RequestFailed, match=f"no answer for 0.3 s .status {status}: 'oops'")
    with replying([lambda body: (status, b"oops")], requests) as url, reason:
        search(url, ["a"], patience=0.3)


@pytest.mark.parametrize("count", [1, 16])
def test_query_that_breaks_a_service_fails_alone(count):
    def answer(body):
        return (500, b"oops") if "bad" in body["queries"] else ok(body)

    queries = [f"q{number}" for number in range(count - 1)] + ["bad"]
    requests = []
    with replying([answer], requests) as url:
        *good, bad = search_all(url, *queries)
    assert [documents[0].id for documents in good] == queries[:-1]
    assert isinstance(bad, RequestFailed) and "no usable answer in 3 attempts (status 500" in str(bad)
    assert len(requests) < 40


def test_service_without_the_route_for_its_health_is_one():
    class Small(Handler):
        def do_POST(self):
            self.reply(*ok(json.loads(self.body())))

    with serving(Small) as url:
        client = RetrieverClient(RetrieverConfig(patience=0.5), url)
        assert client.health() == {}
