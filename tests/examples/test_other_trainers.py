"""CalibAdv in other trainers: the examples run with the real packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = {"trl": "torch", "tunix": "sentencepiece", "verl": "torch"}  # -> a package beside its folder


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_gets_equal_advantages(tmp_path, trainer):
    packages = Path(sys.prefix) / trainer  # where scripts/test.sh puts them
    if not packages.is_dir():
        pytest.skip(f"no {trainer}; scripts/test.sh installs it")
    pytest.importorskip(TRAINERS[trainer])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}
    environment["VERL_USE_EXTERNAL_MODULES"] = "examples.verl_calibadv"
    command = [sys.executable, ROOT / f"tests/examples/{trainer}_steps.py", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
