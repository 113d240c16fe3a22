"""Checkpoint to HuggingFace folder: ``calibadv export --config FILE [key.path=value …]``."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from calibadv_jax import cli
from calibadv_jax.config import Config, MeshConfig
from calibadv_jax.errors import UserError
from calibadv_jax.metrics.console import Console
from calibadv_jax.model import find_policy
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.snapshots.huggingface import read_hf_config, save_folder


def run(config: Config) -> None:
    """Exports and prints the folder."""
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be in use
    Console(config.log.progress).say(f"written to {export(config)}")


def export(config: Config) -> Path:
    """Writes export.source (default: the newest checkpoint of run.dir) to export.output.

    `export.source` is a snapshot, a checkpoint or a folder of checkpoints, of this run or another one.
    Works on one device. As a program it uses the host, since a training run may fill the accelerators.

    Returns:
        The folder; transformers' from_pretrained loads it.

    Raises:
        UserError: the source is missing, incomplete, damaged, or not inside a run's folder.
    """
    source = find_policy(Path(config.export.source or Path(config.run.dir) / "checkpoints"))
    if source.kind == "huggingface":
        raise UserError(f"{source.path}: no complete checkpoint there; train first, or set export.source")
    hf_config = read_hf_config(source.model_folder)
    architecture = architecture_from_hf(hf_config, f"{source.model_folder}/config.json")
    dtype = jnp.dtype(config.export.dtype)
    policy = Policy(architecture, Numerics(compute_dtype=dtype, param_dtype=dtype))
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    params = source.params(policy, mesh)
    output = Path(config.export.output)
    return save_folder(params, hf_config, output, config.export.dtype, source.model_folder)


if __name__ == "__main__":
    cli.main("export", run)
