"""The values that flow between the stages: questions, turns, trajectories, groups.

The agent loop knows which tokens were sampled and which tokens the environment appended. Text is never parsed
to find that out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from calibadv_jax.core.tool_calls import ToolCall

# Names of the actions that are on by default.
DEFAULT_ACTIONS = ("search",)
# Kinds of turns without an action.
NO_ACTIONS = ("answer", "invalid", "unfinished")
# One of NO_ACTIONS, or the name of an action.
TurnKind = str
StopReason = Literal["stop", "eos", "length", "abort"]


@dataclass(frozen=True)
class Message:
    """A message of the prompt that a row of data holds.

    Attributes:
        role: "system", "user" or "assistant".
        parts: The message's text, split at the question's text.
    """

    role: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question with at least one accepted answer.

    Attributes:
        id: Id, unique among the questions of a run.
        text: The question.
        golden_answers: Accepted answers.
        data_source: Data set that the question comes from, such as "nq".
        supporting_ids: Corpus ids of the passages that are known to answer the question; may be empty.
        prompt: Prompt of the question's row, which prompt.template "from_data" uses; empty: it has none.
    """

    id: str
    text: str
    golden_answers: tuple[str, ...]
    data_source: str
    supporting_ids: tuple[str, ...] = ()
    prompt: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Document:
    """A retrieved passage, neutralised, as the policy reads it.

    Attributes:
        id: Id in the corpus, by which the silver set holds the document.
        title: Title of the passage.
        text: Text of the passage.
        score: Score of the index or the reranker, higher is better; None: the service gives none.
    """

    id: str
    title: str
    text: str
    score: float | None = None


@dataclass
class Turn:
    """Sampled tokens up to an action or an answer, and the observation after them.

    Attributes:
        kind: Name of the action, "answer", "invalid" or "unfinished".
        token_ids: int32 [N], the sampled tokens.
        logprobs: float32 [N], their log-probabilities under the sampler's policy, in nats.
        text: The decoded sampled tokens, without the end-of-text token.
        think: Text of the thought.
        query: Body of the action, or its tool calls as text; empty for turns without one.
        answer: Text of the answer; empty for turns of another kind.
        documents: Documents of all calls in the order in which the policy read them; empty unless an action
            was executed.
        is_refused: Whether the action, or every call of the turn, was refused; the observation then says so.
        observation_ids: int32 [M], the tokens of the observation.
        observation_text: Text of the observation.
        stop_reason: Why sampling ended.
        policy_versions: Versions of the policy that sampled the tokens.
        golden_logprobs: "current" or "initial" (a policy) -> the golden answer's mean token log-probability
            before this turn, in nats; see `contrib.probe`.
        values: float32 [N], the critic's value before each sampled token; None: there is no critic.
        teacher_logprobs: float32 [N], log-probabilities of the sampled tokens under the teacher, in nats;
            None: there is no teacher, or it was not asked.
        calls: Tool calls of the turn, in order; empty with the protocol "tags".
        flaw: Why a turn of the protocol "tool_calls" is no valid turn; "" if it is.
        is_context: Whether the turn is only read here, and not trained: it was sampled in another trajectory
            of the group that this one continues, or a demonstration gives it no loss.
    """

    kind: TurnKind
    token_ids: np.ndarray
    logprobs: np.ndarray
    text: str = ""
    think: str = ""
    query: str = ""
    answer: str = ""
    documents: tuple[Document, ...] = ()
    is_refused: bool = False
    observation_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    observation_text: str = ""
    stop_reason: StopReason = "stop"
    policy_versions: tuple[int, ...] = ()
    golden_logprobs: dict[str, float] = field(default_factory=dict)
    values: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    calls: tuple[ToolCall, ...] = ()
    flaw: str = ""
    is_context: bool = False

    @property
    def is_action(self) -> bool:
        """Whether the turn has an action."""
        return self.kind not in NO_ACTIONS

    @property
    def is_closed_thought(self) -> bool:
        """Whether the turn is a thought that the environment closed; the next turn goes on after it."""
        return self.kind == "unfinished" and len(self.observation_ids) > 0

    @property
    def num_searches(self) -> int:
        """Number of searches that the turn makes: with tool calls it may be several."""
        if self.calls:
            return sum(call.name == "search" for call in self.calls)
        return int(self.kind == "search")


