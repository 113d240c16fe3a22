"""Checkpoint to HuggingFace folder: ``calibadv export --config FILE [key.path=value …]``."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from calibadv_jax.config import Config, MeshConfig
from calibadv_jax.config.kept import newest_start, refuse_other_run
from calibadv_jax.config.keys import among, marked
from calibadv_jax.config.load import kept_values
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json
from calibadv_jax.core.locking import locked_output
from calibadv_jax.evaluation.report import ScoreReport, markdown_table
from calibadv_jax.hosts.joining import alone
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh, placed_params
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.rollout.prompts import TEMPLATES
from calibadv_jax.run.fingerprints import describe_policy
from calibadv_jax.run.folder import differences, is_binding, with_defaults
from calibadv_jax.run.model import PolicySource, find_policy
from calibadv_jax.snapshots.card import generation_config, model_card
from calibadv_jax.snapshots.checkpoint import restore_params
from calibadv_jax.snapshots.huggingface import CARD, read_hf_config, save_folder
from calibadv_jax.snapshots.mirror import bring_newest
from calibadv_jax.snapshots.peft import save_adapters

GENERATION = "generation_config.json"
PACKAGES = ("calibadv-jax", "jax", "flax", "transformers")
PLACES = marked(Mark.PLACE)  # the card names their last part, or nothing


def run(config: Config, adapter: bool = False) -> None:
    """Export and print the folder; `adapter` as in `export`."""
    alone(config.distributed, "export")
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be in use
    console = Console(config.log.progress)
    if not config.export.source:
        bring_newest(config, console)
    console.say(f"written to {export(config, adapter)}")


def export(config: Config, adapter: bool = False) -> Path:
    """Write export.source (default: the newest checkpoint of run.dir) to export.output, on one device.

    `export.source` is a snapshot, a checkpoint or a folder of checkpoints, of this run or another run. With
    `adapter`, only the adapters are written, to export.adapter_output; else they are merged into the weights.

    Returns the folder, for transformers' from_pretrained, or PEFT's. Raises UserError if the source is
    missing, incomplete, damaged, or not inside a run's folder; or the output lies in another run's folder, or
    another process writes it.
    """
    key = "adapter_output" if adapter else "output"
    output = Path(getattr(config.export, key))
    refuse_other_run(output, f"export.{key}", Path(config.run.dir))
    source = find_policy(Path(config.export.source or Path(config.run.dir) / "checkpoints")).at_step()
    if source.kind == "huggingface":
        raise UserError(f"{source.path}: no complete checkpoint there; train first, or set export.source")
    if adapter:
        return _export_adapter(config, source, output)
    hf_config = read_hf_config(source.model_folder)
    architecture = architecture_from_hf(hf_config, f"{source.model_folder}/config.json")
    dtype = jnp.dtype(config.export.dtype)
    # Adapters in float32, so that their sum with the base is rounded once.
    numerics = Numerics(compute_dtype=dtype, param_dtype=jnp.float32 if source.adapters else dtype)
    policy = Policy(architecture, numerics, source.adapters)
    params = policy.merged(source.params(policy, _one_device()), dtype)
    before = source.model_folder / GENERATION
    trained = training_config(config, source)
    kept = read_json(before) if before.is_file() else {}
    texts = {
        GENERATION: generation_config(trained["rollout"], hf_config, kept),
        CARD: card(config, source, trained),
    }
    dtype_name, shard_size = config.export.dtype, int(config.export.max_shard_gib * 2**30)
    with locked_output(output, "export.output", Console(config.log.progress).warn):
        return save_folder(params, hf_config, output, dtype_name, source.model_folder, shard_size, texts)


def _export_adapter(config: Config, source: PolicySource, output: Path) -> Path:
    base = source.base
    if base is None:
        raise UserError(
            f"{source.path}: no checkpoint with adapters (policy.lora.rank is 0 in its run, or it is a"
            " snapshot); leave --adapter out, which writes the whole policy"
        )
    architecture = architecture_from_hf(read_hf_config(source.model_folder))
    policy = Policy(architecture, Numerics(), base.adapters)
    targets = placed_params(policy.abstract_trained, _one_device())
    params, _ = restore_params(source.path, targets, source.step)
    text = card(config, source, training_config(config, source), adapter=True)
    with locked_output(output, "export.adapter_output", Console(config.log.progress).warn):
        return save_adapters(params, base.adapters, base.name, output, source.model_folder, text)


def _one_device() -> Mesh:
    return make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])


def training_config(config: Config, source: PolicySource) -> dict[str, Any]:
    """Return the config of the newest start of the source's run; the given config if it kept none."""
    start = newest_start(source.model_folder.parent)
    return kept_values(config) if start is None else with_defaults(start.config)


def card(config: Config, source: PolicySource, trained: dict[str, Any], adapter: bool = False) -> str:
    """Return the model card of the policy, or of its adapters alone."""
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
    scores = _scores(config, policy)
    return model_card(title, trained, policy["step"], settings, prompt, scores, versions, adapter)


def _scores(config: Config, policy: dict[str, Any]) -> str:
    """Return the table of evaluate.output, if it is an evaluation of this policy."""
    path = Path(config.evaluate.output)
    evaluated = read_json(path) if path.is_file() else {}
    if evaluated.get("policy") == policy:
        about = f"Method: {evaluated['method']}; {evaluated['samples']} trajectories a question"
        report = ScoreReport(evaluated["scores"], evaluated["intervals"])
        return f"{about} above temperature 0.\n\n{markdown_table(report, evaluated['confidence'])}"
    return "Not evaluated. `calibadv evaluate` before `calibadv export` puts the scores here."
