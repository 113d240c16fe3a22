"""Several services for one trainer: shared out, one may die, none loses a query."""

import asyncio
import json

import pytest
from search_rig import client_of

pytest.importorskip("aiohttp")

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.services import replicas as replicas_module
from calibadv_jax.services import retriever_client
from calibadv_jax.services.http_client import HttpReply, Unreachable
from calibadv_jax.services.replicas import Replicas
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_replies import Unavailable

GONE = 0  # status of a service that is not there


class Service:
    """A service in memory that says its own name as the document; its fields can be changed.

    Where its manifest has an identity it is one of ours, and says so with every reply.
    """

    def __init__(self, name, **manifest):
        self.name, self.url, self.manifest = name, f"http://{name}", manifest
        self.status, self.health, self.seconds = 200, 200, 0.0
        self.queries, self.under_way, self.most, self.checks = [], 0, 0, 0

    async def post(self, queries):
        self.queries += queries
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(self.seconds)
        self.under_way -= 1
        if self.status == GONE:
            raise Unreachable("gone")
        rows = [[{"document": {"id": self.name, "contents": query}, "score": 1.0}] for query in queries]
        identity = self.manifest.get("identity")
        headers = {"X-Index-Identity": identity} if identity else {}
        return HttpReply(self.status, json.dumps({"result": rows}).encode(), headers)

    def get(self):
        self.checks += 1
        status = self.health.pop(0) if isinstance(self.health, list) else self.health
        if status == GONE or HttpReply(status, b"").is_unavailable:
            raise Unreachable("no health")
        return {"status": "ready", **self.manifest} if status == 200 else {}


@pytest.fixture
def make(monkeypatch):
    """Starts services, in place of earlier ones of the same name."""
    services = {}

    async def request(http, method, url, **arguments):
        return await services[url.removesuffix("/retrieve")].post(arguments["json"]["queries"])

    async def ask_health(http, url):
        return services[url].get()

    def start(name, **manifest):
        services[f"http://{name}"] = service = Service(name, **manifest)
        return service

    monkeypatch.setattr(replicas_module, "request", request)
    monkeypatch.setattr(replicas_module, "ask_health", ask_health)
    monkeypatch.setattr(retriever_client, "ask_health", ask_health)
    monkeypatch.setattr(retriever_client, "MAX_BATCH", 4)
    return start


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


@pytest.mark.parametrize("count", [2, 3, 4])
def test_sequential_searches_use_all_replicas_alike(make, count):
    services = [make(name) for name in "abcd"[:count]]
    with client_of(*services) as (client, run):
        for number in range(10 * count):
            run(ask(client, 1, number))
    assert [len(service.queries) for service in services] == [10] * count


def test_free_replica_is_asked(services):
    slow, *quick = services
    slow.seconds = 0.5
    for service in quick:
        service.seconds = 0.01
    with client_of(*services) as (client, run):
        names = run(ask(client, 60))
    assert names.count("a") <= 8
    assert names.count("b") >= 16 and names.count("c") >= 16


@pytest.mark.parametrize("status", [429, 502, 503])
def test_replica_that_says_it_is_away_gets_one_request(services, status):
    a, b, c = services
    a.status, a.health = status, 503
    with client_of(*services) as (client, run):
        assert "a" not in run(ask(client, 24))
    assert len(a.queries) <= retriever_client.MAX_BATCH
    assert b.most == c.most == 1


@pytest.mark.parametrize(("status", "health"), [(500, 503), (503, 503), (GONE, GONE)])
def test_absent_replica_is_left_out_losing_no_query(services, status, health):
    a, b, c = services

    async def fail():
        a.seconds = b.seconds = c.seconds = 0.02
        tasks = asyncio.create_task(ask(client, 80))
        while len(a.queries) < 8:  # it has answered the first four
            await asyncio.sleep(0)
        a.status, a.health = status, health
        names = await tasks
        a.seconds = b.seconds = c.seconds = 0.0
        return names

    with client_of(*services) as (client, run):
        assert 4 <= run(fail()).count("a") <= 40
        asked = len(a.queries)
        while a.checks < 2:  # asked for its health meanwhile
            run(asyncio.sleep(0.05))
        assert "a" not in run(ask(client, 24, 100)) and len(a.queries) == asked
        a.status, a.health = 200, 200
        while "a" not in run(ask(client, 12, 200)):  # bounded by pytest's limit
            pass
    assert a.most == b.most == c.most == 1


def test_all_away_is_patience_and_then_an_error(services):
    for service in services:
        service.status = service.health = 503
    with (
        client_of(*services, patience=0.5) as (client, run),
        pytest.raises(RequestFailed, match="no answer for 0.5 s .status 503"),
    ):
        run(ask(client, 1))

    async def recover():
        asked = [len(service.queries) for service in services]
        waiting = asyncio.create_task(ask(client, 8))
        while any(len(service.queries) == count for service, count in zip(services, asked, strict=True)):
            await asyncio.sleep(0.01)
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
    with pytest.raises(
        UserError, match=f"{c.url} has corpus_sha256 '2' instead of '1' of {a.url}; name serv"
    ):
        RetrieverClient(RetrieverConfig(), [a.url, b.url, c.url]).health()
    b.health = GONE
    client = RetrieverClient(RetrieverConfig(), [a.url, b.url])
    assert client.health()["corpus_sha256"] == "1" and list(client.unreachable) == [b.url]
    c.health = status  # it has no such route, and is believed
    with client_of(c) as (client, run):
        assert client.health() == {} and run(ask(client, 5)) == ["c"] * 5


