"""The values that flow between the stages: questions, turns, trajectories, groups.

Spans (which tokens were sampled, which the environment appended) come from the agent loop, never from text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

SEARCH_ALONE = ("search",)  # names of the actions that are on by default
NO_ACTIONS = ("answer", "invalid", "unfinished")
TurnKind = str  # one of NO_ACTIONS, or the name of an action
StopReason = Literal["stop", "eos", "length", "abort"]


@dataclass(frozen=True)
class Message:
    """A message of the prompt that a row of data carries."""

    role: str
    parts: tuple[str, ...]  # the question's text stands between them


@dataclass(frozen=True)
class Question:
    """A question with at least one accepted answer."""

    id: str
    text: str
    golden_answers: tuple[str, ...]
    data_source: str
    supporting_ids: tuple[str, ...] = ()  # corpus ids of the passages known to answer it; may be empty
    prompt: tuple[Message, ...] = ()  # used if prompt.template is "from_data"; empty: the row has none


@dataclass(frozen=True)
class Document:
    """A retrieved passage, neutralised, as the policy reads it."""

    id: str  # in the corpus; its identity in the silver set
    title: str
    text: str
    score: float | None = None


@dataclass
class Turn:
    """One model segment and the observation after it."""

    kind: TurnKind
    token_ids: np.ndarray  # int32 [N], as sampled
    logprobs: np.ndarray  # float32 [N], of the sampled tokens under the sampler's policy
    text: str = ""  # decoded sampled tokens, end-of-text token removed
    think: str = ""
    query: str = ""  # body of its action
    answer: str = ""  # kind "answer" only
    documents: tuple[Document, ...] = ()  # in the order shown; empty unless an action was executed
    is_refused: bool = False  # the action refused the query; the observation says so
    observation_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # int32 [M]
    observation_text: str = ""
    stop_reason: StopReason = "stop"
    policy_versions: tuple[int, ...] = ()
    # By policy, "current" or "initial": the golden answer's mean token log-probability before this turn.
    golden_logprobs: dict[str, float] = field(default_factory=dict)
    # float32 [N], the critic's values before each sampled token; None: there is no critic.
    values: np.ndarray | None = None

    @property
    def is_action(self) -> bool:
        return self.kind not in NO_ACTIONS


def _joined(parts: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


@dataclass
class Trajectory:
    """One attempt at a question. Its response is all turns concatenated, without the prompt."""

    question: Question
    prompt_ids: np.ndarray  # int32 [P]
    turns: list[Turn] = field(default_factory=list)
    index: int = 0  # position within its group
    seconds: float = 0.0  # from its first prompt to its end, searches and weight swaps included
    error: str | None = None  # one line, "SERVICE: reason", if it has failed
    format_valid: bool = False  # set by the reward stage
    answer_score: float = 0.0  # answer reward x format validity - penalty, set by the reward stage
    metrics: dict[str, float] = field(default_factory=dict)  # em, f1, cover_em, …
    opening: str = ""  # the environment's text before every turn: <think>, or nothing
    actions: tuple[str, ...] = SEARCH_ALONE  # names of the actions that were on
    first_opening: str | None = None  # opening of the first turn, if the prompt opens it in another way
    max_score: float = 1.0  # largest answer reward of the config, set by the reward stage

    @property
    def relative_score(self) -> float:
        """Answer score as a share of the largest answer reward, for thresholds of scores."""
        return self.answer_score / self.max_score

    def opening_of(self, number: int) -> str:
        """Return the environment's text before a turn, counted from 0."""
        return self.opening if number or self.first_opening is None else self.first_opening

    @property
    def response_ids(self) -> np.ndarray:
        """int32 [T]: sampled and observation tokens of all turns, in order."""
        pairs = ((turn.token_ids, turn.observation_ids) for turn in self.turns)
        return _joined((part for pair in pairs for part in pair), np.int32)

    @property
    def mask(self) -> np.ndarray:
        """bool [T]: True where the policy sampled the token."""
        lengths = ((len(turn.token_ids), len(turn.observation_ids)) for turn in self.turns)
        return _joined((part for n, m in lengths for part in (np.ones(n, bool), np.zeros(m, bool))), bool)

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [T]: the sampler's log-probabilities; 0 on observation tokens."""
        pairs = ((turn.logprobs, np.zeros(len(turn.observation_ids))) for turn in self.turns)
        return _joined((part for pair in pairs for part in pair), np.float32)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Versions of the policy that sampled it, ascending."""
        return tuple(sorted({version for turn in self.turns for version in turn.policy_versions}))

    @property
    def num_searches(self) -> int:
        return sum(turn.kind == "search" for turn in self.turns)

    @property
    def answer(self) -> str | None:
        """Text of the answer turn, or None if the trajectory never answered."""
        last = self.turns[-1] if self.turns else None
        return last.answer if last is not None and last.kind == "answer" else None


@dataclass
class Group:
    """All trajectories of one question in one step: the unit of GRPO's normalisation."""

    question: Question
    trajectories: list[Trajectory]
    failed: list[Trajectory] = field(default_factory=list)  # not finished: neither scored nor trained

    @staticmethod
    def of(question: Question, attempts: Iterable[Trajectory]) -> Group:
        """Group all attempts; those with an `error` have failed."""
        parts: tuple[list[Trajectory], list[Trajectory]] = ([], [])
        for attempt in attempts:
            parts[attempt.error is not None].append(attempt)
        return Group(question, *parts)

    @property
    def attempts(self) -> list[Trajectory]:
        """Finished and failed trajectories in the order of their indices."""
        return sorted([*self.trajectories, *self.failed], key=lambda trajectory: trajectory.index)
