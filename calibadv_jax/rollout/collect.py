"""Groups of trajectories for a batch of questions: one coroutine a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.rollout.agent import RolloutContext, run_trajectory
from calibadv_jax.rollout.failures import FailureCount

T = TypeVar("T")


async def collect_group(
    context: RolloutContext, question: Question, slots: asyncio.Semaphore, seed: int, name: str
) -> Group:
    """`rollout.group_size` trajectories of one question, those that failed apart.

    If one raises an error, the others are cancelled and awaited, and it is raised as it was.

    Args:
        slots: limits how many trajectories of all groups that share it run at once; first come, first served.
        seed: as for `run_trajectory`.
        name: prefix of the session names, ``name/index``; unique among groups in flight.
    """

    async def one(index: int) -> Trajectory:
        async with slots:
            return await run_trajectory(context, question, index, seed, f"{name}/{index}")

    return Group.of(question, await gather([one(index) for index in range(context.rollout.group_size)]))


async def collect_groups(
    context: RolloutContext,
    questions: Sequence[Question],
    seed: int,
    name: str,
    complete: Callable[[Group], object] = lambda _: None,
) -> list[Group]:
    """One group for each question, in their order; arguments as for `collect_group`.

    `complete` is called with each group as soon as it is there, before its failures are counted. At
    most `rollout.max_concurrency` trajectories are in flight, started in the order of the questions.

    Raises:
        UserError: more than `rollout.max_failed_share` of the trajectories failed.
    """
    rollout = context.rollout
    slots = asyncio.Semaphore(rollout.max_concurrency)
    failures = FailureCount(len(questions) * rollout.group_size, rollout.max_failed_share)

    async def one(number: int, question: Question) -> Group:
        group = await collect_group(context, question, slots, seed, f"{name}/{number}")
        complete(group)
        failures.add(group)
        return group

    return await gather([one(number, question) for number, question in enumerate(questions)])


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; after a failure the others are cancelled and awaited before it is raised."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        failure = _first(failures)
    if failure is not None:  # raised out here, so that it keeps its own cause and gets no other context
        raise failure
    return [task.result() for task in tasks]


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The earliest error; later ones come from being cancelled."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
