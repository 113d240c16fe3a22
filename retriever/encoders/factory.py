"""Encoders by name: made for a new index, or read back from the folder of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retriever.encoders.dense import RECIPES, DenseEncoder
from retriever.encoders.hashed import HashedEncoder
from retriever.encoders.probe import check_probe
from retriever.errors import RetrieverError
from retriever.interfaces import Encoder, Row


def make_encoder(name: str, model: str, corpus: Sequence[Row]) -> Encoder:
    """An encoder for a new index.

    Args:
        model: folder or hub name of a sentence-transformers model; empty for the name's own.

    Raises:
        RetrieverError: no such encoder, or its model cannot be loaded.
    """
    if name == HashedEncoder.name:
        if model:
            raise RetrieverError(f"--retriever_model {model}: hashed has no model; leave it out")
        return HashedEncoder.fit(corpus)
    if name not in RECIPES:
        raise RetrieverError(f"encoder {name!r} is unknown; available are hashed, {', '.join(RECIPES)}, bm25")
    return DenseEncoder(name, model)


def load_encoder(folder: Path, name: str, model: str) -> Encoder:
    """The encoder that `save` wrote into a folder.

    Raises:
        RetrieverError: no such encoder, no such model, or a model that is not the index's.
    """
    if name == HashedEncoder.name and not model:
        return HashedEncoder.load(folder)
    encoder = make_encoder(name, model, ())
    check_probe(encoder, folder)
    return encoder
