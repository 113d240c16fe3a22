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
from calibadv_jax.policy.weights import hf_shapes, shape_problems, summarise_problems, to_hf
from calibadv_jax.snapshots.huggingface import CARD, WRITER, copy_tokenizer, refuse_foreign
from calibadv_jax.snapshots.weight_files import Weights, open_weights

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"
# Key of ADAPTER's metadata: the precision of the base that the adapters were trained on.
BASE_DTYPE = "base_dtype"
# Names of the tensors that a LoRA adapter may have.
MATRIX = re.compile(rf".*\.({'|'.join(LORA_TARGETS)})_proj\.lora_[AB]\.weight")
MERGE = "merge it into its base with PEFT (merge_and_unload, save_pretrained) and give that as policy.path"
# Options of PEFT with which an adapter is its two matrices times lora_alpha / r, and nothing else. Any other
# option must be off: None, False or empty. The initialisations named here do not change the base.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica"),
}
# Options that change nothing in a file that has all matrices of policy.lora.targets. The configs of
# initialisations stay where PEFT has converted an adapter, and count only with their initialisation.
HARMLESS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "peft_version",
    "inference_mode",
    "ensure_weight_tying",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "megatron_core",
    "qalora_group_size",
)


def load_adapters(folder: Path, policy: Policy, mesh: Mesh | None) -> Params:
    """Read a PEFT folder's adapters onto the devices.

    Args:
        folder: a PEFT folder.
        policy: a policy with adapters.
        mesh: the devices; None: the default device.

    Returns:
        The adapters in the policy's dtypes and shardings.

    Raises:
        UserError: files are missing or damaged, or the adapters are not those of the policy.
    """
    adapters = policy.adapters
    assert adapters is not None
    config_path = _file(folder, ADAPTER_CONFIG)
    path = _file(folder, ADAPTER)
    _check_config(read_json(config_path), adapters, config_path)
    with open_weights([path]) as weights:
        shapes = {name: weights.shape(name) for name in weights.files}
        _check_targets(shapes, adapters, path)
        _check_base_dtype(weights, adapters, path)
        problems = shape_problems(shapes, hf_shapes(policy.abstract_trained))
        if problems:
            raise UserError(
                f"{path}: {len(problems)} tensor(s) do not fit this policy; give adapters that were made for"
                f" it: {summarise_problems(problems)}"
            )
        return weights.placed(policy.abstract_trained, policy.architecture.num_layers, mesh)


def save_adapters(
    params: Params,
    adapters: Adapters,
    base: str,
    output: Path,
    tokenizer_source: Path | None,
    card: str | None = None,
) -> Path:
    """Write adapters as a PEFT folder, complete or not at all.

    Args:
        params: the adapters, addressable from this process.
        adapters: their rank, alpha, targets and the precision of their base.
        base: the model that they belong to, a folder or ``repository@revision`` of the hub.
        output: the folder, absent, empty or an earlier export, which is replaced.
        tokenizer_source: folder from which the tokenizer's files are copied; None: none are.
        card: text of README.md; None: it is not written.

    Returns:
        The absolute path of the folder.

    Raises:
        UserError: `output` exists and is not an export.
    """
    output = output.absolute()
    refuse_foreign(output)
    base_name = base
    revision = ""
    if hub.is_repository(base):
        base_name, _, revision = base.partition("@")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
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
    # PEFT warns of keys of adapter_config.json that it does not know, so the dtype is kept here.
    metadata = WRITER | {BASE_DTYPE: adapters.base_dtype}
    with atomic_folder(output) as partial:
        tensors = {name: np.ascontiguousarray(array) for name, array in to_hf(params)}
        save_file(tensors, partial / ADAPTER, metadata=metadata)
        (partial / ADAPTER).chmod(0o644)
        if tokenizer_source is not None:
            copy_tokenizer(tokenizer_source, partial)
        if card is not None:
            (partial / CARD).write_text(card, encoding="utf-8")
        write_json(partial / ADAPTER_CONFIG, config)
    return output


