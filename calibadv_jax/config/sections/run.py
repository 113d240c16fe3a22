"""Where a run writes, what it keeps and what it shows."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark
from calibadv_jax.core.files import check_literal


@dataclass(frozen=True, config=SECTION)
class RunConfig:
    dir: Annotated[str, Mark.UNLEARNED, Mark.OUTPUT] = "runs/default"
    """Folder of everything the run writes, on a disk or a mounted file system."""
    mirror: Annotated[str, Mark.UNLEARNED] = ""
    """Where the run's folder is copied to after every full checkpoint: s3://bucket/path, gs://bucket/path or
    a folder. A start whose run.dir lacks the newest checkpoint fetches the run. Empty: nowhere."""
    seed: Annotated[NonNegativeInt, Mark.COLD_START] = 0
    """Seed of initial parameters, order of questions and sampling."""

    @field_validator("dir")
    @classmethod
    def _check_dir(cls, value: str) -> str:
        if "://" in value:
            raise ValueError(
                f"{value} is no folder of a file system; set run.mirror to it and run.dir to a folder"
            )
        check_literal(Path(value))
        return value


@dataclass(frozen=True, config=SECTION)
class LogConfig:
    backends: list[Literal["tensorboard", "wandb", "mlflow", "prometheus"]] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Where metrics go besides metrics.jsonl: TensorBoard event files in the run's folder, Weights & Biases
    (WANDB_MODE=offline works), MLflow (MLFLOW_TRACKING_URI), a Prometheus endpoint. Empty: nowhere else."""
    project: str = "calibadv-jax"
    """Name of the project of Weights & Biases, or of the experiment of MLflow."""
    prometheus: str = Field(default="127.0.0.1:9464", pattern=r"^[^:/]+:\d{1,5}$")
    """host:port of the Prometheus endpoint, if log.backends names prometheus."""
    rollouts: Literal["parquet", "none"] = "parquet"
    """File for the trajectories of a step, with what credit assignment made of them:
    rollouts/step_N.parquet; see docs/record.md. none: they are not kept."""
    rollouts_keep: NonNegativeInt = 100
    """Number of newest steps whose trajectories stay on disk; 0: all steps."""
    rollouts_every: NonNegativeInt = 10
    """Of the steps older than rollouts_keep, every step whose number is a multiple of this stays; 0: none."""
    transcripts: NonNegativeInt = 0
    """Number of trajectories of each training step that the console shows, each of another question."""
    progress: bool = True
    """Show a line for each step, and a bar if standard error is a terminal."""


@dataclass(frozen=True, config=SECTION)
class CheckpointConfig:
    every: NonNegativeInt = 50
    """Steps between two full checkpoints; the last step has a checkpoint too. 0: only the last step has."""
    keep: PositiveInt = 2
    """Number of full checkpoints to keep."""
    asynchronous: Annotated[bool, Mark.UNLEARNED] = True
    """Write a full checkpoint while the next steps go on. A copy of the state waits in the host's memory
    meanwhile. false: the run waits for it."""
    resume: bool = True
    """Continue from the newest full checkpoint in run.dir, if there is one. false: a folder that holds a
    checkpoint is refused."""
    allow_change: list[str] = field(default_factory=list)
    """Keys or sections that may differ from the config of the run that is resumed, such as [learner.steps,
    loss]. All other changes that would make it another experiment are refused."""
    snapshot_dtype: Literal["", "bfloat16", "float32"] = ""
    """Precision of the policy snapshots that vLLM workers load; empty: the precision that they compute in."""
    snapshots_kept: PositiveInt = 2
    """Number of policy snapshots to keep."""


@dataclass(frozen=True, config=SECTION)
class ExportConfig:
    source: str = ""
    """Checkpoint or snapshot to export; empty: the newest full checkpoint of run.dir. The model card has its
    scores if evaluate.output is an evaluation of it."""
    output: Annotated[str, Mark.OUTPUT] = "${run.dir}/hf"
    """HuggingFace folder to write."""
    adapter_output: Annotated[str, Mark.OUTPUT] = "${run.dir}/adapter"
    """PEFT folder that calibadv export --adapter writes."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the exported weights."""
    max_shard_gib: PositiveFloat = 4.0
    """Largest size of a safetensors file in GiB (a larger single tensor has a file of its own); several files
    get an index."""
