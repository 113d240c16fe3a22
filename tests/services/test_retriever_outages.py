"""The retriever's client over HTTP: outages, waits, and services that are not retrievers."""

import asyncio
import json
import socket
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from http_rig import Handler, serving
from search_rig import client_of, search

pytest.importorskip("aiohttp")

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services import http_client
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_process import check_running

ANN = Document("page ann", "Ann", "Ann paints.")


class Answering(Handler):
    """Answers each query with a document of its id, after `failures` replies of another status."""

    status = 503
    failures = 0
    headers_of_failure: dict[str, str] = {}
    name = ""

    def do_POST(self):
        queries = json.loads(self.body())["queries"]
        type(self).requests = [*self.requests, queries]
        if len(self.requests) <= self.failures:
            self.reply(self.status, {"error": "busy"}, self.headers_of_failure)
            return
        passages = [{"document": {"id": self.name or query, "contents": query}} for query in queries]
        self.reply(200, {"result": [[passage] for passage in passages]})

    requests: list[list[str]] = []


def answering(**attributes):
    """A class of handlers with requests of its own."""
    return type("OwnAnswering", (Answering,), {"requests": [], **attributes})


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 507])
def test_service_that_is_away_is_asked_until_it_answers(monkeypatch, status):
    monkeypatch.setattr(http_client, "LAST_PAUSE", 0.01)
    handler = answering(status=status, failures=8)
    with serving(handler) as url:
        ((document,),) = search(url, ["a"], patience=30.0)
    assert document.id == "a"
    assert len(handler.requests) == 9


def test_service_that_stays_away_is_named_with_the_way_out():
    expected = "no answer for 0.2 s .status 503: .*busy.*start it with calibadv retriever,"
    expected += " set retriever.url, or raise retriever.patience"
    with serving(answering(failures=1000)) as url, pytest.raises(RequestFailed, match=expected) as failure:
        search(url, ["a"], patience=0.2)
    assert str(failure.value).startswith(f"retriever {url}: ")
    assert failure.value.service == "retriever"


def test_search_where_nobody_listens_says_how_to_start_a_service():
    with pytest.raises(RequestFailed, match="start it with calibadv retriever, set retriever.url"):
        search("http://127.0.0.1:9", ["a"], patience=0.1)


def test_search_at_no_url_is_refused():
    with pytest.raises(UserError, match="localhost:port/retrieve: not a URL"):
        search("http://localhost:port", ["a"])


