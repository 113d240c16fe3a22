"""One text's vector, kept with an index: by it the model that built the index is known again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from retriever.errors import RetrieverError
from retriever.interfaces import Encoder

PROBE_FILE = "probe.npy"
PROBE_TEXT = "who wrote the book the origin of species"
LEAST_COSINE = 0.98  # fp16 and another machine's kernels stay above 0.999


def probe(encoder: Encoder) -> np.ndarray:
    """float32 [dimension]: the encoder's vector of PROBE_TEXT."""
    return encoder.encode_queries([PROBE_TEXT])[0]


def check_probe(encoder: Encoder, folder: Path) -> None:
    """Compares the encoder with the one that built the index: two models may have the same dimension.

    Raises:
        RetrieverError: their vectors of one text differ, or the kept one cannot be read.
    """
    with reading(folder / PROBE_FILE) as path:
        kept = np.load(path)  # float32 [dimension]
    if kept.shape != (encoder.dimension,):
        raise RetrieverError(
            f"{folder}: holds vectors of dimension {kept.size}, and {encoder.model} makes"
            f" {encoder.dimension}; set --retriever_model to the model that built it"
        )
    if (likeness := cosine(kept, probe(encoder))) < LEAST_COSINE:
        raise RetrieverError(
            f"{folder}: was built with another model than {encoder.model} (likeness {likeness:.2f} of one"
            " text's vectors); set --retriever_model to the model that built it"
        )


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two vectors."""
    return float(a @ b / max(1e-12, float(np.linalg.norm(a) * np.linalg.norm(b))))


@contextmanager
def reading(path: Path) -> Iterator[Path]:
    """While an encoder's file is read: what goes wrong becomes one RetrieverError that names it."""
    try:
        yield path
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise RetrieverError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); build the index again"
        ) from error
