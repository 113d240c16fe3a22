"""The turn loop of one trajectory: think, act, read, answer.

Token-in, token-out: sampled ids are trained on; they are decoded only to decide what the environment does.
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
from calibadv_jax.core.interfaces import Action, Completion, Judge, Reply, Retriever, Sampler, SamplingParams
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.tags import (
    QUERY_REFUSED,
    Grammar,
    neutralise,
    parse_turn,
    refusal,
    well_formed,
    whole_turn,
)
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.rollout.actions import RetrieverAction, SearchAction, grammar_of, invalid_notice
from calibadv_jax.rollout.observation import (
    Observations,
    added_token_strings,
    cut_early,
    decode,
    neutralise_reply,
)
from calibadv_jax.rollout.prompts import open_prompt


@dataclass(frozen=True)
class RolloutContext:
    """Services and settings of every trajectory of a run; no `actions` stand for search alone."""

    sampler: Sampler
    retriever: Retriever
    tokenizer: Any
    rollout: RolloutConfig
    prompt: PromptConfig
    actions: tuple[Action, ...] = ()
    judge: Judge | None = None
    # Trajectories "begun" and "ended", "searches" and sampled "tokens" so far; other threads read it.
    work: Counter[str] = field(default_factory=Counter)
    # Gets each sampled turn with False, and with True when it has its observation.
    watch: Callable[[Turn, bool], object] = lambda turn, is_observed: None

    @cached_property
    def by_name(self) -> dict[str, Action]:
        """The actions that are on; actions of the retriever use `retriever`."""
        actions = {action.name: action for action in self.actions or (SearchAction(),)}
        for name, action in actions.items():
            if isinstance(action, RetrieverAction):
                actions[name] = replace(action, retriever=self.retriever)
        return actions

    @cached_property
    def grammar(self) -> Grammar:
        return grammar_of(self.actions)

    @cached_property
    def observations(self) -> Observations:
        notice = invalid_notice(self.actions, added_token_strings(self.tokenizer) if self.actions else ())
        return Observations(self.tokenizer, self.rollout.max_observation_length, self.prompt.opening, notice)


async def run_trajectory(
    context: RolloutContext, question: Question, index: int, seed: int, session: str
) -> Trajectory:
    """Write one trajectory; with question, index and turn, `seed` determines every sampled token.

    At most `rollout.max_searches` turns get an observation (retried invalid ones count); then comes one final
    turn, in which an action stays unanswered. The trajectory ends at an answer, at a turn cut by a length
    limit, at an invalid turn (unless `on_invalid` is "retry"), and where an observation would leave no room
    for another token within `max_length`: that observation is dropped. A trajectory that sampler, action or
    judge could not serve (RequestFailed), or that took longer than `rollout.time_limit`, carries its error
    and the turns it had. Its `session` at the sampler, unique among those in flight, is always released.
    """
    rollout, opening = context.rollout, context.prompt.opening
    prompt_ids, first_opening = open_prompt(
        question, context.tokenizer, context.prompt, rollout.max_prompt_length, context.actions
    )
    trajectory = Trajectory(
        question,
        prompt_ids,
        index=index,
        opening=opening,
        first_opening=None if first_opening == opening else first_opening,
        actions=context.grammar.actions,
    )
    start = time.monotonic()
    limit = asyncio.timeout(rollout.time_limit or None)
    try:
        async with limit:
            await _write(trajectory, context, seed, session)
            if context.judge is not None and trajectory.answer is not None:
                trajectory.metrics = await context.judge.score(trajectory)
    except RequestFailed as error:
        trajectory.error = well_formed(redact(f"{error.service}: {' '.join(str(error).split())}"))
    except TimeoutError:
        if not limit.expired():
            raise
        trajectory.error = f"time: not finished within rollout.time_limit={rollout.time_limit:g} s"
    finally:
        context.sampler.release(session)
    trajectory.seconds = time.monotonic() - start
    return trajectory


async def _write(trajectory: Trajectory, context: RolloutContext, seed: int, session: str) -> None:
    rollout = context.rollout
    tokens = trajectory.prompt_ids.tolist()
    for number in range(rollout.max_searches + 1):
        sampling = SamplingParams(
            max_tokens=min(rollout.max_turn_length, rollout.max_length - len(tokens)),
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=turn_seed(seed, trajectory.question.id, trajectory.index, number),
            stop=context.grammar.stop_strings,
        )
        completion = await context.sampler.generate(tokens, sampling, session)
        turn = _read(completion, context, trajectory.opening_of(number))
        trajectory.turns.append(turn)
        context.work["tokens"] += len(turn.token_ids)
        context.watch(turn, False)
        tokens += completion.token_ids
        goes_on = turn.is_action or (turn.kind == "invalid" and rollout.on_invalid == "retry")
        if number == rollout.max_searches or not goes_on:
            return
        if not await _observe(turn, context, room=rollout.max_length - len(tokens) - 1):
            return
        context.watch(turn, True)
        tokens += turn.observation_ids.tolist()


def turn_seed(seed: int, question_id: str, index: int, turn: int) -> int:
    """Return a uint32 that depends on all four, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}\0{question_id}\0{index}\0{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def _read(completion: Completion, context: RolloutContext, opening: str) -> Turn:
    ids = completion.token_ids
    # A policy may know several end-of-text tokens; the sampler says "eos" for each of them.
    ended = completion.stop_reason == "eos"
    text = decode(context.tokenizer, ids[:-1] if ended else ids)
    parsed = parse_turn(whole_turn(opening, text), completion.stop_reason, context.grammar)
    return Turn(
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.asarray(completion.logprobs, np.float32),
        text=text,
        stop_reason=completion.stop_reason,
        policy_versions=completion.policy_versions,
        **vars(parsed),
    )


async def _observe(turn: Turn, context: RolloutContext, room: int) -> bool:
    """Append the environment's reply to the turn; False where it has more than `room` tokens."""
    if room < 1:
        return False
    observations, reply = context.observations, Reply()
    if turn.is_action:
        action = context.by_name[turn.kind]
        context.work["searches"] += turn.kind == "search"
        observations = observations.of(action)
        try:
            reply = await action.call(_argument(action, turn.query))
        except (QueryRefused, ActionRefused) as error:
            turn.is_refused = True
            ids, text = observations.information(_refusal(turn.kind, error, context))
        else:
            limit = observations.max_length
            reply = neutralise_reply(reply, action, context.tokenizer, context.grammar, limit)
            ids, text = observations.information(action.render(reply))
    else:
        ids, text = observations.invalid()
    if len(ids) > room:
        return False
    turn.documents, turn.observation_ids, turn.observation_text = reply.documents, ids, text
    return True


def _argument(action: Action, body: str) -> Any:
    try:
        return action.parse(body)
    except ValueError as error:
        raise ActionRefused(str(error)) from error


def _refusal(name: str, error: Exception, context: RolloutContext) -> str:
    if isinstance(error, QueryRefused):
        return QUERY_REFUSED
    extra = added_token_strings(context.tokenizer)
    reason = cut_early(well_formed(str(error)), context.tokenizer, context.rollout.max_observation_length)
    return refusal(name, neutralise(reason, extra, context.grammar))
