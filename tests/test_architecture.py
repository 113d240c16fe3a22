"""What holds across files: who may import whom and when, how long a file is, what ships must parse."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from calibadv_jax.cli import COMMANDS, CORE, TOOLS
from calibadv_jax.cli import module_of as module_of_command
from calibadv_jax.config import known_keys
from retriever.options import parse

ROOT = Path(__file__).resolve().parent.parent
# The packages of calibadv_jax, floor by floor from the ground: each imports itself and lower floors only.
FLOORS: tuple[set[str], ...] = (
    {"core"},
    {"config"},
    {"protocols"},
    {"advantages", "data", "evaluation", "metrics", "policy", "rewards", "rollout", "services"},
    {"distributed", "learner", "rollout_store", "sampler", "snapshots"},
    {"run"},
    {"commands"},
    {"contrib"},
)
# Most modules of this project that a core command loads; optional parts are loaded when they are used.
MAX_LOADED_MODULES = 145
# Everyday words that hide what a name holds; docs/glossary.md has the terms.
VAGUE_NAMES = {"one", "found", "said", "told", "theirs", "wanted"}
OPTIONAL = {
    # tensorboardX is always there, but imports torch; httpx2 and mcp_types come with mcp.
    "calibadv_jax": {"matplotlib", "mcp", "mlflow", "prometheus_client", "tensorboardX", "vllm", "wandb"}
    | {"httpx2", "mcp_types", "IPython", "tokamax"},
    "retriever": {"bm25s", "faiss", "jax", "qdrant_client", "sentence_transformers", "torch"},
}
# Parts that a config key chooses: the function that reads the key imports them.
CHOSEN = {
    f"calibadv_jax.{name}"
    for name in (
        *("commands.evaluate", "commands.tool_demonstration_tokens", "metrics.trackers"),
        *("run.critic_training", "run.tracking"),
        *("rollout.tool_protocol", "protocols.formats", "policy.kernels.blockwise", "policy.kernels.splash"),
        *("policy.kernels.triton", "policy.kernels.tokamax_kernels"),
        *("snapshots.peft", "snapshots.publish", "snapshots.mirror"),
        *("sampler.jax_sampler", "sampler.vllm_sampler", "sampler.rollout_workers"),
    )
}
LAUNCHERS = {  # --help needs nothing installed, and the number of threads is set before NumPy loads
    ROOT / "retriever" / "serve.py",
    ROOT / "retriever" / "build_index.py",
    ROOT / "retriever" / "prepare_corpus.py",
}
KEYS = known_keys().keys()


def sources(package: str) -> list[Path]:
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths, f"no Python files in {package}"
    return paths


def module_of(path: Path) -> str:
    """Dotted name of a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def names_in(node: ast.AST) -> Iterator[str]:
    """Dotted names that an import statement names; none for other nodes."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names a file imports anywhere."""
    return tuple(name for node in ast.walk(tree(path)) for name in names_in(node))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def forbidden_imports(folder: str, packages: set[str]) -> set[str]:
    """Return the imports of these packages by files of the folder."""
    return {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources(folder)
        for name in imports(path)
        if any(within(name, package) for package in packages)
    }


def test_packages_import_lower_floors_only():
    folders = {path.name for path in (ROOT / "calibadv_jax").iterdir() if (path / "__init__.py").is_file()}
    assert folders == set().union(*FLOORS)
    loose = {path.stem for path in (ROOT / "calibadv_jax").glob("*.py")} - {"__init__"}
    for number, floor in enumerate(FLOORS):
        for package in floor:
            above = set().union(*FLOORS[number:], loose) - {package}
            others = {f"calibadv_jax.{name}" for name in above}
            assert not forbidden_imports(f"calibadv_jax/{package}", others)


def test_trainer_and_retriever_do_not_import_each_other():
    assert not forbidden_imports("retriever", {"calibadv_jax"}) | forbidden_imports(
        "calibadv_jax", {"retriever"}
    )


