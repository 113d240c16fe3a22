"""Barriers and exchanges of the processes of a run, with threads in their place, and how all stop."""

import pickle
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.core.stopping import CALLED, Stop
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn
from calibadv_jax.distributed import exchange
from calibadv_jax.distributed.exchange import ALONE, Joined, SaveBarrier, SharedGroups, from_bytes, to_bytes


class Notes:
    """The key-value store of JAX' coordination service, for threads."""

    def __init__(self):
        self.kept, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.kept, key
            self.kept[key] = value
            self.changed.notify_all()

    key_value_set_bytes = key_value_set

    def key_value_dir_get(self, prefix):
        with self.changed:
            return [(key, value) for key, value in self.kept.items() if key.startswith(prefix)]

    def key_value_delete(self, key):
        with self.changed:
            del self.kept[key]

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.kept, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.kept[key]


def run_all(work, count=2, left=0):
    """Do a function of a process' hosts in several of them at once; return its result or error in each."""
    notes, made = Notes(), []

    def run_process(index):
        hosts = Joined(notes, index, count, timeout=5.0)
        made.append(hosts)
        try:
            return work(hosts), hosts.in_step
        except BaseException as error:
            return error, hosts.in_step

    try:
        with ThreadPoolExecutor(count) as threads:
            results = list(threads.map(run_process, range(count)))
    finally:
        for hosts in made:
            hosts.watch.close()
    kept = [key for key in notes.kept if key.startswith("calibadv_exchange")]
    assert len(kept) <= (left or count)  # of the last barrier alone
    return results


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
        hosts.final_barrier()  # nobody is watched any more
        assert not hosts.watch._thread.is_alive()
        return values, hosts.machines, hosts.named(2)

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
    monkeypatch.setattr(exchange, "WAIT", 20)

    def work(hosts):
        stop = Stop()
        with hosts.steps(stop), hosts.barrier("record"):
            if hosts.is_first:
                stop.status = 130
            while hosts.index and (exchange.STOPPING, 0) not in hosts.watch._notes():
                time.sleep(0.01)

    check_stopped(run_all(work))


@pytest.mark.parametrize("reason", ["absent", "gone"])
def test_error_without_the_others_is_out_of_step(monkeypatch, reason):
    """Process 0 never comes to the barrier, or has ended and taken the store with it."""
    monkeypatch.setattr(exchange, "WAIT", 20)

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
    wait, first = exchange._AllGather._wait, []

    def late(gather, key, check):
        value = wait(gather, key, check)
        if gather._index == 0 and first and first[0].met == 2:
            first[0].stop.status = 143
        return value

    monkeypatch.setattr(exchange._AllGather, "_wait", late)

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
                hosts.stopping()
                with stop.held():
                    saved.append(hosts.index)

    def fill_disk(hosts):
        with hosts.steps(Stop()):
            pass
        try:
            raise OSError(28, "No space left on device")
        finally:
            hosts.stopping()

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
    assert all(isinstance(error, RuntimeError) and "came for" in str(error) for error in errors)


QUESTIONS = [Question(f"q{number}", "?", ("a",), "toy") for number in range(5)]


def begin_all(hosts, run_ahead):
    """Shared groups, the futures of all groups, and those of the groups that this process writes."""
    own = {}
    shared = SharedGroups(lambda number, _: own.setdefault(number, Future()), hosts, run_ahead)
    return shared, [shared.begin(number, question) for number, question in enumerate(QUESTIONS)], own


def test_process_writes_its_share_and_gets_all():
    def work(hosts):
        shared, futures, own = begin_all(hosts, run_ahead=False)
        for number, future in own.items():
            question = QUESTIONS[number]
            future.set_result(Group(question, [Trajectory(question, np.arange(number + 1))]))
        shared.wait(futures)
        groups = [future.result() for future in futures]
        return list(own), [(group.question.id, len(group.trajectories[0].prompt_ids)) for group in groups]

    ((own, groups), _), ((other, same), _) = run_all(work)
    assert (own, other) == ([0, 2, 4], [1, 3])
    assert groups == same == [(f"q{number}", number + 1) for number in range(5)]


def test_groups_that_run_ahead_come_one_by_one(monkeypatch):
    """In the same order to all: which groups a step trains must not depend on who wrote them."""
    monkeypatch.setattr(exchange, "LOOK", 0.01)

    def work(hosts):
        shared, futures, own = begin_all(hosts, run_ahead=True)
        order = []
        for number in (3, 0, 1, 2):
            if number in own:
                own[number].set_result(Group(QUESTIONS[number], []))
            shared.wait([])
            order.append([number for number, future in enumerate(futures) if future.done()])
        return order

    (first, _), (second, _) = run_all(work)
    assert first == second == [[3], [0, 3], [0, 1, 3], [0, 1, 2, 3]]


def test_cancelled_group_is_not_written():
    """As when a run goes back to a checkpoint while groups run ahead."""

    def work(hosts):
        _, futures, own = begin_all(hosts, run_ahead=True)
        for future in futures:
            future.cancel()
        return {future.cancelled() for future in own.values()}

    assert [value for value, _ in run_all(work)] == [{True}] * 2


def test_trajectories_are_restored_and_nothing_else():
    question, tokens = Question("q", "who?", ("Ann",), "toy"), np.arange(3, dtype=np.int32)
    turn = Turn("search", tokens, np.float32([-1, -2, -0.1]), documents=(Document("1", "T", "x"),))
    group = Group.of(question, [Trajectory(question, tokens, [turn], metrics={"judge": np.float64(0.5)})])
    restored = from_bytes(to_bytes({3: group}))[3]
    assert restored.question == question and restored.trajectories[0].turns[0].documents == turn.documents
    assert restored.trajectories[0].turns[0].logprobs.tobytes() == turn.logprobs.tobytes()
    assert restored.trajectories[0].metrics == {"judge": 0.5}
    restored.trajectories[0].turns[0].logprobs[0] = 0  # it is an array of its own

    class Harm:
        def __reduce__(self):
            return eval, ("1/0",)

    for sent in (Harm(), np.array([Harm()], object), {"a": [pickle.loads]}):
        with pytest.raises(pickle.UnpicklingError, match="nothing that processes"):
            from_bytes(pickle.dumps(sent))


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
        assert "process 1 (" in str(first) and str(second) in str(first)
    assert [path for folder in folders for path in folder.iterdir()] == []


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
