"""What a group holds beside trajectories sampled from its prompt: demonstrations, continued near misses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section


@dataclass(frozen=True, config=SECTION)
class DemonstrationsConfig(Section):
    """Demonstrations in the groups of the first steps (docs/groups.md)."""

    file: Annotated[str, Mark.PLACE] = ""
    """File of demonstrations, in the formats of sft.demonstrations; they are matched to the training
    questions by the question's text. Empty: none."""
    per_group: PositiveInt = 1
    """Largest number of trajectories of a group that are demonstrations of its question. A question with
    fewer of them keeps sampled trajectories in their place."""
    steps: PositiveInt = 50
    """Steps whose groups hold demonstrations, from the first one on (David-GRPO: 50)."""
    importance: Literal["ratio", "shaped"] = "ratio"
    """Weight of a demonstration's token. ratio: the loss's own, with the learner's probability at the start
    of the step as the denominator, so that it starts at 1; shaped: p / (p + gamma), where p is the token's
    probability under the policy, without clipping (LUFFY)."""
    gamma: PositiveFloat = 0.1
    """importance=shaped: the smaller, the more of the gradient goes to tokens that the policy finds
    unlikely."""

    @property
    def is_on(self) -> bool:
        """Whether groups hold demonstrations."""
        return bool(self.file)

    def _faults(self) -> Iterator[str]:
        pydantic_class: Any = DemonstrationsConfig
        for key, section_field in pydantic_class.__pydantic_fields__.items():
            if not self.file and getattr(self, key) != section_field.default:
                yield f"demonstrations.{key} is set, but there are no demonstrations: set demonstrations.file"
        if self.importance != "shaped" and self.gamma != pydantic_class.__pydantic_fields__["gamma"].default:
            yield f"gamma is {self.gamma:g}, but importance is {self.importance}: set importance=shaped"


@dataclass(frozen=True, config=SECTION)
class ContinuationsConfig(Section):
    """Trajectories that found evidence and failed, continued in a second round (docs/groups.md)."""

    per_group: NonNegativeInt = 0
    """Trajectories of a group that are sampled in a second round: each continues a near miss of the first
    round, behind the observation with its last new supporting passage. In a group without a near miss they
    are sampled from the prompt. 0: there is one round."""
    failed_below: float = Field(default=1.0, gt=0, le=1)
    """Reward of the answer, as a share of the largest one, below which a trajectory has failed."""
    only_unsolved: bool = True
    """Continue only in groups in which every trajectory of the first round has failed, as David-GRPO does;
    false: also beside a right one."""

    @property
    def is_on(self) -> bool:
        """Whether groups have a second round."""
        return self.per_group > 0

    def _faults(self) -> Iterator[str]:
        if self.is_on:
            return
        pydantic_class: Any = ContinuationsConfig
        for key, section_field in pydantic_class.__pydantic_fields__.items():
            if getattr(self, key) != section_field.default:
                yield f"continuations.{key} is set, but continuations.per_group is 0: raise it"
