"""Where child processes look for modules."""

import os
import subprocess
import sys

from calibadv_jax.core.modules_path import safe_path


def search_path(folder, environment):
    """Return sys.path of a child that is started in a folder."""
    code = [sys.executable, "-c", "import sys; print(*sys.path, sep='\\n')"]
    ended = subprocess.run(code, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return ended.stdout.splitlines()


def test_current_folder_is_no_place_of_modules(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/mine", ""]))
    assert "" in search_path(tmp_path, dict(os.environ))
    path = search_path(tmp_path, {**os.environ, **safe_path()})
    assert "" not in path and str(tmp_path) not in path and "/mine" in path
    monkeypatch.setenv("PYTHONPATH", ".")  # named by the user
    assert str(tmp_path) in search_path(tmp_path, {**os.environ, **safe_path()})


def test_this_package_is_found_without_the_current_folder(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    words = [sys.executable, "-c", "import calibadv_jax, retriever"]
    subprocess.run(words, cwd="/", env={**os.environ, **safe_path()}, check=True, timeout=60)
