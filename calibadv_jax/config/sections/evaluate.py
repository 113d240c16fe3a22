"""Evaluation, during training and alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark


@dataclass(frozen=True, config=SECTION)
class EvaluateConfig:
    policy: str = ""
    """Policy to evaluate: a HuggingFace folder, OWNER/NAME[@REVISION] of the hub, a run, its folder of
    checkpoints, a checkpoint or a snapshot; empty: the newest checkpoint of run.dir, or policy.path if there
    is no checkpoint."""
    method: Literal["agent", "direct", "chain_of_thought", "rag", "empty_retriever", "random_documents"] = (
        "agent"
    )
    """How questions are answered. agent: with searches, as trained. Baselines: direct: the answer without
    search; chain_of_thought: a thought, then the answer; rag: passages found for the question stand in the
    prompt. Controls of the agent: empty_retriever: every search finds nothing; random_documents: every search
    finds what was found for another question."""
    template: str = ""
    """Prompt of direct, chain_of_thought and rag, with {question}; empty: the built-in prompt. For rag the
    passages come before the question."""
    temperatures: list[NonNegativeFloat] = Field(default_factory=lambda: [0.0], min_length=1)
    """Sampling temperatures; every temperature is one pass over the evaluation questions."""
    samples: PositiveInt = 1
    """Trajectories per question at temperatures above 0, for mean@k and pass@k; during training it is 1."""
    every: NonNegativeInt = 0
    """Training steps between two evaluations; 0: no evaluation during training."""
    sample_size: NonNegativeInt = 500
    """Number of questions of an evaluation during training: the same questions each time, equally many from
    every data source; 0: all questions."""
    resamples: NonNegativeInt = 10000
    """Number of bootstrap resamples of the questions for the confidence intervals; 0: no intervals."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Coverage of the confidence intervals."""
    output: Annotated[str, Mark.OUTPUT] = "${run.dir}/evaluation.json"
    """JSON file of the scores. Beside it come the tables (.md, .csv) and the questions with their transcripts
    (.jsonl), from which an interrupted evaluation continues."""

    @model_validator(mode="after")
    def _output_is_json(self) -> EvaluateConfig:
        if not self.output.endswith(".json"):
            raise ValueError(f"output is {self.output!r}: it must end in .json")
        return self
