"""Makes encoders by their names, and checks that an encoder fits an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retriever.encoders.dense import PROBE_FILE, PROBE_TEXT, RECIPES, DenseEncoder
from retriever.encoders.hashed import HashedEncoder
from retriever.encoders.kept_files import reading
from retriever.errors import RetrieverError
from retriever.interfaces import CorpusRow, Encoder

# Least cosine of PROBE_TEXT's vectors by the same model: fp16 and another machine's kernels stay above 0.999.
PROBE_COSINE = 0.98
# Least cosine of a passage's vectors: lower than above, because a collection may have been built in fp16, or
# from passages that were cut elsewhere.
PASSAGE_COSINE = 0.5


def make_encoder(name: str, model: str, corpus: Sequence[CorpusRow]) -> Encoder:
    """Return an encoder for a new index.

    Args:
        name: hashed, e5, bge or dense.
        model: Folder or hub name of a sentence-transformers model; empty for the default of the name.
        corpus: Rows whose words the hashed encoder counts; other encoders do not read it.

    Returns:
        The encoder.

    Raises:
        RetrieverError: The name is unknown, or the model cannot be loaded.
    """
    if name == HashedEncoder.name:
        if model:
            raise RetrieverError(f"--retriever_model {model}: hashed has no model; leave it out")
        return HashedEncoder.fit(corpus)
    if name not in RECIPES:
        raise RetrieverError(f"encoder {name!r} is unknown; available are hashed, {', '.join(RECIPES)}, bm25")
    return DenseEncoder(name, model)


def load_encoder(folder: Path, name: str, model: str) -> Encoder:
    """Return the encoder that built an index.

    Args:
        folder: The folder that the encoder's `save` wrote into.
        name: hashed, e5, bge or dense.
        model: Folder or hub name of its model; empty for the default of the name.

    Returns:
        The encoder.

    Raises:
        RetrieverError: Its file cannot be read, or the model is not the one that built the index.
    """
    if name == HashedEncoder.name and not model:
        return HashedEncoder.load(folder)
    encoder = make_encoder(name, model, ())
    with reading(folder / PROBE_FILE) as path:
        probe = np.load(path)  # float32 [D]
    check_dimension(folder, probe.size, encoder)
    similarity = cosine(probe, encoder.encode_queries([PROBE_TEXT])[0])
    if similarity < PROBE_COSINE:
        raise RetrieverError(
            f"{folder}: built with another model than {encoder.model} ({similarity:.2f});"
            " set --retriever_model"
        )
    return encoder


def check_dimension(where: object, dimension: int, encoder: Encoder) -> None:
    """Raise RetrieverError if an index has vectors of another dimension than the encoder's.

    Args:
        where: The index, for the message.
        dimension: Dimension of its vectors.
        encoder: The encoder of the queries.
    """
    if dimension != encoder.dimension:
        raise RetrieverError(
            f"{where}: holds vectors of dimension {dimension}, and {encoder.model or encoder.name} makes"
            f" {encoder.dimension}; set --retriever_model to the model that built it"
        )


def check_vector(where: str, vector: np.ndarray, row: CorpusRow, encoder: Encoder) -> None:
    """Raise RetrieverError if the vector of a passage is not what the encoder makes of it.

    Args:
        where: The index and the passage, for the message.
        vector: float32 [D], the stored vector.
        row: The passage.
        encoder: The encoder of the queries.
    """
    similarity = cosine(vector, encoder.encode_passages([row])[0])
    if similarity < PASSAGE_COSINE:
        raise RetrieverError(
            f"{where}: its vector is not what {encoder.model} makes of its text (cosine {similarity:.2f});"
            " set --retriever_name and --retriever_model to the encoder that built it"
        )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Return the cosine of two vectors [D]; 0 if one of them is zero."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b / max(1e-12, lengths))
