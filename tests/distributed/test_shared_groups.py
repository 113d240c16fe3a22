"""Groups that each process writes for all, with threads in place of processes."""

from concurrent.futures import Future

import numpy as np
from process_rig import run_all

from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.distributed import shared_groups
from calibadv_jax.distributed.shared_groups import SharedGroups

QUESTIONS = [Question(f"q{number}", "?", ("a",), "toy") for number in range(5)]


def begin_all(process_group, run_ahead):
    """Shared groups, the futures of all groups, and those of the groups that this process writes."""
    own = {}
    shared = SharedGroups(lambda number, _: own.setdefault(number, Future()), process_group, run_ahead)
    return shared, [shared.begin(number, question) for number, question in enumerate(QUESTIONS)], own


def test_process_writes_its_share_and_gets_all():
    def work(process_group):
        shared, futures, own = begin_all(process_group, run_ahead=False)
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
    monkeypatch.setattr(shared_groups, "EXCHANGE_SECONDS", 0.01)

    def work(process_group):
        shared, futures, own = begin_all(process_group, run_ahead=True)
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

    def work(process_group):
        _, futures, own = begin_all(process_group, run_ahead=True)
        for future in futures:
            future.cancel()
        return {future.cancelled() for future in own.values()}

    assert [value for value, _ in run_all(work)] == [{True}] * 2
