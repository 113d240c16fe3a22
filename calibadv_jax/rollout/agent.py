"""The turn loop of one trajectory: think, act, read, answer.

The loop is token-in, token-out: the sampled token ids themselves are continued and trained on. They are
decoded only to decide what the environment does.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from calibadv_jax.config import PromptConfig, RolloutConfig, ToolCallsConfig
from calibadv_jax.core.errors import RequestFailed
from calibadv_jax.core.interfaces import Action, Completion, Judge, Retriever, Sampler, SamplingParams
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.tags import Grammar, well_formed
from calibadv_jax.core.tokens import decode
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.rollout.actions import RetrieverAction, SearchAction, grammar_of
from calibadv_jax.rollout.protocol import ProtocolSettings, TurnProtocol
from calibadv_jax.rollout.protocol_choice import make_protocol


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
    tool_calls: ToolCallsConfig = ToolCallsConfig()
    answer_from: str = "tag"  # where the answer stands; see `Config.answer_from`

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
    def protocol(self) -> TurnProtocol:
        """The protocol of the turns."""
        return make_protocol(
            ProtocolSettings(
                self.tokenizer, self.rollout, self.prompt, self.actions, self.tool_calls, self.answer_from
            )
        )


@dataclass(frozen=True)
class Prefix:
    """The beginning of a trajectory, which another trajectory of the group continues.

    Attributes:
        source: Index, in the group, of the trajectory that sampled these turns.
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
    protocol = context.protocol
    prompt_ids, first_opening = protocol.open_prompt(question, context.rollout.max_prompt_length)
    return Trajectory(
        question,
        prompt_ids,
        index=index,
        opening=protocol.opening,
        first_opening=None if first_opening == protocol.opening else first_opening,
        actions=protocol.action_names,
        protocol=protocol.name,
    )


async def _write_turns(trajectory: Trajectory, context: RolloutContext, seed: int, session: str) -> None:
    """Sample turns and append their observations until the trajectory ends."""
    rollout = context.rollout
    protocol = context.protocol
    tokens = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]  # the whole context so far
    # Turns that got an observation; closed thoughts do not count.
    num_observed = sum(not turn.is_closed_thought for turn in trajectory.turns)
    while True:
        number = len(trajectory.turns)
        opening = trajectory.opening_of(number)
        completion, is_thinking = await _sample(tokens, opening, trajectory, context, seed, session)
        turn = protocol.read_turn(completion, opening)
        trajectory.turns.append(turn)
        context.work["tokens"] += len(turn.token_ids)
        context.watch(turn, False)
        tokens += completion.token_ids
        if not is_thinking:
            is_retried = turn.kind == "invalid" and rollout.on_invalid == "retry"
            if num_observed == rollout.max_searches or not (turn.is_action or is_retried):
                return
            num_observed += 1
        room = rollout.max_length - len(tokens) - 1
        if not await _observe(turn, is_thinking, context, room):
            return
        context.watch(turn, True)
        tokens += turn.observation_ids.tolist()


async def _sample(
    tokens: Sequence[int],
    opening: str,
    trajectory: Trajectory,
    context: RolloutContext,
    seed: int,
    session: str,
) -> tuple[Completion, bool]:
    """Sample a turn, or its thought alone if that reaches its limit.

    Returns:
        The completion, and whether its thought has reached `tool_calls.max_thinking_tokens`.
    """
    rollout = context.rollout
    protocol = context.protocol
    number = len(trajectory.turns)
    limit = rollout.max_turn_length
    if number and trajectory.turns[-1].is_closed_thought:
        # The turn goes on after a thought that the environment closed.
        limit = max(1, limit - len(trajectory.turns[-1].token_ids))
    limit = min(limit, rollout.max_length - len(tokens))
    thinking_limit = protocol.thinking_limit(trajectory.turns)
    has_thinking_limit = 0 < thinking_limit < limit
    sampling = SamplingParams(
        max_tokens=thinking_limit if has_thinking_limit else limit,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=turn_seed(seed, trajectory.question.id, trajectory.index, number),
        stop=protocol.stop_strings,
    )
    completion = await context.sampler.generate(tokens, sampling, session)
    if not has_thinking_limit or completion.stop_reason != "length":
        return completion, False
    if protocol.is_thinking(decode(context.tokenizer, completion.token_ids), opening):
        return completion, True
    rest = await context.sampler.generate(
        [*tokens, *completion.token_ids],
        replace(
            sampling,
            max_tokens=limit - len(completion.token_ids),
            seed=_seed_of_rest(sampling.seed, len(completion.token_ids)),
        ),
        session,
    )
    return _joined(completion, rest), False


def _seed_of_rest(seed: int, length: int) -> int:
    """Return the seed of the rest of a turn of which `length` tokens are sampled."""
    digest = hashlib.blake2b(f"{seed}/{length}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def _joined(start: Completion, rest: Completion) -> Completion:
    """Return the completion of two parts."""
    versions = sorted({*start.policy_versions, *rest.policy_versions})
    return Completion(
        [*start.token_ids, *rest.token_ids],
        [*start.logprobs, *rest.logprobs],
        rest.stop_reason,
        tuple(versions),
    )


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


async def _observe(turn: Turn, is_thinking: bool, context: RolloutContext, room: int) -> bool:
    """Add the environment's reply to a turn.

    Args:
        turn: the turn.
        is_thinking: whether it is a thought that has reached its limit.
        context: services and settings.
        room: tokens that the reply may have.

    Returns:
        Whether the reply has at most `room` tokens; a longer one is not added.
    """
    if room < 1:
        return False
    protocol = context.protocol
    if is_thinking:
        observation = protocol.close_thought()
    elif turn.is_action:
        context.work["searches"] += turn.num_searches
        observation = await protocol.execute(turn, context.by_name)
    else:
        observation = protocol.notice(turn)
    turn.is_refused = observation.is_refused
    if len(observation.ids) > room:
        return False
    turn.documents = observation.documents
    turn.observation_ids = observation.ids
    turn.observation_text = observation.text
    return True
