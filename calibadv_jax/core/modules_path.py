"""The places in which child processes look for modules: not the current folder, which may be anybody's."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

# Folder that holds this package: a source tree, or Python's folder of installed packages.
_HOME = str(Path(__file__).parents[2])


def safe_path() -> dict[str, str]:
    """Return the environment variables with which Python does not look for modules in the current folder.

    A child that is started as ``python -m MODULE`` would import its modules from there first. Folders that
    PYTHONPATH names stay, even the current one; an empty entry, which also stands for it, is dropped.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [entry for entry in entries if entry]
    is_installed = _HOME in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    if not is_installed and _HOME not in folders:
        folders.append(_HOME)
    variables = {"PYTHONSAFEPATH": "1"}
    if entries != [""] or folders:
        variables["PYTHONPATH"] = os.pathsep.join(folders)
    return variables
