"""How answers are scored, and how advantages follow from the scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section, credential_faults
from calibadv_jax.core.registry import ANSWER_REWARDS, ESTIMATORS
from calibadv_jax.core.user_functions import is_address

JUDGE = "judge"
# The metric that says whether the judge and the exact match agree.
JUDGE_AGREEMENT = "judge_agreement"
USER_FUNCTION = "my_package.my_module:function"
CALIBRATED = "calibadv"


def _choices(*names: str) -> Any:
    """Return a field whose documented choices are `names`, or a function of the user's own."""
    return Field(json_schema_extra={"enum": [*names, USER_FUNCTION]})


@dataclass(frozen=True, config=SECTION)
class JudgeConfig(Section):
    """A language model that judges answers."""

    url: Annotated[str, Mark.UNLEARNED, Mark.NO_ANSWER] = ""
    """Base URL of an OpenAI-compatible endpoint, such as http://127.0.0.1:8001/v1, that judges every answer
    (reward/judge, for reward.answer). JUDGE_TOKEN is sent as a bearer token. Empty: no judge."""
    model: str = ""
    """Model of the request."""
    prompt: str = ""
    """File with the judge's instructions; empty: it compares the answer with the golden answers. Question,
    golden answers and the answer's first 2000 letters follow as JSON."""
    max_tokens: PositiveInt = 512
    """Tokens that the judge may write; the verdict is in its last line."""
    timeout: Annotated[PositiveFloat, Mark.UNLEARNED, Mark.NO_ANSWER] = 60.0
    """Seconds for one request; then it is repeated."""
    patience: Annotated[PositiveFloat, Mark.UNLEARNED, Mark.NO_ANSWER] = 600.0
    """Seconds to wait for an unreachable endpoint; after that the trajectory of the answer has failed."""
    max_concurrency: Annotated[PositiveInt, Mark.UNLEARNED, Mark.NO_ANSWER] = 64
    """Largest number of requests at the same time."""

    def _faults(self) -> Iterator[str]:
        yield from credential_faults("url", self.url, "JUDGE_TOKEN")
        if bool(self.url) != bool(self.model):
            yield f"url is {self.url!r} and model is {self.model!r}: set both to ask a judge, or neither"


