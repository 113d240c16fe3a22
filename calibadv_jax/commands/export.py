"""Export of a checkpoint as a HuggingFace folder: ``calibadv export --config FILE [key.path=value …]``."""

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
from calibadv_jax.config.keys import is_among, keys_with_mark
from calibadv_jax.config.load import kept_values
from calibadv_jax.config.sections.data import ANSWER_FORMAT_PLACE, FROM_DATA
from calibadv_jax.config.sections.rollout import TAGS as PROTOCOL_OF_TAGS
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json
from calibadv_jax.core.locking import locked_output
from calibadv_jax.core.user_functions import is_address
from calibadv_jax.distributed.joining import require_single_process
from calibadv_jax.evaluation.score_tables import ScoreReport, markdown_table
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh, placed_params
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.rollout.prompts import ANSWER_FORMATS, TEMPLATES
from calibadv_jax.run.comparison import differences, is_binding, with_defaults
from calibadv_jax.run.fingerprints import describe_policy
from calibadv_jax.run.model import PolicySource, find_policy, load_tokenizer
from calibadv_jax.snapshots.checkpoint import restore_params
from calibadv_jax.snapshots.huggingface import CARD, read_hf_config, save_folder
from calibadv_jax.snapshots.mirror import fetch_newest
from calibadv_jax.snapshots.peft import save_adapters

GENERATION = "generation_config.json"
PLACES = keys_with_mark(Mark.PLACE)  # Keys whose values are paths: the card names the last part at most.
TAGS = ["calibadv", "search-agent", "reinforcement-learning"]
SAMPLING_KEYS = ("temperature", "top_p", "top_k")
CARD_TEXT = """\
---
{front}
---

# {title}

A search agent, trained with calibadv_jax (arXiv 2604.18235).

## Use

{loading}{usage}

{prompt}

## Training

{facts}
{settings}
## Scores

{scores}
"""
TAG_USAGE = """\
Each turn the policy writes `<think>…</think>` and then `<search>…</search>` or another
action that the prompt names, or `<answer>…</answer>`. Stop at the closing tag. After an action, append
its result between `<information>` and `</information>` and let the policy go on. The prompt, in the
tokenizer's chat template if it has one:"""
TOOL_USAGE = """\
The policy calls tools in the format of the tokenizer's chat template, which lies here unchanged: give the
tools ({tools}) to `apply_chat_template`, run the calls of each turn, and append their results as messages of
the role tool. A turn ends at the control token that the template writes behind it; a turn without a call is
the answer ({answer}). The system message and the user's message:"""
ANSWER_PLACES = {
    "whole": "its whole text",
    "tag": "between `<answer>` and `</answer>`",
    "box": "inside `\\boxed{}`",
}
LOADING_TEXT = """\
LoRA adapters, trained on the base `{base}` in {dtype}. Load the base with `torch_dtype=torch.{dtype}`, then
`peft.PeftModel.from_pretrained(base, FOLDER)`: the adapters belong to weights that are rounded so.

"""


def run(config: Config, adapter: bool = False) -> None:
    """Export a policy, and print the folder.

    Args:
        config: The config of the command.
        adapter: As in `export`.

    Raises:
        UserError: As `export`.
    """
    require_single_process(config.distributed, "export")
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be in use
    console = Console(config.log.progress)
    if not config.export.source:
        fetch_newest(config, console)
    console.say(f"written to {export(config, adapter)}")


