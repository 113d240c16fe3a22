"""The turn loop of one trajectory: think, act, read, answer.

The loop is token-in, token-out: the sampled token ids themselves are continued and trained on. They are
decoded only to decide what the environment does.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from calibadv_jax.config import PromptConfig, RolloutConfig
from calibadv_jax.core.errors import ActionRefused, QueryRefused, RequestFailed
from calibadv_jax.core.interfaces import Action, Completion, Judge, Retriever, Sampler, SamplingParams
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.tags import (
    QUERY_REFUSED,
    Grammar,
    parse_turn,
    refusal_text,
    text_with_opening,
    well_formed,
)
from calibadv_jax.core.trajectory import Document, Question, Trajectory, Turn
from calibadv_jax.rollout.actions import RetrieverAction, SearchAction, grammar_of, invalid_notice
from calibadv_jax.rollout.observation import (
    Observations,
    cut_early,
    decode,
    make_neutraliser,
    neutralise_reply,
)
from calibadv_jax.rollout.prompts import open_prompt


def _ignore_turn(turn: Turn, is_observed: bool) -> None:
    """Take no notice of a turn."""


@dataclass(frozen=True)
class RolloutContext:
    """Services and settings of every trajectory of a run."""

    sampler: Sampler
    retriever: Retriever
    tokenizer: Any  # a tokenizer of transformers
    rollout: RolloutConfig
    prompt: PromptConfig
    actions: tuple[Action, ...] = ()  # the actions that are on; none stand for search alone
    judge: Judge | None = None  # scores answers; None: answers are not judged
    # Counts so far: "begun" and "ended" trajectories, "searches", sampled "tokens". Other threads read them.
    work: Counter[str] = field(default_factory=Counter)
    # Called with each sampled turn and False, and with it and True once it has its observation.
    watch: Callable[[Turn, bool], object] = _ignore_turn

    @cached_property
    def by_name(self) -> dict[str, Action]:
        """The actions that are on, by name; those of the retriever ask `retriever`."""
        actions: dict[str, Action] = {}
        for action in self.actions or (SearchAction(),):
            if isinstance(action, RetrieverAction):
                action = replace(action, retriever=self.retriever)
            actions[action.name] = action
        return actions

    @cached_property
    def grammar(self) -> Grammar:
        """The tags of the actions that are on."""
        return grammar_of(self.actions)

    @cached_property
    def neutraliser(self) -> Neutraliser:
        """The neutraliser of questions, documents and texts of actions."""
        return make_neutraliser(self.tokenizer, self.actions)

    @cached_property
    def observations(self) -> Observations:
        """The writer of observations."""
        notice = invalid_notice(self.actions, self.neutraliser)
        return Observations(self.tokenizer, self.rollout.max_observation_length, self.prompt.opening, notice)


@dataclass(frozen=True)
class Prefix:
    """The beginning of a trajectory that another one continues.

    Attributes:
        source: Index of the first one in the group.
        turns: Its first turns, each with an observation, as `is_context`.
    """

    source: int
    turns: tuple[Turn, ...]


async def run_trajectory(
    context: RolloutContext,
    question: Question,
    index: int,
    seed: int,
    session: str,
    prefix: Prefix | None = None,
) -> Trajectory:
    """Write one trajectory.

    At most `rollout.max_searches` turns get an observation (retried invalid ones count). Then comes one final
    turn, whose action, if any, is not executed. The trajectory ends

    - at an answer,
    - at a turn that a length limit cut,
    - at an invalid turn, unless `rollout.on_invalid` is "retry",
    - before an observation that would leave no room for another token within `rollout.max_length`; this
      observation is dropped.

    Args:
        context: services and settings.
        question: the question.
        index: place of the trajectory in its group.
        seed: determines, with the question's id, the index and the turn, every sampled token.
        session: name of the trajectory at the sampler, unique among those in flight. It is always released.
        prefix: turns with which the trajectory begins; they count towards `rollout.max_searches`. None: it
            begins with the prompt.

    Returns:
        The trajectory, unscored. If sampler, action or judge could not serve it, or it took longer than
        `rollout.time_limit`, it has an `error` and the turns up to there.

    Raises:
        UserError: if no trajectory can be written, such as with a prompt that is too long.
        TimeoutError: if a service raises it before `rollout.time_limit` has passed.
    """
    rollout = context.rollout
    trajectory = _begin(context, question, index)
    if prefix is not None:
        trajectory.continues = prefix.source
        trajectory.turns.extend(prefix.turns)
    start = time.monotonic()
    limit = asyncio.timeout(rollout.time_limit or None)
    try:
        async with limit:
            await _write_turns(trajectory, context, seed, session)
            if context.judge is not None and trajectory.answer is not None:
                trajectory.metrics = await context.judge.score(trajectory)
    except RequestFailed as error:
        trajectory.error = failure_text(error)
    except TimeoutError:
        if not limit.expired():
            raise
        trajectory.error = f"time: not finished within rollout.time_limit={rollout.time_limit:g} s"
    finally:
        context.sampler.release(session)
    trajectory.seconds = time.monotonic() - start
    return trajectory


def failure_text(error: RequestFailed) -> str:
    """Return the `Trajectory.error` of a trajectory that a service could not serve."""
    message = " ".join(str(error).split())
    return well_formed(redact(f"{error.service}: {message}"))


def _begin(context: RolloutContext, question: Question, index: int) -> Trajectory:
    """Return a trajectory that has its prompt and no turns."""
    prompt_ids, first_opening = open_prompt(
        question,
        context.tokenizer,
        context.prompt,
        context.rollout.max_prompt_length,
        context.actions,
        context.neutraliser,
    )
    opening = context.prompt.opening
    return Trajectory(
        question,
        prompt_ids,
        index=index,
        opening=opening,
        first_opening=None if first_opening == opening else first_opening,
        actions=context.grammar.actions,
    )


async def _write_turns(trajectory: Trajectory, context: RolloutContext, seed: int, session: str) -> None:
    """Sample turns and append their observations until the trajectory ends."""
    rollout = context.rollout
    tokens = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]  # the whole context so far
    for number in range(len(trajectory.turns), rollout.max_searches + 1):
        sampling = SamplingParams(
            max_tokens=min(rollout.max_turn_length, rollout.max_length - len(tokens)),
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=turn_seed(seed, trajectory.question.id, trajectory.index, number),
            stop=context.grammar.stop_strings,
        )
        completion = await context.sampler.generate(tokens, sampling, session)
        turn = _read_turn(completion, context, trajectory.opening_of(number))
        trajectory.turns.append(turn)
        context.work["tokens"] += len(turn.token_ids)
        context.watch(turn, False)
        tokens += completion.token_ids
        is_retried = turn.kind == "invalid" and rollout.on_invalid == "retry"
        if number == rollout.max_searches or not (turn.is_action or is_retried):
            return
        room = rollout.max_length - len(tokens) - 1
        if not await _observe(turn, context, room):
            return
        context.watch(turn, True)
        tokens += turn.observation_ids.tolist()


def turn_seed(seed: int, question_id: str, index: int, turn: int) -> int:
    """Return the seed of a turn, the same on every machine.

    Args:
        seed: seed of the group.
        question_id: id of the question.
        index: place of the trajectory in its group.
        turn: number of the turn, from 0.

    Returns:
        A uint32 that depends on all four.
    """
    digest = hashlib.blake2b(f"{seed}\0{question_id}\0{index}\0{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def _read_turn(completion: Completion, context: RolloutContext, opening: str) -> Turn:
    """Decode and parse a completion; `opening` is the environment's text before it."""
    text_ids = completion.token_ids
    # A policy may have several end-of-text tokens; the sampler says "eos" for each of them.
    if completion.stop_reason == "eos":
        text_ids = text_ids[:-1]
    text = decode(context.tokenizer, text_ids)
    parsed = parse_turn(text_with_opening(opening, text), completion.stop_reason, context.grammar)
    return Turn(
        kind=parsed.kind,
        token_ids=np.asarray(completion.token_ids, np.int32),
        logprobs=np.asarray(completion.logprobs, np.float32),
        text=text,
        think=parsed.think,
        query=parsed.query,
        answer=parsed.answer,
        stop_reason=completion.stop_reason,
        policy_versions=completion.policy_versions,
    )


