"""The run's folder, logs, checkpoints, evaluations, exports and guards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section
from calibadv_jax.core.files import check_literal


@dataclass(frozen=True, config=SECTION)
class RunConfig(Section):
    """The folder of a run, its copy, and its seed."""

    dir: Annotated[str, Mark.UNLEARNED, Mark.OUTPUT] = "runs/default"
    """Folder of everything the run writes, on a disk or a mounted file system."""
    mirror: Annotated[str, Mark.UNLEARNED] = ""
    """Where the run's folder is copied after every full checkpoint: s3://bucket/path, gs://bucket/path or a
    folder. A start whose run.dir lacks the newest checkpoint fetches the run from there. Empty: no copy."""
    seed: Annotated[NonNegativeInt, Mark.COLD_START] = 0
    """Seed of initial parameters, order of questions and sampling."""

    def _faults(self) -> Iterator[str]:
        if "://" in self.dir:
            yield (
                f"{self.dir} is not a folder of a file system; set run.mirror to it, and run.dir to a folder"
            )
        check_literal(Path(self.dir))


@dataclass(frozen=True, config=SECTION)
class LogConfig:
    """What a run logs and keeps of its training steps."""

    backends: list[Literal["tensorboard", "wandb", "mlflow", "prometheus"]] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Where metrics go besides metrics.jsonl: TensorBoard event files in the run's folder, Weights & Biases
    (WANDB_MODE=offline works), MLflow (MLFLOW_TRACKING_URI), a Prometheus endpoint. Empty: nowhere else."""
    project: str = "calibadv-jax"
    """Project of Weights & Biases, or experiment of MLflow."""
    prometheus: str = Field(default="127.0.0.1:9464", pattern=r"^[^:/]+:\d{1,5}$")
    """host:port of the Prometheus endpoint."""
    rollouts: Literal["parquet", "none"] = "parquet"
    """Keep the trajectories of every step with their credit, in rollouts/step_N.parquet (docs/record.md)."""
    rollouts_keep: NonNegativeInt = 100
    """Newest steps whose trajectories stay on disk; 0: all steps."""
    rollouts_every: NonNegativeInt = 10
    """Older steps whose number is a multiple of this keep their trajectories too; 0: none."""
    tables_every: NonNegativeInt = 10
    """Steps between two tables of trajectories in Weights & Biases and MLflow (docs/metrics.md); 0: none."""
    transcripts: NonNegativeInt = 0
    """Trajectories of each training step that the console shows, each for a different question."""
    progress: bool = True
    """Show a line for each step, and the work in progress."""
    profile_step: NonNegativeInt = 0
    """Step that JAX's profiler traces into profile/ of the run's folder (docs/tuning.md); 0: none. The first
    two steps compile: take a later one."""


@dataclass(frozen=True, config=SECTION)
class CheckpointConfig:
    """Full checkpoints, from which a run resumes, and policy snapshots."""

    every: NonNegativeInt = 50
    """Steps between two full checkpoints; the last step has one too. 0: only the last step."""
    keep: PositiveInt = 2
    """Full checkpoints to keep."""
    asynchronous: Annotated[bool, Mark.UNLEARNED] = True
    """Write a full checkpoint while the next steps go on, from a copy of the state in host memory."""
    resume: bool = True
    """Continue from the newest full checkpoint in run.dir. false: a folder with a checkpoint is refused."""
    allow_change: list[str] = field(default_factory=list)
    """Keys or sections that may differ from the config of the run that is resumed, such as [learner.steps,
    loss]. Other changes that would make it another experiment are refused."""
    snapshot_dtype: Literal["", "bfloat16", "float32"] = ""
    """Precision of the policy snapshots that vLLM workers load; empty: the precision that they compute in."""
    snapshots_kept: PositiveInt = 2
    """Policy snapshots to keep."""


