"""The barrier of the threads that save checkpoints: an error in one process ends the waits of all."""

import time
from concurrent.futures import ThreadPoolExecutor

import hosts_rig
import pytest
from test_exchange import Notes

from calibadv_jax.hosts.exchange import SaveBarrier

# Processes that only save: the disk is full from the second checkpoint on, or the last one stops before it.
PROGRAM = """
import sys
import jax, numpy as np
from pathlib import Path
from calibadv_jax.cli import end
from calibadv_jax.config import Config, DistributedConfig
from calibadv_jax.core.errors import EnvironmentFailure
from calibadv_jax.hosts.joining import joined
from calibadv_jax.snapshots.checkpoint import CheckpointStore

def work():
    address, index, folder, asynchronous, count = sys.argv[1:]
    place = {"coordinator_address": address, "num_processes": int(count), "process_id": int(index)}
    section = DistributedConfig(**place, timeout=20)
    with joined(Config(distributed=section)) as hosts:
        mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        whole = np.random.default_rng(0).random((int(count), 80_000), np.float32)
        state = {"params": jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])}
        store = CheckpointStore(Path(folder) / "checkpoints", 9, asynchronous == "True", hosts.save_barrier())
        for step in range(1, 9):
            if (index, step) == ("2", 2):
                raise EnvironmentFailure("no disk")
            store.save(step, state, {"step": step})
            with hosts.barrier("checkpoint"):
                store.wait()
        store.close()

end(work)
"""


def in_threads(work):
    notes = Notes()

    def outcome(index):
        barrier = SaveBarrier(notes, index, 2, lambda index: f"process {index}")
        try:
            return work(barrier, index)
        except OSError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(outcome, range(2)))


def test_barrier_waits_for_all_processes():
    entered = []

    def work(barrier, index):
        for key in "abc":
            time.sleep(0.02 * index)
            entered.append(key)
            barrier(key=key, timeout_ms=1000)
            assert entered.count(key) == 2
        return barrier.is_broken

    assert in_threads(work) == [False, False]


def test_error_of_one_save_ends_all_until_reset():
    """Process 1 comes to the last barrier with its error, as Orbax does; the other waits at the first one."""

    def work(barrier, index):
        with pytest.raises(OSError) as caught:
            if index:
                try:
                    raise OSError(28, "No space left on device")
                finally:
                    barrier(key="last", timeout_ms=1000)
            barrier(key="first", timeout_ms=1000)
        with pytest.raises(OSError):
            barrier(key="last", timeout_ms=1000)
        assert barrier.is_broken
        barrier.reset()
        assert not barrier.is_broken
        barrier(key="first", timeout_ms=1000)
        return caught.value

    first, second = in_threads(work)
    assert str(first) == "process 1: No space left on device" and second.errno == 28


def test_processes_at_different_barriers_have_failed():
    """One has left its save without an error that its thread knows."""
    outcomes = in_threads(lambda barrier, index: barrier(key="ab"[index], timeout_ms=1000))
    assert list(map(str, outcomes)) == ["another process could not save its part"] * 2


def start(count, folder, asynchronous):
    address = f"127.0.0.1:{hosts_rig.free_port()}"
    arguments = [str(folder), str(asynchronous), str(count)]
    commands = [["-c", PROGRAM, address, str(index), *arguments] for index in range(count)]
    return [hosts_rig.spawn(command, hosts_rig.environment(1)) for command in commands]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_full_disk_ends_both_processes(small_disk, asynchronous):
    """With one line each and status 75; the checkpoints before are whole."""
    running = start(2, small_disk, asynchronous)
    for errors, status in hosts_rig.ends(running, 120):
        lines = errors.splitlines()
        assert status == 75 and len(lines) == 1 and lines[0].startswith("error: "), errors
        assert "No space left on device" in lines[0] or "has ended" in lines[0], errors
    steps = [path.name for path in (small_disk / "checkpoints").iterdir() if path.name.isdigit()]
    assert sorted(steps) == [str(step) for step in range(1, len(steps) + 1)] and 0 < len(steps) < 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_lost_process_is_named_by_the_others(tmp_path):
    """A save without one of three processes fails in JAX; that is no failure of the disk."""
    *others, last = hosts_rig.ends(start(3, tmp_path, False), 120)
    assert last == ("error: no disk\n", 75)
    for errors, status in others:
        assert status == 75 and errors.startswith("error: process 2 (") and "no disk" in errors, errors
