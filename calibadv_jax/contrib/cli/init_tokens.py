"""Gives untrained tokens the embeddings of their text: ``calibadv init-tokens MODEL --tokens … --output``.

The rows of a token, in the embeddings and in the output head, become the mean of the rows of the tokens that
its text has without it: of "<", "tool", "_call" and ">" for "<tool_call>". So the token differs from the ids
without a use, and adapters can learn to write it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_folder, write_json, write_text
from calibadv_jax.policy.weights import WEIGHTS
from calibadv_jax.run.model import load_tokenizer
from calibadv_jax.snapshots.huggingface import (
    CARD,
    CONFIG,
    STORED_DTYPES,
    WRITER,
    copy_tokenizer,
    read_hf_config,
)
from calibadv_jax.snapshots.weight_files import INDEX, SINGLE, open_weights, weight_files

# Ends of the names of the tensors that have a row for each token.
TABLES = tuple(WEIGHTS[path].hf.removeprefix("model.") for path in ("embed.embedding", "lm_head.kernel"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="HuggingFace folder")
    parser.add_argument(
        "--tokens", nargs="+", required=True, metavar="TOKEN", help="as `calibadv doctor` names them"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="HuggingFace folder to write; must not exist"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the folder, and print the pieces of each token."""
    pieces = init_tokens(arguments.model, arguments.tokens, arguments.output)
    for token, texts in pieces.items():
        sys.stdout.write(f"{token}: the mean of {' '.join(texts)}\n")
    sys.stdout.write(f"written to {arguments.output}\n")


def init_tokens(model: Path, tokens: Sequence[str], output: Path) -> dict[str, list[str]]:
    """Write a copy of a model in which tokens have the mean of the embeddings of their text.

    Args:
        model: a HuggingFace folder; it is not changed.
        tokens: added tokens of its tokenizer.
        output: the folder to write, complete or not at all.

    Returns:
        The pieces of each token.

    Raises:
        UserError: `output` exists, a token is not one of the tokenizer's added ones, or files of the model
            are missing or damaged.
    """
    if output.exists():
        raise UserError(f"{output}: exists already; choose another --output")
    hf_config = read_hf_config(model)
    weights = weight_files(model)
    tokenizer = load_tokenizer(model)
    pieces = {token: _pieces(tokenizer, token) for token in tokens}
    rows = {tokenizer.convert_tokens_to_ids(token): ids for token, ids in pieces.items()}
    with atomic_folder(output) as partial:
        for path in weights:
            _write_weights(path, partial / path.name, rows)
        if weights != [model / SINGLE]:
            write_text(partial / INDEX, (model / INDEX).read_text(encoding="utf-8"))
        copy_tokenizer(model, partial)
        write_json(partial / CONFIG, hf_config)
        write_text(partial / CARD, _card(model, tokens))
    return {token: tokenizer.convert_ids_to_tokens(ids) for token, ids in pieces.items()}


def _pieces(tokenizer: Any, token: str) -> list[int]:
    """Return the tokens of a token's text, which is encoded in two halves so that it is not found in it.

    Raises:
        UserError: it is no added token, or its halves have added tokens.
    """
    added = {str(entry): number for number, entry in tokenizer.added_tokens_decoder.items()}
    if token not in added:
        raise UserError(f"{token!r} is no added token of the tokenizer; these are: {' '.join(added)}")
    half = len(token) // 2
    ids = []
    for text in (token[:half], token[half:]):
        ids += tokenizer.encode(text, add_special_tokens=False)
    if not ids or set(ids).intersection(added.values()):
        raise UserError(
            f"{token!r} has no text of other tokens; train all parameters in the cold start instead"
        )
    return ids


def _write_weights(source: Path, target: Path, rows: Mapping[int, Sequence[int]]) -> None:
    """Copy a safetensors file, with rows of its tables replaced: row -> the rows whose mean it becomes."""
    tensors = {}
    with open_weights([source]) as weights:
        for name in weights.files:
            everything = (slice(None),) * len(weights.shape(name))
            tensor = weights.read(name, everything)
            if name.endswith(TABLES):
                if weights.dtype(name) not in STORED_DTYPES or len(tensor) <= max(rows):
                    raise UserError(
                        f"{source}: {name} is {weights.dtype(name)} {list(tensor.shape)}; it must have a row"
                        f" for every token of the tokenizer, in {', '.join(STORED_DTYPES)}"
                    )
                tensor = tensor.copy()
                for row, others in rows.items():
                    tensor[row] = tensor[list(others)].astype(np.float32).mean(axis=0).astype(tensor.dtype)
            tensors[name] = tensor
    save_file(tensors, target, WRITER)


def _card(model: Path, tokens: Sequence[str]) -> str:
    """Return the model card: what was changed."""
    names = ", ".join(json.dumps(token) for token in tokens)
    return (
        f"{model.name}, in which `calibadv init-tokens` gave the tokens {names} the mean of the embeddings of"
        " their text. All other weights are unchanged.\n"
    )
