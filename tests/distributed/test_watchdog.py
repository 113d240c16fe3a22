"""What a watchdog says of other processes, and when it ends its own."""

import os
import signal
import time
from contextlib import suppress

import jax
import pytest
from process_rig import KeyValueStore

from calibadv_jax.distributed import watchdog
from calibadv_jax.distributed.watchdog import STOPPING, Watchdog


class Ended(Exception):
    """In place of the end of the process."""


def make_watchdog(store, index=1, on_stop=print, count=3):
    describe_process = "process {0} (host{0})".format
    return Watchdog(store, index, count, 30.0, describe_process, on_stop)


class Gone(KeyValueStore):
    """Process 0 has ended, and the store with it."""

    def key_value_set(self, key, value, allow_overwrite=False):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused\nat line 1")


@pytest.mark.parametrize(
    ("notes", "silent", "line"),
    [
        ({}, {0: 1.0, 1: 0.0, 2: 31.0}, "process 2 (host2) is lost: no sign of life for 31 s; start all"),
        ({("ended", 0): "OSError disk full"}, {0: 0.0}, "process 0 (host0) has ended: OSError disk full;"),
        ({("done", 2): "", ("ended", 1): "myself"}, {0: 29.0, 2: 60.0}, ""),
        (None, None, "process 0 (host0) is gone, or cannot be reached (UNAVAILABLE: connection refused)"),
    ],
)
def test_lost_or_ended_process_ends_this_one(monkeypatch, capfd, notes, silent, line):
    statuses = []

    def exit_process(status):
        statuses.append(status)
        raise Ended

    monkeypatch.setattr(os, "_exit", exit_process)
    watcher = make_watchdog(Gone())
    monkeypatch.setattr(watcher._is_closed, "wait", lambda _: False)
    with suppress(Ended):
        watcher._run() if notes is None else watcher._react(notes, silent)
    error = capfd.readouterr().err
    assert error.startswith(f"error: {line}" if line else "") and error.count("\n") == len(statuses)
    assert statuses == ([75] if line else [])


def test_paused_watchdog_counts_no_process_as_lost(monkeypatch):
    """A process that was stopped and goes on must not take the others for dead."""
    watcher = make_watchdog(None, index=0, count=2)
    silences, now = [], iter([0.0, 1.0, 100.0, 101.0])
    monkeypatch.setattr(watcher, "write_note", lambda *_: None)
    monkeypatch.setattr(watcher, "_read_notes", lambda: {("alive", 0): "7", ("alive", 1): str(len(silences))})
    monkeypatch.setattr(watcher, "_react", lambda notes, silent: silences.append(silent))
    monkeypatch.setattr(watcher._is_closed, "wait", lambda _: len(silences) == 3)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    watcher._run()
    assert silences == [{0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}, {0: 1.0, 1: 0.0}]


def test_failure_is_reported_where_it_can_be():
    notes = KeyValueStore()
    for store in (notes, Gone()):
        watcher = make_watchdog(store)
        watcher.report_failure("OSError disk full")
        assert watcher._is_closed.is_set()  # it must not end for another reason meanwhile
    assert make_watchdog(notes, 0)._read_notes() == {("ended", 1): "OSError disk full"}


def test_stop_of_another_process_interrupts_once(monkeypatch):
    monkeypatch.setattr(watchdog, "HEARTBEAT_SECONDS", 0.01)
    notes, calls, before = KeyValueStore(), [], signal.getsignal(signal.SIGUSR1)
    watcher, other = (make_watchdog(notes, index, lambda: calls.append(len(calls))) for index in (0, 1))

    def look(times=3):
        until = int(watcher._read_notes()["alive", 0]) + times
        while int(watcher._read_notes()["alive", 0]) < until:
            time.sleep(0.005)

    try:
        watcher.start()
        watcher.write_note(STOPPING, "")
        look()
        assert calls == []  # its own
        other.write_note(STOPPING, "")
        while not calls:
            time.sleep(0.005)
        look()
        watcher.close()
    finally:
        watcher._is_closed.set()
        signal.signal(signal.SIGUSR1, before)
    assert calls == [0] and ("done", 0) in watcher._read_notes() and not watcher._thread.is_alive()
