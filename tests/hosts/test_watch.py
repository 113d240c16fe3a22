"""What a watch says of other processes, and when it ends its own."""

import os
import signal
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
    """What a watch of process 1 of 3 says at the end of the process, if work ends it."""

    def of(store, work):
        statuses = []

        def leave(status):
            statuses.append(status)
            raise Ended

        monkeypatch.setattr(os, "_exit", leave)
        watcher = watch.Watch(store, 1, 3, lambda index: f"process {index} (host{index})", 30.0, print)
        monkeypatch.setattr(watcher._over, "wait", lambda _: False)
        with suppress(Ended):
            work(watcher)
        error = capfd.readouterr().err
        assert error.count("\n") == len(statuses) and statuses in ([], [75])
        return error

    return of


@pytest.mark.parametrize(
    ("notes", "silent", "line"),
    [
        (
            {},
            {0: 1.0, 1: 0.0, 2: 31.0},
            "error: process 2 (host2) is lost: no sign of life for 31 s; start all",
        ),
        (
            {("ended", 0): "OSError disk full"},
            {0: 0.0},
            "error: process 0 (host0) has ended: OSError disk full;",
        ),
        ({("done", 2): "", ("ended", 1): "myself"}, {0: 29.0, 2: 60.0}, ""),
    ],
)
def test_lost_or_ended_process_ends_this_one(last_line, notes, silent, line):
    actual = last_line(None, lambda watcher: watcher._act(notes, silent))
    assert actual.startswith(line) and bool(actual) == bool(line)


def test_paused_watch_counts_nobody_as_lost(monkeypatch):
    """A process that was stopped and goes on must not take the others for dead."""
    watcher = watch.Watch(None, 0, 2, str, 30.0, lambda: None)
    silences, now = [], iter([0.0, 1.0, 100.0, 101.0])
    monkeypatch.setattr(watcher, "note", lambda *_: None)
    monkeypatch.setattr(watcher, "_notes", lambda: {("alive", 0): "7", ("alive", 1): str(len(silences))})
    monkeypatch.setattr(watcher, "_act", lambda notes, silent: silences.append(silent))
    monkeypatch.setattr(watcher._over, "wait", lambda _: len(silences) == 3)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    watcher._watch()
    assert silences == [{0: 0.0, 1: 0.0}, {0: 0.0, 1: 0.0}, {0: 1.0, 1: 0.0}]


class Gone(Notes):
    """Process 0 has ended, and the store with it."""

    def key_value_set(self, key, value, allow_overwrite=False):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused\nat line 1")


def test_lost_store_ends_the_process(last_line):
    line = last_line(Gone(), lambda watcher: watcher._watch())
    assert line.startswith(
        "error: process 0 (host0) is gone, or cannot be reached (UNAVAILABLE: connection ref"
    )


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
