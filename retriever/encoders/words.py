"""What BM25 counts, and its constants: for the sparse index and for the hashed encoder."""

from __future__ import annotations

import re

K1, B = 0.9, 0.4  # Pyserini's defaults for Wikipedia passages


def words(text: str) -> list[str]:
    """Lower-case runs of letters and digits; no stemming, no stop words."""
    return re.findall(r"\w+", text.lower())