def export(config: Config, adapter: bool = False) -> Path:
    """Write export.source to a folder for transformers' or PEFT's from_pretrained, on one device.

    Args:
        config: The config. export.source is a snapshot, a checkpoint or a folder of checkpoints, of this run
            or another run; empty: the newest checkpoint of run.dir.
        adapter: Write only the adapters, to export.adapter_output. Otherwise they are merged into the
            weights, which are written to export.output.

    Returns:
        The folder.

    Raises:
        UserError: The source is missing, incomplete, damaged, or not inside a run's folder; or the output
            lies in another run's folder, or another process writes it.
    """
    key = "adapter_output" if adapter else "output"
    output = Path(getattr(config.export, key))
    refuse_other_run(output, f"export.{key}", Path(config.run.dir))
    source = _exported_policy(config)
    base = source.base
    if adapter and base is None:
        raise UserError(
            f"{source.path}: no checkpoint with adapters (policy.lora.rank is 0 in its run, or it is a"
            " snapshot); leave --adapter out, which writes the whole policy"
        )
    folder = source.model_folder
    hf_config = read_hf_config(folder)
    dtype = jnp.dtype(config.export.dtype)
    # Adapters are kept in float32, so that their sum with the base is rounded once.
    numerics = Numerics(compute_dtype=dtype, param_dtype=jnp.float32 if base else dtype)
    policy = Policy(architecture_from_hf(hf_config, f"{folder}/config.json"), numerics, source.adapters)
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    if adapter:
        targets = placed_params(policy.abstract_trained, mesh)
        params, _ = restore_params(source.path, targets, source.step)
    else:
        params = policy.fold_adapters(source.params(policy, mesh), dtype)
    trained = training_config(config, source)
    card = model_card(config, source, trained, adapter)
    with locked_output(output, f"export.{key}", Console(config.log.progress).warn):
        if adapter and base is not None:
            return save_adapters(params, base.adapters, base.name, output, folder, card)
        ends = _end_of_turn_ids(trained, folder)
        texts = {GENERATION: _generation_config(trained["rollout"], hf_config, folder, ends), CARD: card}
        shard_bytes = int(config.export.max_shard_gib * 2**30)
        return save_folder(params, hf_config, output, config.export.dtype, folder, shard_bytes, texts)


def _exported_policy(config: Config) -> PolicySource:
    """Return the checkpoint or snapshot to export; UserError if there is none."""
    path = Path(config.export.source or Path(config.run.dir) / "checkpoints")
    source = find_policy(path).at_step()
    has_checkpoint = source.kind != "checkpoint" or source.step is not None
    if source.kind == "huggingface" or not has_checkpoint:
        raise UserError(f"{source.path}: no complete checkpoint there; train first, or set export.source")
    return source


def training_config(config: Config, source: PolicySource) -> dict[str, Any]:
    """Return the config of the newest start of the source's run.

    Args:
        config: Returned if the run kept none.
        source: A checkpoint or a snapshot.

    Returns:
        The config as nested values.
    """
    start = newest_start(source.model_folder.parent)
    if start is None:
        return kept_values(config)
    return with_defaults(start.config)


def _end_of_turn_ids(trained: Mapping[str, Any], folder: Path) -> list[int]:
    """Return the tokens that end a turn of tool calls, so that readers stop there; none with tags.

    A format of the user's own is code, which an export does not run: its policy keeps its own tokens.
    """
    name = trained["tool_calls"]["format"]
    if trained["rollout"]["protocol"] == PROTOCOL_OF_TAGS or is_address(name):
        return []
    from calibadv_jax.protocols.formats import end_of_turn_ids

    prompt = trained["prompt"]
    return end_of_turn_ids(
        load_tokenizer(folder), name, prompt["chat_template_kwargs"], prompt["date_string"]
    )


def _generation_config(
    rollout: Mapping[str, Any], hf_config: Mapping[str, Any], folder: Path, end_of_turn_ids: list[int]
) -> str:
    """Return generation_config.json, with which readers sample as in training by default.

    The `folder` may have the file of the policy that the training began with. Only its end-of-text, padding
    and beginning tokens are kept: its temperature and penalties are not those of the training.
    """
    initial = {}
    if (folder / GENERATION).is_file():
        initial = read_json(folder / GENERATION)
    tokens = {
        "eos_token_id": _all_ids(hf_config.get("eos_token_id"), initial.get("eos_token_id"), end_of_turn_ids),
        "bos_token_id": initial.get("bos_token_id", hf_config.get("bos_token_id")),
        "pad_token_id": initial.get("pad_token_id", hf_config.get("pad_token_id")),
    }
    fields: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
    if rollout["temperature"]:
        fields["do_sample"] = True
        fields["repetition_penalty"] = 1.0
        for key in SAMPLING_KEYS:
            fields[key] = rollout[key]
    else:
        fields["do_sample"] = False
    return json.dumps(fields, indent=2) + "\n"


def _all_ids(*fields: int | list[int] | None) -> int | list[int] | None:
    """Return the token ids of fields that hold one, several or none, in the same form."""
    ids: set[int] = set()
    for field in fields:
        if isinstance(field, int):
            ids.add(field)
        elif field:
            ids.update(field)
    ordered = sorted(ids)
    if len(ordered) == 1:
        return ordered[0]
    return ordered or None


