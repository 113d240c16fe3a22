"""What an export says about itself: the model card, and how the policy is sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TAGS = ("calibadv", "search-agent", "reinforcement-learning")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def generation_config(
    rollout: Mapping[str, Any], hf_config: Mapping[str, Any], before: Mapping[str, Any]
) -> str:
    """generation_config.json: the policy is sampled as in training, which its readers take as the default.

    Args:
        rollout: temperature, top_p and top_k of the training.
        before: that of the policy the training began with, or empty; only its padding and beginning tokens
            are kept, since its temperature and penalties are not those of the training.
    """
    fields = {"eos_token_id": hf_config.get("eos_token_id", before.get("eos_token_id"))}
    for name in ("bos_token_id", "pad_token_id"):
        fields[name] = before.get(name, hf_config.get(name))
    fields = {name: value for name, value in fields.items() if value is not None}
    if not rollout["temperature"]:
        return json.dumps(fields | {"do_sample": False}, indent=2) + "\n"
    names = ("temperature", "top_p", "top_k")
    sampling = {"do_sample": True, "repetition_penalty": 1.0} | {name: rollout[name] for name in names}
    return json.dumps(fields | sampling, indent=2) + "\n"


def model_card(
    title: str,
    config: Mapping[str, Any],
    step: int | None,
    settings: Mapping[str, Any],
    prompt: str,
    scores: str,
    versions: Mapping[str, str],
    adapter: bool = False,
) -> str:
    """README.md of an export, with the front matter of HuggingFace's hub.

    Args:
        title: name of the run.
        config: of the training, as nested values.
        step: trainer steps that the policy has seen; None: unknown.
        settings: keys of the training that differ from the defaults.
        prompt: template with {question}.
        scores: a Markdown table, or a sentence where there is none.
        adapter: the export holds the adapters alone, and the card says how their base is loaded.
    """
    start = config["policy"]["path"]
    library = "peft" if adapter else "transformers"
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": list(TAGS)}
    if HUB_ID.fullmatch(start) and not Path(start).exists():
        front["base_model"] = start
    facts = {
        "algorithm": config["advantage"]["name"],
        "began with": Path(start).name or "random parameters",
        "step": step,
        "training questions": _file_names(config["data"]["train"]) or None,
        "questions a step": config["rollout"]["questions_per_step"],
        "trajectories a question": config["rollout"]["group_size"],
        "searches a trajectory, at most": config["rollout"]["max_searches"],
        "documents a search": config["retriever"].get("topk"),
        "reward": config["reward"]["answer"],
    }
    present = {name: value for name, value in facts.items() if value is not None}
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in front.items()), "---", ""]
    lines += [f"# {title}", "", "A search agent, trained with calibadv_jax (arXiv 2604.18235)."]
    lines += ["", "## Use", ""]
    lines += _loading(front.get("base_model", Path(start).name), config) if adapter else []
    lines += [
        *_protocol([tool["name"] for tool in config["tools"]]),
        "The prompt, in the tokenizer's chat template if it has a template:",
        "",
        *(f"    {line}" for line in prompt.splitlines()),
    ]
    lines += ["", "## Training", "", *_table(present)]
    if settings:
        lines += ["", "Settings that differ from the defaults:", "", *_table(settings)]
    lines += ["", "## Scores", "", scores.rstrip(), "", "## Versions", "", *_table(versions), ""]
    return "\n".join(lines)


def _loading(base: str, config: Mapping[str, Any]) -> list[str]:
    dtype = config["policy"]["lora"]["base_dtype"]
    return [
        f"LoRA adapters, trained on the base in {dtype}. Load it in this precision: the adapters belong to",
        "its weights as they are rounded there.",
        "",
        "    import torch",
        "    from peft import PeftModel",
        "    from transformers import AutoModelForCausalLM",
        "",
        f"    base = AutoModelForCausalLM.from_pretrained({json.dumps(base)}, torch_dtype=torch.{dtype})",
        '    model = PeftModel.from_pretrained(base, "THIS_FOLDER")',
        "",
    ]


def _protocol(tools: Sequence[str]) -> list[str]:
    """Describe how a client talks with the policy; the prompt names actions other than search."""
    if list(tools) == ["search"]:
        action, reply = "`<search>…</search>`", "After a search, append the passages"
    else:
        action, reply = "the tag of an action that the prompt names,", "After an action, append its reply"
    return [
        f"Each turn the policy writes `<think>…</think>` and then {action} or `<answer>…</answer>`.",
        f"Stop at the closing tag. {reply} between `<information>` and `</information>` and let it go on.",
    ]


def _file_names(value: Any) -> str:
    if isinstance(value, str):
        return Path(value).name
    return ", ".join(map(_file_names, value))


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {name} | {_cell(value)} |" for name, value in values.items()]
    return ["| | |", "|---|---|", *rows]


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|")
