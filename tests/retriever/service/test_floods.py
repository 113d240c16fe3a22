"""Floods against the running service; benchmarks/retrieval/flood.py has the full sizes."""

import resource
import subprocess

import pytest

from benchmarks.retrieval.flood import TOKEN, bodies, idle, service, slow, watch

MB = 2**20


@pytest.fixture(scope="module")
def running(files):
    """(address, process id) of a service."""
    with service(*files, "--max_connections", "150", "--request_seconds", "2") as (address, pid):
        bodies(address, 2, 15 * MB, TOKEN)  # the buffers of a first large body stay
        yield address, pid


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flood", "growth"),
    [
        (lambda address: idle(address, 400, 3.0), 20 * MB),
        (lambda address: slow(address, 60, 4.0), 20 * MB),
        (lambda address: bodies(address, 40, 15 * MB), 30 * MB),
        # 128 MB of bodies at most, up to twice that while they grow
        (lambda address: bodies(address, 40, 15 * MB, TOKEN), 270 * MB),
        (lambda address: bodies(address, 1, 4 * MB, TOKEN, 1024), 30 * MB),
    ],
    ids=["idle connections", "slow requests", "bodies without token", "bodies with token", "small parts"],
)
def test_service_answers_and_keeps_its_memory(running, request, flood, growth):
    address, pid = running
    outcome = watch(request.node.callspec.id, address, pid, lambda: flood(address))
    assert outcome.answers >= 2
    assert outcome.peak - outcome.before < growth, outcome


@pytest.mark.slow
def test_flood_does_not_take_all_files(files, monkeypatch, capfd):
    """The loop accepted connections faster than it closed those that they replaced."""
    limit = 700
    start = subprocess.Popen

    def with_few_files(*arguments, **options):
        few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # noqa: E731
        return start(*arguments, preexec_fn=few, **options)

    monkeypatch.setattr(subprocess, "Popen", with_few_files)
    with service(*files) as (address, pid):
        monkeypatch.undo()
        outcome = watch("idle", address, pid, lambda: idle(address, 1800, 2.0))
    assert outcome.answers >= 2
    assert capfd.readouterr().err == ""