@dataclass(frozen=True, config=SECTION)
class EvaluateConfig(Section):
    """Evaluations, on their own and during training."""

    policy: str = ""
    """Policy to evaluate: a HuggingFace folder, OWNER/NAME[@REVISION] of the hub, a run, its folder of
    checkpoints, a checkpoint or a snapshot; empty: the newest checkpoint of run.dir, else policy.path."""
    method: Literal["agent", "direct", "chain_of_thought", "rag", "empty_retriever", "random_documents"] = (
        "agent"
    )
    """How questions are answered. agent: with searches, as trained. Baselines: direct: no search;
    chain_of_thought: a thought, no search; rag: passages for the question in the prompt. Controls of the
    agent: empty_retriever: searches return nothing; random_documents: the documents of another question."""
    template: str = ""
    """Prompt of direct, chain_of_thought and rag, with {question}; empty: built in."""
    temperatures: list[NonNegativeFloat] = Field(default_factory=lambda: [0.0], min_length=1)
    """Sampling temperatures; each is one pass over the evaluation questions."""
    samples: PositiveInt = 1
    """Trajectories per question at temperatures above 0, for mean@k and pass@k; during training 1."""
    every: NonNegativeInt = 0
    """Training steps between two evaluations; 0: none during training."""
    sample_size: NonNegativeInt = 500
    """Questions of an evaluation during training, always the same, of all data sources; 0: all questions."""
    resamples: NonNegativeInt = 10000
    """Bootstrap resamples of the questions for the confidence intervals; 0: no intervals."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Coverage of the confidence intervals."""
    output: Annotated[str, Mark.OUTPUT] = "${run.dir}/evaluation.json"
    """JSON file of the scores. The tables (.md, .csv) and the questions with their transcripts (.jsonl) are
    written beside it; an interrupted evaluation continues from the transcripts."""

    def _faults(self) -> Iterator[str]:
        if not self.output.endswith(".json"):
            yield f"output is {self.output!r}: it must end in .json"


@dataclass(frozen=True, config=SECTION)
class ExportConfig:
    """What `calibadv export` reads and writes."""

    source: str = ""
    """Checkpoint or snapshot to export; empty: the newest full checkpoint of run.dir."""
    output: Annotated[str, Mark.OUTPUT] = "${run.dir}/hf"
    """HuggingFace folder to write."""
    adapter_output: Annotated[str, Mark.OUTPUT] = "${run.dir}/adapter"
    """PEFT folder that calibadv export --adapter writes."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the exported weights."""
    max_shard_gib: PositiveFloat = 4.0
    """Largest size of a safetensors file in GiB; a larger tensor has a file of its own."""


@dataclass(frozen=True, config=SECTION)
class GuardsConfig:
    """Metric thresholds that stop a run or roll it back."""

    action: Literal["log", "stop", "rollback"] = "log"
    """What happens when a guard trips. log: a warning, since the thresholds are rules of thumb; stop: the run
    saves its state and ends; rollback: it returns to the last good checkpoint and continues with other random
    draws."""
    patience_steps: PositiveInt = 3
    """Steps in a row beyond a threshold before its guard trips."""
    max_rollbacks: NonNegativeInt = 3
    """rollback: rollbacks after which the run stops."""
    min_entropy: PositiveFloat | None = 0.01
    """Smallest actor/entropy allowed (nats a token). At 0.01 a policy is nearly deterministic, and groups
    tie. Healthy quickstarts end at 0.02 to 0.07. null: off."""
    min_format_valid: float | None = Field(default=0.1, gt=0, le=1)
    """Smallest reward/format_valid allowed; below it, groups have hardly any rewards to compare. null:
    off."""
    min_answered: float | None = Field(default=0.2, gt=0, le=1)
    """Smallest rollout/answered allowed, the share of trajectories that end with an answer: a policy that is
    rarely right can learn to give none. null: off."""
    max_answer_words: PositiveFloat | None = 8.0
    """Largest rollout/answer_words allowed, the length of answers as a multiple of the golden answers'.
    Longer answers collect words, which some rewards pay for. null: off."""
    max_think_repetition: float | None = Field(default=0.3, gt=0, le=1)
    """Largest rollout/think_repetition allowed, the share of 4-grams of a turn that are repeated in it.
    Technical prose has about 0.06, a loop close to 1. null: off."""
    max_sampled_perplexity: float | None = Field(default=10.0, gt=1)
    """Largest rollout/sampled_perplexity allowed: 1 to 3 is usual, noise has 10. null: off."""
    max_answer_ratio: PositiveFloat | None = 5.0
    """Largest advantage/answer/ratio_before allowed: about 1 if right and wrong answers are equally long. At
    5, wrong answers are far longer, and hardly anything is reinforced. null: off."""
