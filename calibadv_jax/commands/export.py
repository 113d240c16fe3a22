"""Checkpoint to HuggingFace folder: ``calibadv export --config FILE [key.path=value …]``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from calibadv_jax.config import Config, MeshConfig
from calibadv_jax.config.kept import newest_start, refuse_other_run
from calibadv_jax.config.keys import among, marked
from calibadv_jax.config.load import kept_values
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json
from calibadv_jax.core.locking import locked_output
from calibadv_jax.distributed.joining import alone
from calibadv_jax.evaluation.report import ScoreReport, markdown_table
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh, placed_params
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.rollout.prompts import TEMPLATES
from calibadv_jax.run.fingerprints import describe_policy
from calibadv_jax.run.folder import differences, is_binding, with_defaults
from calibadv_jax.run.model import PolicySource, find_policy
from calibadv_jax.snapshots.checkpoint import restore_params
from calibadv_jax.snapshots.huggingface import CARD, read_hf_config, save_folder
from calibadv_jax.snapshots.mirror import bring_newest
from calibadv_jax.snapshots.peft import save_adapters

GENERATION = "generation_config.json"
PLACES = marked(Mark.PLACE)  # the card names their last part, or nothing
TAGS = ["calibadv", "search-agent", "reinforcement-learning"]
CARD_TEXT = """\
---
{front}
---

# {title}

A search agent, trained with calibadv_jax (arXiv 2604.18235).

## Use

{loading}Each turn the policy writes `<think>…</think>` and then `<search>…</search>` or another
action that the prompt names, or `<answer>…</answer>`. Stop at the closing tag. After an action, append
its result between `<information>` and `</information>` and let the policy go on. The prompt, in the
tokenizer's chat template if it has one:

{prompt}

## Training

{facts}
{settings}
## Scores

{scores}
"""
LOADING_TEXT = """\
LoRA adapters, trained on the base `{base}` in {dtype}. Load the base with `torch_dtype=torch.{dtype}`, then
`peft.PeftModel.from_pretrained(base, FOLDER)`: the adapters belong to weights that are rounded so.

"""


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
    if source.kind == "huggingface" or (source.kind == "checkpoint" and source.step is None):
        raise UserError(f"{source.path}: no complete checkpoint there; train first, or set export.source")
    base, folder = source.base, source.model_folder
    if adapter and base is None:
        fault = "no checkpoint with adapters (policy.lora.rank is 0 in its run, or it is a snapshot)"
        raise UserError(f"{source.path}: {fault}; leave --adapter out, which writes the whole policy")
    hf_config, dtype = read_hf_config(folder), jnp.dtype(config.export.dtype)
    # Adapters in float32, so that their sum with the base is rounded once.
    numerics = Numerics(compute_dtype=dtype, param_dtype=jnp.float32 if base else dtype)
    policy = Policy(architecture_from_hf(hf_config, f"{folder}/config.json"), numerics, source.adapters)
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    if adapter:
        params, _ = restore_params(source.path, placed_params(policy.abstract_trained, mesh), source.step)
    else:
        params = policy.merged(source.params(policy, mesh), dtype)
    trained = training_config(config, source)
    card = model_card(config, source, trained, adapter)
    with locked_output(output, f"export.{key}", Console(config.log.progress).warn):
        if adapter and base is not None:
            return save_adapters(params, base.adapters, base.name, output, folder, card)
        texts = {GENERATION: _generation_config(trained["rollout"], hf_config, folder), CARD: card}
        shard_bytes = int(config.export.max_shard_gib * 2**30)
        return save_folder(params, hf_config, output, config.export.dtype, folder, shard_bytes, texts)


def training_config(config: Config, source: PolicySource) -> dict[str, Any]:
    """Return the config of the newest start of the source's run; the given config if it kept none."""
    start = newest_start(source.model_folder.parent)
    return kept_values(config) if start is None else with_defaults(start.config)


def _generation_config(rollout: Mapping[str, Any], hf_config: Mapping[str, Any], folder: Path) -> str:
    """Return generation_config.json: readers sample as in training by default.

    Of the file in `folder`, that of the policy the training began with, only padding and beginning tokens
    are kept: its temperature and penalties are not those of the training.
    """
    before = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    fields = {"eos_token_id": hf_config.get("eos_token_id", before.get("eos_token_id"))}
    for name in ("bos_token_id", "pad_token_id"):
        fields[name] = before.get(name, hf_config.get(name))
    fields = {name: value for name, value in fields.items() if value is not None}
    sampling: dict[str, Any] = {"do_sample": False}
    if rollout["temperature"]:
        names = ("temperature", "top_p", "top_k")
        sampling = {"do_sample": True, "repetition_penalty": 1.0} | {name: rollout[name] for name in names}
    return json.dumps(fields | sampling, indent=2) + "\n"


def model_card(config: Config, source: PolicySource, trained: Mapping[str, Any], adapter: bool) -> str:
    """Return README.md of an export, with the front matter of HuggingFace's hub.

    `trained` is the training's config as nested values; with `adapter` the card says how the base is loaded.
    """
    start, policy = trained["policy"]["path"], describe_policy(source)
    front: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    front |= {"pipeline_tag": "text-generation", "tags": TAGS}
    if hub.is_repository(start):
        front["base_model"] = start.partition("@")[0]
    facts = {
        "algorithm": trained["advantage"]["name"],
        "began with": Path(start).name or "random parameters",
        "step": policy["step"],
        "training questions": _file_names(trained["data"]["train"]),
    }
    used = dataclasses.replace(config, policy=dataclasses.replace(config.policy, path=start, revision=""))
    settings = {
        name: now
        for name, _, now in differences(dataclasses.asdict(Config()), trained)
        if is_binding(name, used) and not among(PLACES, name)
    }
    base, dtype = front.get("base_model", Path(start).name), trained["policy"]["lora"]["base_dtype"]
    template = trained["prompt"]["template"]
    prompt = TEMPLATES.get(template, template)
    return CARD_TEXT.format(
        front="\n".join(f"{name}: {json.dumps(value)}" for name, value in front.items()),
        title=source.model_folder.parent.name,  # the run's
        loading=LOADING_TEXT.format(base=base, dtype=dtype) if adapter else "",
        prompt="\n".join(f"    {line}" for line in prompt.splitlines()),
        facts=_table({name: value for name, value in facts.items() if value not in (None, "")}),
        settings=f"\nSettings that differ from the defaults:\n\n{_table(settings)}\n" if settings else "",
        scores=_scores(config, policy).rstrip(),
    )


def _scores(config: Config, policy: Mapping[str, Any]) -> str:
    """Return the table of evaluate.output, if it is an evaluation of this policy."""
    path = Path(config.evaluate.output)
    evaluated = read_json(path) if path.is_file() else {}
    if evaluated.get("policy") != policy:
        return "Not evaluated. `calibadv evaluate` before `calibadv export` puts the scores here."
    method = f"Method: {evaluated['method']}; {evaluated['samples']} trajectories a question"
    report = ScoreReport(evaluated["scores"], evaluated["intervals"])
    return f"{method} above temperature 0.\n\n{markdown_table(report, evaluated['confidence'])}"


def _file_names(value: Any) -> str:
    return Path(value).name if isinstance(value, str) else ", ".join(map(_file_names, value))


def _table(values: Mapping[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    cells = {name: " ".join(text.split()).replace("|", "\\|") for name, text in texts.items()}
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {cell} |" for name, cell in cells.items())])
