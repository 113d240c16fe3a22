"""Gives untrained tokens rows of their own: ``calibadv init-tokens MODEL --tokens … --output FOLDER``.

The rows of a token, in the embeddings and in the output head, are drawn from the normal distribution that the
other tokens' rows have, dimension by dimension. So the token has a direction of its own, and adapters can
learn to write it. The mean of the rows of the token's text would not do: its logit is the mean of their
logits, so that the token is never likelier than all of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

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

MOST_ROWS = 4096  # of a table, evenly spaced, from which its mean and its deviation are taken
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
    """Write the folder, and say so."""
    init_tokens(arguments.model, arguments.tokens, arguments.output)
    sys.stdout.write(f"written to {arguments.output}\n")


def init_tokens(model: Path, tokens: Sequence[str], output: Path) -> None:
    """Write a copy of a model in which tokens have rows of their own.

    Args:
        model: a HuggingFace folder; it is not changed.
        tokens: added tokens of its tokenizer.
        output: the folder to write, complete or not at all.

    Raises:
        UserError: `output` exists, a token is not one of the tokenizer's added ones, files of the model are
            missing or damaged, or none of its tensors is named as embeddings or output head are.
    """
    if output.exists():
        raise UserError(f"{output}: exists already; choose another --output")
    hf_config = read_hf_config(model)
    weights = weight_files(model)
    tokenizer = load_tokenizer(model)
    added = tokenizer.get_added_vocab()
    unknown = [token for token in tokens if token not in added]
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise UserError(f"{names}: no added token of the tokenizer; these are: {' '.join(added)}")
    rows = [added[token] for token in tokens]
    with open_weights(weights) as opened:
        if not any(name.endswith(TABLES) for name in opened.files):
            raise UserError(
                f"{model}: no tensor is named {' or '.join(TABLES)}; give a model as in docs/models.md"
            )
    with atomic_folder(output) as partial:
        for path in weights:
            _write_weights(path, partial / path.name, rows)
        if weights != [model / SINGLE]:
            write_text(partial / INDEX, (model / INDEX).read_text(encoding="utf-8"))
        copy_tokenizer(model, partial)
        write_json(partial / CONFIG, hf_config)
        write_text(partial / CARD, _card(model, tokens))


def _write_weights(source: Path, target: Path, rows: Sequence[int]) -> None:
    """Copy a safetensors file; these rows of its tables are drawn anew."""
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
                tensor[rows] = _drawn_rows(tensor, rows).astype(tensor.dtype)
            tensors[name] = tensor
    save_file(tensors, target, WRITER)


def _drawn_rows(table: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Return rows [len(rows), D] with the table's mean and deviation; the number of a row is its seed."""
    others = table[:: max(1, len(table) // MOST_ROWS)].astype(np.float32)
    noise = np.stack([np.random.default_rng(row).normal(size=table.shape[1]) for row in rows])
    return others.mean(axis=0) + others.std(axis=0) * noise


def _card(model: Path, tokens: Sequence[str]) -> str:
    """Return the model card, which says what was changed."""
    names = ", ".join(json.dumps(token) for token in tokens)
    return (
        f"{model.name}, in which `calibadv init-tokens` drew the rows of the tokens {names} anew, in the"
        " embeddings and in the output head. All other weights are unchanged.\n"
    )
