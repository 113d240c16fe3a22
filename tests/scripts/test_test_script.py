"""scripts/test.sh with programs that only write down how they were called."""

import os
import platform
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
        answer = subprocess.run(
            ["bash", "scripts/test.sh", *arguments],
            cwd=ROOT,
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=60,
        )
        markers = [line.rpartition(" -m ")[2].split(" tests/")[0] for line in calls.read_text().splitlines()]
        return answer, markers

    return call


@pytest.mark.medium
def test_failing_part_does_not_hide_the_next(run):
    answer, markers = run(fast=1)
    assert markers == ["not slow", "slow"]
    assert answer.returncode == 1 and answer.stderr.endswith("== failed: not slow\n")
    answer, markers = run(slow=1)
    assert markers == ["not slow", "slow"] and answer.returncode == 1
    answer, markers = run()
    assert markers == ["not slow", "slow"] and (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.medium
def test_types_that_do_not_fit_hide_no_test(run):
    """As with the newest numpy, whose types are others."""
    answer, markers = run(mypy=1)
    assert markers == ["not slow", "slow"]
    assert answer.returncode == 1 and answer.stderr.endswith("== failed: mypy\n")


@pytest.mark.medium
@pytest.mark.parametrize("status", [2, 3, 4])
def test_other_failures_end_the_script(run, status):
    answer, markers = run(fast=status)
    assert markers == ["not slow"] and answer.returncode == status


@pytest.mark.medium
def test_fast_runs_one_part_and_fails_with_it(run):
    answer, markers = run("--fast", fast=1)
    assert markers == ["not medium and not slow"] and answer.returncode == 1


@pytest.mark.medium
def test_no_tests_pass_only_if_chosen(run):
    assert run("tests/learner", fast=5, slow=0)[0].returncode == 0
    assert run(fast=5)[0].returncode == 5


@pytest.mark.medium
def test_log_names_the_cpu(run):
    lines = run("--fast")[0].stdout.splitlines()
    named = lines[lines.index("== versions") + 1]
    assert named.startswith("CPU: ") and named.endswith(f" x {os.cpu_count()}")
    if platform.system() == "Linux" and "model name" in (info := Path("/proc/cpuinfo").read_text()):
        assert info.split("model name", 1)[1].split(": ", 1)[1].splitlines()[0] in named
