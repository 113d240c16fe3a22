"""PEFT folders in and out: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from calibadv_jax.config.sections.policy import LORA_TARGETS
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json, replacing_folder, write_json
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.transformer import Params, Policy
from calibadv_jax.policy.weights import hf_shapes, shape_problems, summary, to_hf
from calibadv_jax.snapshots.huggingface import WRITER, copy_tokenizer, open_weights, refuse_foreign

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
# Fields of PEFT that change what an adapter computes, with the values that leave it a plain one.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "fan_in_fan_out": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
}


def load_adapters(folder: Path, policy: Policy, mesh: Mesh | None) -> Params:
    """The adapters of a PEFT folder, in the precision and shardings of the policy's.

    Args:
        policy: with adapters, of which rank, alpha and targets must be the folder's.

    Raises:
        UserError: a file is missing or damaged, or the adapters are of another kind than ours or do not fit.
    """
    for name in (ADAPTER_CONFIG, ADAPTER):
        if not (folder / name).is_file():
            raise UserError(
                f"policy.lora.init_from: {folder / name}: no such file; give a PEFT folder with"
                f" {ADAPTER_CONFIG} and {ADAPTER}"
            )
    assert policy.adapters is not None
    config = read_json(folder / ADAPTER_CONFIG)
    _check_config(config, policy.adapters, folder / ADAPTER_CONFIG)
    with open_weights([folder / ADAPTER]) as weights:
        found = {name: weights.shape(name) for name in weights.files}
        _check_targets(found, policy.adapters, folder / ADAPTER)
        problems = shape_problems(found, hf_shapes(policy.abstract_trained))
        if problems:
            raise UserError(
                f"{folder / ADAPTER}: {len(problems)} tensor(s) do not fit this policy; give adapters that"
                f" were made for it: {summary(problems)}"
            )
        return weights.placed(policy.abstract_trained, policy.architecture.num_layers, mesh)


def save_adapters(
    params: Params, adapters: Adapters, base: str, output: Path, tokenizer_source: Path | None
) -> Path:
    """Writes a folder that PEFT loads; it appears under its name only when complete.

    Args:
        params: the adapters; addressable from this process.
        base: name of the model that they belong to.
        tokenizer_source: folder whose tokenizer files are copied.

    Returns:
        The absolute path of `output`.

    Raises:
        UserError: `output` exists and is not a folder of ours.
    """
    output = output.absolute()
    refuse_foreign(output)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": [f"{target}_proj" for target in adapters.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    with replacing_folder(output) as partial:
        tensors = {name: np.ascontiguousarray(array) for name, array in to_hf(params)}
        save_file(tensors, partial / ADAPTER, metadata=WRITER)
        (partial / ADAPTER).chmod(0o644)
        if tokenizer_source is not None:
            copy_tokenizer(tokenizer_source, partial)
        write_json(partial / ADAPTER_CONFIG, config)
    return output


def adapters_hash(folder: Path) -> str:
    """SHA-256 of a PEFT folder's adapters.

    Raises:
        UserError: there are none.
    """
    path = folder / ADAPTER
    if not path.is_file():
        raise UserError(f"policy.lora.init_from: {path}: no such file; give a PEFT folder with {ADAPTER}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_config(config: Mapping[str, Any], adapters: Adapters, path: Path) -> None:
    for name, plain in PLAIN.items():
        if config.get(name) not in plain:
            raise UserError(
                f"{path}: {name} is {config.get(name)!r}, which is not supported; only plain LoRA"
                f" adapters are, with {name} {plain[-1]!r}"
            )
    for name, key, ours in (("r", "rank", adapters.rank), ("lora_alpha", "alpha", adapters.alpha)):
        if config.get(name) != ours:
            raise UserError(
                f"{path}: {name} is {config.get(name)!r}, but policy.lora.{key} is {ours:g}: set"
                f" policy.lora.{key}={config.get(name)}"
            )


def _check_targets(found: Mapping[str, Any], adapters: Adapters, path: Path) -> None:
    modules = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in found})
    targets = [module.removesuffix("_proj") for module in modules]
    unknown = [
        module
        for module, target in zip(modules, targets, strict=True)
        if target not in LORA_TARGETS or not module.endswith("_proj")
    ]
    if unknown:
        raise UserError(
            f"{path}: has adapters on {', '.join(unknown)}, which is not supported; an adapter may be on"
            f" {', '.join(f'{target}_proj' for target in LORA_TARGETS)}"
        )
    if tuple(targets) != adapters.targets:
        raise UserError(
            f"{path}: has adapters on {', '.join(targets)}, but policy.lora.targets is"
            f" {', '.join(adapters.targets)}: set policy.lora.targets=[{', '.join(targets)}]"
        )
