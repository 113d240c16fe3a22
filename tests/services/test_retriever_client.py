"""The client against real servers: the service itself, and servers that misbehave."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.errors import UserError
from calibadv_jax.services import retriever_client
from calibadv_jax.services.retriever_client import RetrieverClient, RetrieverProcess

pytest.importorskip("aiohttp")


def good(body):
    def documents(query):
        return [{"document": {"id": query, "contents": f'"T {query}"\ntext'}, "score": 1.5}]

    return {"result": [documents(query) for query in body["queries"]]}


@pytest.fixture
def server(monkeypatch):
    """A server whose replies are taken from a list; the last one is repeated."""
    monkeypatch.setattr(retriever_client, "FIRST_DELAY", 0.01)
    replies, requests = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body)
            status, content = (replies.pop(0) if len(replies) > 1 else replies[0])(body)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", replies, requests
    http.shutdown()
    http.server_close()


def ok(body):
    return 200, good(body)


def search(url, queries, **config):
    client = RetrieverClient(RetrieverConfig(**({"timeout": 2.0, "retries": 2} | config)), url)

    async def run():
        try:
            return await client.search(queries)
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_query_that_comes_whenever_is_answered(server):
    """Above all one that comes just as the answers to the last ones have gone out."""
    url, replies, _ = server
    replies.append(ok)
    client = RetrieverClient(RetrieverConfig(timeout=2.0), url)

    async def one(number):
        for turn in range(10):
            await asyncio.sleep(0.0007 * ((number * 7 + turn * 3) % 11))
            ((document,),) = await client.search([f"{number} {turn}"])
            assert document.id == f"{number} {turn}"

    async def run():
        await asyncio.wait_for(asyncio.gather(*(one(number) for number in range(8))), 30)
        await client.close()

    asyncio.run(run())


def test_documents_are_parsed(server):
    url, replies, requests = server
    replies.append(ok)
    ((document,), _) = search(url, ["a", "b"])
    assert (document.id, document.title, document.text, document.score) == ("a", "T a", "text", 1.5)
    assert requests == [{"queries": ["a", "b"], "topk": 3, "return_scores": True}]


def test_concurrent_searches_share_a_request_and_get_their_own_answer(server):
    url, replies, requests = server
    replies.append(ok)
    client = RetrieverClient(RetrieverConfig(), url)

    async def many():
        try:
            return await asyncio.gather(*(client.search([str(i)]) for i in range(50)))
        finally:
            await client.close()

    for _ in range(2):  # a second event loop: nothing may be bound to the first
        found = asyncio.run(many())
        assert [one[0][0].id for one in found] == [str(i) for i in range(50)]
    assert len(requests) == 2


@pytest.mark.parametrize(
    "bad",
    [
        lambda body: (500, b"oops"),
        lambda body: (200, b"<html>hello</html>"),
        lambda body: (200, {"result": []}),
        lambda body: (200, {"result": ["text"] * len(body["queries"])}),
        lambda body: (200, {"result": [[{"document": "text"}]] * len(body["queries"])}),
        lambda body: (503, {"error": "busy"}),
    ],
)
def test_bad_replies_are_repeated_then_reported(server, bad):
    url, replies, requests = server
    replies += [bad, ok]
    assert search(url, ["a"])[0][0].id == "a"
    replies[:] = [bad]
    requests.clear()
    with pytest.raises(UserError, match=f"retriever {url}: no usable answer after 3 attempts") as error:
        search(url, ["a"])
    assert "\n" not in str(error.value)
    assert len(requests) == 3


def test_a_slow_server_is_a_clear_error(server):
    import time

    url, replies, _ = server
    replies.append(lambda body: (time.sleep(0.5), ok(body))[1])
    with pytest.raises(UserError, match="Timeout on reading data"):
        search(url, ["a"], timeout=0.1, retries=0)


def test_nobody_listens():
    with pytest.raises(UserError, match="start it with scripts/launch_retriever.sh or set retriever.url"):
        search("http://127.0.0.1:9", ["a"], retries=0)


def test_the_child_service_answers_and_ends(tmp_path):
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
    with pytest.raises(UserError, match="no usable answer"):
        search(process.url, ["a"], retries=0)


def test_a_service_with_a_token(tmp_path, monkeypatch):
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


def test_a_child_that_can_not_start_says_why(tmp_path):
    pytest.importorskip("faiss")
    config = RetrieverConfig(corpus=str(tmp_path / "none.jsonl"), index=str(tmp_path / "index"))
    with pytest.raises(UserError, match=r"the retriever ended with status 2: .*none.jsonl: no such corpus"):
        RetrieverProcess(config, tmp_path / "log.txt").__enter__()
