"""CalibAdv in other trainers: the examples run with the real packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRL = Path(sys.prefix) / "trl"  # where scripts/test.sh puts it
EXAMPLES = {"trl": "examples/trl_calibadv.py"}


@pytest.mark.parametrize("path", EXAMPLES.values())
def test_example_has_at_most_eighty_lines(path):
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= 80


@pytest.mark.slow
@pytest.mark.skipif(not TRL.is_dir(), reason="no TRL; scripts/test.sh installs it")
def test_trl_trains_with_equal_advantages(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TRL), str(ROOT)])}
    command = [sys.executable, ROOT / "tests/examples/trl_steps.py", tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