@pytest.mark.parametrize(
    ("retry_after", "failures", "pauses"),
    [
        (0.0, 6, [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]),
        (7.0, 0, [7.0]),  # as long as the service asks
        (60.0, 0, [10.0]),
    ],
)
def test_pause_between_checks_grows_to_its_limit(services, monkeypatch, retry_after, failures, pauses):
    services[0].health = [GONE] * failures + [200]
    noted, sleep = [], asyncio.sleep

    async def pause(seconds):
        noted.append(seconds)
        await sleep(0)

    async def run():
        replicas = Replicas(None, [service.url for service in services], None, print)
        replica = await replicas._free.get()
        assert replicas._leave_out(replica, Unreachable("gone", retry_after))
        await replica.recovery
        return replica in replicas._free._queue

    monkeypatch.setattr(replicas_module, "CHECK_PAUSE", 0.5)
    monkeypatch.setattr(replicas_module.asyncio, "sleep", pause)
    assert asyncio.run(run()) and noted == pauses


def test_outage_is_warned_of_unless_announced():
    """A single service, or the last one, is never left out; a good reply ends an outage."""
    warnings = []

    async def run():
        replicas = Replicas(None, ["http://a", "http://b", "http://c"], None, warnings.append)
        single = Replicas(None, ["http://d"], None, warnings.append)
        first, second, last = replicas._replicas
        assert replicas._leave_out(first, Unavailable("status 503"))
        assert replicas._leave_out(second, Unreachable("gone"))
        for replica, owner in ((last, replicas), (single._replicas[0], single)):
            assert not owner._leave_out(replica, Unreachable("gone")) and replica.recovery is None
        await replicas.close()
        last.pause = 8.0
        await replicas._check_index(last, HttpReply(200, b""))
        assert last.pause == replicas_module.CHECK_PAUSE

    asyncio.run(run())
    assert warnings == ["retriever http://b is left out until it answers: gone"]


OURS = {"corpus_sha256": "c1", "encoder": "hashed", "model": "", "reranker": "", "identity": "aa"}
FOREIGN = {"corpus_sha256": "c1", "encoder": "e5"}
EXCHANGED, REASON = OURS | {"identity": "bb"}, "identity 'bb' instead of 'aa'"  # in place of OURS, no outage


def test_replica_with_exchanged_index_is_left_out(make):
    first, second = make("a", **OURS), make("b", **OURS)
    warnings = []
    with client_of(first, second, warn=warnings.append) as (client, run):
        client.health()
        names = set()
        while names != {"a", "b"}:  # bounded by pytest's limit
            names |= set(run(ask(client, 4)))
        second.manifest = EXCHANGED
        for _ in range(5):
            assert set(run(ask(client, 6))) == {"a"}
        message = f"retriever {second.url} serves another index ({REASON}) and is left out"
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
        second.status = second.health = GONE
        assert set(run(ask(client, 12))) == {"a"}
        again = make("b", **FOREIGN | {"corpus_sha256": "c2"})
        while not again.checks:
            assert set(run(ask(client, 4))) == {"a"}
        for _ in range(10):
            assert set(run(ask(client, 4))) == {"a"}
    assert again.queries == [] and any("corpus_sha256 'c2' instead of 'c1'" in line for line in warnings)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_exchange_of_every_index_ends_the_run(make, names):
    made = [make(name, **OURS) for name in names]
    with client_of(*made, warn=lambda _: None) as (client, run):
        client.health()
        run(ask(client, 5))
        for service in made:
            service.manifest = EXCHANGED
        with pytest.raises(UserError, match=f"serves another index .*{REASON}") as caught:
            run(ask(client, 12))
    assert type(caught.value) is UserError  # a RequestFailed would cost one trajectory only


def test_replica_that_is_away_may_come_back_with_the_agreed_index(make):
    first, second = make("a", **OURS), make("b", **OURS)
    with client_of(first, second, warn=lambda _: None) as (client, run):
        client.health()
        second.manifest = EXCHANGED
        assert run(ask(client, 12)) == ["a"] * 12 and second.queries

        async def restart():
            second.status = second.health = GONE
            checks = second.checks
            while second.checks < checks + 2:
                await asyncio.sleep(0.01)
            first.manifest, second.manifest = EXCHANGED, OURS
            asked = len(first.queries)
            waiting = asyncio.create_task(ask(client, 4))
            while len(first.queries) == asked:
                await asyncio.sleep(0.01)
            second.status = second.health = 200
            return await waiting

        assert run(restart()) == ["b"] * 4


def test_foreign_service_is_compared_after_outage(make):
    service = make("a", **FOREIGN)
    with client_of(service, warn=lambda _: None) as (client, run):
        client.health()
        run(ask(client, 5))

        async def come_back(manifest):
            service.status = 503
            asked = len(service.queries)
            waiting = asyncio.create_task(ask(client, 5))
            while len(service.queries) == asked:
                await asyncio.sleep(0.01)
            service.manifest, service.status = manifest, 200
            return await waiting

        assert run(come_back(FOREIGN)) == ["a"] * 5
        with pytest.raises(UserError, match="corpus_sha256 'c2' instead of 'c1'"):
            run(come_back(FOREIGN | {"corpus_sha256": "c2"}))


def test_replica_that_is_away_at_the_start_joins_later(make):
    here, gone = make("a", corpus_sha256="1"), make("b", corpus_sha256="1")
    gone.status = gone.health = GONE
    warnings = []
    with client_of(here, gone, warn=warnings.append) as (client, run):
        assert client.health()["corpus_sha256"] == "1" and list(client.unreachable) == [gone.url]
        assert set(run(ask(client, 24))) == {"a"}
        (warning,) = warnings
        assert warning.startswith(f"retriever {gone.url} is left out until it answers: ")
        gone.status = gone.health = 200
        while "b" not in run(ask(client, 6)):  # bounded by pytest's limit
            pass
