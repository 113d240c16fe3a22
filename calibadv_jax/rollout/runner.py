"""Rollouts in the background: the event loop on which trajectories are written while the learner works."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Document, Group, Question
from calibadv_jax.rollout.agent import RolloutContext
from calibadv_jax.rollout.collect import collect_group, collect_groups

T = TypeVar("T")


class Rollouts:
    """Writes trajectories on an event loop of its own, in a thread that lives as long as the block.

    Args:
        context: its sampler, retriever, actions and judge are used on that loop only, and closed at the end
            of the block.
        seed: of the run.
        publish: makes of a version's parameters what the sampler takes. It is called in the thread that uses
            this object, in all processes of a run together.
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

    def __enter__(self) -> Rollouts:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._run(self._finish())
        except UserError:
            if kind is None:  # else it would hide why the block ends
                raise
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def load(self, version: int, published: Any) -> None:
        """Hands what `publish` returned to the sampler; when it returns the parameters may be donated."""
        self._run(self.context.sampler.load(version, published))

    def begin(self, number: int, question: Question) -> Future[Group]:
        """Starts the rollout of group `number`, counted over the whole run, in the background.

        The number decides what is drawn, so that a question which comes twice gets other trajectories.
        """
        seed = int(random_state(self.seed, number, "group").integers(2**31))
        coroutine = collect_group(self.context, question, self._slots, seed, f"group{number}")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def collect(
        self,
        questions: Sequence[Question],
        name: str,
        seed: int,
        complete: Callable[[Group], object] = lambda _: None,
        **changes: Any,
    ) -> list[Group]:
        """Groups of trajectories in the order of the questions.

        Args:
            name: prefix of the sessions' names.
            complete: called with each group as soon as it is there, on this object's thread.
            changes: fields of RolloutConfig that differ from the context's.
        """
        context = replace(self.context, rollout=replace(self.context.rollout, **changes))
        return self._run(collect_groups(context, questions, seed, name, complete))

    def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Documents of each query; see `Retriever.search`."""
        return self._run(self.context.retriever.search(queries))

    def metrics(self) -> dict[str, float]:
        """What the sampler counts; see `Sampler.metrics`."""
        return self.context.sampler.metrics()

    def prompt_logprobs(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Log-probabilities of a text under each copy of the weights; see `Sampler.prompt_logprobs`."""
        return self._run(self.context.sampler.prompt_logprobs(token_ids))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interruption of this thread must not leave it running
            raise

    async def _finish(self) -> None:
        """Cancels what is running, and closes the connections, all of them before an error is raised."""
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        failures: list[UserError] = []
        for service in (
            *self.context.actions,
            self.context.judge,
            self.context.retriever,
            self.context.sampler,
        ):
            try:
                if service is not None:
                    await service.close()
            except UserError as error:
                failures.append(error)
        if failures:
            raise failures[0]
