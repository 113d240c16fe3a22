"""scripts/test.sh with programs that only write down how they were called."""

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Does what is asked of the environment's Python; pytest ends with the status that FAST or SLOW names.
PYTHON = """
case "$*" in
  *"-m pip list"*) echo "jax 0.0" ;;
  *"-m pytest"*"-m not "*) echo "pytest: $*" >>"$CALLS"; exit "$FAST" ;;
  *"-m pytest"*) echo "pytest: $*" >>"$CALLS"; exit "$SLOW" ;;
esac
"""
PROGRAMS = {"python": PYTHON, "ruff": "", "mypy": "exit $MYPY", "chromium": ""}
BOTH, NO_TESTS = ["not slow", "slow"], 5


@pytest.fixture
def run(tmp_path):
    """Runs the script with statuses of its programs; gives how it ended, and the markers for pytest."""
    venv, calls = tmp_path / "venv", tmp_path / "calls"
    for folder in ("bin", "libtpu", "cuda_compiler", "trl", "tunix", "verl"):  # nothing is to be installed
        (venv / folder).mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (venv / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (venv / "bin" / name).chmod(0o755)
    (venv / "installed").write_text(f"{ROOT}[cpu,dev]\n{(ROOT / 'pyproject.toml').read_text()}")
    own = {"VENV": str(venv), "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls)}

    def run(arguments, statuses):
        environment = os.environ | own
        environment |= {name: str(statuses.get(name, 0)) for name in ("FAST", "SLOW", "MYPY")}
        done = subprocess.run(
            ["bash", "scripts/test.sh", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
        )
        called = calls.read_text().splitlines()
        return done, [line.rpartition(" -m ")[2].split(" tests/")[0] for line in called]

    return run


@pytest.mark.medium
@pytest.mark.parametrize(
    ("arguments", "statuses", "markers", "status", "end"),
    [
        ([], {}, ["not slow"], 0, ""),
        (["--slow"], {}, ["slow"], 0, ""),
        (["--all"], {}, BOTH, 0, ""),
        ([], {"FAST": 1}, ["not slow"], 1, "== failed: not slow\n"),
        (["--slow"], {"SLOW": 1}, ["slow"], 1, "== failed: slow\n"),
        (["--all"], {"FAST": 1}, BOTH, 1, "== failed: not slow\n"),
        (["--all"], {"SLOW": 1}, BOTH, 1, "== failed: slow\n"),
        # As with the newest numpy, whose types are others.
        ([], {"MYPY": 1}, ["not slow"], 1, "== failed: mypy\n"),
        *[(["--all"], {"FAST": other}, BOTH[:1], other, "") for other in (2, 3, 4, NO_TESTS)],
        (["--fast"], {"FAST": 1}, ["not medium and not slow"], 1, ""),
        (["tests/learner"], {"FAST": NO_TESTS}, BOTH, 0, ""),
    ],
    ids=str,
)
def test_failing_part_does_not_hide_the_next(run, arguments, statuses, markers, status, end):
    """But other failures of pytest end the script, and so does no test where none were chosen."""
    answer, called = run(arguments, statuses)
    lines = answer.stdout.splitlines()
    assert lines[lines.index("== versions") + 1].endswith(f" x {os.cpu_count()}")
    assert called == markers and answer.returncode == status
    assert answer.stderr.endswith(end) and (end or status or not answer.stderr)


@pytest.mark.medium
def test_log_names_the_cpu(run):
    answer, _ = run(["--fast"], {})
    lines = answer.stdout.splitlines()
    named = lines[lines.index("== versions") + 1]
    assert named.startswith("CPU: ") and named.endswith(f" x {os.cpu_count()}")
    if platform.system() == "Linux":
        model = re.search("model name.*?: (.*)", Path("/proc/cpuinfo").read_text())
        assert model is None or model[1] in named
