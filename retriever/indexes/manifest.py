"""The manifest of an index: what it was built from, and the checksums of its files."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from retriever.backends import KINDS
from retriever.errors import RetrieverError

# Name of the manifest in the folder of an index; it is written last, so that an index with it is complete.
MANIFEST = "manifest.json"
# Entries that every manifest has, beside `kind`.
REQUIRED_ENTRIES = {"corpus_sha256", "documents", "encoder", "factory", "checksums"}
# Bytes read at once for a checksum.
BLOCK = 16 * 2**20
# What to do with a damaged index.
REBUILD = "build it again with python -m retriever.build_index"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the entries of the manifest in the folder of an index.

    Args:
        folder: The folder of the index.

    Returns:
        The entries: `corpus_sha256`, `documents`, `kind`, `encoder`, `factory`, `checksums`, and those of
        the encoder and of the backend.

    Raises:
        RetrieverError: The manifest is missing, damaged, or of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise RetrieverError(f"{folder}: no complete index; build it with python -m retriever.build_index")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        is_complete = manifest.keys() >= REQUIRED_ENTRIES
        is_known = manifest["kind"] in KINDS or ":" in manifest["kind"]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise RetrieverError(f"{path}: damaged ({error}); {REBUILD}") from error
    if not (is_complete and is_known):
        raise RetrieverError(f"{path}: not a manifest of this version; {REBUILD}")
    for name in manifest["checksums"]:
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts:
            raise RetrieverError(f"{path}: names the file {name}, which is not in its folder; {REBUILD}")
    return manifest


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the CRC-32 of files.

    Args:
        folder: The folder of the index.
        files: Paths below it; folders among them are left out.

    Returns:
        Eight hexadecimal digits for each file, by its name within the folder, sorted by name.
    """
    sums = {}
    for file in sorted(files):
        if file.is_file():
            sums[str(file.relative_to(folder))] = _checksum(file)
    return sums


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise RetrieverError if a file of an index is missing or is not the one that was built.

    FAISS itself takes random bytes for vectors.

    Args:
        folder: The folder of the index.
        manifest: Its manifest.
    """
    for name, expected in manifest["checksums"].items():
        path = folder / name
        if _checksum(path) != expected:
            raise RetrieverError(f"{path}: damaged (its checksum is not the manifest's); {REBUILD}")


def _checksum(path: Path) -> str:
    value = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                value = zlib.crc32(block, value)
    except OSError as error:
        raise RetrieverError(f"{path}: cannot be read ({error.strerror}); {REBUILD}") from error
    return f"{value:08x}"
