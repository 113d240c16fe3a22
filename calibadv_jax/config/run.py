"""Where a run writes, what it keeps and what it shows."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.section import SECTION


@dataclass(frozen=True, config=SECTION)
class RunConfig:
    dir: str = "runs/default"
    """Folder of everything the run writes."""
    seed: NonNegativeInt = 0
    """Seed of parameters, data order and sampling."""


@dataclass(frozen=True, config=SECTION)
class LogConfig:
    backends: list[Literal["tensorboard", "wandb", "mlflow", "prometheus"]] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Where metrics go beside metrics.jsonl: TensorBoard event files in the run's folder, Weights & Biases
    (WANDB_MODE=offline works), MLflow (MLFLOW_TRACKING_URI), a Prometheus endpoint. Empty: nowhere else."""
    project: str = "calibadv-jax"
    """Project of Weights & Biases, experiment of MLflow."""
    prometheus: str = Field(default="127.0.0.1:9464", pattern=r"^[^:/]+:\d{1,5}$")
    """host:port of the Prometheus endpoint, where log.backends names it."""
    rollouts: Literal["parquet", "none"] = "parquet"
    """Keep every trajectory, with what credit assignment made of it, as rollouts/step_N.parquet;
    see docs/record.md."""
    rollouts_keep: NonNegativeInt = 100
    """Newest steps whose trajectories stay on disk; 0: all."""
    rollouts_every: NonNegativeInt = 10
    """Older than rollouts_keep: every so many steps one stays; 0: none."""
    transcripts: NonNegativeInt = 0
    """Trajectories of each training step that the console shows, each of another question; 0: none."""
    progress: bool = True
    """Show a line a step, and a bar where standard error is a terminal."""


@dataclass(frozen=True, config=SECTION)
class CheckpointConfig:
    every: NonNegativeInt = 50
    """Steps between full checkpoints; one is written at the last step too. 0: at the last step only."""
    keep: PositiveInt = 2
    """Full checkpoints kept."""
    resume: bool = True
    """Continue from the newest full checkpoint in run.dir, if there is one. false: a folder that holds a
    checkpoint is refused."""
    allow_change: list[str] = field(default_factory=list)
    """Keys or sections that may differ from those of the run that is resumed, such as [learner.steps, loss].
    All other changes that would make it another experiment are refused."""
    snapshot_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the policy snapshots that samplers load."""
    snapshots_kept: PositiveInt = 2
    """Policy snapshots kept."""


@dataclass(frozen=True, config=SECTION)
class ExportConfig:
    source: str = ""
    """Checkpoint or snapshot to export; empty: the newest full checkpoint of run.dir. The model card has its
    scores where evaluate.output is an evaluation of it."""
    output: str = "${run.dir}/hf"
    """HuggingFace folder to write."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the exported weights."""
    max_shard_gib: PositiveFloat = 4.0
    """Size of one safetensors file in GiB, a larger single tensor apart; more of them get an index."""