@dataclass(frozen=True, config=SECTION)
class RewardConfig(Section):
    """The reward of a trajectory."""

    answer: str | dict[str, float] = "f1"
    """Reward of an answer. f1, em, cover_em: agreement with the best golden answer; judge: the verdict of
    reward.judge; package.module:function: your own, at most 1 (examples/own_reward.py). Several with weights,
    {f1: 0.5, judge: 0.5}: their weighted sum. The sum of the positive weights is the largest reward."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of your own function in `answer`, by name: {cost: 0.2}. With several functions of
    your own: the arguments of each, by the function's name: {short_way: {cost: 0.2}}."""
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    answer_from: Annotated[Literal["auto", "tag", "whole", "box"], Mark.COLD_START] = "auto"
    """Where the answer stands. tag: inside <answer>; with rollout.protocol=tool_calls also whole: the whole
    message without a call, and box: inside its last \\boxed{}. auto: tag for tags, whole for tool_calls."""
    format: bool = True
    """Multiply the answer reward by format validity (0 or 1)."""
    evidence: Annotated[NonNegativeFloat, Mark.NO_ANSWER] = 0.0
    """Weight of the share of the question's supporting_ids that the trajectory's searches returned, which is
    added to the answer reward. Questions without supporting_ids keep the answer reward. 0: off."""
    search_cost: Annotated[NonNegativeFloat, Mark.NO_ANSWER] = 0.0
    """Cost of each search beyond those that were needed to find the question's supporting_ids, or beyond
    their number while one is missing. The score does not fall below 0 by it. 0: off."""
    overlong_penalty: NonNegativeFloat = 0.0
    """Penalty of a trajectory with overlong_until sampled tokens or more (DAPO: 1); 0: off."""
    overlong_from: NonNegativeInt = 0
    """Sampled tokens from which the penalty grows evenly."""
    overlong_until: NonNegativeInt = 0
    """Sampled tokens from which the penalty is full; must be above overlong_from."""
    shuffle: Annotated[bool, Mark.NO_ANSWER] = False
    """Control experiment: permute the rewards of the step's trajectories, so that they carry no signal."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward in the answer's reward."""
        return {self.answer: 1.0} if isinstance(self.answer, str) else self.answer

    @property
    def max_score(self) -> float:
        """Largest reward of an answer, if no function of the user's own returns more than 1."""
        positive_weights = [weight for weight in self.weights.values() if weight > 0]
        return math.fsum(positive_weights) or 1.0

    @property
    def own_functions(self) -> list[str]:
        """The functions of the user's own in `answer`, as ``package.module:function``."""
        return [name for name in self.weights if is_address(name)]

    def arguments_of(self, address: str) -> dict[str, Any]:
        """Return the further arguments of a function of the user's own.

        Args:
            address: ``package.module:function``, one of `own_functions`.
        """
        if len(self.own_functions) == 1:
            return self.args
        _, _, function_name = address.partition(":")
        arguments: dict[str, Any] = self.args.get(function_name, {})
        return arguments

    def _argument_faults(self) -> Iterator[str]:
        if self.args and not self.own_functions:
            yield "args is set, but answer names no function of your own: leave it out"
        if len(self.own_functions) < 2:
            return
        names = [address.partition(":")[2] for address in self.own_functions]
        for name, arguments in self.args.items():
            if name not in names or not isinstance(arguments, dict):
                yield (
                    f"args holds {name!r}, but answer names several functions of your own: give the arguments"
                    f" of each by its name, as in {{{names[0]}: {{NAME: VALUE}}}}"
                )

    def _faults(self) -> Iterator[str]:
        yield from self._argument_faults()
        if not self.weights:
            yield "answer names no reward: name one, such as f1, or several with their weights"
        names = (*ANSWER_REWARDS, JUDGE)
        for name, weight in self.weights.items():
            if name not in names and not is_address(name):
                yield (
                    f"answer names {name!r}: must be one of {', '.join(names)}, "
                    f"or your own as {USER_FUNCTION}"
                )
            if not weight:
                yield f"answer gives {name} the weight 0: leave it out, it is logged all the same"
        if JUDGE in self.weights and not self.judge.url:
            yield "answer names judge, but there is none: set judge.url and judge.model"
        start = self.overlong_from
        end = self.overlong_until
        if self.overlong_penalty and end <= start:
            yield f"overlong_penalty needs overlong_until ({end}) above overlong_from ({start}), in tokens"
        if not self.overlong_penalty and (start or end):
            yield "overlong_from and overlong_until do nothing: set overlong_penalty, or leave them out"


