"""A test file as a program of its own, with a compiler that must not stand beside the other packages."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_with(compiler, file):
    """Runs `file`, with the packages of the folder `compiler` importable; it must succeed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, compiler)))}
    command = [sys.executable, str(Path(file).resolve())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
