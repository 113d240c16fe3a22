"""HuggingFace folders in and out: config.json, safetensors (one or several), tokenizer files."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_folder, atomic_write, read_json, write_json
from calibadv_jax.core.hub import TOKENIZER_FILES
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import placed_params
from calibadv_jax.policy.transformer import Params, Policy
from calibadv_jax.policy.weights import (
    WEIGHTS,
    Region,
    flatten,
    from_hf,
    hf_shapes,
    shape_problems,
    summary,
    to_hf,
    unflatten,
)

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
CARD = "README.md"
SAMPLED = 2**16  # bytes at each of three places of a tensor that `weights_hash` reads
WRITER = {"format": "pt", "writer": "calibadv_jax"}  # "pt": transformers refuses files without it
STORED_DTYPES = ("F64", "F32", "F16", "BF16")
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return the fields of config.json; UserError without such a file, or if it is no JSON object."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a HuggingFace folder with config.json and safetensors")
    return read_json(path)


def load_params(folder: Path, policy: Policy, mesh: Mesh | None) -> Params:
    """Return a folder's parameters in the policy's precision and shardings, without adapters.

    The host holds one parameter at a time. Raises UserError for damaged files, or tensors that do not fit.
    """
    with _policy_weights(folder, policy) as weights:
        return weights.placed(policy.abstract_base, policy.architecture.num_layers, mesh)


def check_weights(folder: Path, policy: Policy) -> str:
    """Compare the headers of a folder's safetensors with the policy, and say so; raises as `load_params`."""
    with _policy_weights(folder, policy, with_values=False) as weights:
        files = len(set(weights.path_of.values()))
        return f"{len(weights.files)} tensors in {files} file(s) of {folder} have the policy's shapes"


def read_base_tensors(folder: Path, policy: Policy, dtype: Any) -> dict[str, Any]:
    """Return host arrays of `dtype`, as `load_params`."""
    layers, arrays = policy.architecture.num_layers, {}
    with _policy_weights(folder, policy) as weights:
        for path, leaf in flatten(policy.abstract_base).items():
            arrays[path] = from_hf(path, weights.read, layers, (slice(None),) * len(leaf.shape), dtype)
    return unflatten(arrays)


