"""PEFT folders in and out: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from calibadv_jax.config.sections.policy import LORA_TARGETS
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_folder, read_json, write_json
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.transformer import Params, Policy
from calibadv_jax.policy.weights import hf_shapes, shape_problems, summary, to_hf
from calibadv_jax.snapshots.huggingface import CARD, WRITER, copy_tokenizer, open_weights, refuse_foreign

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
BASE_DTYPE = "base_dtype"  # metadata of ADAPTER: the precision of the base that the adapters were trained on
MATRIX = re.compile(rf".*\.({'|'.join(LORA_TARGETS)})_proj\.lora_[AB]\.weight")
MERGE = "merge it into its base with PEFT (merge_and_unload, save_pretrained) and give that as policy.path"
# Options of PEFT with which an adapter is its two matrices times lora_alpha / r, and nothing else. Any other
# option must be off: None, False or empty. The initialisations named here leave the base as it was.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica"),
}
# Options that change nothing in a file that has all matrices of policy.lora.targets. The configs of
# initialisations stay where PEFT has converted an adapter, and count only with their initialisation.
HARMLESS = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_pattern"),
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"),
    *("ensure_weight_tying", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("megatron_core", "qalora_group_size"),
)


def load_adapters(folder: Path, policy: Policy, mesh: Mesh | None) -> Params:
    """Return a PEFT folder's adapters in the policy's dtypes and shardings; UserError if they do not fit."""
    adapters, config, path = policy.adapters, _file(folder, ADAPTER_CONFIG), _file(folder, ADAPTER)
    assert adapters is not None
    _check_config(read_json(config), adapters, config)
    with open_weights([path]) as weights:
        shapes = {name: weights.shape(name) for name in weights.files}
        _check_targets(shapes, adapters, path)
        for file in weights.files.values():
            dtype = (file.metadata() or {}).get(BASE_DTYPE, adapters.base_dtype)
            if dtype != adapters.base_dtype:
                raise UserError(
                    f"{path}: was trained on a base in {dtype}, but policy.lora.base_dtype is"
                    f" {adapters.base_dtype}: set policy.lora.base_dtype={dtype}"
                )
        if problems := shape_problems(shapes, hf_shapes(policy.abstract_trained)):
            fault = f"{path}: {len(problems)} tensor(s) do not fit this policy"
            raise UserError(f"{fault}; give adapters that were made for it: {summary(problems)}")
        return weights.placed(policy.abstract_trained, policy.architecture.num_layers, mesh)


def save_adapters(
    params: Params,
    adapters: Adapters,
    base: str,
    output: Path,
    tokenizer_source: Path | None,
    card: str | None = None,
) -> Path:
    """Write the adapters of the model `base` as a PEFT folder, with README.md `card`; see `save_folder`."""
    output = output.absolute()
    refuse_foreign(output)
    name, _, revision = base.partition("@") if hub.is_repository(base) else (base, "", "")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": revision or None,
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
    with atomic_folder(output) as partial:
        tensors = {name: np.ascontiguousarray(array) for name, array in to_hf(params)}
        # PEFT warns of keys of adapter_config.json that it does not know, so the dtype stands here.
        save_file(tensors, partial / ADAPTER, metadata=WRITER | {BASE_DTYPE: adapters.base_dtype})
        (partial / ADAPTER).chmod(0o644)
        if tokenizer_source is not None:
            copy_tokenizer(tokenizer_source, partial)
        if card is not None:
            (partial / CARD).write_text(card, encoding="utf-8")
        write_json(partial / ADAPTER_CONFIG, config)
    return output


def adapters_hash(folder: Path) -> str:
    """Return the SHA-256 of a PEFT folder's adapters; raise UserError if there are none."""
    with _file(folder, ADAPTER).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        fault = f"policy.lora.init_from: {folder / name}: no such file"
        raise UserError(f"{fault}; give a PEFT folder with {ADAPTER_CONFIG} and {ADAPTER}")
    return folder / name


def _check_config(config: Mapping[str, Any], adapters: Adapters, path: Path) -> None:
    for name, value in ({"peft_type": None} | dict(config)).items():
        is_off = value is None or value is False or (isinstance(value, str | list | dict) and not value)
        if name not in HARMLESS and not (value in PLAIN[name] if name in PLAIN else is_off):
            fault = f"{path}: {name} is {value!r:.80}, which is not supported; only plain LoRA adapters are"
            raise UserError(f"{fault}: {MERGE}")
    for name, key, expected in (("r", "rank", adapters.rank), ("lora_alpha", "alpha", adapters.alpha)):
        size: Any = config.get(name)
        is_number = isinstance(size, int | float) and not isinstance(size, bool) and 0 < size < math.inf
        if not is_number or (name == "r" and size % 1):
            raise UserError(
                f"{path}: {name} is {size!r:.80}, but must be a number above 0: write the value of the"
                f" adapter's training there, and set policy.lora.{key} to it (verl's model merger always"
                " writes lora_alpha 0; the value is verl's actor_rollout_ref.model.lora_alpha)"
            )
        if size != expected:
            fault = f"{path}: {name} is {size!r}, but policy.lora.{key} is {expected:g}"
            raise UserError(f"{fault}: set policy.lora.{key}={size}")


def _check_targets(shapes: Mapping[str, Any], adapters: Adapters, path: Path) -> None:
    matches = {name: MATRIX.fullmatch(name) for name in shapes}
    foreign = sorted(name for name, match in matches.items() if match is None)
    if foreign or not matches:
        raise UserError(
            f"{path}: holds {summary(foreign) or 'no adapters'}, which is not supported; only lora_A.weight"
            f" and lora_B.weight of {'_proj, '.join(LORA_TARGETS)}_proj are. If the embeddings are those of"
            f" the base, save the adapter again with PEFT's save_embedding_layers=False; else {MERGE}"
        )
    targets = ", ".join(sorted({match[1] for match in matches.values() if match}))
    expected = ", ".join(adapters.targets)
    if targets != expected:
        fault = f"{path}: has adapters on {targets}, but policy.lora.targets is {expected}"
        raise UserError(f"{fault}: set policy.lora.targets=[{targets}]")
