"""Groups of trajectories: one coroutine a trajectory, on an event loop beside the learner's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from calibadv_jax.config import RolloutConfig
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.rollout.agent import RolloutContext, run_trajectory

T = TypeVar("T")
any_done = partial(wait, return_when=FIRST_COMPLETED)


class FailureCount:
    """Counts failed trajectories among the `total` of all groups as groups complete."""

    def __init__(self, total: int, max_share: float):
        self.total, self.max_share = total, max_share
        self._errors: Counter[str] = Counter()

    def add(self, group: Group) -> None:
        """Raise EnvironmentFailure, with the commonest reason, if more than `max_share` have failed."""
        self._errors.update(str(trajectory.error) for trajectory in group.failed)
        failed = self._errors.total()
        if failed > self.max_share * self.total:
            ((reason, count),) = self._errors.most_common(1)
            raise EnvironmentFailure(
                f"{failed} of {self.total} trajectories failed, more than"
                f" rollout.max_failed_share={self.max_share:g}; the commonest reason ({count} times):"
                f" {reason}"
            )


async def collect_group(
    context: RolloutContext, question: Question, slots: asyncio.Semaphore, seed: int, name: str
) -> Group:
    """Write `rollout.group_size` trajectories of one question; an error of one cancels the others.

    `slots` limits all groups' trajectories together. Sessions are ``name/index``, unique among those in
    flight.
    """

    async def write(index: int) -> Trajectory:
        try:
            async with slots:
                return await run_trajectory(context, question, index, seed, f"{name}/{index}")
        finally:
            context.work["ended"] += 1

    context.work["begun"] += context.rollout.group_size
    return Group.of(question, await _gather([write(index) for index in range(context.rollout.group_size)]))


async def collect_groups(
    context: RolloutContext,
    questions: Sequence[Question],
    seed: int,
    name: str,
    complete: Callable[[Group], object] = lambda _: None,
) -> list[Group]:
    """Write a group for each question, and call `complete` with it; UserError above `max_failed_share`."""
    rollout = context.rollout
    slots = asyncio.Semaphore(rollout.max_concurrency)
    failures = FailureCount(len(questions) * rollout.group_size, rollout.max_failed_share)

    async def collect(number: int, question: Question) -> Group:
        group = await collect_group(context, question, slots, seed, f"{name}/{number}")
        complete(group)
        failures.add(group)
        return group

    return await _gather([collect(number, question) for number, question in enumerate(questions)])


async def _gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order; a failure is raised when the others are cancelled and have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        failure: BaseException = failures
        while isinstance(failure, BaseExceptionGroup):  # the earliest: later ones come from being cancelled
            failure = failure.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise failure  # out here, so that it keeps its own cause and gets no other context


class Rollouts:
    """Writes trajectories on an event loop of its own, in a thread that lives as long as the block.

    The services of `context` are used on that loop only, and closed at the end of the block. All processes of
    a run call `publish` together: it turns a version's parameters into the sampler's input.
    """

    def __init__(
        self,
        context: RolloutContext,
        seed: int,
        publish: Callable[[int, dict[str, Any]], Any] = lambda version, params: params,
    ):
        self.context, self.seed, self.publish = context, seed, publish
        self._slots = asyncio.Semaphore(context.rollout.max_concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self.collected: Counter[str] = Counter()  # the work of `collect`; the context has that of `begin`

    def __enter__(self) -> Rollouts:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.run(self._finish())
        except UserError:
            if kind is None:  # else it would hide why the block ends
                raise
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def load(self, version: int, published: Any) -> None:
        """Hand a result of `publish` to the sampler; when this returns the parameters may be donated."""
        self.run(self.context.sampler.load(version, published))

    def begin(self, number: int, question: Question) -> Future[Group]:
        """Start the rollout of group `number`, which seeds it: a question that comes twice differs."""
        seed = int(random_state(self.seed, number, "group").integers(2**31))
        return self.submit(collect_group(self.context, question, self._slots, seed, f"group{number}"))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop in the background; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def collect(
        self,
        questions: Sequence[Question],
        name: str,
        seed: int,
        complete: Callable[[Group], object] = lambda _: None,
        **changes: Any,
    ) -> list[Group]:
        """Write groups as `collect_groups`, with `changes` of the context's RolloutConfig."""
        rollout = replace(self.context.rollout, **changes)
        context = replace(self.context, rollout=rollout, work=self.collected)
        return self.run(collect_groups(context, questions, seed, name, complete))

    def progress(self, of_collect: bool = False) -> Callable[[], tuple[int, int, str]]:
        """Return a function for `Console.live`: how many trajectories end from now on, and the rates."""
        work = self.collected if of_collect else self.context.work
        before, begun = Counter(work), time.monotonic()

        def progress() -> tuple[int, int, str]:
            seconds, done = time.monotonic() - begun, work["ended"] - before["ended"]
            searches, tokens = ((work[name] - before[name]) / seconds for name in ("searches", "tokens"))
            rates = f"{searches:.1f} searches/s, {tokens:,.0f} sampled tok/s"
            return done, work["begun"] - before["ended"], rates

        return progress

    def metrics(self) -> dict[str, float]:
        return self.context.sampler.metrics()

    def prompt_logprobs(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        return self.run(self.context.sampler.prompt_logprobs(token_ids))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interruption of this thread must not leave it running
            raise

    async def _finish(self) -> None:
        """Cancel running tasks, and close all connections before an error is raised."""
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        context, failures = self.context, []
        for service in (*context.actions, context.judge, context.retriever, context.sampler):
            try:
                if service is not None:
                    await service.close()
            except UserError as error:
                failures.append(error)
        if failures:
            raise failures[0]


@dataclass
class _Started:
    number: int
    question: Question
    step: int
    future: Future[Group]


class RolloutStream:
    """Hands groups to the learner, `per_step` at a time; rollouts run ahead by a bounded number of steps.

    A group, counted over the whole run, is not assigned to a step in advance. It begins once the policy is
    new enough to train it within `max_staleness` steps, even if all others finish first. With 0 that is
    on-policy training: all groups of a step begin together, and the step waits for all of them.

    `begin` starts the rollout of (number, question) in the background; `questions` are endless. Above
    `max_failed_share` of a step's trajectories `take` raises an error. At most `dynamic_sampling` groups that
    `are_tied` give way to others, a step. `wait_for` waits until one of the running groups is complete.
    """

    def __init__(
        self,
        begin: Callable[[int, Question], Future[Group]],
        questions: Iterator[Question],
        config: RolloutConfig,
        are_tied: Callable[[Sequence[Group]], Sequence[bool]] = lambda groups: [False] * len(groups),
        wait_for: Callable[[list[Future[Group]]], object] = any_done,
    ):
        self._begin, self._questions, self._are_tied, self._wait_for = begin, questions, are_tied, wait_for
        self.config, self.per_step = config, config.questions_per_step
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
        last_steps = [self._running[number].step + self.config.max_staleness for number in waiting]
        return all(
            sum(last <= due for last in last_steps) <= (due - step) * self.per_step
            for due in range(step, step + self.config.max_staleness + 1)
        )

    def _replace(self, numbers: Sequence[int]) -> bool:
        """Take out as many tied groups as may be replaced; return whether there was one."""
        room = self.config.dynamic_sampling - len(self._replaced)
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
        while self._begun < done + (1 + self.config.max_staleness) * self.per_step:
            if not self._pending:
                self._pending.append((self._begun, next(self._questions)))
            number, question = self._pending[0]  # stays until its group runs: a stop in between loses nothing
            self._running[number] = _Started(number, question, step, self._begin(number, question))
            self._pending.popleft()
            self._begun += 1

    def _check_failures(self, groups: Sequence[Group]) -> None:
        groups = groups[: self.per_step]
        group_size = max((len(group.attempts) for group in groups), default=0)
        failures = FailureCount(self.per_step * group_size, self.config.max_failed_share)
        for group in groups:
            failures.add(group)
