"""Groups of trajectories for a batch of questions: one coroutine a trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from calibadv_jax.config import PromptConfig, RolloutConfig
from calibadv_jax.rollout.agent import run_trajectory
from calibadv_jax.rollout.protocols import Retriever, Sampler
from calibadv_jax.trajectory import Group, Question, Trajectory


async def collect_groups(
    questions: Sequence[Question],
    *,
    sampler: Sampler,
    retriever: Retriever,
    tokenizer: Any,
    rollout: RolloutConfig,
    prompt: PromptConfig,
    seed: int,
    name: str,
    on_group: Callable[[Group], object] | None = None,
) -> list[Group]:
    """`rollout.group_size` trajectories of each question, in the order of the questions.

    At most `rollout.max_concurrency` are in flight, started in that order. If one fails, the others are
    cancelled and awaited, and its error is raised as it was.

    Args:
        name: prefix of the session names, ``name/question/index``.
        on_group: called with every group as soon as it is complete.
    """
    slots = asyncio.Semaphore(rollout.max_concurrency)
    groups: dict[int, Group] = {}
    finished: dict[int, dict[int, Trajectory]] = {number: {} for number in range(len(questions))}

    async def one(number: int, index: int) -> None:
        async with slots:
            trajectory = await run_trajectory(
                questions[number],
                index,
                sampler=sampler,
                retriever=retriever,
                tokenizer=tokenizer,
                rollout=rollout,
                prompt=prompt,
                seed=seed,
                session=f"{name}/{number}/{index}",
            )
        members = finished[number]
        members[index] = trajectory
        if len(members) == rollout.group_size:
            groups[number] = Group(questions[number], [members[k] for k in range(rollout.group_size)])
            if on_group is not None:
                on_group(groups[number])

    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            for number in range(len(questions)):
                for index in range(rollout.group_size):
                    tasks.create_task(one(number, index))
    except BaseExceptionGroup as failures:
        failure = _first(failures)
    if failure is not None:  # raised out here, so that it keeps its own cause and gets no other context
        raise failure
    return [groups[number] for number in range(len(questions))]


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The earliest error; later ones come from being cancelled."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
