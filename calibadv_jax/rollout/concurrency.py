"""Coroutines that run at the same time and fail together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time.

    Args:
        coroutines: coroutines that have not started.

    Returns:
        Their results, in the same order.

    Raises:
        BaseException: the error of the first coroutine that fails, once the others are cancelled and ended.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        failure: BaseException = failures
        while isinstance(failure, BaseExceptionGroup):
            # The first error is the cause; later ones come from the cancellation.
            failure = failure.exceptions[0]
    else:
        return [task.result() for task in tasks]
    # Raised outside the except block, so that the error keeps its own cause and gets no other context.
    raise failure