@dataclass(frozen=True, config=SECTION)
class AdvantageConfig(Section):
    """How advantages follow from scores, and how CalibAdv calibrates them by turn."""

    name: Annotated[str, _choices(CALIBRATED, *ESTIMATORS)] = CALIBRATED
    """calibadv: the advantages of `base`, calibrated by turn (arXiv 2604.18235). The others: docs/credit.md.
    package.module:function: a function of your own, see examples/own_advantage.py."""
    base: Annotated[str, _choices(*ESTIMATORS)] = "grpo"
    """calibadv: the estimator whose advantages are calibrated; any `name` but calibadv."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of your own function in `name` or `base`, by name."""
    normalize_std: bool = True
    """grpo, grpo_neutral, grpo_acceptable, grpo_passk, querygroup and the estimators that compare turns:
    divide by the standard deviation; false: centre only (Dr. GRPO)."""
    std_over: Literal["group", "step"] = "group"
    """normalize_std: the standard deviation of each group, or of all scores of the step."""
    score_threshold: float = Field(default=0.7, ge=0, le=1)
    """grpo_neutral, grpo_acceptable: lowest relative score below the group's mean that is nearly right."""
    turn_weight: NonNegativeFloat = 1.0
    """gigpo, mt_grpo, stepsearch, a2tgpo, tips: weight of turns' rewards, beside GRPO's advantage."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """gigpo, stepsearch, igpo, a2tgpo, tips: weight of the next turn's reward in a turn's sum (GiGPO's
    authors: 0.95). gae: gamma, for each sampled token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """gae: lambda. 1: score less the critic's value; 0: change of the value up to the next sampled token."""
    probes: Annotated[list[Literal["current", "initial"]], Mark.UNLEARNED] = Field(default_factory=list)
    """Policies whose log-probability of the golden answer after every turn is kept for `calibadv audit`:
    current (before the step's update) for igpo and a2tgpo, initial (of the run's start) for tips."""
    soft_penalty: bool = True
    """calibadv: make a negative advantage of a search turn smaller by its correctness."""
    softening: Literal["plain", "aggressive", "upper_limit", "reset"] = "plain"
    """calibadv: form of soft_penalty. plain: times 1 - correctness, as in the paper; aggressive: also 0 from
    a correctness of 1/3; upper_limit: moved towards the group's largest advantage, by the correctness; reset:
    plain, and a positive advantage becomes 0 where all search turns of that number are correct."""
    silver_threshold: float = Field(default=0.7, ge=0, le=1)
    """calibadv, querygroup, stepsearch: lowest relative score of a trajectory whose documents are silver."""
    correctness: Literal["fraction", "max", "mean"] = "fraction"
    """calibadv, querygroup: how the correctness of a search turn follows from its silver documents."""
    rebalance: bool = True
    """calibadv: balance positive and negative advantage, by default of the answer turns of each group."""
    rebalance_over: Literal["answer", "turn", "all"] = "answer"
    """calibadv: turns that are balanced together. answer: answer turns, as in the paper; turn: answer turns,
    first search turns, second search turns and so on, each among themselves; all: all turns."""
    rebalance_within: Literal["group", "step"] = "group"
    """calibadv: balance the turns of a group together, as in the paper, or of the step."""
    rebalance_by: Literal["advantage", "tokens"] = "advantage"
    """calibadv: what is balanced. advantage: the sums of the advantages over the tokens; tokens: only the
    numbers of tokens of the two sides."""
    rebalance_excess: bool = False
    """calibadv: rebalance only turns whose |negative sum| / positive sum is above target_ratio."""
    target_ratio: PositiveFloat = 1.0
    """calibadv: the paper's lambda: |negative sum| / positive sum of the balanced tokens afterwards."""
    adjust: Literal["positive", "negative", "clip"] = "positive"
    """calibadv: the side that the rebalance multiplies by a factor. clip: neither side; instead no advantage
    is below -target_ratio times the mean positive advantage over the balanced tokens."""

    @property
    def is_calibrated(self) -> bool:
        """Whether CalibAdv calibrates the advantages of the estimator."""
        return self.name == CALIBRATED

    @property
    def estimator(self) -> str:
        """Name of the estimator before any calibration."""
        return self.base if self.is_calibrated else self.name

    @property
    def _needs(self) -> str:
        """What the estimator needs beside scores; see `registry.Estimator`."""
        entry = ESTIMATORS.get(self.estimator)
        return entry.needs if entry is not None else ""

    @property
    def has_critic(self) -> bool:
        """Whether the estimator needs a critic."""
        return self._needs == "critic"

    @property
    def probed(self) -> tuple[str, ...]:
        """Policies under which the golden answer's log-probability after every turn is computed."""
        policies: set[str] = set(self.probes)
        if self._needs in ("current", "initial"):
            policies.add(self._needs)
        return tuple(sorted(policies))

    def _faults(self) -> Iterator[str]:
        yield from _estimator_faults("name", self.name, (CALIBRATED, *ESTIMATORS))
        yield from _estimator_faults("base", self.base, tuple(ESTIMATORS))
        if self.args and not is_address(self.estimator):
            yield "advantage.args is set, but no function of your own is the estimator: leave it out"


def _estimator_faults(key: str, name: str, choices: tuple[str, ...]) -> Iterator[str]:
    if name not in choices and not is_address(name):
        yield (
            f"advantage.{key}: must be one of {', '.join(choices)}, "
            f"or your own as {USER_FUNCTION}, not {name}"
        )
