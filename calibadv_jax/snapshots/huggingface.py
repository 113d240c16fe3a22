"""HuggingFace folders in and out: config.json, safetensors (one or several), tokenizer files."""

from __future__ import annotations

import fnmatch
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_folder, atomic_write, read_json, write_json
from calibadv_jax.core.hub import TOKENIZER_FILES
from calibadv_jax.policy.architecture import RopeScaling, YarnScaling, architecture_from_hf, rope_fields
from calibadv_jax.policy.transformer import Params, Policy
from calibadv_jax.policy.weights import (
    WEIGHTS,
    flatten,
    from_hf,
    hf_shapes,
    shape_problems,
    summarise_problems,
    to_hf,
    unflatten,
)
from calibadv_jax.snapshots.weight_files import INDEX, Weights, open_weights, weight_files

CONFIG = "config.json"
CARD = "README.md"
# Metadata of every safetensors file that is written here; transformers refuses files without the format "pt".
WRITER = {"format": "pt", "writer": "calibadv_jax"}
# Safetensors' names of the dtypes that are read.
STORED_DTYPES = ("F64", "F32", "F16", "BF16")
# Prefix of the names of all tensors but the output head.
BODY_PREFIX = "model."
# The class in transformers of each model_type.
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
# Number of rows of the embeddings that are compared at a time with those of a tied output head.
COMPARED_ROWS = 4096


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return the fields of config.json.

    Args:
        folder: a HuggingFace folder.

    Raises:
        UserError: there is no such file, or it is no JSON object.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a HuggingFace folder with config.json and safetensors")
    return read_json(path)


def load_params(folder: Path, policy: Policy, mesh: Mesh | None) -> Params:
    """Read a folder's parameters onto the devices. The host holds one parameter at a time.

    Args:
        folder: a HuggingFace folder.
        policy: the policy that the folder holds.
        mesh: the devices; None: the default device.

    Returns:
        All parameters but adapters, in the policy's precision and shardings.

    Raises:
        UserError: files are damaged, or tensors do not fit the policy.
    """
    with _policy_weights(folder, policy) as weights:
        return weights.placed(policy.abstract_base, policy.architecture.num_layers, mesh)


def check_weights(folder: Path, policy: Policy) -> str:
    """Compare the headers of a folder's safetensors with a policy, without reading values.

    Args:
        folder: a HuggingFace folder.
        policy: the policy that the folder is to hold.

    Returns:
        A sentence for the user: the numbers of tensors and files that fit.

    Raises:
        UserError: files are damaged, or tensors do not fit the policy.
    """
    with _policy_weights(folder, policy, with_values=False) as weights:
        num_files = len(set(weights.path_of.values()))
        return f"{len(weights.files)} tensors in {num_files} file(s) of {folder} have the policy's shapes"


def read_head_rows(folder: Path, policy: Policy, rows: Sequence[int]) -> np.ndarray:
    """Read rows of a folder's output head: the vectors that give the logits of these tokens.

    Args:
        folder: a HuggingFace folder.
        policy: the policy that the folder holds.
        rows: ids of the tokens.

    Returns:
        float32 [len(rows), D]; of the embeddings, if they are tied to the head.

    Raises:
        UserError: files are damaged, or tensors do not fit the policy.
    """
    is_tied = policy.architecture.tie_word_embeddings
    name = WEIGHTS["embed.embedding" if is_tied else "lm_head.kernel"].hf
    with _policy_weights(folder, policy, with_values=False) as weights:
        read = [weights.read(name, (slice(row, row + 1), slice(None)))[0] for row in rows]
    return np.asarray(read, np.float32).reshape(len(rows), policy.architecture.hidden_size)


def read_base_tensors(folder: Path, policy: Policy, dtype: Any) -> dict[str, Any]:
    """Read a folder's parameters as host arrays.

    Args:
        folder: a HuggingFace folder.
        policy: the policy that the folder holds.
        dtype: of the arrays.

    Returns:
        The tree of all parameters but adapters.

    Raises:
        UserError: files are damaged, or tensors do not fit the policy.
    """
    num_layers = policy.architecture.num_layers
    arrays = {}
    with _policy_weights(folder, policy) as weights:
        for path, leaf in flatten(policy.abstract_base).items():
            everything = (slice(None),) * len(leaf.shape)
            arrays[path] = from_hf(path, weights.read, num_layers, everything, dtype)
    return unflatten(arrays)


