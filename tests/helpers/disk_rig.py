"""A disk that tests can fill."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress

import pytest

from calibadv_jax import cli


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


def refuses_full_disk(disk, path, command, capsys):
    """Whether `command`, for which `disk` has no room, ends with status 75, and a line that names `path`."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    before = sorted(place for place in disk.rglob("*") if place.is_file())
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(cli, "exit_process", sys.exit)  # whatever threads other tests have left
        cli.run_and_exit(command)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert str(path) in line and "No space left on device" in line
    assert sorted(place for place in disk.rglob("*") if place.is_file()) == before
    return ended.value.code == 75
