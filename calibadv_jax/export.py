"""Checkpoint to HuggingFace folder: ``python -m calibadv_jax.export --config FILE [key.path=value …]``."""

from __future__ import annotations

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

    Returns:
        The folder; transformers' from_pretrained loads it.
    """
    from pathlib import Path

    import jax

    from calibadv_jax.policy.architecture import architecture_from_hf
    from calibadv_jax.policy.sharding import make_mesh, param_shardings
    from calibadv_jax.policy.transformer import Numerics, Policy
    from calibadv_jax.snapshots.checkpoint import restore_params
    from calibadv_jax.snapshots.huggingface import read_hf_config, save_folder
    from calibadv_jax.snapshots.publish import MANIFEST, load_snapshot

    folder = Path(config.run.dir) / "policy"
    hf_config = read_hf_config(folder)
    policy = Policy(architecture_from_hf(hf_config, f"{folder}/config.json"), Numerics.from_config(config.policy))
    mesh = make_mesh(config.mesh)
    source = Path(config.export.source or Path(config.run.dir) / "checkpoints")
    if (source / MANIFEST).is_file():
        params = load_snapshot(source, policy, mesh, verify=True)
    else:
        step = int(source.name) if source.name.isdigit() else None
        abstract = jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
            policy.abstract_params,
            param_shardings(policy.abstract_params, mesh),
        )
        params, _ = restore_params(source if step is None else source.parent, abstract, step)
    return save_folder(params, hf_config, Path(config.export.output), config.export.dtype, folder)


if __name__ == "__main__":
    cli.main(run, "calibadv_jax.export", "Writes a checkpoint as a HuggingFace folder.")
