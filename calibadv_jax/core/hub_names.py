"""Names of repositories of a HuggingFace hub, told apart from paths; nothing is contacted."""

from __future__ import annotations

import os
import re
from pathlib import Path

DATASETS = "hf://datasets/"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_repository(name: str) -> bool:
    """Return whether a name is ``OWNER/NAME`` or ``OWNER/NAME@REVISION``, and neither it nor OWNER a path."""
    owner = name.split("/")[0]
    is_path = Path(name).exists() or Path(owner).exists()
    return _REPOSITORY.fullmatch(name) is not None and not is_path


def is_cached_model(repository: str) -> bool:
    """Return whether files of a model were downloaded before.

    Args:
        repository: OWNER/NAME or OWNER/NAME@REVISION.
    """
    name, _, _ = repository.partition("@")
    folder = f"models--{name.replace('/', '--')}"
    return (_cache() / folder / "snapshots").is_dir()


def _cache() -> Path:
    """Return the cache of huggingface_hub, whose import would take too long for the command line."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(home).expanduser() / "hub"
