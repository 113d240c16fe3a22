"""The barrier of the threads that save checkpoints, between threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from process_rig import KeyValueStore

from calibadv_jax.distributed import all_gather
from calibadv_jax.distributed.save_barrier import SaveBarrier


def in_threads(work):
    notes = KeyValueStore()

    def outcome(index):
        barrier = SaveBarrier(notes, index, 2, lambda index: f"process {index}")
        try:
            return work(barrier, index)
        except OSError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(outcome, range(2)))


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


def test_thread_stops_waiting_when_the_main_thread_has_ended(monkeypatch):
    """The end of a process waits for its threads, so this one must not go on waiting for another process."""
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    monkeypatch.setattr(all_gather, "POLL_MILLISECONDS", 1)
    notes = KeyValueStore()
    get, polls = notes.blocking_key_value_get_bytes, iter(range(4))

    def get_sometimes(key, milliseconds):
        assert next(polls) < 3, "the thread goes on waiting"
        return get(key, milliseconds)

    monkeypatch.setattr(notes, "blocking_key_value_get_bytes", get_sometimes)
    barrier = SaveBarrier(notes, 0, 2, str)
    with pytest.raises(threading.BrokenBarrierError):
        barrier(key="first", timeout_ms=1000)
