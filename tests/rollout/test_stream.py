"""Rollouts ahead of the learner: what is begun when, what is taken, what a resumed stream asks for again."""

import json
import random
from concurrent.futures import Future
from itertools import count

import numpy as np
import pytest

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.rollout.stream import RolloutStream

PER_STEP = 3


class Background:
    """Begins groups, and completes them when told to."""

    def __init__(self, finish_at_once=True):
        self.finish_at_once, self.futures = finish_at_once, {}

    def begin(self, number, question):
        self.futures[number] = Future()
        if self.finish_at_once:
            self.finish(number, question)
        return self.futures[number]

    def finish(self, number, asked=None):
        self.futures[number].set_result(Group(asked or question(number), []))


def question(number):
    return Question(f"q{number}", "?", ("x",), "test")


def stream(background, staleness=0, per_step=PER_STEP, state=None, tied=(), max_replaced=0):
    """Groups of the numbers `tied` are."""
    drawn = 0 if state is None else state["asked"]
    questions = map(question, count(drawn))
    rollouts = RolloutStream(
        background.begin, questions, per_step, staleness, 0.25, max_replaced,
        lambda groups: [int(group.question.id[1:]) in tied for group in groups],
    )  # fmt: skip
    if state is not None:
        rollouts.restore(state, {f"q{number}": question(number) for number in range(100)})
    return rollouts


def begun(staleness, *finished):
    """A stream that has begun all that it may, of which these groups are complete."""
    background = Background(finish_at_once=False)
    rollouts = stream(background, staleness)
    rollouts._begin_allowed(0)
    for number in finished:
        background.finish(number)
    return background, rollouts


def ids(groups):
    return [group.question.id for group in groups]


def test_ahead_by_one_takes_complete_groups_first():
    background, rollouts = begun(1, 4, 1, 5)
    assert sorted(background.futures) == list(range(2 * PER_STEP))
    assert ids(rollouts.take(0)) == ["q1", "q4", "q5"]


def test_untrained_groups_begin_again():
    _, rollouts = begun(1, 0, 3, 5)
    rollouts.take(0)
    assert rollouts.state() == {"asked": 6, "pending": [(n, f"q{n}") for n in range(6)]}  # not trained yet
    rollouts.commit()
    state = rollouts.state()
    assert state == {"asked": 6, "pending": [(1, "q1"), (2, "q2"), (4, "q4")]}
    again = Background()
    resumed = stream(again, 1, state=state)
    assert ids(resumed.take(1)) == ["q1", "q2", "q4"]
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
        trained += ids(first.take(step))
        first.commit()
    state = json.loads(json.dumps(first.state()))
    resumed = stream(Background(), staleness, per_step, state)
    for step in range(2, 8):
        trained += ids(resumed.take(step))
        resumed.commit()
    assert trained == [f"q{number}" for number in range(2 * PER_STEP + 6 * per_step)]


def failed(number, errors):
    ids = np.zeros(1, np.int32)
    return Group.of(question(number), [Trajectory(question(number), ids, error=error) for error in errors])


def test_many_failures_end_a_step_early():
    for errors, ends in ((["sampler: lost", *"abc"[:2], None], False), (["x"] * 4, True)):
        background, rollouts = begun(0)
        background.futures[1].set_result(failed(1, errors))
        if ends:
            with pytest.raises(UserError, match=r"4 of 12 trajectories failed.* \(4 times\): x"):
                rollouts.take(0)
            assert background.futures[0].cancelled() and background.futures[2].cancelled()
        else:
            for number in (0, 2):
                background.futures[number].set_result(failed(number, [None] * 4))
            assert ids(rollouts.take(0)) == ["q0", "q1", "q2"]


def test_failures_of_later_groups_do_not_count():
    background, rollouts = begun(1)
    for number in range(6):
        errors = [None] * 4 if number < 3 else ["sampler: lost"] * 4
        background.futures[number].set_result(failed(number, errors))
    assert ids(rollouts.take(0)) == ["q0", "q1", "q2"]
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
    state = json.loads(json.dumps(first.state()))
    assert state == {"asked": 2, "pending": [[0, "q0"], [1, "q1"]]}
    assert ids(stream(Background(), state=state).take(0)) == ["q0", "q1", "q2"]


@pytest.mark.parametrize(
    ("max_replaced", "steps", "replaced"),
    [
        (0, [[0, 1, 2], [3, 4, 5]], [[], []]),
        (1, [[1, 2, 3], [5, 6, 7]], [[0], [4]]),
        (2, [[1, 3, 4], [6, 7, 8]], [[0, 2], [5]]),
        (9, [[1, 3, 6], [7, 8, 9]], [[0, 2, 4, 5], []]),  # those that come instead are tied too
    ],
)
def test_tied_groups_give_way_whatever_the_order(monkeypatch, max_replaced, steps, replaced):
    for seed in range(5):
        background = Background(finish_at_once=False)
        rollouts = stream(background, tied={0, 2, 4, 5}, max_replaced=max_replaced)
        rng = random.Random(seed)

        def finish_one(*_, background=background, rng=rng):
            waiting = [number for number, future in background.futures.items() if not future.done()]
            background.finish(rng.choice(waiting))

        monkeypatch.setattr("calibadv_jax.rollout.stream.wait", finish_one)
        for step, (numbers, gone) in enumerate(zip(steps, replaced, strict=True)):
            assert ids(rollouts.take(step)) == [f"q{number}" for number in numbers]
            assert ids(rollouts.replaced) == [f"q{number}" for number in gone]
            rollouts.commit()
            assert rollouts.replaced == []
        assert sorted(background.futures) == list(range(len(background.futures)))


def test_untrained_step_replaces_same_groups_again():
    tied = {0, 2, 4}
    first = stream(Background(), tied=tied, max_replaced=9)
    assert ids(first.take(0)) == ["q1", "q3", "q5"]
    state = json.loads(json.dumps(first.state()))
    assert state == {"asked": 6, "pending": [[number, f"q{number}"] for number in range(6)]}
    again = stream(Background(), state=state, tied=tied, max_replaced=9)
    assert ids(again.take(0)) == ["q1", "q3", "q5"]
    again.commit()
    assert again.state() == {"asked": 6, "pending": []}
    assert ids(again.take(1)) == ["q6", "q7", "q8"]


@pytest.mark.parametrize("max_replaced", [0, 2])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_group_is_staler_than_allowed(staleness, max_replaced, monkeypatch):
    background, started, seen = Background(finish_at_once=False), {}, []
    rollouts = stream(background, staleness, tied=set(range(0, 300, 3)), max_replaced=max_replaced)
    rng = random.Random(staleness)

    def finish_one(*_):
        for number in background.futures:
            started.setdefault(number, step)
        background.finish(rng.choice([n for n, future in background.futures.items() if not future.done()]))

    monkeypatch.setattr("calibadv_jax.rollout.stream.wait", finish_one)
    for step in range(30):
        rollouts._begin_allowed(step)
        for number in background.futures:
            started.setdefault(number, step)
        for number, future in background.futures.items():  # about half are complete before the step
            if not future.done() and rng.random() < 0.5:
                background.finish(number)
        numbers = [int(group.question.id[1:]) for group in rollouts.take(step)]
        gone = [int(group.question.id[1:]) for group in rollouts.replaced]
        rollouts.commit()
        assert len(numbers) == PER_STEP and len(gone) <= max_replaced
        assert all(step - started[number] <= staleness for number in numbers)
        seen += numbers + gone
    assert len(seen) == len(set(seen))
