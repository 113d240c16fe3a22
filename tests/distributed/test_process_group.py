"""Barriers and exchanges of the processes of a run, with threads in their place, and how all stop."""

import socket
import time
from contextlib import ExitStack
from unittest.mock import Mock

import jax
import pytest
from process_rig import run_all

from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.core.stopping import CALLED, Stop
from calibadv_jax.distributed import all_gather
from calibadv_jax.distributed.all_gather import AllGather
from calibadv_jax.distributed.process_group import ALONE
from calibadv_jax.distributed.watchdog import STOPPING


def check_stopped(results, status=130):
    """All have stopped in step with the status of a signal."""
    for error, in_step in results:
        assert isinstance(error, SystemExit) and error.code == status and in_step


def test_exchange_keeps_the_order_of_processes():
    def work(hosts):
        values = [
            hosts.exchange("a", hosts.index),
            hosts.run_on_main_and_broadcast("b", lambda: f"from {hosts.index}"),
        ]
        hosts.final_barrier()  # it ends the watchdog
        assert not hosts.watchdog._thread.is_alive()
        return values, hosts.machines, hosts.describe_process(2)

    host = socket.gethostname()
    ((values, machines, name), _), *others = run_all(work, 3)
    assert values == [[0, 1, 2], "from 0"] and [other[0][0] for other in others] == [values] * 2
    assert machines == [host] * 3 and name == f"process 2 ({host})"
    assert (
        ALONE.exchange("a", 7) == [7]
        and ALONE.run_on_main_and_broadcast("b", lambda: 8) == 8
        and ALONE.is_first
    )


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (UserError("data.train: no such file"), 2),
        (EnvironmentFailure("the service is away"), 75),
        (OSError(28, "No space left on device"), 75),
        (RuntimeError("a fault"), 75),  # of the other process: for this one it is its environment
    ],
    ids=repr,
)
def test_error_ends_all_processes_with_its_kind(raised, status):
    def work(hosts):
        with hosts.barrier("record"):
            if hosts.index:
                raise raised

    (first, is_in_step), (second, other_is_in_step) = run_all(work)
    assert isinstance(first, UserError) and "process 1 (" in str(first) and str(raised.args[-1]) in str(first)
    assert exit_status(first) == status and isinstance(first, EnvironmentFailure) == (status == 75)
    assert second is raised and is_in_step and other_is_in_step


def test_signal_stops_all_at_the_next_barrier():
    def work(hosts):
        stop = Stop()
        with hosts.steps(stop):
            if hosts.index:
                stop.status = 130  # as its handler sets it within held work
            with hosts.local_work("rollout"):
                assert not hosts.index, "nothing begins any more"

    check_stopped(run_all(work))


@pytest.mark.parametrize("called", [0, 1])
def test_signal_to_a_waiting_process_stops_both(called):
    """It waits for the rollouts of the one that is called: both stop at this barrier, with its status."""

    def work(hosts):
        stop = Stop()
        with hosts.steps(stop), hosts.local_work("rollout"):
            if hosts.index == called:
                stop.was_called, stop.status = True, CALLED  # as `Stop.call` in its main thread
                raise SystemExit(CALLED)
            stop.status = 130

    check_stopped(run_all(work))


def test_signal_while_waiting_is_noted_for_the_others(monkeypatch):
    monkeypatch.setattr(all_gather, "POLL_MILLISECONDS", 20)

    def work(hosts):
        stop = Stop()
        with hosts.steps(stop), hosts.barrier("record"):
            if hosts.is_first:
                stop.status = 130
            while hosts.index and (STOPPING, 0) not in hosts.watchdog._read_notes():
                time.sleep(0.01)

    check_stopped(run_all(work))


