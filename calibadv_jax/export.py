"""Checkpoint to HuggingFace folder: ``python -m calibadv_jax.export --config FILE [key.path=value …]``."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from calibadv_jax import cli
from calibadv_jax.config import Config

if TYPE_CHECKING:
    from pathlib import Path


def run(config: Config) -> None:
    """Exports and says where to."""
    from calibadv_jax.metrics.console import Console

    Console(config.log.progress).say(f"written to {export(config)}")


def export(config: Config) -> Path:
    """Writes export.source (default: the newest checkpoint of run.dir) to export.output.

    `export.source` is a snapshot, a checkpoint or a folder of checkpoints, of this run or another one.
    Works on one device: the host, where this is the program, so that a training may fill the accelerators.

    Returns:
        The folder; transformers' from_pretrained loads it.

    Raises:
        UserError: the source is missing, incomplete, damaged, or not inside a run's folder.
    """
    from pathlib import Path

    import jax
    import jax.numpy as jnp

    from calibadv_jax.config import MeshConfig
    from calibadv_jax.policy.architecture import architecture_from_hf
    from calibadv_jax.policy.sharding import make_mesh, placed_params
    from calibadv_jax.policy.transformer import Numerics, Policy
    from calibadv_jax.snapshots.checkpoint import restore_params
    from calibadv_jax.snapshots.huggingface import read_hf_config, save_folder
    from calibadv_jax.snapshots.publish import load_snapshot

    source = Path(config.export.source or Path(config.run.dir) / "checkpoints").absolute()
    is_snapshot = re.fullmatch(r"v\d+", source.name) is not None
    is_step = source.name.isdigit()
    run_folder = source.parent.parent if is_snapshot or is_step else source.parent
    hf_config = read_hf_config(run_folder / "policy")
    architecture = architecture_from_hf(hf_config, f"{run_folder}/policy/config.json")
    dtype = jnp.dtype(config.export.dtype)
    policy = Policy(architecture, Numerics(compute_dtype=dtype, param_dtype=dtype))
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    if is_snapshot:
        params = load_snapshot(source, policy, mesh, verify=True)
    else:
        step = int(source.name) if is_step else None
        params, _ = restore_params(
            source.parent if is_step else source, placed_params(policy.abstract_params, mesh, dtype), step
        )
    output = Path(config.export.output)
    return save_folder(params, hf_config, output, config.export.dtype, run_folder / "policy")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # an accelerator may be in use
    cli.main(run, "calibadv_jax.export", "Writes a checkpoint as a HuggingFace folder.")
