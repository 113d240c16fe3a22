"""The folder of an index: its files, and the manifest that is written last."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from retriever.errors import RetrieverError

MANIFEST = "manifest.json"
INDEX_FILE = "index.faiss"
BM25 = "bm25"  # a folder, a kind, and a --retriever_name
KINDS = ("faiss", "jax", "qdrant")  # of vectors
BLOCK = 16 * 2**20  # bytes read at once for a checksum
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
    """Marks the folder's index as complete; it is written last."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """CRC-32 of files, by their names within the folder."""
    return {str(file.relative_to(folder)): _checksum(file) for file in sorted(files) if file.is_file()}


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Reads the index's files from beginning to end: FAISS takes random bytes for vectors.

    Raises:
        RetrieverError: one of them is not what was built.
    """
    for name, expected in manifest.get("checksums", {}).items():  # absent in manifests of earlier versions
        if _checksum(folder / name) != expected:
            raise RetrieverError(f"{folder / name}: damaged (its checksum is not the manifest's); {AGAIN}")


def _checksum(path: Path) -> str:
    value = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                value = zlib.crc32(block, value)
    except OSError as error:
        raise RetrieverError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error
    return f"{value:08x}"
