"""A disk that tests can fill."""

from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 2 MiB; skips where this process may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
