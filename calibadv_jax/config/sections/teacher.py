"""On-policy distillation: a teacher's probabilities of the tokens that the policy sampled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section, credential_faults

CURRENT = "current"
INITIAL = "initial"
# Teachers that the run holds anyway.
OWN_POLICIES = (CURRENT, INITIAL)
ANSWER_PLACE = "answer"
TITLES_PLACE = "titles"
_PLACE = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True, config=SECTION)
class TeacherConfig(Section):
    """A teacher that scores the tokens that the policy sampled (docs/distillation.md)."""

    policy: Annotated[str, Mark.PLACE] = ""
    """Teacher: a HuggingFace folder or OWNER/NAME[@REVISION] of the hub, with the policy's vocabulary;
    initial: the policy of the run's start (with adapters: the base); current: the policy before each step's
    update, which needs a hint. Empty: no teacher, unless url is set."""
    url: Annotated[str, Mark.UNLEARNED, Mark.NO_ANSWER] = ""
    """Instead of policy: base URL of a vLLM server such as http://127.0.0.1:8001/v1, which returns the
    log-probabilities of prompts. TEACHER_TOKEN is sent as a bearer token."""
    model: str = ""
    """Model of the requests to url."""
    hint: str = ""
    """Text behind the question in the teacher's prompt, which the policy does not see. {answer}: the first
    golden answer; {titles}: titles of the supporting passages in retriever.corpus. Empty: the same prompt."""
    acts_on: Literal["advantage", "loss"] = "advantage"
    """advantage: coef x (log teacher - log old policy) is added to each token's advantage, which the loss
    clips; loss: coef x estimator of the reverse KL divergence is added to each token's term of the loss."""
    estimator: Literal["low_var_kl", "kl", "abs", "mse"] = "mse"
    """acts_on=loss: estimator of the divergence, as loss.kl_estimator. mse has its gradient on average."""
    guides: Literal["all", "failed", "negative"] = "all"
    """Tokens with a teacher. all; failed: those of trajectories with a score below failed_below (DGPO);
    negative: those with a negative advantage, after any calibration by turn."""
    failed_below: float = Field(default=1.0, gt=0, le=1)
    """guides=failed: score, as a share of the largest reward, below which a trajectory has failed."""
    coef: NonNegativeFloat = 1.0
    """Weight of the teacher in the first step."""
    coef_end: NonNegativeFloat = 0.0
    """Weight after coef_steps steps."""
    coef_steps: NonNegativeInt = 0
    """Steps in which the weight moves evenly from coef to coef_end, where it stays; 0: it stays coef."""
    reward_weight: NonNegativeFloat = 1.0
    """Factor of the advantages from the reward. 0: the policy learns from the teacher alone."""
    clip: PositiveFloat = 10.0
    """Largest difference of two log-probabilities of a token, in nats; larger ones count as this."""
    timeout: Annotated[PositiveFloat, Mark.UNLEARNED, Mark.NO_ANSWER] = 120.0
    """url: seconds for one request; then it is repeated."""
    patience: Annotated[PositiveFloat, Mark.UNLEARNED, Mark.NO_ANSWER] = 600.0
    """url: seconds to wait for an unreachable server; after that the run saves its state and stops."""
    max_concurrency: Annotated[PositiveInt, Mark.UNLEARNED, Mark.NO_ANSWER] = 32
    """url: largest number of requests at the same time."""

    @property
    def is_on(self) -> bool:
        """Whether the run has a teacher."""
        return bool(self.policy or self.url)

    @property
    def has_own_weights(self) -> bool:
        """Whether the teacher is a policy beside those of the run, which this program loads."""
        return bool(self.policy) and self.policy not in OWN_POLICIES

    @property
    def needs_titles(self) -> bool:
        """Whether the hint names the supporting passages."""
        return TITLES_PLACE in _PLACE.findall(self.hint)

    def coef_at(self, step: int) -> float:
        """Return the teacher's weight in a step.

        Args:
            step: Number of steps trained before it.
        """
        if not self.coef_steps:
            return self.coef
        share = min(1.0, step / self.coef_steps)
        return self.coef + share * (self.coef_end - self.coef)

    def _faults(self) -> Iterator[str]:
        yield from credential_faults("url", self.url, "TEACHER_TOKEN")
        if not self.is_on and not self.model:
            yield from self._idle_faults()
        if self.policy and self.url:
            yield "policy and url both name a teacher: leave one out"
        if bool(self.url) != bool(self.model):
            yield f"url is {self.url!r} and model is {self.model!r}: set both for a teacher at a server"
        if self.policy == CURRENT and not self.hint:
            yield "policy=current is the policy itself, which teaches nothing without a hint: set hint"
        places = set(_PLACE.findall(self.hint)) - {ANSWER_PLACE, TITLES_PLACE}
        if places:
            named = ", ".join(f"{{{place}}}" for place in sorted(places))
            yield f"hint holds {named}, but only {{answer}} and {{titles}} are replaced: correct it"
        if self.coef_end and not self.coef_steps:
            yield f"coef_end is {self.coef_end:g}, but coef_steps is 0: set both, or leave both out"

    def _idle_faults(self) -> Iterator[str]:
        """Refuse settings of a teacher that is not there."""
        pydantic_class: Any = TeacherConfig
        for key, section_field in pydantic_class.__pydantic_fields__.items():
            if getattr(self, key) != section_field.default:
                yield f"teacher.{key} is set, but there is no teacher: set teacher.policy or teacher.url"
