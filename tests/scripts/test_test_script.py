"""scripts/test.sh with programs that only write down how they were called."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Does what is asked of the environment's Python; pytest ends with the status that FAST or SLOW names.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *"-m pip list"*) echo "jax 0.0" ;;
  *"-m pytest"*"-m not "*) echo "pytest: $*" >>"$CALLS"; exit "$FAST" ;;
  *"-m pytest"*) echo "pytest: $*" >>"$CALLS"; exit "$SLOW" ;;
esac
"""
BOTH, NO_TESTS = ["not slow", "slow"], 5


@pytest.fixture
def run(tmp_path):
    """Arguments and two statuses -> the script as it ended, and the markers of its calls of pytest."""
    venv = tmp_path / "venv"
    for folder in ("bin", "libtpu", "cuda_compiler", "trl", "tunix", "verl"):  # nothing is to be installed
        (venv / folder).mkdir(parents=True)
    mypy = "#!/usr/bin/env bash\nexit ${MYPY:-0}\n"
    for name, text in {"python": PYTHON, "ruff": "", "mypy": mypy, "chromium": ""}.items():
        (venv / "bin" / name).write_text(text or "#!/usr/bin/env bash\n")
        (venv / "bin" / name).chmod(0o755)
    (venv / "installed").write_text(f"{ROOT}[cpu,dev]\n{(ROOT / 'pyproject.toml').read_text()}")

    def call(*arguments, fast=0, slow=0, mypy=0):
        calls = tmp_path / "calls"
        calls.write_text("")
        path = f"{venv / 'bin'}:{os.environ['PATH']}"
        own = {"VENV": str(venv), "PATH": path, "CALLS": str(calls), "FAST": str(fast), "SLOW": str(slow)}
        own["MYPY"] = str(mypy)
        command, environment = ["bash", "scripts/test.sh", *arguments], os.environ | own
        answer = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
        markers = [line.rpartition(" -m ")[2].split(" tests/")[0] for line in calls.read_text().splitlines()]
        return answer, markers

    return call


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "statuses", "markers", "status", "end"),
    [
        ([], {}, BOTH, 0, ""),
        ([], {"fast": 1}, BOTH, 1, "== failed: not slow\n"),
        ([], {"slow": 1}, BOTH, 1, "== failed: slow\n"),
        ([], {"mypy": 1}, BOTH, 1, "== failed: mypy\n"),  # as with the newest numpy, whose types are others
        *[([], {"fast": other}, BOTH[:1], other, "") for other in (2, 3, 4, NO_TESTS)],
        (["--fast"], {"fast": 1}, ["not medium and not slow"], 1, ""),
        (["tests/learner"], {"fast": NO_TESTS}, BOTH, 0, ""),
    ],
    ids=str,
)
def test_failing_part_does_not_hide_the_next(run, arguments, statuses, markers, status, end):
    """But other failures of pytest end the script, and so does no test where none were chosen."""
    answer, called = run(*arguments, **statuses)
    lines = answer.stdout.splitlines()
    assert lines[lines.index("== versions") + 1].endswith(f" x {os.cpu_count()}")
    assert called == markers and answer.returncode == status
    assert answer.stderr.endswith(end) and (end or status or not answer.stderr)