@pytest.mark.parametrize("reason", ["absent", "gone"])
def test_error_without_the_others_is_out_of_step(monkeypatch, reason):
    """Process 0 never comes to the barrier, or has ended and taken the store with it."""
    monkeypatch.setattr(all_gather, "POLL_MILLISECONDS", 20)

    gone = jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused")

    def work(hosts):
        hosts._timeout = 0.1
        hosts.out_of_step()
        if not hosts.index:
            return None
        if reason == "gone":
            hosts._all_gather._client = Mock(**{"blocking_key_value_get_bytes.side_effect": gone})
        with hosts.barrier("record"):
            raise UserError("data.train: no such file")

    (_, first), (error, second) = run_all(work, left=3)
    assert str(error) == "data.train: no such file" and (first, second) == (False, False)


def test_signal_within_a_barrier_stops_at_the_next(monkeypatch):
    """One process has said that it goes on when it is told to stop; the other may have gone on already."""
    wait, first = AllGather._wait, []

    def late(gather, key, check):
        value = wait(gather, key, check)
        if gather._index == 0 and first and first[0].met == 2:
            first[0].stop.status = 143
        return value

    monkeypatch.setattr(AllGather, "_wait", late)

    def work(hosts):
        hosts.stop, hosts.met = Stop(), 0
        if hosts.is_first:
            first.append(hosts)
        with hosts.steps(hosts.stop):
            try:
                for hosts.met in range(1, 6):
                    hosts.exchange("groups", hosts.met)
            finally:
                assert hosts.met == 3

    check_stopped(run_all(work), 143)


def test_late_note_of_a_stop_is_harmless():
    """It comes after the barrier, while a process saves; or to one that a full disk ends already."""
    saved = []

    def save(hosts):
        with Stop() as stop:
            try:
                with hosts.steps(stop), hosts.barrier("checkpoint"):
                    if hosts.is_first:
                        raise UserError("run.mirror was taken over")
            finally:
                hosts.on_other_process_stopping()
                with stop.held():
                    saved.append(hosts.index)

    def fill_disk(hosts):
        with hosts.steps(Stop()):
            pass
        try:
            raise OSError(28, "No space left on device")
        finally:
            hosts.on_other_process_stopping()

    (first, _), (second, _) = run_all(save)
    assert str(first) == "run.mirror was taken over" and sorted(saved) == [0, 1]
    assert isinstance(second, UserError) and "process 0 (" in str(second)
    assert [type(error) for error, _ in run_all(fill_disk)] == [OSError] * 2


@pytest.mark.parametrize("in_rollouts", [False, True])
def test_difference_stops_all_at_one_step(in_rollouts):
    """In rollouts, as where tied groups would give way in one process, and in the other would not."""

    def work(hosts):
        with ExitStack() as stack:
            if in_rollouts:
                stack.enter_context(hosts.steps(Stop()))
                stack.enter_context(hosts.local_work("rollout"))
            hosts.assert_equal("score of a group", lambda: [[0.0, float(hosts.index)]])

    for error, in_step in run_all(work):
        assert isinstance(error, UserError) and in_step
        assert "has another score of a group than process" in str(error)


def test_processes_at_different_barriers_fail():
    errors = [error for error, _ in run_all(lambda hosts: hosts.exchange(f"from {hosts.index}", 0))]
    assert all(isinstance(error, RuntimeError) and "is at the barrier" in str(error) for error in errors)


@pytest.mark.parametrize("is_one", [True, False])
def test_separate_run_folders_are_refused(tmp_path, is_one):
    folders = [tmp_path / "a", tmp_path / ("a" if is_one else "b")]
    for folder in folders:
        folder.mkdir(exist_ok=True)

    def work(hosts):
        hosts._timeout = 0.2
        hosts.share("run.dir", folders[hosts.index])
        return "shared"

    (first, _), (second, _) = run_all(work)
    if is_one:
        assert first == second == "shared"
    else:
        assert isinstance(second, UserError) and f"run.dir={folders[1]}: process 1 (" in str(second)
        assert "all processes must share one folder" in str(second)
        assert "process 1 (" in str(first) and str(second) in str(first)
    assert [path for folder in folders for path in folder.iterdir()] == []
