"""Rollouts that run ahead of the learner by a bounded number of steps.

A group, counted over the whole run, is not assigned to a step in advance. It begins once the policy is new
enough to train the group within `max_staleness` steps, even if all others finish first. With 0 that is
on-policy training: all groups of a step begin together, and the step waits for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.rollout.runner import FailureCount


@dataclass
class _Started:
    number: int
    question: Question
    step: int
    future: Future[Group]


def any_done(running: list[Future[Group]]) -> None:
    wait(running, None, FIRST_COMPLETED)


class RolloutStream:
    """Hands groups to the learner, `per_step` at a time.

    `begin` starts the rollout of (number, question) in the background; `questions` are endless. Above
    `max_failed_share` of a step's trajectories `take` raises an error. At most `max_replaced` groups that
    `are_tied` give way to others, a step. `wait_for` waits until one of the running groups is complete.
    """

    def __init__(
        self,
        begin: Callable[[int, Question], Future[Group]],
        questions: Iterator[Question],
        per_step: int,
        max_staleness: int,
        max_failed_share: float,
        max_replaced: int = 0,
        are_tied: Callable[[Sequence[Group]], Sequence[bool]] = lambda groups: [False] * len(groups),
        wait_for: Callable[[list[Future[Group]]], object] = any_done,
    ):
        self._begin, self._questions = begin, questions
        self.per_step, self.max_staleness, self.max_failed_share = per_step, max_staleness, max_failed_share
        self._max_replaced, self._are_tied, self._wait_for = max_replaced, are_tied, wait_for
        self._begun, self._trained = 0, 0  # groups, over the whole run; replaced ones count as trained
        self._pending: deque[tuple[int, Question]] = deque()  # of a resumed run: to begin before others
        self._running: dict[int, _Started] = {}
        self._training: list[_Started] = []  # of the last `take`; none after `commit`, as those replaced
        self._replaced: list[_Started] = []

    @property
    def replaced(self) -> list[Group]:
        """Groups of the last `take` that others replaced; none after `commit`."""
        return [group.future.result() for group in self._replaced]

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` takes: groups that are not trained yet are begun again."""
        open_groups = [*self._training, *self._replaced, *self._running.values()]
        pending = {group.number: group.question.id for group in open_groups}
        pending |= {number: question.id for number, question in self._pending}
        return {"asked": self._begun + len(self._pending), "pending": sorted(pending.items())}

    def restore(self, state: Mapping[str, Any], questions: Mapping[str, Question]) -> None:
        """Continue where `state` was called, before any group begins; UserError if a question is gone."""
        missing = [name for _, name in state["pending"] if name not in questions]
        if missing:
            fault = f"data.train: question {missing[0]!r} of the checkpoint is missing"
            raise UserError(f"{fault}; restore the file, or choose another run.dir")
        self._pending = deque((number, questions[name]) for number, name in state["pending"])
        self._begun = self._trained = state["asked"] - len(self._pending)

    def take(self, step: int) -> list[Group]:
        """Wait for the groups that `step` trains, and begin as many others as may run meanwhile.

        Returns the oldest complete groups, once no other one must be waited for; until `commit` they are
        untrained. Groups that begin now replace tied ones among them, whoever is first. Raises the error of a
        rollout, or UserError where too many trajectories failed; all others are cancelled.
        """
        self._begin_allowed(step)
        while True:
            ready = sorted(number for number, group in self._running.items() if group.future.done())
            try:
                self._check_failures([self._running[number].future.result() for number in ready])
            except BaseException:
                self.close()
                raise
            if len(ready) >= self.per_step and self._is_in_time(ready, step):
                if not self._replace(ready[: self.per_step]):
                    break
                self._begin_allowed(step)
                continue
            self._wait_for([group.future for group in self._running.values() if not group.future.done()])
        self._training = [self._running.pop(number) for number in ready[: self.per_step]]
        return [group.future.result() for group in self._training]

    def _is_in_time(self, ready: Sequence[int], step: int) -> bool:
        """Whether the steps to come can train all other groups within `max_staleness`."""
        waiting = self._running.keys() - ready[: self.per_step]
        last_steps = [self._running[number].step + self.max_staleness for number in waiting]
        return all(
            sum(last <= due for last in last_steps) <= (due - step) * self.per_step
            for due in range(step, step + self.max_staleness + 1)
        )

    def _replace(self, numbers: Sequence[int]) -> bool:
        """Take out as many tied groups as may be replaced; return whether there was one."""
        room = self._max_replaced - len(self._replaced)
        if room <= 0:
            return False
        are_tied = self._are_tied([self._running[number].future.result() for number in numbers])
        tied = [number for number, is_tied in zip(numbers, are_tied, strict=True) if is_tied][:room]
        self._replaced += [self._running.pop(number) for number in tied]
        return bool(tied)

    def commit(self) -> None:
        self._trained += len(self._training) + len(self._replaced)
        self._training, self._replaced = [], []

    def close(self) -> None:
        for group in self._running.values():
            group.future.cancel()

    def _begin_allowed(self, step: int) -> None:
        # Counted in groups, not in steps: a resumed run may have another number of them a step.
        done = self._trained + len(self._replaced)
        while self._begun < done + (1 + self.max_staleness) * self.per_step:
            if not self._pending:
                self._pending.append((self._begun, next(self._questions)))
            number, question = self._pending[0]  # stays until its group runs: a stop in between loses nothing
            self._running[number] = _Started(number, question, step, self._begin(number, question))
            self._pending.popleft()
            self._begun += 1

    def _check_failures(self, groups: Sequence[Group]) -> None:
        groups = groups[: self.per_step]
        group_size = max((len(group.attempts) for group in groups), default=0)
        failures = FailureCount(self.per_step * group_size, self.max_failed_share)
        for group in groups:
            failures.add(group)
