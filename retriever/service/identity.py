"""The identity of what is searched: services with the same one answer alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Header of every reply of POST /retrieve and POST /access.
HEADER = "X-Index-Identity"
# Hexadecimal digits of the identity.
IDENTITY_LENGTH = 32
# Entries of the manifest that are no part of it: place and file format of an index. Copies of an index, and
# engines that search exactly, answer alike.
IRRELEVANT = ("kind", "bytes", "checksums", "url")


def index_identity(manifest: Mapping[str, Any], reranker: str, pages: str = "") -> str:
    """Return a hash of all that decides results.

    Services over copies of one index have the same, wherever they run.

    Args:
        manifest: The manifest of the index: corpus, encoder and approximation count.
        reranker: Model of the reranker; empty without one.
        pages: Hash of the pages; empty without any.

    Returns:
        IDENTITY_LENGTH hexadecimal digits.
    """
    entries = {name: value for name, value in manifest.items() if name not in IRRELEVANT}
    decisive: list[Any] = [entries, reranker]
    if pages:
        decisive.append(pages)
    text = json.dumps(decisive, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_LENGTH]