def weights_hash(folder: Path) -> str:
    """Return a hash of a folder's weights, at a price that does not grow with their size.

    SHA-256 over every tensor's name, dtype and shape, and 64 KiB at its beginning, middle and end, whichever
    file it is in. Raises UserError without safetensors, or for a damaged file.
    """
    digests: dict[str, str] = {}
    for path in _weight_files(folder):
        try:
            with path.open("rb") as file:
                digests |= _tensor_digests(file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not a full safetensors file ({error}); copy it again") from error
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


def _tensor_digests(file: BinaryIO) -> dict[str, str]:
    size, digests = file.seek(0, 2), {}
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(min(length, size)))
    for name in header.keys() - {"__metadata__"}:
        entry = header[name]
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if not 0 <= begin <= end <= size:
            raise ValueError(f"{name} is cut off")
        digest = hashlib.sha256(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        for start in (begin, (begin + end - SAMPLED) // 2, end - SAMPLED):
            file.seek(max(begin, start))
            digest.update(file.read(min(SAMPLED, end - begin)))
        digests[name] = digest.hexdigest()
    return digests


def save_folder(
    params: Params,
    hf_config: Mapping[str, Any],
    output: Path,
    dtype: Any,
    tokenizer_source: Path | None,
    max_shard_bytes: int = 4 * 2**30,
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write a folder that transformers and vLLM load, complete or not at all; return its absolute path.

    Host memory: one shard and one parameter. Parameters must be addressable from this process. Tokenizer
    files are copied from `tokenizer_source`; `texts` are further files by name, which win over copied ones.
    Raises UserError if `output` exists and is not an export.
    """
    output = output.absolute()
    refuse_foreign(output)
    with atomic_folder(output) as partial:
        _write_weights(params, partial, np.dtype(jnp.dtype(dtype)), max_shard_bytes)
        if tokenizer_source is not None:
            copy_tokenizer(tokenizer_source, partial)
        for name, text in (texts or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        write_json(partial / CONFIG, _complete(hf_config, jnp.dtype(dtype).name))
    return output


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files and generation_config.json; remove those that the source does not have."""
    if source.resolve() == target.resolve():
        return
    for file in target.iterdir():
        if _is_tokenizer_file(file.name) and not (source / file.name).is_file():
            file.unlink()
    for file in sorted(source.iterdir()):
        if file.is_file() and _is_tokenizer_file(file.name):
            with atomic_write(target / file.name) as partial:
                shutil.copyfile(file, partial)


@dataclass
class Weights:
    """Open safetensors files and their paths, by tensor name."""

    files: dict[str, Any]
    path_of: dict[str, Path]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self.files[name].get_slice(name).get_dtype())

    def read(self, name: str, region: Region) -> np.ndarray:
        """Return a region of a tensor in its stored dtype; raise UserError if the file is damaged."""
        try:
            return self.files[name].get_slice(name)[region]
        except SafetensorError as error:
            raise UserError(f"{self.path_of[name]}: {name} cannot be read: {error}") from error

    def placed(self, abstract: Mapping[str, Any], num_layers: int, mesh: Mesh | None) -> Params:
        """Return parameters in the shapes and dtypes of `abstract` and their shardings; raises as `read`."""

        def load(path: str, target: jax.ShapeDtypeStruct) -> jax.Array:
            parts: dict[Any, np.ndarray] = {}  # replicas share a part

            def read(region: Any) -> np.ndarray:
                key = tuple((axis.start, axis.stop) for axis in region)
                if key not in parts:
                    parts[key] = from_hf(path, self.read, num_layers, region, target.dtype)
                return parts[key]

            return jax.make_array_from_callback(target.shape, target.sharding, read)

        targets = flatten(placed_params(abstract, mesh))
        return unflatten({path: load(path, target) for path, target in targets.items()})


@contextmanager
def open_weights(files: Sequence[Path]) -> Iterator[Weights]:
    """Open safetensors files; raise UserError if one is damaged."""
    with ExitStack() as stack:
        weights = Weights({}, {})
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path}: not a full safetensors file ({error}); copy it again") from error
            weights.files |= dict.fromkeys(file.keys(), file)
            weights.path_of |= dict.fromkeys(file.keys(), path)
        yield weights


@contextmanager
def _policy_weights(folder: Path, policy: Policy, with_values: bool = True) -> Iterator[Weights]:
    with open_weights(_weight_files(folder)) as weights:
        _check(weights, policy, str(folder), with_values)
        yield weights


def _weight_files(folder: Path) -> list[Path]:
    """Return the single file, else those of the index, as transformers chooses."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise UserError(f"{index}: field 'weight_map' is missing; copy the file again")
        files = sorted({str(name) for name in names.values()})
        bad = [name for name in files if Path(name).name != name or not (folder / name).is_file()]
        if bad:
            raise UserError(f"{index}: names files that do not exist: {', '.join(bad)}; copy them too")
        return [folder / name for name in files]
    way_out = "give a HuggingFace folder with safetensors, as save_pretrained of transformers writes it"
    raise UserError(f"{folder}: no {SINGLE} and no {INDEX}; {way_out}")


def _check(weights: Weights, policy: Policy, source: str, with_values: bool) -> None:
    shapes = {name: weights.shape(name) for name in weights.files if not name.endswith("rotary_emb.inv_freq")}
    head, embedding = WEIGHTS["lm_head.kernel"].hf, WEIGHTS["embed.embedding"].hf
    if policy.architecture.tie_word_embeddings and head in shapes:
        shape = shapes.pop(head)
        if with_values and shape == shapes.get(embedding):
            for row in range(0, shape[0], 4096):
                rows = slice(row, min(row + 4096, shape[0])), slice(None)
                if not np.array_equal(weights.read(head, rows), weights.read(embedding, rows)):
                    fault = f"{source}: config.json ties the embeddings, but {head} differs from {embedding}"
                    raise UserError(f"{fault}; set tie_word_embeddings to false there")
    if problems := shape_problems(shapes, hf_shapes(policy.abstract_base)):
        raise UserError(f"{source}: {len(problems)} tensor(s) do not fit config.json: {summary(problems)}")
    coded = [f"{name} ({weights.dtype(name)})" for name in shapes if weights.dtype(name) not in STORED_DTYPES]
    if coded:
        fault = f"{source}: quantised or integer weights are not supported: {', '.join(coded)}"
        raise UserError(f"{fault}; give the folder of the unquantised model")


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
        index = {"metadata": plan.metadata, "weight_map": dict(sorted(plan.tensor_to_filename.items()))}
        write_json(folder / INDEX, index)


def _complete(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config with every field whose default differs between readers."""
    architecture = architecture_from_hf(hf_config)
    explicit = {
        "architectures": [ARCHITECTURES[architecture.model_type]],
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "rms_norm_eps": architecture.rms_norm_eps,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "hidden_act": "silu",
    }
    present = {name: value for name, value in hf_config.items() if value is not None}
    # Readers before transformers 5 look for rope_theta, rope_scaling and torch_dtype, later ones for
    # rope_parameters, which a rope_scaling beside it overrules, and dtype.
    theta = {"rope_theta": architecture.rope_theta}
    rope: dict[str, Any] = theta | {"rope_parameters": {"rope_type": "default"} | theta}
    if architecture.rope_scaling is not None:
        scaling = {"rope_type": "llama3"} | asdict(architecture.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_length")
        rope |= {"rope_scaling": scaling, "rope_parameters": scaling | theta}
    # Without it transformers 5 warns of a folder with a large vocabulary that its tokenizer were wrong.
    origin = {"transformers_version": version("transformers")}
    return origin | explicit | present | rope | {"dtype": dtype, "torch_dtype": dtype}


def _is_tokenizer_file(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in TOKENIZER_FILES)


def refuse_foreign(output: Path) -> None:
    """Raise UserError unless `output` is absent, empty, or an export."""
    if output.is_file():
        raise UserError(f"{output}: is a file; choose another output folder")
    if not output.exists():
        return
    for file in sorted(output.iterdir()):
        is_config = file.name in (CONFIG, INDEX, "adapter_config.json")
        if not (is_config or _is_tokenizer_file(file.name) or _is_ours(file)):
            fault = f"{output}: holds {file.name}, which is not an export's"
            raise UserError(f"{fault}; choose another output folder")


def _is_ours(file: Path) -> bool:
    if file.name == CARD:
        return WRITER["writer"] in file.read_text(encoding="utf-8", errors="replace")
    if file.suffix != ".safetensors":
        return False
    try:
        with safe_open(file, framework="np") as weights:
            return (weights.metadata() or {}).get("writer") == WRITER["writer"]
    except SafetensorError:
        return False
