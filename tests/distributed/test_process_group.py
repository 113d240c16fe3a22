"""Barriers and exchanges of the processes of a run, with threads in their place, and how all stop."""

import socket
import time
from contextlib import ExitStack
from unittest.mock import Mock

import jax
import pytest
from process_rig import run_all

from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.core.signals import REMOTE_STOP_STATUS, Stop
from calibadv_jax.distributed import all_gather
from calibadv_jax.distributed.all_gather import AllGather
from calibadv_jax.distributed.process_group import SINGLE_PROCESS
from calibadv_jax.distributed.watchdog import STOPPING


def check_stopped(results, status=130):
    """All have stopped in step with the status of a signal."""
    for error, can_save_together in results:
        assert isinstance(error, SystemExit) and error.code == status and can_save_together


def test_exchange_keeps_the_order_of_processes():
    def work(process_group):
        values = [
            process_group.all_gather("a", process_group.process_index),
            process_group.run_on_main_and_broadcast("b", lambda: f"from {process_group.process_index}"),
        ]
        process_group.final_barrier()  # it ends the watchdog
        assert not process_group.watchdog._thread.is_alive()
        return values, process_group.machines, process_group.describe_process(2)

    host = socket.gethostname()
    ((values, machines, name), _), *others = run_all(work, 3)
    assert values == [[0, 1, 2], "from 0"] and [other[0][0] for other in others] == [values] * 2
    assert machines == [host] * 3 and name == f"process 2 ({host})"
    assert (
        SINGLE_PROCESS.all_gather("a", 7) == [7]
        and SINGLE_PROCESS.run_on_main_and_broadcast("b", lambda: 8) == 8
        and SINGLE_PROCESS.is_main
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
    def work(process_group):
        with process_group.barrier("record"):
            if process_group.process_index:
                raise raised

    (first, is_in_step), (second, other_is_in_step) = run_all(work)
    assert isinstance(first, UserError) and "process 1 (" in str(first) and str(raised.args[-1]) in str(first)
    assert exit_status(first) == status and isinstance(first, EnvironmentFailure) == (status == 75)
    assert second is raised and is_in_step and other_is_in_step


def test_signal_stops_all_at_the_next_barrier():
    def work(process_group):
        stop = Stop()
        with process_group.stop_at_barriers(stop):
            if process_group.process_index:
                stop.status = 130  # as its handler sets it within held work
            with process_group.local_work("rollout"):
                assert not process_group.process_index, "nothing begins any more"

    check_stopped(run_all(work))


@pytest.mark.parametrize("called", [0, 1])
def test_signal_to_a_waiting_process_stops_both(called):
    """It waits for the rollouts of the one that is called: both stop at this barrier, with its status."""

    def work(process_group):
        stop = Stop()
        with process_group.stop_at_barriers(stop), process_group.local_work("rollout"):
            if process_group.process_index == called:
                stop.was_requested, stop.status = (
                    True,
                    REMOTE_STOP_STATUS,
                )  # as `Stop.request_stop` in its main thread
                raise SystemExit(REMOTE_STOP_STATUS)
            stop.status = 130

    check_stopped(run_all(work))


def test_signal_while_waiting_is_noted_for_the_others(monkeypatch):
    monkeypatch.setattr(all_gather, "POLL_MILLISECONDS", 20)

    def work(process_group):
        stop = Stop()
        with process_group.stop_at_barriers(stop), process_group.barrier("record"):
            if process_group.is_main:
                stop.status = 130
            while process_group.process_index and (STOPPING, 0) not in process_group.watchdog._read_notes():
                time.sleep(0.01)

    check_stopped(run_all(work))


@pytest.mark.parametrize("reason", ["absent", "gone"])
def test_error_without_the_others_is_out_of_step(monkeypatch, reason):
    """Process 0 never comes to the barrier, or has ended and taken the store with it."""
    monkeypatch.setattr(all_gather, "POLL_MILLISECONDS", 20)

    gone = jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused")

    def work(process_group):
        process_group._timeout = 0.1
        process_group.mark_desynchronized()
        if not process_group.process_index:
            return None
        if reason == "gone":
            process_group._all_gather._client = Mock(**{"blocking_key_value_get_bytes.side_effect": gone})
        with process_group.barrier("record"):
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

    def work(process_group):
        process_group.stop, process_group.met = Stop(), 0
        if process_group.is_main:
            first.append(process_group)
        with process_group.stop_at_barriers(process_group.stop):
            try:
                for process_group.met in range(1, 6):
                    process_group.all_gather("groups", process_group.met)
            finally:
                assert process_group.met == 3

    check_stopped(run_all(work), 143)


def test_late_note_of_a_stop_is_harmless():
    """It comes after the barrier, while a process saves; or to one that a full disk ends already."""
    saved = []

    def save(process_group):
        with Stop() as stop:
            try:
                with process_group.stop_at_barriers(stop), process_group.barrier("checkpoint"):
                    if process_group.is_main:
                        raise UserError("run.mirror was taken over")
            finally:
                process_group.on_other_process_stopping()
                with stop.held():
                    saved.append(process_group.process_index)

    def fill_disk(process_group):
        with process_group.stop_at_barriers(Stop()):
            pass
        try:
            raise OSError(28, "No space left on device")
        finally:
            process_group.on_other_process_stopping()

    (first, _), (second, _) = run_all(save)
    assert str(first) == "run.mirror was taken over" and sorted(saved) == [0, 1]
    assert isinstance(second, UserError) and "process 0 (" in str(second)
    assert [type(error) for error, _ in run_all(fill_disk)] == [OSError] * 2


@pytest.mark.parametrize("in_rollouts", [False, True])
def test_difference_stops_all_at_one_step(in_rollouts):
    """In rollouts, as where tied groups would give way in one process, and in the other would not."""

    def work(process_group):
        with ExitStack() as stack:
            if in_rollouts:
                stack.enter_context(process_group.stop_at_barriers(Stop()))
                stack.enter_context(process_group.local_work("rollout"))
            process_group.assert_equal(
                "score of a group", lambda: [[0.0, float(process_group.process_index)]]
            )

    for error, can_save_together in run_all(work):
        assert isinstance(error, UserError) and can_save_together
        assert "has another score of a group than process" in str(error)


def test_processes_at_different_barriers_fail():
    errors = [
        error
        for error, _ in run_all(
            lambda process_group: process_group.all_gather(f"from {process_group.process_index}", 0)
        )
    ]
    assert all(isinstance(error, RuntimeError) and "is at the barrier" in str(error) for error in errors)


@pytest.mark.parametrize("is_one", [True, False])
def test_separate_run_folders_are_refused(tmp_path, is_one):
    folders = [tmp_path / "a", tmp_path / ("a" if is_one else "b")]
    for folder in folders:
        folder.mkdir(exist_ok=True)

    def work(process_group):
        process_group._timeout = 0.2
        process_group.assert_shared_folder("run.dir", folders[process_group.process_index])
        return "shared"

    (first, _), (second, _) = run_all(work)
    if is_one:
        assert first == second == "shared"
    else:
        assert isinstance(second, UserError) and f"run.dir={folders[1]}: process 1 (" in str(second)
        assert "all processes must share one folder" in str(second)
        assert "process 1 (" in str(first) and str(second) in str(first)
    assert [path for folder in folders for path in folder.iterdir()] == []
