"""The supervised cold start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.learner import OptimizerConfig
from calibadv_jax.config.sections.section import SECTION, Mark


@dataclass(frozen=True, config=SECTION)
class SftPhase:
    steps: PositiveInt | None = None
    """Number of optimizer updates; null: 100, or as many as `epochs` needs."""
    epochs: PositiveInt | None = None
    """Instead of steps: number of passes over the demonstrations of the file, each in another order; the last
    update of a phase may have fewer rows."""
    kind: Literal["imperfect", "lookups", "drills"] = "imperfect"
    """What the generator demonstrates. imperfect: whole trajectories with flaws; lookups: careful one-hop and
    comparison questions; drills: words to copy and names to compare, without search. With a JSONL file it has
    no effect."""
    loss_on: Literal["sampled", "all"] = "sampled"
    """Tokens with a loss. sampled: what the policy would sample; all: documents and prompt too."""

    @model_validator(mode="after")
    def _one_length(self) -> SftPhase:
        if self.steps and self.epochs:
            raise ValueError(f"has steps={self.steps} and epochs={self.epochs}: leave one out")
        return self


@dataclass(frozen=True, config=SECTION)
class SftConfig:
    init_from: str = ""
    """Policy to start from: a HuggingFace folder, or OWNER/NAME[@REVISION] of the hub; empty: random
    parameters of policy.init."""
    demonstrations: str = ""
    """JSONL file of demonstrations, in our layout or as chat messages (docs/data.md), or the name of a
    generator: world."""
    first_query: Literal["best", "varied"] = "best"
    """What `calibadv demonstrate` searches first. best: the query that finds most, mostly the question
    itself; varied: the question or a title that it mentions, drawn for each question among those that lead to
    all supporting passages. Then the policy learns several kinds of query, among which RL can choose."""
    held_out: float = Field(default=0.0, ge=0, lt=1)
    """Share of the file's questions that are not trained on; their loss is sft/held_out_loss."""
    held_out_every: PositiveInt = 20
    """Updates between two measurements of sft/held_out_loss; it is always measured after the last update."""
    phases: list[SftPhase] = Field(default_factory=list)
    """Phases of the cold start, in order."""
    row_length: PositiveInt | None = None
    """Tokens of a packed row; null: rollout.max_length, or what an unfinished cold start began with."""
    rows: PositiveInt = 16
    """Packed rows per update, which are computed together: fewer or shorter rows need less memory."""
    checkpoint_every: NonNegativeInt = 50
    """Updates between two saved states from which an interrupted cold start goes on; if updates are slow, the
    state is saved after ten minutes. The newest one is kept until the policy is written. 0: it is saved only
    when a signal or an error ends the cold start."""
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer of the cold start."""
    output: Annotated[str, Mark.OUTPUT] = "${run.dir}/sft"
    """HuggingFace folder to write the trained policy to."""
