"""What holds across files: who may import whom, who may print, what ships must parse and answer fast."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from calibadv_jax.config import load_config

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("data", "rollout", "rewards", "advantages", "policy", "learner", "snapshots", "metrics")
ENTRY_POINTS = ("train", "sft", "evaluate", "export", "doctor", "quickstart")
HEAVY = ("jax", "numpy", "transformers", "pydantic", "omegaconf", "yaml", "grain", "orbax", "tensorboardX")
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "retriever")


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no Python files in {package}"
    return found


def imports(path: Path) -> Iterator[str]:
    """Dotted names a file imports anywhere, relative ones made absolute."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_other_stage_and_no_entry_point(stage):
    """But for the network itself: the learner, the embedded sampler and the weight files compute with it."""
    allowed = {stage, "policy"}
    forbidden = [
        f"calibadv_jax.{name}" for name in (*STAGES, *ENTRY_POINTS, "cli", "wiring") if name not in allowed
    ]
    violations = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(f"calibadv_jax/{stage}")
        for name in imports(path)
        if any(within(name, package) for package in forbidden)
    }
    assert not violations


@pytest.mark.parametrize(("package", "other"), [("retriever", "calibadv_jax"), ("calibadv_jax", "retriever")])
def test_trainer_and_retriever_do_not_import_each_other(package, other):
    violations = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(package)
        for name in imports(path)
        if within(name, other)
    }
    assert not violations


@pytest.mark.parametrize("package", ["calibadv_jax", "retriever"])
def test_nothing_is_printed(package):
    prints = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not prints


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_parses(path):
    load_config(path)


def test_the_retrievers_config_parses():
    from retriever.options import parse

    assert parse(["--config", str(ROOT / "configs/retriever.yaml")]).retriever_name == "e5"


def test_configs_are_shipped():
    assert {
        "quickstart.yaml",
        "quickstart_grpo.yaml",
        "quickstart_vllm.yaml",
        "paper.yaml",
        "wiki_sample.yaml",
    } <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_help_answers_at_once(entry_point):
    command = [sys.executable, "-X", "importtime", "-m", f"calibadv_jax.{entry_point}", "--help"]
    best, answer = float("inf"), None
    for _ in range(3):  # the fastest of three: another process may hold the machine
        start = time.perf_counter()
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        best = min(best, time.perf_counter() - start)
        if best < 0.5:
            break
    assert answer is not None and answer.returncode == 0, answer
    assert f"usage: python -m calibadv_jax.{entry_point}" in answer.stdout
    imported = set(re.findall(r"\|\s+(\w+)", answer.stderr))
    assert "argparse" in imported, "the list of imports was not understood"
    assert not imported & set(HEAVY)
    assert best < 0.5


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_missing_config_is_one_line(entry_point):
    command = [sys.executable, "-m", f"calibadv_jax.{entry_point}", "--config", "nowhere.yaml"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: nowhere.yaml: no such config file")
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)


def test_no_python_is_one_line():
    """An empty PATH but for the tools the script itself needs: no suitable Python can be found."""
    command = ["bash", "scripts/quickstart.sh"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "/nonexistent/python3", "VENV": "/nonexistent/venv"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert answer.stderr == "error: PYTHON=/nonexistent/python3 is not a Python 3.11, 3.12 or 3.13\n"


def test_the_readme_has_exactly_two_set_up_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("\n## Set up\n")[1].split("\n## ")[0]
    commands = [
        line.split("#")[0].strip()
        for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
        for line in block.splitlines()
    ]
    assert commands == ["scripts/quickstart.sh", "scripts/test.sh"]