def test_search_waits_as_long_as_the_service_asks(monkeypatch):
    pauses = []
    sleep = asyncio.sleep

    async def note(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(http_client.asyncio, "sleep", note)
    handler = answering(failures=1, headers_of_failure={"Retry-After": "7"})
    with serving(handler) as url:
        search(url, ["a"], patience=30.0)
    assert pauses.count(7.0) == 1
    assert len(handler.requests) == 2


def test_searches_that_wait_are_answered_once_a_service_starts():
    """Its connections are refused first."""
    port = free_port()

    async def wait_for_start(client):
        waiting = asyncio.gather(*(client.search([str(number)]) for number in range(20)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        with serving(answering(), port):
            return await waiting

    with client_of(f"http://127.0.0.1:{port}", patience=30.0) as (client, run):
        results = run(wait_for_start(client))
    assert [documents[0].id for (documents,) in results] == [str(number) for number in range(20)]


def test_waiting_search_can_be_cancelled():
    handler = answering(failures=10_000)

    async def cancel(client):
        task = asyncio.create_task(client.search(["a"]))
        while len(handler.requests) < 2:  # bounded by pytest's limit
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(handler) as url, client_of(url, patience=600.0) as (client, run):
        run(cancel(client))


def test_hanging_replica_delays_its_queries_and_loses_none():
    go_on = threading.Event()

    class Hanging(Handler):
        def do_POST(self):
            self.body()
            go_on.wait()

        def do_GET(self):
            self.reply(503, b"")

    async def ask(client):
        return await asyncio.gather(*(client.search([f"q{number}"]) for number in range(24)))

    with ExitStack() as stack:
        urls = [stack.enter_context(serving(Hanging))]
        urls += [stack.enter_context(serving(answering(name=name))) for name in "bc"]
        stack.callback(go_on.set)
        with client_of(*urls, timeout=0.3, warn=lambda _: None) as (client, run):
            results = run(ask(client))
    assert {documents[0].id for (documents,) in results} <= {"b", "c"}
    assert [documents[0].title for (documents,) in results] == [f"q{number}" for number in range(24)]


def test_error_names_the_replica_that_made_it():
    refusing = answering(status=401, failures=1000)
    with (
        serving(answering()) as good_url,
        serving(refusing) as refusing_url,
        client_of(good_url, refusing_url) as (client, run),
    ):
        run(client.search(["a"]))
        with pytest.raises(UserError, match=f"retriever {refusing_url}: asks for a token"):
            run(client.search(["b"]))


@pytest.mark.parametrize("status", [404, 501])
def test_service_without_a_health_route_is_accepted(status):
    """Small servers answer 501 where they know no GET."""

    def do_GET(self):
        self.reply(status, b"")

    with serving(answering(do_GET=do_GET)) as url:
        client = RetrieverClient(RetrieverConfig(timeout=5.0, patience=0.2), url)
        assert client.health() == {}


@contextmanager
def served_pages():
    """The URL of a service with a page of Ann, and its state, which can be changed."""
    service = SimpleNamespace(state={"corpus_sha256": "c1", "pages_sha256": "p1", "identity": "aa"})

    class Pages(Handler):
        def do_GET(self):
            self.reply(200, service.state)

        def do_POST(self):
            self.body()
            page = {"url": "p/ann", "contents": '"Ann"\nAnn paints.'}
            self.reply(200, {"result": [page]}, {"X-Index-Identity": service.state["identity"]})

    with serving(Pages) as service.url:
        yield service


def test_exchanged_pages_are_refused():
    """A service that was started again with another --pages_path, and the same index."""
    with served_pages() as service, client_of(service, page_address="p/{}", patience=0.2) as (client, run):
        client.health()
        assert run(client.access(["ann"])) == [ANN]
        assert run(client.access(["ann"])) == [ANN]
        service.state = service.state | {"pages_sha256": "p2", "identity": "bb"}
        with pytest.raises(UserError, match="serves another index than at the start") as caught:
            run(client.access(["ann"]))
    assert type(caught.value) is UserError  # a RequestFailed would cost one trajectory only


def test_start_waits_for_a_service_that_comes_late():
    """The message says how to start one."""
    messages = []
    port = free_port()
    ready = type("Ready", (Handler,), {"do_GET": lambda self: self.reply(200, {"status": "ready"})})
    with ExitStack() as stack:

        def start_the_service(message):
            messages.append(message)
            stack.enter_context(serving(ready, port))

        url = f"http://127.0.0.1:{port}"
        check_running(RetrieverConfig(url=url, patience=60.0), start_the_service)
    (message,) = messages
    assert message.startswith(f"waiting up to 60 s for retriever {url} (")
    assert "otherwise start it with calibadv retriever or set retriever.url" in message


def test_outage_is_told_once_and_its_end(monkeypatch):
    """A single service that was away was waited for without a word."""
    monkeypatch.setattr(http_client, "LAST_PAUSE", 0.01)
    handler = answering(failures=5)
    lines = []
    with serving(handler) as url, client_of(url, warn=lines.append) as (client, run):
        run(client.search(["a"]))
        run(client.search(["b"]))
        assert run(client.unreachable_reason(5.0)) == ""  # a service without GET /health answers all the same
    assert lines[0].startswith(f"retriever {url} does not answer (status 503: ")
    assert lines[1:] == [f"retriever {url} answers again"]


def test_reason_why_no_service_is_reached():
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, serving(answering()) as url:
        away = f"http://127.0.0.1:{free_port()}"
        deaf = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for urls, words in (([away], "onnect"), ([deaf], "no answer within 0.1 s"), ([away, url], "")):
            with client_of(*urls) as (client, run):
                reason = run(client.unreachable_reason(0.1 if deaf in urls else 5.0))
                assert words in reason and bool(reason) == bool(words)
