"""Groups of trajectories: one coroutine a trajectory, on an event loop beside the learner's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.rollout.agent import RolloutContext, run_trajectory

T = TypeVar("T")


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

    `slots` limits how many trajectories of all groups run at once. The sessions are called ``name/index``,
    unique among groups in flight.
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
    """Write one group for each question, in their order; call `complete` with each complete group.

    Raises UserError if more than `rollout.max_failed_share` of the trajectories failed.
    """
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

    The services of `context` are used on that loop only, and closed at the end of the block. `publish` turns
    a version's parameters into the sampler's input; all processes of a run call it together, on the thread
    that uses this object.
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
