"""The safetensors files of HuggingFace and PEFT folders: finding, opening, reading and hashing them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import read_json
from calibadv_jax.policy.sharding import placed_params
from calibadv_jax.policy.transformer import Params
from calibadv_jax.policy.weights import Region, flatten, from_hf, unflatten

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The entry of a safetensors header that is no tensor.
METADATA = "__metadata__"
# Length in bytes of each of the three blocks of a tensor that `weights_hash` reads.
HASHED_BLOCK = 2**16


@dataclass
class Weights:
    """Open safetensors files.

    Attributes:
        files: by tensor name, the open file that holds the tensor.
        path_of: by tensor name, the path of that file.
        stored_names: by tensor name, its name in the file, if that is another one.
    """

    files: dict[str, Any]
    path_of: dict[str, Path]
    stored_names: dict[str, str] = field(default_factory=dict)

    def rename(self, old: str, new: str) -> None:
        """Give a tensor another name than it has in its file."""
        self.files[new] = self.files.pop(old)
        self.path_of[new] = self.path_of.pop(old)
        self.stored_names[new] = old

    def _slice(self, name: str) -> Any:
        return self.files[name].get_slice(self.stored_names.get(name, name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, by the header of its file."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, by the header of its file and in its words, such as "BF16"."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, region: Region) -> np.ndarray:
        """Read a region of a tensor.

        Args:
            name: of the tensor.
            region: a slice for each axis.

        Returns:
            The values in the stored dtype.

        Raises:
            UserError: the file is damaged.
        """
        try:
            return self._slice(name)[region]
        except SafetensorError as error:
            raise UserError(f"{self.path_of[name]}: {name} cannot be read: {error}") from error

    def placed(self, abstract: Mapping[str, Any], num_layers: int, mesh: Mesh | None) -> Params:
        """Read parameters onto the devices, one at a time.

        Args:
            abstract: a tree of ShapeDtypeStructs.
            num_layers: number of layers that a stacked parameter has.
            mesh: the devices; None: the default device.

        Returns:
            Parameters in the shapes and dtypes of `abstract` and in their shardings.

        Raises:
            UserError: a file is damaged.
        """
        params = {}
        for path, target in flatten(placed_params(abstract, mesh)).items():
            params[path] = self._placed_parameter(path, target, num_layers)
        return unflatten(params)

    def _placed_parameter(self, path: str, target: jax.ShapeDtypeStruct, num_layers: int) -> jax.Array:
        regions: dict[Any, np.ndarray] = {}  # read already: devices with replicas ask for the same region

        def read_region(region: Any) -> np.ndarray:
            key = tuple((axis.start, axis.stop) for axis in region)
            if key not in regions:
                regions[key] = from_hf(path, self.read, num_layers, region, target.dtype)
            return regions[key]

        return jax.make_array_from_callback(target.shape, target.sharding, read_region)


@contextmanager
def open_weights(paths: Sequence[Path]) -> Iterator[Weights]:
    """Open safetensors files for the block.

    Args:
        paths: of the files.

    Yields:
        The tensors of all files.

    Raises:
        UserError: a file is damaged.
    """
    with ExitStack() as stack:
        weights = Weights({}, {})
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="np"))
            except (SafetensorError, OSError) as error:
                _refuse_damaged(path, error)
            for name in file.keys():  # noqa: SIM118 (the file is no dict)
                weights.files[name] = file
                weights.path_of[name] = path
        yield weights


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a HuggingFace folder, as transformers chooses them.

    Args:
        folder: its path.

    Returns:
        The single file if it exists, else the files of the index.

    Raises:
        UserError: there is neither, the index is invalid, or files that it names are missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if any(folder.glob("*.bin")):
            raise UserError(
                f"{folder}: only PyTorch .bin weights; convert them once with transformers:"
                " AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
            )
        raise UserError(
            f"{folder}: no {SINGLE} and no {INDEX}; give a HuggingFace folder with safetensors, as"
            " save_pretrained of transformers writes it"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: field 'weight_map' is missing; copy the file again")
    names = sorted({str(name) for name in weight_map.values()})
    missing = []
    for name in names:
        is_plain_name = Path(name).name == name
        if not is_plain_name or not (folder / name).is_file():
            missing.append(name)
    if missing:
        raise UserError(f"{index}: names files that do not exist: {', '.join(missing)}; copy them too")
    return [folder / name for name in names]


def weights_hash(folder: Path) -> str:
    """Hash a folder's weights, in a time that does not grow with their size.

    Args:
        folder: a HuggingFace folder.

    Returns:
        SHA-256 over every tensor's name, dtype and shape, and HASHED_BLOCK bytes at its beginning, middle and
        end, whichever file it is in.

    Raises:
        UserError: there are no safetensors, or a file is damaged.
    """
    digests: dict[str, str] = {}
    for path in weight_files(folder):
        try:
            with path.open("rb") as file:
                digests.update(_tensor_digests(file))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _refuse_damaged(path, error)
    ordered = [digests[name] for name in sorted(digests)]
    return hashlib.sha256("".join(ordered).encode()).hexdigest()


def _tensor_digests(file: BinaryIO) -> dict[str, str]:
    """Return a digest of every tensor of a safetensors file, by name."""
    size = file.seek(0, 2)
    file.seek(0)
    header_length = int.from_bytes(file.read(8), "little")
    data_start = 8 + header_length
    header = json.loads(file.read(min(header_length, size)))
    digests = {}
    for name, entry in header.items():
        if name == METADATA:
            continue
        begin, end = (data_start + offset for offset in entry["data_offsets"])
        if not 0 <= begin <= end <= size:
            raise ValueError(f"{name} is cut off")
        digest = hashlib.sha256(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        middle = (begin + end - HASHED_BLOCK) // 2
        for start in (begin, middle, end - HASHED_BLOCK):
            file.seek(max(begin, start))  # a short tensor is read whole, three times
            digest.update(file.read(min(HASHED_BLOCK, end - begin)))
        digests[name] = digest.hexdigest()
    return digests


def _refuse_damaged(path: Path, error: Exception) -> NoReturn:
    raise UserError(f"{path}: not a full safetensors file ({error}); copy it again") from error
