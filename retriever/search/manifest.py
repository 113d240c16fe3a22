"""The folder of an index: its files, and the manifest that is written last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from retriever.errors import RetrieverError

MANIFEST = "manifest.json"
INDEX_FILE = "index.faiss"
BM25 = "bm25"  # a folder, a kind, and a --retriever_name
KINDS = ("faiss", "jax", "qdrant")  # of vectors
AGAIN = "build it again with python -m retriever.build_index"


def is_index(path: Path) -> bool:
    """Whether a complete index, or a bare file of one, lies there."""
    return path.is_file() or (path / MANIFEST).is_file()


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `write_manifest` wrote, or an earlier version's.

    Raises:
        RetrieverError: there is none, or it is damaged.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise RetrieverError(f"{folder}: no complete index; build it with python -m retriever.build_index")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        missing = {"corpus_sha256", "documents", "encoder", "factory"} - set(manifest)
    except (ValueError, TypeError) as error:
        raise RetrieverError(f"{path}: damaged ({error}); {AGAIN}") from error
    if missing or manifest.get("kind", "faiss") not in (*KINDS, BM25):
        raise RetrieverError(f"{path}: not a manifest of this version; {AGAIN}")
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Marks the folder's index as complete."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
