"""What a watch says of other processes, and when it ends its own."""

import os
import signal
import threading
import time
from contextlib import suppress

import jax
import pytest
from test_exchange import Notes

from calibadv_jax.hosts import watch


class Ended(Exception):
    """In place of the end of the process."""


@pytest.fixture
def last_line(monkeypatch, capfd):
    """What a watch of process 1 of 3 says, and its status, when it finds these notes."""

    def of(notes, silent):
        statuses = []

        def leave(status):
            statuses.append(status)
            raise Ended

        monkeypatch.setattr(os, "_exit", leave)
        called = threading.Event()
        watcher = watch.Watch(None, 1, 3, lambda index: f"process {index} (host{index})", 30.0, called.set)
        with suppress(Ended):
            watcher._heed(notes, silent)
        return capfd.readouterr().err, statuses

    return of


def test_a_process_that_is_silent_or_has_failed_ends_this_one_with_a_line(last_line):
    line, statuses = last_line({}, {0: 1.0, 1: 0.0, 2: 31.0})
    assert line.startswith(
        "error: process 2 (host2) is lost: no sign of life for 31 s; start all processes again"
    )
    assert line.count("\n") == 1 and statuses == [75]
    line, statuses = last_line({("ended", 0): "OSError disk full"}, {0: 0.0})
    assert line.startswith("error: process 0 (host0) has ended: OSError disk full;") and statuses == [75]


def test_processes_that_live_or_are_done_end_nobody(last_line):
    assert last_line({("done", 2): "", ("ended", 1): "myself"}, {0: 29.0, 2: 60.0}) == ("", [])


def test_paused_watch_counts_nobody_as_lost(monkeypatch):
    """A process that was stopped and goes on must not take the others for dead."""
    watcher = watch.Watch(None, 0, 2, str, 30.0, lambda: None)
    silences, now = [], iter([0.0, 1.0, 100.0, 101.0])
    monkeypatch.setattr(watcher, "note", lambda *_: None)
    monkeypatch.setattr(watcher, "_notes", lambda: {("alive", 0): "7", ("alive", 1): str(len(silences))})
    monkeypatch.setattr(watcher, "_heed", lambda notes, silent: silences.append(silent))
    monkeypatch.setattr(watcher._over, "wait", lambda _: len(silences) == 3)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    watcher._look_on()
    assert silences == [{0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}, {0: 1.0, 1: 0.0}]


class Gone(Notes):
    """Process 0 has ended, and the store with it."""

    def key_value_set(self, key, value, allow_overwrite=False):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused\nat line 1")


def test_lost_store_ends_the_process(last_line, monkeypatch, capfd):
    last_line({}, {})  # for the stand-in of the end
    watcher = watch.Watch(Gone(), 1, 2, lambda index: f"process {index}", 30.0, lambda: None)
    monkeypatch.setattr(watcher._over, "wait", lambda _: False)
    with suppress(Ended):
        watcher._look_on()
    line = capfd.readouterr().err
    assert line.startswith(
        "error: process 0 is gone, or cannot be reached (UNAVAILABLE: connection refused);"
    )
    assert line.count("\n") == 1


def test_last_words_are_left_where_they_can_be():
    notes = Notes()
    for store in (notes, Gone()):
        watcher = watch.Watch(store, 1, 2, str, 30.0, lambda: None)
        watcher.last_words("OSError disk full")
        assert watcher._over.is_set()  # it must not end for another reason meanwhile
    assert watch.Watch(notes, 0, 2, str, 30.0, lambda: None)._notes() == {("ended", 1): "OSError disk full"}


def test_stop_of_another_process_interrupts_once(monkeypatch):
    monkeypatch.setattr(watch, "PERIOD", 0.01)
    notes, calls, before = Notes(), [], signal.getsignal(signal.SIGUSR1)
    watcher, other = (
        watch.Watch(notes, index, 2, str, 30.0, lambda: calls.append(len(calls))) for index in (0, 1)
    )

    def look(times=3):
        until = int(watcher._notes()["alive", 0]) + times
        while int(watcher._notes()["alive", 0]) < until:
            time.sleep(0.005)

    try:
        watcher.start()
        watcher.note(watch.STOPPING, "")
        look()
        assert calls == []  # its own
        other.note(watch.STOPPING, "")
        while not calls:
            time.sleep(0.005)
        look()
        watcher.close()
    finally:
        watcher._over.set()
        signal.signal(signal.SIGUSR1, before)
    assert calls == [0] and ("done", 0) in watcher._notes() and not watcher._thread.is_alive()
