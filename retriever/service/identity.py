"""What decides a service's documents, as one short string that clients can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HEADER = "X-Index-Identity"  # of every reply of POST /retrieve and POST /access
LENGTH = 32  # hexadecimal digits
# Where an index lies and what its file is like: copies, and engines that search exactly, answer alike.
_IRRELEVANT = ("kind", "bytes", "checksums", "url")


def index_identity(manifest: Mapping[str, Any], reranker: str, pages: str = "") -> str:
    """A hash of corpus, encoder, model, how the index approximates, reranker, and pages.

    Equal for two services over copies of one index, wherever and whenever they run.

    Args:
        manifest: of the searcher.
        reranker: its model; empty: none.
        pages: their hash; empty: none.
    """
    decisive = {name: value for name, value in manifest.items() if name not in _IRRELEVANT}
    text = json.dumps([decisive, reranker, *([pages] if pages else [])], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]
