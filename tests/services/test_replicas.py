"""Several services for one trainer: shared out, one may die, none loses a query."""

import asyncio
import json
import time
from contextlib import ExitStack

import pytest
from http_rig import Handler, serving
from search_rig import client_of

pytest.importorskip("aiohttp")

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.services import retriever_client
from calibadv_jax.services.http_client import HttpReply, Unreachable
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_replies import Away

NOBODY = "http://127.0.0.1:9"


class Service:
    """A server on loopback that says its own name as the document; its fields can be changed.

    Where its manifest has an identity it is one of ours, and says so with every reply.
    """

    def __init__(self, name, port=0, **manifest):
        self.name, self.status, self.seconds, self.health, self.manifest = name, 200, 0.0, 200, manifest
        self.is_stopped = False
        self.queries, self.under_way, self.most, self.checks = [], 0, 0, 0
        service = self

        class Named(Handler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                queries = json.loads(self.body())["queries"]
                service.queries += queries
                service.under_way += 1
                service.most = max(service.most, service.under_way)
                time.sleep(service.seconds)
                service.under_way -= 1
                rows = [[{"document": {"id": service.name, "contents": q}, "score": 1.0}] for q in queries]
                identity = service.manifest.get("identity")
                headers = {"X-Index-Identity": identity} if identity else {}
                self.answer(service.status, {"result": rows}, headers)

            def do_GET(self):
                service.checks += 1
                self.answer(service.health, {"status": "ready", **service.manifest})

            def answer(self, status, content, headers=None):
                if service.is_stopped:  # also for connections that are open
                    self.close_connection = True
                    return
                self.reply(status, content, headers)

        self._server = ExitStack()
        self.url = self._server.enter_context(serving(Named, port))
        self.port = int(self.url.rpartition(":")[2])

    def stop(self):
        self.is_stopped = True
        self._server.close()


@pytest.fixture
def make(monkeypatch):
    """Starts services, which end with the test."""
    monkeypatch.setattr(retriever_client, "MAX_BATCH", 4)
    monkeypatch.setattr(retriever_client, "LAST_PAUSE", 0.1)
    with ExitStack() as stack:

        def start(name, port=0, **manifest):
            service = Service(name, port, **manifest)
            stack.callback(service.stop)
            return service

        yield start


@pytest.fixture
def services(make):
    return [make(name) for name in "abc"]


async def ask(client, count, first=0):
    """The name of the service that answered each of so many queries."""
    replies = await asyncio.gather(*(client.search([f"q{first + n}"]) for n in range(count)))
    assert [reply[0][0].title for reply in replies] == [f"q{first + n}" for n in range(count)]
    return [reply[0][0].id for reply in replies]


def test_queries_are_shared_out_one_request_at_each(services):
    for service in services:
        service.seconds = 0.05
    with client_of(*services) as (client, run):
        names = run(ask(client, 48))
    assert all(12 <= names.count(service.name) <= 20 and service.most == 1 for service in services)


@pytest.mark.parametrize("count", [2, 3])
def test_sequential_searches_use_all_replicas_alike(services, count):
    with client_of(*services[:count]) as (client, run):
        for number in range(10 * count):
            run(ask(client, 1, number))
    assert [len(service.queries) for service in services[:count]] == [10] * count


@pytest.mark.medium
@pytest.mark.parametrize("status", [500, 503])
def test_replica_that_announces_absence_is_left_out(services, status):
    a, b, c = services
    a.status, a.health = status, 503
    with client_of(*services) as (client, run):
        assert "a" not in run(ask(client, 24))
        asked = len(a.queries)
        assert asked <= 4  # one request
        while a.checks < 2:  # asked for its health meanwhile
            run(asyncio.sleep(0.05))
        assert "a" not in run(ask(client, 24, 100)) and len(a.queries) == asked
        a.status, a.health = 200, 200
        while "a" not in run(ask(client, 12, 200)):  # bounded by pytest's limit
            pass
    assert b.most == c.most == 1


def test_dead_replica_loses_no_query(services, make):
    a = services[0]
    for service in services:
        service.seconds = 0.02

    async def kill():
        tasks = asyncio.create_task(ask(client, 80))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(a.stop)
        return await tasks

    with client_of(*services) as (client, run):
        assert 4 <= run(kill()).count("a") <= 40
        assert "a" not in run(ask(client, 12, 100))
        again = make("a", a.port)
        while not again.queries:
            run(ask(client, 12, 200))


def test_all_away_is_patience_and_then_an_error(services):
    for service in services:
        service.status = service.health = 503
    with (
        client_of(*services, patience=0.5) as (client, run),
        pytest.raises(RequestFailed, match="no answer for 0.5 s .status 503"),
    ):
        run(ask(client, 1))

    async def recover():
        waiting = asyncio.create_task(ask(client, 8))
        await asyncio.sleep(0.4)
        assert not waiting.done()
        for service in services:
            service.status = service.health = 200
        return await waiting

    with client_of(*services) as (client, run):
        assert len(run(recover())) == 8


@pytest.mark.parametrize("status", [404, 501])
def test_services_must_serve_one_index(make, status):
    a, b, c = (make(name, corpus_sha256=corpus) for name, corpus in zip("abc", "112", strict=True))
    assert RetrieverClient(RetrieverConfig(), [a.url, b.url]).health()["corpus_sha256"] == "1"
    with pytest.raises(UserError, match=f"{c.url} has corpus_sha256 '2' instead of '1' of {a.url}"):
        RetrieverClient(RetrieverConfig(), [a.url, c.url]).health()
    client = RetrieverClient(RetrieverConfig(), [a.url, NOBODY])
    assert client.health()["corpus_sha256"] == "1" and list(client.missing) == [NOBODY]
    c.health = status  # it has no such route, and is believed
    with client_of(c) as (client, run):
        assert client.health() == {} and run(ask(client, 5)) == ["c"] * 5


@pytest.fixture
def replicas(monkeypatch):
    """Makes replicas whose next health is what `answers` holds; notes pauses and warnings."""

    def make(*names, agreed=None):
        urls = [f"http://{name}" for name in names]
        return retriever_client.Replicas(None, urls, agreed, make.warnings.append)

    make.answers, make.pauses, make.warnings = [], [], []
    sleep = asyncio.sleep

    async def pause(seconds):
        make.pauses.append(seconds)
        await sleep(0)

    async def answer(http, url):
        state = make.answers.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    monkeypatch.setattr(retriever_client, "CHECK_PAUSE", 0.5)
    monkeypatch.setattr(retriever_client.asyncio, "sleep", pause)
    monkeypatch.setattr(retriever_client, "ask_health", answer)
    return make


@pytest.mark.parametrize(
    ("retry_after", "failures", "pauses"),
    [
        (0.0, 6, [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]),
        (7.0, 0, [7.0]),  # as long as the service asks
        (60.0, 0, [10.0]),
    ],
)
def test_pause_between_checks_grows_to_its_limit(replicas, retry_after, failures, pauses):
    replicas.answers += [Unreachable("gone")] * failures + [{}]

    async def run():
        several = replicas("a", "b")
        replica = await several.acquire()
        assert several.leave_out(replica, Unreachable("gone", retry_after))
        several.release(replica)
        await replica.check
        return replica.is_well

    assert asyncio.run(run()) and replicas.pauses == pauses


def test_outage_is_warned_of_once_unless_announced(replicas):
    """A single service is never left out; a good reply ends an outage."""

    async def run():
        several, single = replicas("a", "b"), replicas("c")
        first, second = several._all
        several.leave_out(first, Away("status 503"))
        for reason in ("gone", "still gone"):
            several.leave_out(second, Unreachable(reason))
            assert not single.leave_out(single._all[0], Unreachable(reason))
        await several.close()
        assert single._all[0].is_well and single._all[0].check is None
        second.pause = 8.0
        await several.check(second, HttpReply(200, b""))
        assert second.is_well and second.pause == retriever_client.CHECK_PAUSE

    asyncio.run(run())
    assert replicas.warnings == ["retriever http://b is left out until it answers: gone"]


def test_refusal_need_not_name_the_index(replicas):
    """A proxy may refuse; an answer without the name is another service's."""
    several = replicas("a", "b", agreed={"identity": "x"})
    replica = several._all[0]
    replica.is_named = replica.is_verified = True
    asyncio.run(several.check(replica, HttpReply(422, b"")))
    with pytest.raises(Unreachable, match="serves another index: no X-Index-Identity instead of 'x'"):
        asyncio.run(several.check(replica, HttpReply(200, b"")))


OURS = {"corpus_sha256": "c1", "encoder": "hashed", "model": "", "reranker": "", "identity": "aa"}
FOREIGN = {"corpus_sha256": "c1", "encoder": "e5"}
# Put in place of OURS without an outage. The second is of another make, and its health says nothing else.
EXCHANGED = {
    "identity 'bb' instead of 'aa'": OURS | {"identity": "bb"},
    "no X-Index-Identity instead of 'aa'": {k: v for k, v in OURS.items() if k != "identity"},
}
exchanged = pytest.mark.parametrize(("reason", "manifest"), EXCHANGED.items(), ids=["another", "none"])


@exchanged
def test_replica_with_exchanged_index_is_left_out(make, reason, manifest):
    first, second = make("a", **OURS), make("b", **OURS)
    warnings = []
    with client_of(first, second, warn=warnings.append) as (client, run):
        client.health()
        names = set()
        while names != {"a", "b"}:  # bounded by pytest's limit
            names |= set(run(ask(client, 4)))
        second.manifest = manifest
        for _ in range(5):
            assert set(run(ask(client, 6))) == {"a"}
        message = f"retriever {second.url} serves another index ({reason}) and is left out"
        assert warnings[0].startswith(message)
        asked, checks = len(second.queries), second.checks
        while second.checks < checks + 3:
            assert set(run(ask(client, 6))) == {"a"}
        assert len(second.queries) == asked and len(set(warnings)) == len(warnings)
        second.manifest = OURS
        while "b" not in run(ask(client, 6)):
            pass


def test_replica_returning_with_another_corpus_is_left_out(make):
    """It says what it serves on GET /health only."""
    first, second = make("a", **FOREIGN), make("b", **FOREIGN)
    warnings = []
    with client_of(first, second, warn=warnings.append) as (client, run):
        client.health()
        run(ask(client, 24))
        second.stop()
        assert set(run(ask(client, 12))) == {"a"}
        again = make("b", second.port, corpus_sha256="c2", encoder="e5")
        while not again.checks:
            assert set(run(ask(client, 4))) == {"a"}
        for _ in range(10):
            assert set(run(ask(client, 4))) == {"a"}
    assert again.queries == [] and any("corpus_sha256 'c2' instead of 'c1'" in line for line in warnings)


@exchanged
@pytest.mark.parametrize("names", ["a", "ab"])
def test_exchange_of_every_index_ends_the_run(make, names, reason, manifest):
    made = [make(name, **OURS) for name in names]
    with client_of(*made, warn=lambda _: None) as (client, run):
        client.health()
        run(ask(client, 5))
        for service in made:
            service.manifest = manifest
        with pytest.raises(UserError, match=f"serves another index .*{reason}") as caught:
            run(ask(client, 12))
    assert type(caught.value) is UserError  # a RequestFailed would cost one trajectory only


def test_foreign_service_is_compared_after_outage(make):
    service = make("a", **FOREIGN)
    with client_of(service, warn=lambda _: None) as (client, run):
        client.health()
        run(ask(client, 5))

        async def come_back(manifest):
            service.status = 503
            waiting = asyncio.create_task(ask(client, 5))
            await asyncio.sleep(0.1)
            service.manifest, service.status = manifest, 200
            return await waiting

        assert run(come_back(FOREIGN)) == ["a"] * 5
        with pytest.raises(UserError, match="corpus_sha256 'c2' instead of 'c1'"):
            run(come_back(FOREIGN | {"corpus_sha256": "c2"}))
