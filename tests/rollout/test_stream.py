"""Rollouts ahead of the learner: what is begun when, what is taken, what a resumed stream asks for again."""

import json
import random
from concurrent.futures import Future
from itertools import count

import numpy as np
import pytest

from calibadv_jax.config import RolloutConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.rollout.runner import RolloutStream

PER_STEP = 3


class Background:
    """Begins groups at `step`, complete at once; with a `seed`, waiting completes a random one."""

    def __init__(self, seed=None):
        self.rng = None if seed is None else random.Random(seed)
        self.futures, self.steps, self.step = {}, {}, 0

    def begin(self, number, question):
        self.futures[number], self.steps[number] = Future(), self.step
        if self.rng is None:
            self.finish(number)
        return self.futures[number]

    def finish(self, number, errors=()):
        ids = np.zeros(1, np.int32)
        attempts = [Trajectory(question(number), ids, error=error) for error in errors]
        self.futures[number].set_result(Group.from_attempts(question(number), attempts))

    def waiting(self):
        return [number for number, future in self.futures.items() if not future.done()]

    def wait_for(self, running):
        self.finish(self.rng.choice(self.waiting()))


def question(number):
    return Question(f"q{number}", "?", ("x",), "test")


def stream(background, staleness=0, per_step=PER_STEP, state=None, tied=(), max_replaced=0):
    """Groups of the numbers `tied` are; the state goes through JSON."""
    drawn = 0 if state is None else state["asked"]

    def are_tied(groups):
        return [number in tied for number in numbers(groups)]

    limits = {"max_staleness": staleness, "max_failed_share": 0.25, "dynamic_sampling": max_replaced}
    config, questions = RolloutConfig(questions_per_step=per_step, **limits), map(question, count(drawn))
    rollouts = RolloutStream(background.begin, questions, config, are_tied, background.wait_for)
    if state is not None:
        rollouts.restore(json.loads(json.dumps(state)), {f"q{n}": question(n) for n in range(100)})
    return rollouts


def begun(staleness, *finished):
    """A stream that has begun all that it may, of which these groups are complete."""
    background = Background(seed=0)
    rollouts = stream(background, staleness)
    rollouts._begin_allowed(0)
    for number in finished:
        background.finish(number)
    return background, rollouts


def numbers(groups):
    return [int(group.question.id[1:]) for group in groups]


def pending(*numbers):
    return [(number, f"q{number}") for number in numbers]


def test_on_policy_begins_one_step_at_a_time():
    background = Background()
    rollouts = stream(background)
    assert numbers(rollouts.take(0)) == [0, 1, 2]
    assert sorted(background.futures) == [0, 1, 2]
    rollouts.commit()
    assert numbers(rollouts.take(1)) == [3, 4, 5]


def test_ahead_by_one_takes_complete_groups_first():
    background, rollouts = begun(1, 4, 1, 5)
    assert sorted(background.futures) == list(range(2 * PER_STEP))
    assert numbers(rollouts.take(0)) == [1, 4, 5]


def test_oldest_groups_are_waited_for_before_they_are_too_stale():
    background, rollouts = begun(1, 3, 4, 5)
    assert numbers(rollouts.take(0)) == [3, 4, 5]
    rollouts.commit()
    rollouts._begin_allowed(1)
    for number in (6, 7, 8):  # complete, but of version 1; 0, 1 and 2 are of version 0 and due now
        background.finish(number)
    assert sorted(background.futures) == list(range(3 * PER_STEP))
    waits = []

    def finish_the_rest(running):
        waits.append(len(running))
        for number in (0, 1, 2):
            background.finish(number)

    rollouts._wait_for = finish_the_rest
    assert numbers(rollouts.take(1)) == [0, 1, 2]
    assert waits == [3]


def test_untrained_groups_begin_again():
    _, rollouts = begun(1, 0, 3, 5)
    rollouts.take(0)
    assert rollouts.state() == {"asked": 6, "pending": pending(*range(6))}  # not trained yet
    rollouts.commit()
    assert rollouts.state() == {"asked": 6, "pending": pending(1, 2, 4)}
    again = Background()
    resumed = stream(again, 1, state=rollouts.state())
    assert numbers(resumed.take(1)) == [1, 2, 4]
    assert sorted(again.futures) == [1, 2, 4, *range(6, 9)]
    with pytest.raises(UserError, match="question 'q700' of the checkpoint is missing"):
        stream(Background(), state={"asked": 2, "pending": [(1, "q700")]})