# Imports every command in turn, each time without the modules of this project; other libraries stay.
LOADED = """
import importlib, json, sys
loaded = {}
for command in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "calibadv_jax"]:
        del sys.modules[name]
    importlib.import_module(f"calibadv_jax.commands.{command}")
    loaded[command] = [name for name in sys.modules if name.partition(".")[0] == "calibadv_jax"]
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded_modules() -> dict[str, list[str]]:
    """Return the modules of this project that each core command loads."""
    program = [sys.executable, "-c", LOADED, *CORE]
    done = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    loaded: dict[str, list[str]] = json.loads(done.stdout)
    return loaded


@pytest.mark.parametrize("command", CORE)
def test_core_command_loads_no_optional_module(loaded_modules, command):
    modules = loaded_modules[command]
    assert f"calibadv_jax.commands.{command}" in modules
    assert not [name for name in modules if within(name, "calibadv_jax.contrib")]
    assert len(modules) <= MAX_LOADED_MODULES


@pytest.mark.parametrize("package", ["calibadv_jax", "retriever", "benchmarks", "experiments", "scripts"])
def test_top_level_names_are_not_of_pythons_library(package):
    """A file that is run by its path finds its neighbours before Python's own modules."""
    assert not {path.stem for path in (ROOT / package).iterdir()} & sys.stdlib_module_names


def bound_names(tree: ast.Module) -> dict[str, int]:
    """Names of variables, arguments, attributes and functions, with the line of the first."""
    names: dict[str, int] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.setdefault(name, node.lineno)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.setdefault(name, node.lineno)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.setdefault(name, node.lineno)
    return names


@pytest.mark.parametrize("package", ["calibadv_jax", "retriever"])
def test_no_name_is_a_vague_word(package):
    vague = set()
    for path in sources(package):
        names = bound_names(tree(path))
        vague |= {f"{path.relative_to(ROOT)}:{names[name]} {name}" for name in names.keys() & VAGUE_NAMES}
    assert not vague


@pytest.mark.parametrize("package", ["calibadv_jax", "retriever"])
def test_imports_form_no_circle(package):
    modules = {module_of(path): path for path in sources(package)}
    graph = {name: set(imports(path)) & set(modules) - {name} for name, path in modules.items()}
    for name, path in modules.items():
        if path.name == "__init__.py":  # a package that gathers its modules is no circle with them
            graph[name] = {imported for imported in graph[name] if not within(imported, name)}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", ["calibadv_jax", "retriever"])
def test_functions_import_optional_and_chosen_parts_only(package):
    violations = {
        f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"
        for path in set(sources(package)) - LAUNCHERS
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        for name in names_in(node)
        if name.partition(".")[0] not in OPTIONAL[package]
        and name not in CHOSEN
        and name.rpartition(".")[0] not in CHOSEN
    }
    assert not violations


@pytest.mark.parametrize(
    "package", ["calibadv_jax", "retriever", "scripts", "benchmarks", "experiments", "tests"]
)
def test_length_of_files_and_functions(package):
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(package)}
    long = {f"{path.relative_to(ROOT)}: {length}" for path, length in lengths.items() if length > 700}
    long |= {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1}"
        for path in sources(package)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80
    }
    assert not long


# First parts of dotted names in docstrings and comments that are no modules of this project.
OUTSIDE = {
    *("asyncio", "dataclasses", "jax", "nnx", "pyarrow", "scipy", "select", "sys", "vllm"),
    *("config", "metrics", "sampling", "turns"),  # arguments of that name, metrics.jsonl, a column
}