def save_folder(
    params: Params,
    hf_config: Mapping[str, Any],
    output: Path,
    dtype: Any,
    tokenizer_source: Path | None,
    max_shard_bytes: int = 4 * 2**30,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write a folder that transformers and vLLM load, complete or not at all.

    The host holds one shard and one parameter at a time.

    Args:
        params: all parameters, addressable from this process.
        hf_config: fields of config.json.
        output: the folder, absent, empty or an earlier export, which is replaced.
        dtype: of the written tensors.
        tokenizer_source: folder from which the tokenizer's files are copied; None: none are.
        max_shard_bytes: largest size of a safetensors file.
        texts: contents of further files by name, which win over copied ones.

    Returns:
        The absolute path of the folder.

    Raises:
        UserError: `output` exists and is not an export.
    """
    output = output.absolute()
    refuse_foreign(output)
    with atomic_folder(output) as partial:
        _write_weights(params, partial, np.dtype(jnp.dtype(dtype)), max_shard_bytes)
        if tokenizer_source is not None:
            copy_tokenizer(tokenizer_source, partial)
        for name, text in (texts or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        write_json(partial / CONFIG, _complete_config(hf_config, jnp.dtype(dtype).name))
    return output


def copy_tokenizer(source: Path, target: Path) -> None:
    """Make a folder hold the tokenizer's files and generation_config.json of another folder.

    Args:
        source: folder to copy from.
        target: folder to copy to. Files of these names that the source does not have are removed.
    """
    if source.resolve() == target.resolve():
        return
    for file in target.iterdir():
        if _is_tokenizer_file(file.name) and not (source / file.name).is_file():
            file.unlink()
    for file in sorted(source.iterdir()):
        if file.is_file() and _is_tokenizer_file(file.name):
            with atomic_write(target / file.name) as partial:
                shutil.copyfile(file, partial)


def refuse_foreign(output: Path) -> None:
    """Check that a folder may be replaced by an export.

    Args:
        output: its path.

    Raises:
        UserError: it is not absent, empty, or an export.
    """
    if output.is_file():
        raise UserError(f"{output}: is a file; choose another output folder")
    if not output.exists():
        return
    for file in sorted(output.iterdir()):
        is_config = file.name in (CONFIG, INDEX, "adapter_config.json")
        if not (is_config or _is_tokenizer_file(file.name) or _is_ours(file)):
            raise UserError(
                f"{output}: holds {file.name}, which is not an export's; choose another output folder"
            )


@contextmanager
def _policy_weights(folder: Path, policy: Policy, with_values: bool = True) -> Iterator[Weights]:
    """Open a folder's weights, after comparing them with a policy."""
    with open_weights(weight_files(folder)) as weights:
        _add_prefix(weights, policy)
        _check(weights, policy, str(folder), with_values)
        yield weights


def _add_prefix(weights: Weights, policy: Policy) -> None:
    """Name the tensors of a model that was saved without its output head as those of a whole model.

    Their names lack the prefix ``model.``; transformers adds it, too.
    """
    for name in set(hf_shapes(policy.abstract_base)).difference(weights.files):
        stored_name = name.removeprefix(BODY_PREFIX)
        if stored_name in weights.files:
            weights.rename(stored_name, name)


def _check(weights: Weights, policy: Policy, source: str, with_values: bool) -> None:
    """Raise UserError unless the tensors are those of the policy; `with_values`: read a tied head."""
    shapes = {}
    for name in weights.files:
        if not name.endswith("rotary_emb.inv_freq"):  # computed from the config
            shapes[name] = weights.shape(name)
    _refuse_quantised(weights, source)
    head = WEIGHTS["lm_head.kernel"].hf
    embedding = WEIGHTS["embed.embedding"].hf
    if policy.architecture.tie_word_embeddings and head in shapes:
        head_shape = shapes.pop(head)
        if with_values and head_shape == shapes.get(embedding):
            _check_tied_head(weights, head_shape[0], source)
    problems = shape_problems(shapes, hf_shapes(policy.abstract_base))
    if problems:
        raise UserError(
            f"{source}: {len(problems)} tensor(s) do not fit config.json: {summarise_problems(problems)}"
        )


def _refuse_quantised(weights: Weights, source: str) -> None:
    """Raise UserError if a tensor has another dtype than weights that are not quantised.

    Shapes are compared afterwards: FP8, GPTQ, AWQ and bitsandbytes also add tensors of their own.
    """
    coded = []
    for name in sorted(weights.files):
        dtype = weights.dtype(name)
        if dtype not in STORED_DTYPES:
            coded.append(f"{name} ({dtype})")
    if coded:
        raise UserError(
            f"{source}: quantised or integer weights are not supported: {summarise_problems(coded)}; give the"
            " folder of the unquantised model"
        )


def _check_tied_head(weights: Weights, num_rows: int, source: str) -> None:
    """Raise UserError if the output head has other values than the embeddings, with which it is tied."""
    head = WEIGHTS["lm_head.kernel"].hf
    embedding = WEIGHTS["embed.embedding"].hf
    for start in range(0, num_rows, COMPARED_ROWS):
        rows = slice(start, min(start + COMPARED_ROWS, num_rows))
        region = (rows, slice(None))
        if not np.array_equal(weights.read(head, region), weights.read(embedding, region)):
            raise UserError(
                f"{source}: config.json ties the embeddings, but {head} differs from {embedding}; set"
                " tie_word_embeddings to false there"
            )


def _write_weights(params: Params, folder: Path, dtype: np.dtype, max_shard_bytes: int) -> None:
    """Write the tensors in one pass; a shard is written when its last tensor has arrived."""
    sizes = {name: dtype.itemsize * math.prod(shape) for name, shape in hf_shapes(params).items()}
    plan = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    pending: dict[str, dict[str, np.ndarray]] = {file: {} for file in plan.filename_to_tensors}
    for name, array in to_hf(params):
        file = plan.tensor_to_filename[name]
        pending[file][name] = np.ascontiguousarray(array, dtype)
        if len(pending[file]) == len(plan.filename_to_tensors[file]):
            save_file(pending.pop(file), folder / file, metadata=WRITER)
            (folder / file).chmod(0o644)
    if plan.is_sharded:
        weight_map = dict(sorted(plan.tensor_to_filename.items()))
        write_json(folder / INDEX, {"metadata": plan.metadata, "weight_map": weight_map})


def _complete_config(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config with every field whose default differs between readers."""
    architecture = architecture_from_hf(hf_config)
    config: dict[str, Any] = {
        # Without it transformers 5 warns of a folder with a large vocabulary that its tokenizer were wrong.
        "transformers_version": version("transformers"),
        "architectures": [ARCHITECTURES[architecture.model_type]],
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "rms_norm_eps": architecture.rms_norm_eps,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "hidden_act": "silu",
    }
    config.update({name: value for name, value in hf_config.items() if value is not None})
    # Readers before transformers 5 look for rope_theta, rope_scaling and torch_dtype, later ones for
    # rope_parameters, which a rope_scaling beside it overrules, and dtype.
    rope_theta = architecture.rope_theta
    config["rope_theta"] = rope_theta
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_theta}
    if architecture.rope_scaling is not None:
        scaling = _rope_scaling(hf_config, architecture.rope_scaling)
        config["rope_scaling"] = scaling
        config["rope_parameters"] = {**scaling, "rope_theta": rope_theta}
    config["dtype"] = dtype
    config["torch_dtype"] = dtype
    return config


def _rope_scaling(hf_config: Mapping[str, Any], rope: RopeScaling | YarnScaling) -> dict[str, Any]:
    """Return the field rope_scaling of config.json, as transformers and vLLM read it."""
    if isinstance(rope, YarnScaling):
        # Only fields that were given: readers differ in what they know beside them.
        scaling = {name: value for name, value in rope_fields(hf_config).items() if value is not None}
        scaling.pop("type", None)
        scaling.pop("rope_theta", None)
        scaling |= {"rope_type": "yarn", "factor": rope.factor}
    else:
        scaling = {"rope_type": "llama3", **asdict(rope)}
        scaling.pop("original_length")
    scaling["original_max_position_embeddings"] = rope.original_length
    return scaling


def _is_tokenizer_file(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)


def _is_ours(file: Path) -> bool:
    """Return whether a model card or safetensors file was written here."""
    if file.name == CARD:
        return WRITER["writer"] in file.read_text(encoding="utf-8", errors="replace")
    if file.suffix != ".safetensors":
        return False
    try:
        with safe_open(file, framework="np") as weights:
            metadata = weights.metadata() or {}
            return metadata.get("writer") == WRITER["writer"]
    except SafetensorError:
        return False