def test_error_stops_the_step_and_cancels_the_others():
    background, rollouts = begun(0)
    background.futures[1].set_exception(UserError("retriever is down"))
    with pytest.raises(UserError, match="retriever is down"):
        rollouts.take(0)
    assert background.futures[0].cancelled() and background.futures[2].cancelled()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("per_step", [1, 2, 4, 7])
def test_resumed_run_may_change_questions_per_step(staleness, per_step):
    first = stream(Background(), staleness)
    trained = []
    for step in range(2):
        trained += numbers(first.take(step))
        first.commit()
    resumed = stream(Background(), staleness, per_step, first.state())
    for step in range(2, 8):
        trained += numbers(resumed.take(step))
        resumed.commit()
    assert trained == list(range(2 * PER_STEP + 6 * per_step))


def test_many_failures_end_a_step_early():
    background, rollouts = begun(0)
    background.finish(1, ["x"] * 4)
    with pytest.raises(UserError, match=r"4 of 12 trajectories failed.* \(4 times\): x"):
        rollouts.take(0)
    assert background.futures[0].cancelled() and background.futures[2].cancelled()


def test_failures_of_later_groups_do_not_count():
    background, rollouts = begun(1)
    errors = [[None] * 4, ["x", "y", "z", None], [None] * 4, *[["sampler: lost"] * 4] * 3]
    for number, of_group in enumerate(errors):
        background.finish(number, of_group)
    assert numbers(rollouts.take(0)) == [0, 1, 2]
    rollouts.commit()
    with pytest.raises(UserError, match="4 of 12 trajectories failed"):
        rollouts.take(1)


def test_question_of_unstarted_group_is_not_lost():
    """As where a signal stops the run between drawing a question and beginning its group."""

    class Refusing(Background):
        def begin(self, number, question):
            if number == 1:
                raise SystemExit(143)
            return super().begin(number, question)

    first = stream(Refusing())
    with pytest.raises(SystemExit):
        first.take(0)
    assert first.state() == {"asked": 2, "pending": pending(0, 1)}
    assert numbers(stream(Background(), state=first.state()).take(0)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("max_replaced", "steps", "replaced"),
    [
        (0, [[0, 1, 2], [3, 4, 5]], [[], []]),
        (1, [[1, 2, 3], [5, 6, 7]], [[0], [4]]),
        (2, [[1, 3, 4], [6, 7, 8]], [[0, 2], [5]]),
        (9, [[1, 3, 6], [7, 8, 9]], [[0, 2, 4, 5], []]),  # those that come instead are tied too
    ],
)
def test_tied_groups_give_way_whatever_the_order(max_replaced, steps, replaced):
    for seed in range(5):
        background = Background(seed)
        rollouts = stream(background, tied={0, 2, 4, 5}, max_replaced=max_replaced)
        for step, (trained, gone) in enumerate(zip(steps, replaced, strict=True)):
            assert numbers(rollouts.take(step)) == trained
            assert numbers(rollouts.replaced) == gone
            rollouts.commit()
            assert rollouts.replaced == []
        assert sorted(background.futures) == list(range(len(background.futures)))


def test_untrained_step_replaces_same_groups_again():
    tied = {0, 2, 4}
    first = stream(Background(), tied=tied, max_replaced=9)
    assert numbers(first.take(0)) == [1, 3, 5]
    assert first.state() == {"asked": 6, "pending": pending(*range(6))}
    again = stream(Background(), state=first.state(), tied=tied, max_replaced=9)
    assert numbers(again.take(0)) == [1, 3, 5]
    again.commit()
    assert again.state() == {"asked": 6, "pending": []}
    assert numbers(again.take(1)) == [6, 7, 8]


@pytest.mark.parametrize("max_replaced", [0, 2])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_group_is_staler_than_allowed(staleness, max_replaced):
    background, seen = Background(staleness), []
    rollouts = stream(background, staleness, tied=set(range(0, 300, 3)), max_replaced=max_replaced)
    for background.step in range(30):
        rollouts._begin_allowed(background.step)
        for number in background.waiting():  # about half are complete before the step
            if background.rng.random() < 0.5:
                background.finish(number)
        trained, gone = numbers(rollouts.take(background.step)), numbers(rollouts.replaced)
        rollouts.commit()
        assert len(trained) == PER_STEP and len(gone) <= max_replaced
        assert all(background.step - background.steps[number] <= staleness for number in trained)
        seen += trained + gone
    assert len(seen) == len(set(seen))