@dataclass
class Trajectory:
    """One attempt at a question. Its response is all turns concatenated, without the prompt.

    Attributes:
        question: The question.
        prompt_ids: int32 [P], the tokens of the prompt.
        turns: The turns, in order.
        index: Position within the group, from 0.
        seconds: Seconds from the first prompt to the end, searches and weight swaps included.
        error: One line, "SERVICE: reason", if the trajectory has failed; otherwise None.
        format_valid: Format validity; set by the reward stage.
        answer_score: Answer reward x format validity - penalty; set by the reward stage.
        metrics: Name -> value, such as em, f1 and cover_em; set by the reward stage.
        opening: The environment's text before every turn: "<think>", or nothing.
        actions: Names of the actions that were on.
        first_opening: Opening of the first turn, if the prompt opens it in another way; otherwise None.
        max_score: Largest answer reward of the config; set by the reward stage.
        protocol: "tags" or "tool_calls"; see `rollout.protocol`.
        is_demonstration: Whether its turns come from a demonstration: the policy sampled none of them, and
            their `logprobs` are 0.
        continues: Index of the trajectory of the group whose first turns it continues; None: it has no such
            turns. They come first, and are `is_context`.
    """

    question: Question
    prompt_ids: np.ndarray
    turns: list[Turn] = field(default_factory=list)
    index: int = 0
    seconds: float = 0.0
    error: str | None = None
    format_valid: bool = False
    answer_score: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    opening: str = ""
    actions: tuple[str, ...] = DEFAULT_ACTIONS
    first_opening: str | None = None
    max_score: float = 1.0
    protocol: str = "tags"
    is_demonstration: bool = False
    continues: int | None = None

    @property
    def is_from_prompt(self) -> bool:
        """Whether the policy sampled all of it from the prompt on."""
        return not self.is_demonstration and self.continues is None

    @property
    def new_turns(self) -> list[Turn]:
        """The turns that the policy sampled for this trajectory, without those that it continues."""
        if self.is_demonstration:
            return []
        return [turn for turn in self.turns if not turn.is_context]

    @property
    def relative_score(self) -> float:
        """Answer score as a share of the largest answer reward, for thresholds of scores."""
        return self.answer_score / self.max_score

    def opening_of(self, number: int) -> str:
        """Return the environment's text before a turn, counted from 0.

        After a thought that the environment closed there is none.
        """
        if number == 0 and self.first_opening is not None:
            return self.first_opening
        if number > 0 and self.turns[number - 1].is_closed_thought:
            return ""
        return self.opening

    @property
    def response_ids(self) -> np.ndarray:
        """int32 [T]: sampled and observation tokens of all turns, in order."""
        arrays = []
        for turn in self.turns:
            arrays.append(turn.token_ids)
            arrays.append(turn.observation_ids)
        return _concatenate(arrays, np.int32)

    @property
    def mask(self) -> np.ndarray:
        """bool [T]: True where the policy sampled the token, also in the trajectory that this continues."""
        arrays = []
        for turn in self.turns:
            arrays.append(np.ones(len(turn.token_ids), bool))
            arrays.append(np.zeros(len(turn.observation_ids), bool))
        return _concatenate(arrays, bool)

    @property
    def trained(self) -> np.ndarray:
        """bool [T]: True where the token is trained: where `mask` is, without the turns that are context."""
        arrays = []
        for turn in self.turns:
            arrays.append(np.full(len(turn.token_ids), not turn.is_context))
            arrays.append(np.zeros(len(turn.observation_ids), bool))
        return _concatenate(arrays, bool)

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [T]: the sampler's log-probabilities; 0 on observation tokens."""
        arrays = []
        for turn in self.turns:
            arrays.append(turn.logprobs)
            arrays.append(np.zeros(len(turn.observation_ids)))
        return _concatenate(arrays, np.float32)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Versions of the policy that sampled the trajectory, ascending."""
        versions: set[int] = set()
        for turn in self.turns:
            versions.update(turn.policy_versions)
        return tuple(sorted(versions))

    @property
    def num_searches(self) -> int:
        """Number of search turns."""
        return sum(turn.kind == "search" for turn in self.turns)

    @property
    def answer(self) -> str | None:
        """Text of the answer turn, or None if the trajectory never answered."""
        if not self.turns or self.turns[-1].kind != "answer":
            return None
        return self.turns[-1].answer


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Return the arrays joined as `dtype`; without any, an empty array."""
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


@dataclass
class Group:
    """All trajectories of one question in one step: the unit of GRPO's normalisation.

    Attributes:
        question: The question.
        trajectories: Trajectories that have finished.
        failed: Trajectories that have failed, and are neither scored nor trained.
    """

    question: Question
    trajectories: list[Trajectory]
    failed: list[Trajectory] = field(default_factory=list)

    @staticmethod
    def from_attempts(question: Question, attempts: Iterable[Trajectory]) -> Group:
        """Return the group of all attempts at a question; an attempt with an `error` has failed."""
        finished: list[Trajectory] = []
        failed: list[Trajectory] = []
        for attempt in attempts:
            if attempt.error is None:
                finished.append(attempt)
            else:
                failed.append(attempt)
        return Group(question, finished, failed)

    @property
    def from_prompt(self) -> Group:
        """The group without demonstrations and continuations: what the policy does on its own."""
        trajectories = [trajectory for trajectory in self.trajectories if trajectory.is_from_prompt]
        failed = [trajectory for trajectory in self.failed if trajectory.is_from_prompt]
        return Group(self.question, trajectories, failed)

    @property
    def attempts(self) -> list[Trajectory]:
        """Finished and failed trajectories in the order of their indices."""
        return sorted([*self.trajectories, *self.failed], key=lambda trajectory: trajectory.index)
