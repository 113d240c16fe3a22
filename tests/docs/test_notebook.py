"""The quickstart's notebook: committed without results, and in step with package and docs."""

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.metrics.catalogue import find

nbformat = pytest.importorskip("nbformat")
inputs = pytest.importorskip("IPython.core.inputtransformer2")

PATH = Path(__file__).resolve().parents[2] / "examples/quickstart.ipynb"
CELLS = nbformat.read(PATH, as_version=4).cells
CODE = [cell.source for cell in CELLS if cell.cell_type == "code"]
PROSE = [cell.source for cell in CELLS if cell.cell_type == "markdown"]


def test_notebook_is_valid_and_holds_no_results():
    nbformat.validate(nbformat.read(PATH, as_version=nbformat.NO_CONVERT))
    assert not [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")]
    assert [cell.source for cell in CELLS if cell.metadata] == [source for source in CODE if "%pip" in source]


@pytest.mark.parametrize("source", CODE, ids=range(len(CODE)))
def test_cell_parses_and_its_names_exist(source):
    for node in ast.walk(ast.parse(inputs.TransformerManager().transform_cell(source))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("calibadv_jax"):
            assert all(hasattr(importlib.import_module(node.module), name.name) for name in node.names)
    assert all(find(metric) for metric in re.findall(r'"((?:reward|advantage)/[\w/]+)"', source))
    assert max(map(len, source.splitlines())) <= 110


def test_config_of_the_training_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (config,) = (source for source in CODE if source.startswith("%%writefile small.yaml\n"))
    Path("small.yaml").write_text(config.split("\n", 1)[1])
    (command,) = re.findall(r"!{calibadv} quickstart (.*)", "\n".join(CODE))
    parsed = cli.parse("calibadv", "", shlex.split(command.format(RUN="a", STEPS=2)))
    assert load_config(parsed.configs, parsed.overrides, with_inputs=True).learner.steps == 2


def test_prose_is_short_and_links_exist():
    links = re.findall(r"\]\(([^)#]+)", "\n".join(PROSE))
    assert links and all((PATH.parent / link).is_file() for link in links)
    assert sum(len(source.split()) for source in PROSE) <= 450
    assert all(source.startswith("#") for source in PROSE)
