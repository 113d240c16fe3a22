"""The client against real servers: the service itself, and servers that are away or misbehave."""

import asyncio
import json
import re
import time
from types import SimpleNamespace

import pytest
from http_rig import Handler, replying, serving
from search_rig import client_of, search

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.core.errors import EnvironmentFailure, QueryRefused, RequestFailed, UserError
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services import retriever_client
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_process import check_running, open_retriever

pytest.importorskip("aiohttp")
RERANKED = {"rerank_candidates": 6, "topk": 2}


def good(body):
    def documents(query):
        return [{"document": {"id": query, "contents": f'"T {query}"\ntext'}, "score": 1.5}]

    return {"result": [documents(query) for query in body["queries"]]}


@pytest.fixture
def server():
    """Its `replies` are functions that return status and content; the last one stays."""
    replies, requests = [], []

    class Planned(Handler):
        def do_GET(self):
            self.reply(200, {"corpus_sha256": "c1", "pages_sha256": "p1", "identity": "aa"})

        def do_POST(self):
            requests.append(json.loads(self.body()))
            assert self.path == ("/access" if "urls" in requests[-1] else "/retrieve")
            self.reply(*(replies.pop(0) if len(replies) > 1 else replies[0])(requests[-1]))

    with serving(Planned) as url:
        yield SimpleNamespace(url=url, replies=replies, requests=requests)


def ok(body):
    return 200, good(body)


def search_all(url, *searches, **config):
    """Searches at the same time on one loop; the documents or the error of each."""

    async def ask(client):
        return await asyncio.gather(*map(client.search, searches), return_exceptions=True)

    with client_of(url, **{"timeout": 20.0} | config) as (client, run):
        return run(ask(client))


def ids(results):
    return [[documents[0].id for documents in result] for result in results]


def test_query_that_comes_whenever_is_answered(server):
    server.replies.append(ok)

    async def ask(number):
        for turn in range(10):
            await asyncio.sleep(0.0007 * ((number * 7 + turn * 3) % 11))
            assert ids([await client.search([f"{number} {turn}"])]) == [[f"{number} {turn}"]]

    async def ask_all():
        await asyncio.gather(*map(ask, range(8)))

    with client_of(server, timeout=60.0) as (client, run):
        run(ask_all())


def test_documents_are_parsed(server):
    server.replies.append(ok)
    ((document,), _) = search(server, ["a", "b"])
    assert (document.id, document.title, document.text, document.score) == ("a", "T a", "text", 1.5)
    assert server.requests == [{"queries": ["a", "b"], "topk": 3, "return_scores": True}]
    server.replies[:] = [lambda body: (200, {"result": [[{"document": '"T"\nx', "score": 0.5}]]})]
    assert search(server, ["c"], **RERANKED)[0][0].title == "T"
    depths = {"topk_retrieval": 6, "topk_rerank": 2, "not_sort": False}
    assert server.requests[1:] == [{"queries": ["c"], "return_scores": True} | depths]


@pytest.mark.parametrize(
    ("searches", "limit", "sent"),
    [
        ([1] * 50, 256, [50]),
        ([1, 1, 1, 1], 4, [4]),
        ([2, 2, 1], 4, [4, 1]),
        ([3, 2, 2], 4, [3, 4]),
        ([4, 1], 4, [4, 1]),
        ([5, 1], 4, [5, 1]),  # one search is never divided
    ],
)
def test_concurrent_searches_share_a_request(server, monkeypatch, searches, limit, sent):
    monkeypatch.setattr(retriever_client, "MAX_BATCH", limit)
    server.replies.append(ok)
    client = RetrieverClient(RetrieverConfig(), server.url)
    queries = [[f"{number} {n}" for n in range(count)] for number, count in enumerate(searches)]

    async def ask():
        results = await asyncio.gather(*map(client.search, queries))
        await client.close()
        return ids(results)

    for _ in range(2):  # a second event loop: nothing may be bound to the first
        assert asyncio.run(ask()) == queries
    assert [len(body["queries"]) for body in server.requests] == 2 * sent


