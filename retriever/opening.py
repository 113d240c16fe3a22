"""What opening an index does beyond reading data: an index may come from somebody else.

Imports nothing heavy: the command lines read the registry of backends, which names these functions.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Variable of the environment that holds the key of a Qdrant server.
QDRANT_KEY = "QDRANT_API_KEY"
# Addresses that only this machine answers.
_LOOPBACK = re.compile(r"https?://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?/?", re.IGNORECASE)


def reads_data(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return no deed: the files of the index are data."""
    return []


def qdrant_deeds(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return what opening an index of the kind qdrant does.

    Args:
        folder: Folder of the index.
        manifest: Its manifest, whose `url` is the address of a server, another folder, or empty.
    """
    url = str(manifest.get("url", ""))
    if "://" not in url:
        # The embedded mode of qdrant-client keeps every point as a pickle.
        place = Path(url) if url else folder
        return [f"unpickle {str(place)!r}, which can run any code"]
    if os.environ.get(QDRANT_KEY):
        return [f"contact {url!r} and send it {QDRANT_KEY}"]
    if not _LOOPBACK.fullmatch(url):
        return [f"contact {url!r}"]
    return []


def find_own_module(kind: str | None) -> None:
    """Let a kind that the user named, ``package.module:Class``, be imported from the current folder.

    Commands start this package without the current folder among the places of modules (PYTHONSAFEPATH).

    Args:
        kind: Value of --kind; None if it was not given.
    """
    if kind and ":" in kind and sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