def model_card(config: Config, source: PolicySource, trained: Mapping[str, Any], adapter: bool) -> str:
    """Return README.md of an export, with the front matter of HuggingFace's hub.

    Args:
        config: The config of the export.
        source: The exported policy.
        trained: The training's config as nested values.
        adapter: Whether only the adapters are written; the card then says how the base is loaded.

    Returns:
        Markdown. It holds the scores of evaluate.output if they are those of this policy.
    """
    policy = describe_policy(source)
    front = _front_matter(trained, adapter)
    loading = ""
    if adapter:
        base = front.get("base_model", Path(trained["policy"]["path"]).name)
        loading = LOADING_TEXT.format(base=base, dtype=trained["policy"]["lora"]["base_dtype"])
    usage, prompt = _usage(trained)
    settings = _changed_settings(config, trained)
    settings_text = ""
    if settings:
        settings_text = f"\nSettings that differ from the defaults:\n\n{_table(settings)}\n"
    return CARD_TEXT.format(
        front="\n".join(f"{name}: {json.dumps(value)}" for name, value in front.items()),
        title=source.model_folder.parent.name,  # name of the run's folder
        loading=loading,
        usage=usage,
        prompt="\n".join(f"    {line}" for line in prompt.splitlines()),
        facts=_table(_training_facts(trained, policy["step"])),
        settings=settings_text,
        scores=_scores(config, policy).rstrip(),
    )


def _usage(trained: Mapping[str, Any]) -> tuple[str, str]:
    """Return how the policy acts, and its prompt."""
    prompt = trained["prompt"]
    if trained["rollout"]["protocol"] == PROTOCOL_OF_TAGS:
        return TAG_USAGE, TEMPLATES.get(prompt["template"], prompt["template"])
    place = trained["reward"]["answer_from"]
    answer = ANSWER_PLACES.get(place, ANSWER_PLACES["whole"])
    tools = ", ".join(f"`{tool['name'] or 'those of an MCP server'}`" for tool in trained["tools"])
    usage = TOOL_USAGE.format(tools=tools, answer=answer)
    if prompt["template"] == FROM_DATA:
        return usage, "the messages of the data"
    answer_format = ANSWER_FORMATS.get(place, ANSWER_FORMATS["whole"])
    system = prompt["system"].replace(ANSWER_FORMAT_PLACE, answer_format)
    return usage, "\n".join(text for text in (system, prompt["user"]) if text)


def _front_matter(trained: Mapping[str, Any], adapter: bool) -> dict[str, Any]:
    """Return the metadata that HuggingFace's hub reads."""
    initial = trained["policy"]["path"]
    front: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": TAGS,
    }
    if hub.is_repository(initial):
        repository, _, _ = initial.partition("@")
        front["base_model"] = repository
    return front


def _training_facts(trained: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """Return what the card says of the training, without empty values."""
    facts = {
        "algorithm": trained["advantage"]["name"],
        "began with": Path(trained["policy"]["path"]).name or "random parameters",
        "step": step,
        "training questions": _file_names(trained["data"]["train"]),
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _changed_settings(config: Config, trained: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the training that decide what is learned and differ from the defaults."""
    policy = dataclasses.replace(config.policy, path=trained["policy"]["path"], revision="")
    used = dataclasses.replace(config, policy=policy)
    settings = {}
    for name, _, value in differences(dataclasses.asdict(Config()), trained):
        if is_binding(name, used) and not is_among(PLACES, name):
            settings[name] = value
    return settings


def _scores(config: Config, policy: Mapping[str, Any]) -> str:
    """Return the table of evaluate.output, if it is an evaluation of this policy."""
    path = Path(config.evaluate.output)
    evaluation = read_json(path) if path.is_file() else {}
    if evaluation.get("policy") != policy:
        return "Not evaluated. `calibadv evaluate` before `calibadv export` puts the scores here."
    method = f"Method: {evaluation['method']}; {evaluation['samples']} trajectories a question"
    report = ScoreReport(evaluation["scores"], evaluation["intervals"])
    return f"{method} above temperature 0.\n\n{markdown_table(report, evaluation['confidence'])}"


def _file_names(value: Any) -> str:
    """Return the names of a file or of nested lists of files, separated by commas."""
    if isinstance(value, str):
        return Path(value).name
    return ", ".join(_file_names(entry) for entry in value)


def _table(values: Mapping[str, Any]) -> str:
    """Return a Markdown table of two columns without a header."""
    lines = ["| | |", "|---|---|"]
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        cell = " ".join(text.split()).replace("|", "\\|")
        lines.append(f"| {name} | {cell} |")
    return "\n".join(lines)