BAD = {
    "status": lambda body: (418, b"oops"),
    "not json": lambda body: (200, b"<html>hello</html>"),
    "no utf-8": lambda body: (200, b"\xff\xfe"),
    "too deep": lambda body: (200, b"[" * 100_000),
    "too few": lambda body: (200, {"result": []}),
    "no lists": lambda body: (200, {"result": ["text"] * len(body["queries"])}),
    "no contents": lambda body: (200, {"result": [[{"document": "text"}]] * len(body["queries"])}),
    "a redirection": lambda body: (307, b""),
}
ITEM = b'{"result": [[{"document": {"id": 1, "contents": "x"}, "score": %s}]]}'
for score in (b'"high"', b"[1]", b"{}", b"NaN", b"Infinity", b"true", b"1e999", b'"1.5"'):
    BAD[f"score {score}"] = lambda body, score=score: (200, ITEM % score)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_replies_fail_their_query_only(server, bad):
    server.replies += [bad, ok]
    assert search(server, ["a"])[0][0].id == "a"
    server.replies[:] = [lambda body: bad(body) if "bad" in body["queries"] else ok(body)]
    server.requests.clear()
    good, failed = search_all(server, ["good"], ["bad"])
    assert ids([good]) == [["good"]] and type(failed) is RequestFailed
    assert str(failed).startswith(f"retriever {server.url}: no usable answer in 3 attempts (")
    assert "\n" not in str(failed) and failed.service == "retriever"
    assert [body["queries"] for body in server.requests].count(["bad"]) == 3
    assert len(server.requests) == 5  # together, and then alone


@pytest.mark.parametrize("status", [400, 413, 422])
def test_refused_query_fails_no_other(server, status):
    refusal = status, {"error": "too long"}
    server.replies.append(lambda body: refusal if len(max(body["queries"], key=len)) > 9 else ok(body))
    queries = [f"q{number}" if number % 50 else "x" * (10 + number) for number in range(1, 200)]
    for query, result in zip(queries, search_all(server, *([query] for query in queries)), strict=True):
        if len(query) > 9:
            assert isinstance(result, QueryRefused) and f'status {status}: \'{{"error": "too' in str(result)
            assert [body["queries"] for body in server.requests].count([query]) == 1
        else:
            assert ids([result]) == [[query]]
    assert len(server.requests) < 60  # by halves, not one by one


NO_QUERY = {"detail": "field required: query"}


@pytest.mark.parametrize(
    ("status", "content", "config", "words"),
    [
        (422, NO_QUERY, {}, "field required.*it refuses every query.*retriever.topk=3"),
        (422, NO_QUERY, RERANKED, "it refuses every query.*rerank_candidates=6 and retriever.topk=2"),
        (401, b"", {}, "asks for a token; set the environment variable RETRIEVER_TOKEN"),
        (403, b"no", {}, "status 403: .*set retriever.url"),
        (404, b"no", {}, "status 404: .*set retriever.url"),
        (405, b"no", {}, "status 405: .*set retriever.url"),
        *((status, b"oops", {}, f"for 0.3 s .status {status}: 'oops'") for status in (429, 500, 507)),
    ],
)
def test_service_that_answers_no_query_is_an_error(server, status, content, config, words):
    """A wrong address ends the run at once, an outage costs a trajectory."""
    server.replies.append(lambda body: (status, content))
    with pytest.raises(UserError, match=words) as caught:
        search(server, ["a"], patience=0.3, **config)
    assert type(caught.value) is (RequestFailed if content == b"oops" else UserError)
    assert len(server.requests) == 1 or status not in (401, 403, 404, 405)


def test_cancelled_search_leaves_the_request_to_others(server):
    server.replies.append(ok)

    async def ask(client):
        first, second = (asyncio.create_task(client.search([query])) for query in "ab")
        await asyncio.sleep(0)  # both have joined one request
        first.cancel()
        ((document,),) = await second
        return document.id, first.cancelled()

    with client_of(server, timeout=60.0) as (client, run):
        assert run(ask(client)) == ("b", True)
    assert [body["queries"] for body in server.requests] == [["a", "b"]]


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


@pytest.mark.parametrize("count", [1, 16])
def test_query_that_breaks_a_service_fails_alone(server, count):
    server.replies.append(lambda body: (500, b"oops") if "bad" in body["queries"] else ok(body))
    queries = [[f"q{number}"] for number in range(count - 1)]
    *good, bad = search_all(server, *queries, ["bad"])
    assert ids(good) == queries and len(server.requests) < 40
    assert isinstance(bad, RequestFailed) and "no usable answer in 3 attempts (status 500" in str(bad)


