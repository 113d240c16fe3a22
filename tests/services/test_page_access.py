"""`POST /access` of the retriever's client: pages, no pages, and services that are ill."""

import asyncio
import json

import pytest
from http_rig import Handler, serving
from search_rig import client_of

from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.core.trajectory import Document
from calibadv_jax.services import http_client


@pytest.fixture
def service():
    """Reads pages with a client, from a service that first gives the replies."""

    class Pages(Handler):
        replies: list = []
        asked: list = []
        state = {"corpus_sha256": "c1", "pages_sha256": "p1", "identity": "aa"}

        def do_GET(self):
            self.reply(200, self.state)

        def do_POST(self):
            urls = json.loads(self.body())["urls"]
            self.asked.append((self.path, urls))
            if self.replies:
                self.reply(*self.replies.pop(0))
                return
            row = {"url": "p/ann", "contents": '"Ann"\nAnn paints.', "more": 1}
            result = [row if url == "p/ann" else None for url in urls]
            self.reply(200, {"result": result}, {"X-Index-Identity": self.state["identity"]})

    def read(*addresses, between=None, patience=0.2):
        with client_of(url, page_address="p/{}", patience=patience) as (client, run):
            if between is not None:
                client.health()
                run(client.access(addresses))
                between()
            return run(client.access(addresses))

    with serving(Pages) as url:
        yield read, Pages


ANN = Document("page ann", "Ann", "Ann paints.")


def test_page_differs_from_passage_of_its_title(service):
    """Failures that pass are waited for."""
    read, handler = service
    assert read("ann", "bob") == [ANN, None]
    assert sorted(handler.asked) == [("/access", ["p/ann"]), ("/access", ["p/bob"])]
    handler.replies += [(503, b""), (200, b"{}"), (200, {"result": []})]
    assert read("ann") == [ANN]


@pytest.mark.parametrize(
    ("reply", "times", "kind", "message"),
    [
        ((200, {"result": [{"contents": 5}]}), 3, RequestFailed, "no usable page in 3 attempts"),
        ((500, b"broken"), 3, RequestFailed, "no usable page in 3 attempts"),
        ((503, b""), 99, RequestFailed, "no answer for 0.2 s"),
        ((404, b"none"), 1, UserError, "start the service with --pages_path"),
        ((422, b"too long"), 1, RequestFailed, "status 422"),
    ],
)
def test_service_that_stays_ill(service, reply, times, kind, message):
    read, handler = service
    handler.replies += [reply] * times
    with pytest.raises(kind, match=message) as error:
        read("ann")
    assert (type(error.value) is UserError) == (kind is UserError)


def test_exchanged_pages_are_never_taken(service):
    read, handler = service

    def exchange():
        handler.state = handler.state | {"pages_sha256": "p2", "identity": "bb"}

    assert read("ann", between=lambda: None) == [ANN]
    with pytest.raises(UserError, match="serves another index than at the start") as error:
        read("ann", between=exchange)
    assert type(error.value) is UserError


def test_page_waits_as_long_as_the_service_asks(service, monkeypatch):
    read, handler = service
    handler.replies += [(503, b"", {"Retry-After": "7"}), (429, b"")]
    pauses, sleep = [], asyncio.sleep

    async def note(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(http_client.asyncio, "sleep", note)
    assert read("ann", patience=20.0) == [ANN]
    assert pauses == [7.0, pytest.approx(0.02, abs=0.01)]