def test_docstrings_name_existing_modules():
    """A file name exists, and `module.name` in backticks is a word of a module, or a config key."""
    paths = [*sources("calibadv_jax"), *sources("retriever")]
    files = {path.name for path in ROOT.rglob("*.py")} | {"inspect.py", "my_reward.py"}
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    modules: dict[str, str] = {}
    for path, text in texts.items():
        for name in (path.stem, path.parent.name, path.parent.parent.name):
            modules[name] = f"{modules.get(name, '')} {path.parent.name} {path.stem} {text}"
    documents = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    missing = set()
    for path in paths:
        docs = [ast.get_docstring(node) or "" for node in ast.walk(tree(path)) if isinstance(node, documents)]
        text = "\n".join([*docs, *re.findall(r"#(.*)", texts[path])])
        missing |= {
            (path, name) for name in re.findall(r"(?<![\w.])([a-z_]+\.py)\b", text) if name not in files
        }
        for module, name in set(re.findall(r"`([a-z_]+)\.([A-Za-z_]\w*)[`.(]", text)):
            is_key = any(key == f"{module}.{name}" or key.startswith(f"{module}.{name}.") for key in KEYS)
            if module not in OUTSIDE and not is_key:
                code = modules.get(module, "").replace(f"`{module}.{name}", "")
                missing |= set() if re.search(rf"\b{name}\b", code) else {(path, f"{module}.{name}")}
    assert not missing


def test_config_of_the_service_parses():
    assert parse(["--config", str(ROOT / "configs/retriever.yaml")]).retriever_name == "e5"


def test_commands_have_modules_that_run():
    for command in (*COMMANDS, *TOOLS):
        module = importlib.import_module(module_of_command(command))
        assert callable(module.run) and (command in COMMANDS or callable(module.add_arguments))


def test_optional_parts_exist():
    """The core loads them by name, which no import checker follows."""
    texts = [path.read_text(encoding="utf-8") for path in sources("calibadv_jax")]
    names = {name for text in texts for name in re.findall(r'load_optional\("([\w.]+)"\)', text)}
    assert {"judge", "probe"} <= names
    for name in sorted(names):
        assert importlib.util.find_spec(f"calibadv_jax.contrib.{name}") is not None, name


def test_modules_run_by_name_have_a_main():
    """A module without its ``if __name__ == "__main__"`` would end at once, with status 0."""
    folders = [ROOT / name for name in ("docs", "scripts", "benchmarks", "experiments", "configs", "tests")]
    paths = [path for folder in folders for path in folder.rglob("*.*")] + [ROOT / "README.md"]
    texts = [path for path in paths if path.suffix in (".md", ".sh", ".py", ".yaml")]
    pattern = re.compile(r"-m[\s\",]+((?:calibadv_jax|retriever|benchmarks|experiments|scripts)(?:\.\w+)*)")
    named = {name for path in texts for name in pattern.findall(path.read_text(encoding="utf-8"))}
    assert {"calibadv_jax", "calibadv_jax.train", "retriever.serve", "benchmarks.kill"} <= named
    for name in sorted(named):
        path = ROOT / name.replace(".", "/")
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        assert "__main__" in file.read_text(encoding="utf-8"), name


@pytest.mark.parametrize("script", ["scripts/quickstart.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script):
    path = ROOT / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=250)


def test_unused_programs_are_forgotten(tmp_path):
    for name, days in (("used", 13), ("unused", 16)):
        (tmp_path / name).write_text("")
        # Compiled long ago; the time of the last reading counts.
        os.utime(tmp_path / name, (time.time() - 86_400 * days, time.time() - 86_400 * 100))
    for folder in (tmp_path, tmp_path / "nowhere"):
        command = f'source scripts/common.sh; forget_unused "{folder}"'
        subprocess.run(["bash", "-euc", command], cwd=ROOT, check=True, timeout=250)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_no_python_is_one_line():
    """An empty PATH but for the tools the script itself needs: no suitable Python can be found."""
    command = ["bash", "scripts/quickstart.sh"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "/nonexistent/python3", "VENV": "/nonexistent/venv"}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert answer.returncode == 2
    assert answer.stderr == "error: PYTHON=/nonexistent/python3 is not a Python 3.11, 3.12 or 3.13\n"