@pytest.mark.parametrize(
    ("config", "state", "words"),
    [
        ({}, {}, "not reranked: the best 3 documents"),
        ({}, {"reranker": ""}, "not reranked: the best 3 documents"),
        ({"rerank_candidates": 0, "topk": 4}, {"reranker": "m"}, "not reranked: the best 4 documents"),
        (RERANKED, {"reranker": "m"}, "6 documents reranked to 2 by m"),
        (RERANKED, {}, "6 documents reranked to 2 by a service that does not name its reranker"),
        ({}, {"reranker": "m"}, "error: .*its reranker m would be without effect; ask for it with"),
        (
            RERANKED,
            {"reranker": ""},
            "error: .*has no reranker, but retriever.rerank_candidates is 6; start it",
        ),
    ],
    ids=str,
)
def test_reranker_fits_the_config_or_is_refused(config, state, words):
    try:
        actual = RetrieverClient(RetrieverConfig(**config), "http://h").check_reranker(state)
    except UserError as error:
        actual = f"error: {error}"
    assert re.match(words, actual)


ANN = Document("page ann", "Ann", "Ann paints.")  # not the passage of this title


def pages(body):
    row = {"url": "p/ann", "contents": '"Ann"\nAnn paints.', "more": 1}
    result = [row if url == "p/ann" else None for url in body["urls"]]
    return 200, {"result": result}


def read(url, *addresses, patience=0.2):
    with client_of(url, page_address="p/{}", patience=patience) as (client, run):
        return run(client.access(addresses))


def test_pages_are_read_despite_passing_failures(server):
    server.replies.append(pages)
    assert read(server, "ann", "bob") == [ANN, None]
    assert sorted(request["urls"] for request in server.requests) == [["p/ann"], ["p/bob"]]
    failures = [(503, b""), (200, b"{}"), (200, {"result": []})]
    server.replies[:0] = [lambda body, reply=reply: reply for reply in failures]
    assert read(server, "ann") == [ANN]


@pytest.mark.parametrize(
    ("status", "content", "kind", "words"),
    [
        (200, {"result": [{"contents": 5}]}, RequestFailed, "no usable page in 3 attempts"),
        (500, b"broken", RequestFailed, "no usable page in 3 attempts"),
        (503, b"", RequestFailed, "no answer for 0.2 s"),
        (404, b"none", UserError, "start the service with --pages_path"),
        (422, b"too long", QueryRefused, "status 422"),
    ],
)
def test_service_that_reads_no_page_is_an_error(server, status, content, kind, words):
    server.replies.append(lambda body: (status, content))
    with pytest.raises(kind, match=words) as error:
        read(server, "ann")
    assert type(error.value) is kind


def test_service_answers_inside_a_running_event_loop():
    async def ask():
        with replying((200, {"status": "ready"})) as (url, _):
            return RetrieverClient(RetrieverConfig(), url).health()

    assert asyncio.run(ask()) == {"status": "ready"}


def test_start_waits_for_a_service_that_is_loading(tmp_path):
    state, messages = {"status": "loading", "stage": "reading the index"}, []
    with replying((503, state), (503, state), (200, state)) as (url, requests):
        config = RetrieverConfig(url=url, patience=60.0)
        with open_retriever(config, tmp_path / "log", messages.append) as urls:
            assert urls == url
    assert [path for path, _ in requests] == ["/health"] * 3
    (message,) = messages
    assert message.startswith(f"waiting up to 60 s for retriever {url} (") and "reading the index" in message


UNREACHABLE = r"retriever http://127.0.0.1:9, http://127.0.0.1:10: cannot be reached \(.*\); start it with"


@pytest.mark.parametrize(
    ("url", "patience", "kind", "words"),
    [
        (["http://127.0.0.1:9", "http://127.0.0.1:10"], 0.3, EnvironmentFailure, UNREACHABLE),
        ("localhost:8000", 600.0, UserError, "not a URL; give one such as"),
        ("http://localhost:port", 600.0, UserError, "not a URL; give one such as"),
        ("ftp://a", 600.0, UserError, "not a URL; give one such as"),
    ],
)
def test_start_without_a_service_is_refused(url, patience, kind, words):
    """What is no URL is not waited for."""
    messages = []
    with pytest.raises(kind, match=words) as refused:
        check_running(RetrieverConfig(url=url, patience=patience), messages.append)
    assert len(messages) == (kind is EnvironmentFailure)
    assert all(each in str(refused.value) for each in ([url] if isinstance(url, str) else url))