async def _observe(turn: Turn, context: RolloutContext, room: int) -> bool:
    """Add the environment's reply to a turn.

    Returns:
        Whether the reply has at most `room` tokens; a longer one is not added.
    """
    if room < 1:
        return False
    documents: tuple[Document, ...] = ()
    if turn.is_action:
        documents, ids, text = await _execute(turn, context)
    else:
        ids, text = context.observations.invalid()
    if len(ids) > room:
        return False
    turn.documents = documents
    turn.observation_ids = ids
    turn.observation_text = text
    return True


async def _execute(turn: Turn, context: RolloutContext) -> tuple[tuple[Document, ...], np.ndarray, str]:
    """Execute the action of a turn.

    Returns:
        The documents that it returned, and its observation as token ids, int32 [M], and as text.
    """
    action = context.by_name[turn.kind]
    if turn.kind == "search":
        context.work["searches"] += 1
    observations = context.observations.for_action(action)
    try:
        argument = _parse_argument(action, turn.query)
        reply = await action.call(argument)
    except (QueryRefused, ActionRefused) as error:
        turn.is_refused = True
        ids, text = observations.information(_refusal(turn.kind, error, context))
        return (), ids, text
    reply = neutralise_reply(
        reply, action, context.tokenizer, context.neutraliser, max_length=observations.max_length
    )
    ids, text = observations.information(action.render(reply))
    return reply.documents, ids, text


def _parse_argument(action: Action, body: str) -> Any:
    try:
        return action.parse(body)
    except ValueError as error:
        raise ActionRefused(str(error)) from error


def _refusal(name: str, error: Exception, context: RolloutContext) -> str:
    """Return the neutralised body of the observation after a refused action."""
    if isinstance(error, QueryRefused):
        return QUERY_REFUSED
    reason = cut_early(well_formed(str(error)), context.tokenizer, context.rollout.max_observation_length)
    return refusal_text(name, context.neutraliser.neutralise(reason))
