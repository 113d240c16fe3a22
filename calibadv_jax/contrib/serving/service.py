"""The service behind the API: it answers questions, a limited number at a time.

It runs on the event loop of the rollouts: a client that leaves cancels its trajectory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from calibadv_jax.contrib.cli import ask
from calibadv_jax.contrib.serving.chat import Moment, Progress
from calibadv_jax.contrib.serving.chat_request import ApiError, ChatRequest
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.rollout.runner import Rollouts

RETRY_LATER = {"Retry-After": "2"}  # header of a failure that may pass; seconds
# Header of a failure that would come again: without it OpenAI's clients repeat the request.
NEVER_RETRY = {"X-Should-Retry": "false"}


@dataclass
class Service:
    """Answers questions with `rollouts`, `slots` at a time; at most `queue` further ones wait."""

    rollouts: Rollouts
    model: str  # name under which clients ask for it
    slots: int
    queue: int
    seconds: float  # time limit of one question, without its waiting
    # Returns why the retriever does not answer, or ""; None: there is none to ask.
    retriever_fault: Callable[[], Awaitable[str]] | None = None
    examples: Sequence[str] = ()  # questions that the page offers
    # Tasks of the questions that wait or are answered.
    attempts: set[asyncio.Task[Trajectory]] = field(default_factory=set, init=False)
    _free: asyncio.Semaphore = field(init=False)
    _num_asked: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)

    def fitted(self, request: ChatRequest) -> ChatRequest:
        """Return a request with as many of its newest earlier messages as the prompt has room for."""
        context = self.rollouts.context
        num_earlier = len(request.earlier)
        while num_earlier:
            question = Question("serve", request.text(num_earlier), (), "ask")
            try:
                context.protocol.open_prompt(question, context.rollout.max_prompt_length)
                break
            except UserError:
                num_earlier -= 1
        num_left_out = len(request.earlier) - num_earlier
        return replace(
            request,
            earlier=request.earlier[num_left_out:],
            ignored=[*request.ignored, *["earlier message"] * num_left_out],
        )

    async def answer(self, request: ChatRequest) -> AsyncGenerator[Progress]:
        """Yield each turn and observation, then the finished trajectory.

        A generator that is closed early cancels the question.

        Raises:
            ApiError: the question cannot be asked, too many wait, or it failed.
        """
        if len(self.attempts) >= self.slots + self.queue:
            raise ApiError(
                429, f"all slots are in use, and {self.queue} questions wait; try again later", RETRY_LATER
            )
        moments: asyncio.Queue[Moment | None] = asyncio.Queue()  # None: there are no more
        self._num_asked += 1
        task = asyncio.create_task(self._write(request, f"serve{self._num_asked}", moments))
        self.attempts.add(task)
        task.add_done_callback(self.attempts.discard)
        task.add_done_callback(lambda _: moments.put_nowait(None))
        has_turn = False
        try:
            while (moment := await moments.get()) is not None:
                has_turn = True
                yield moment
            yield self._finished(task, has_turn)
        finally:
            task.cancel()

    async def _write(
        self, request: ChatRequest, session: str, moments: asyncio.Queue[Moment | None]
    ) -> Trajectory:
        """Write the trajectory of a request, and put each of its moments into the queue."""
        default = self.rollouts.context.rollout
        temperature = request.temperature
        if temperature is None:
            temperature = default.temperature
        max_turn_length = default.max_turn_length
        if request.max_tokens is not None:
            max_turn_length = min(request.max_tokens, max_turn_length)
        rollout = replace(
            default,
            temperature=temperature,
            top_p=request.top_p or default.top_p,
            max_turn_length=max_turn_length,
            time_limit=self.seconds,
        )

        def watch(turn: Turn, is_observed: bool) -> None:
            moments.put_nowait((turn, is_observed))

        async with self._free:
            return await ask.run_question(
                self.rollouts,
                "serve",
                request.text(len(request.earlier)),
                watch,
                rollout,
                request.seed,
                session,
            )

    def _finished(self, task: asyncio.Task[Trajectory], has_turn: bool) -> Trajectory:
        """Return the trajectory of a task that is done; ApiError if it failed."""
        if task.cancelled():
            raise ApiError(503, "the service is ending", RETRY_LATER)
        error = task.exception()
        if isinstance(error, UserError):
            message = redact(str(error))
            if has_turn or isinstance(error, EnvironmentFailure):
                raise ApiError(503, message, RETRY_LATER)
            raise ApiError(400, message)  # the question is too long
        if error is not None:
            logging.getLogger("uvicorn.error").error("a question failed", exc_info=error)
            raise ApiError(500, f"{type(error).__name__} in the service; its log has the details")
        trajectory = task.result()
        if trajectory.error is None:
            return trajectory
        if trajectory.error.startswith("time: "):
            raise ApiError(504, f"not finished within {self.seconds:g} s (--time-limit)", NEVER_RETRY)
        raise ApiError(503, trajectory.error, RETRY_LATER)

    async def end(self) -> None:
        """Cancel all questions."""
        for task in self.attempts:
            task.cancel()