def adapters_hash(folder: Path) -> str:
    """Return the SHA-256 of a PEFT folder's adapters.

    Args:
        folder: a PEFT folder.

    Raises:
        UserError: there are no adapters.
    """
    with _file(folder, ADAPTER).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise UserError(
            f"policy.lora.init_from: {path}: no such file; give a PEFT folder with {ADAPTER_CONFIG} and"
            f" {ADAPTER}"
        )
    return path


def _check_config(config: Mapping[str, Any], adapters: Adapters, path: Path) -> None:
    """Raise UserError unless these are plain LoRA adapters of the policy's rank and alpha."""
    options: dict[str, Any] = {"peft_type": None}  # checked also where the config lacks it
    options.update(config)
    for name, value in options.items():
        if name not in HARMLESS and not _is_plain(name, value):
            raise UserError(
                f"{path}: {name} is {value!r:.80}, which is not supported; only plain LoRA adapters are:"
                f" {MERGE}"
            )
    _check_size("r", config.get("r"), "rank", adapters.rank, path)
    _check_size("lora_alpha", config.get("lora_alpha"), "alpha", adapters.alpha, path)


def _is_plain(name: str, value: Any) -> bool:
    """Return whether an option has a value with which adapters are nothing but their two matrices."""
    if name in PLAIN:
        return value in PLAIN[name]
    is_empty = isinstance(value, str | list | dict) and not value
    return value is None or value is False or is_empty


def _check_size(name: str, size: Any, key: str, expected: float, path: Path) -> None:
    """Raise UserError unless the option `name` is a number, and equal to policy.lora.`key`."""
    is_number = isinstance(size, int | float) and not isinstance(size, bool)
    is_valid = is_number and 0 < size < math.inf
    if is_valid and name == "r":
        is_valid = size % 1 == 0
    if not is_valid:
        raise UserError(
            f"{path}: {name} is {size!r:.80}, but must be a number above 0: write the value of the"
            f" adapter's training there, and set policy.lora.{key} to it (verl's model merger always"
            " writes lora_alpha 0; the value is verl's actor_rollout_ref.model.lora_alpha)"
        )
    if size != expected:
        raise UserError(
            f"{path}: {name} is {size!r}, but policy.lora.{key} is {expected:g}: set policy.lora.{key}={size}"
        )


def _check_targets(shapes: Mapping[str, Any], adapters: Adapters, path: Path) -> None:
    """Raise UserError unless the tensors are LoRA matrices of the policy's targets."""
    foreign = []
    targets = set()
    for name in shapes:
        match = MATRIX.fullmatch(name)
        if match is None:
            foreign.append(name)
        else:
            targets.add(match[1])
    if foreign or not shapes:
        raise UserError(
            f"{path}: holds {summarise_problems(sorted(foreign)) or 'no adapters'}, which is not"
            " supported; only"
            f" lora_A.weight and lora_B.weight of {'_proj, '.join(LORA_TARGETS)}_proj are. If the embeddings"
            " are those of the base, save the adapter again with PEFT's save_embedding_layers=False; else"
            f" {MERGE}"
        )
    in_file = ", ".join(sorted(targets))
    expected = ", ".join(adapters.targets)
    if in_file != expected:
        raise UserError(
            f"{path}: has adapters on {in_file}, but policy.lora.targets is {expected}: set"
            f" policy.lora.targets=[{in_file}]"
        )


def _check_base_dtype(weights: Weights, adapters: Adapters, path: Path) -> None:
    """Raise UserError if the adapters were trained on a base in another precision than the policy's."""
    for file in weights.files.values():
        metadata = file.metadata() or {}
        dtype = metadata.get(BASE_DTYPE, adapters.base_dtype)
        if dtype != adapters.base_dtype:
            raise UserError(
                f"{path}: was trained on a base in {dtype}, but policy.lora.base_dtype is"
                f" {adapters.base_dtype}: set policy.lora.base_dtype={dtype}"
            )
