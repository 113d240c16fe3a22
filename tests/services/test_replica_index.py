"""Documents of another index than at the start are never taken, wherever it is put in place of the first."""

import asyncio

import pytest
from search_rig import client_of
from test_replicas import Service, ask

from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.services import retriever_client

OURS = {"corpus_sha256": "c1", "encoder": "hashed", "model": "", "reranker": "", "identity": "aa"}
FOREIGN = {"corpus_sha256": "c1", "encoder": "e5"}
# Put in place of OURS without an outage. The second is of another make, and its health says nothing else.
EXCHANGED = {
    "identity 'bb' instead of 'aa'": OURS | {"identity": "bb"},
    "no X-Index-Identity instead of 'aa'": {k: v for k, v in OURS.items() if k != "identity"},
}


@pytest.fixture(autouse=True)
def frequent_checks(monkeypatch):
    monkeypatch.setattr(retriever_client, "LAST_PAUSE", 0.1)


@pytest.fixture
def pair(request):
    made = [Service(name, **request.param) for name in "ab"]
    yield made
    for service in made:
        service.stop()


exchanged = pytest.mark.parametrize(("reason", "manifest"), EXCHANGED.items(), ids=["another", "none"])
ours = pytest.mark.parametrize("pair", [OURS], indirect=True)
foreign = pytest.mark.parametrize("pair", [FOREIGN], indirect=True)


@ours
@exchanged
def test_replica_with_exchanged_index_is_left_out(pair, reason, manifest):
    first, second = pair
    warnings = []
    with client_of(first, second, warn=warnings.append) as (client, run):
        client.health()
        answered = set()
        while answered != {"a", "b"}:  # bounded by pytest's limit
            answered |= set(run(ask(client, 4)))
        second.manifest = manifest
        for _ in range(5):
            assert set(run(ask(client, 6))) == {"a"}
        assert warnings[0].startswith(
            f"retriever {second.url} serves another index ({reason}) and is left out"
        )
        asked, checks = len(second.asked), second.checks
        while second.checks < checks + 3:  # bounded by pytest's limit
            assert set(run(ask(client, 6))) == {"a"}
        assert len(second.asked) == asked and len(set(warnings)) == len(warnings)
        second.manifest = OURS
        while "b" not in run(ask(client, 6)):
            pass


@foreign
def test_replica_returning_with_another_corpus_is_left_out(pair):
    """It says what it serves on GET /health only."""
    first, second = pair
    warnings = []
    with client_of(first, second, warn=warnings.append) as (client, run):
        client.health()
        run(ask(client, 24))
        second.stop()
        assert set(run(ask(client, 12))) == {"a"}
        checks = Service("b", second.port, corpus_sha256="c2", encoder="e5")
        while not checks.checks:
            assert set(run(ask(client, 4))) == {"a"}
        for _ in range(10):
            assert set(run(ask(client, 4))) == {"a"}
        checks.stop()
    assert checks.asked == [] and any("corpus_sha256 'c2' instead of 'c1'" in line for line in warnings)


@ours
@exchanged
def test_single_service_with_another_index_ends_the_run(pair, reason, manifest):
    (service, _) = pair
    with client_of(service, warn=lambda _: None) as (client, run):
        client.health()
        run(ask(client, 5))
        service.manifest = manifest
        message = f"retriever {service.url} serves another index .*{reason}"
        with pytest.raises(UserError, match=message) as caught:
            run(ask(client, 5))
    assert not isinstance(caught.value, RequestFailed)  # else it would cost one trajectory


@foreign
def test_foreign_service_is_compared_after_outage(pair):
    (service, _) = pair
    with client_of(service, warn=lambda _: None) as (client, run):
        client.health()
        run(ask(client, 5))

        async def exchanged(manifest):
            service.status = 503
            waiting = asyncio.create_task(ask(client, 5))
            await asyncio.sleep(0.1)
            service.manifest, service.status = manifest, 200
            return await waiting

        assert run(exchanged(FOREIGN)) == ["a"] * 5
        with pytest.raises(UserError, match="corpus_sha256 'c2' instead of 'c1'"):
            run(exchanged(FOREIGN | {"corpus_sha256": "c2"}))


@ours
def test_when_every_replica_serves_another_index_the_run_ends(pair):
    with client_of(*pair, warn=lambda _: None) as (client, run):
        client.health()
        for service in pair:
            service.manifest = OURS | {"identity": "bb"}
        with pytest.raises(UserError, match="serves another index than at the start"):
            run(ask(client, 12))


def test_services_that_say_nothing_of_themselves_are_believed():
    service = Service("a")
    service.health = 404
    with client_of(service) as (client, run):
        assert client.health() == {}
        assert run(ask(client, 5)) == ["a"] * 5
    service.stop()
