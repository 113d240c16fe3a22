"""Checkpoint to HuggingFace folder: ``calibadv export --config FILE [key.path=value …]``."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from calibadv_jax.commands.evaluate import at_step, describe_policy
from calibadv_jax.config import Config, MeshConfig
from calibadv_jax.config.keys import among, marked
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.config.starts import newest_start
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json
from calibadv_jax.core.locking import locked_output
from calibadv_jax.evaluation.report import Report, markdown_table
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.rollout.prompts import TEMPLATES
from calibadv_jax.run.folder import differences, is_binding, with_defaults
from calibadv_jax.run.model import PolicySource, find_policy
from calibadv_jax.snapshots.card import generation_config, model_card
from calibadv_jax.snapshots.huggingface import CARD, read_hf_config, save_folder

GENERATION = "generation_config.json"
PACKAGES = ("calibadv-jax", "jax", "flax", "transformers")
PLACES = marked(Mark.PLACE)  # the card names their last part, or nothing


def run(config: Config) -> None:
    """Exports and prints the folder."""
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be in use
    Console(config.log.progress).say(f"written to {export(config)}")


def export(config: Config) -> Path:
    """Writes export.source (default: the newest checkpoint of run.dir) to export.output.

    `export.source` is a snapshot, a checkpoint or a folder of checkpoints, of this run or another run.
    Works on one device. As a program it uses the host, since a training run may fill the accelerators.

    Returns:
        The folder; transformers' from_pretrained loads it.

    Raises:
        UserError: the source is missing, incomplete, damaged, or not inside a run's folder; or another
            process writes the output.
    """
    source = at_step(find_policy(Path(config.export.source or Path(config.run.dir) / "checkpoints")))
    if source.kind == "huggingface":
        raise UserError(f"{source.path}: no complete checkpoint there; train first, or set export.source")
    hf_config = read_hf_config(source.model_folder)
    architecture = architecture_from_hf(hf_config, f"{source.model_folder}/config.json")
    dtype = jnp.dtype(config.export.dtype)
    policy = Policy(architecture, Numerics(compute_dtype=dtype, param_dtype=dtype))
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    params = source.params(policy, mesh)
    before = source.model_folder / GENERATION
    trained = training_config(config, source)
    texts = {
        GENERATION: generation_config(
            trained["rollout"], hf_config, read_json(before) if before.is_file() else {}
        ),
        CARD: card(config, source, trained),
    }
    output = Path(config.export.output)
    with locked_output(output, "export.output", Console(config.log.progress).warn):
        return save_folder(
            params,
            hf_config,
            output,
            config.export.dtype,
            source.model_folder,
            int(config.export.max_shard_gib * 2**30),
            texts,
        )


def training_config(config: Config, source: PolicySource) -> dict[str, Any]:
    """The config of the newest start of the source's run; if it kept none, the config that was given."""
    start = newest_start(source.model_folder.parent)
    return dataclasses.asdict(config) if start is None else with_defaults(start.config)


def card(config: Config, source: PolicySource, trained: dict[str, Any]) -> str:
    """The model card."""
    policy = describe_policy(source)
    used = dataclasses.replace(
        config, policy=dataclasses.replace(config.policy, path=trained["policy"]["path"], revision="")
    )
    settings = {
        name: now
        for name, _, now in differences(dataclasses.asdict(Config()), trained)
        if is_binding(name, used) and not among(PLACES, name)
    }
    versions = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    template = trained["prompt"]["template"]
    prompt = TEMPLATES.get(template, template)
    title = source.model_folder.parent.name  # the run's
    return model_card(title, trained, policy["step"], settings, prompt, _scores(config, policy), versions)


def _scores(config: Config, policy: dict[str, Any]) -> str:
    """The table of evaluate.output, if that is an evaluation of this policy."""
    path = Path(config.evaluate.output)
    if path.is_file():
        found = read_json(path)
        if found.get("policy") == policy:
            report = Report(found["scores"], found["intervals"])
            about = (
                f"Method: {found['method']}; {found['samples']} trajectories a question above temperature 0."
            )
            return f"{about}\n\n{markdown_table(report, found['confidence'])}"
    return "Not evaluated. `calibadv evaluate` before `calibadv export` puts the scores here."
