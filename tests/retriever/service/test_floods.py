"""Floods against the running service; benchmarks/retrieval/flood.py has the full sizes."""

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from benchmarks.retrieval.flood import TOKEN, bodies, idle, service, slow, watch

MB = 2**20


@pytest.fixture(scope="module")
def running(files):
    with service(*files, "--max_connections", "150", "--request_seconds", "2") as (address, pid):
        bodies(address, 2, 15 * MB, TOKEN)  # buffers of a first large body stay
        yield address, pid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "flood", "growth"),
    [
        ("more idle connections than it takes", lambda address: idle(address, 400, 3.0), 20 * MB),
        ("slow heads and bodies", lambda address: slow(address, 60, 4.0), 20 * MB),
        ("40 bodies without token", lambda address: bodies(address, 40, 15 * MB), 30 * MB),
        # 128 MB of bodies at most, up to twice that while they grow
        ("40 bodies with token", lambda address: bodies(address, 40, 15 * MB, TOKEN), 270 * MB),
        ("a body in small parts", lambda address: bodies(address, 1, 4 * MB, TOKEN, 1024), 30 * MB),
    ],
)
def test_memory_stays_and_the_service_answers(running, what, flood, growth):
    address, pid = running
    outcome = watch(what, address, pid, lambda: flood(address))
    assert outcome.answers >= 2
    assert outcome.longest < 10, outcome
    assert outcome.most - outcome.before < growth, outcome
