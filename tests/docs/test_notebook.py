"""The quickstart's notebook: committed without results; tests/test_wheel.py runs it."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

PATH = Path(__file__).resolve().parents[2] / "examples/quickstart.ipynb"
CELLS = nbformat.read(PATH, as_version=4).cells
PROSE = [cell.source for cell in CELLS if cell.cell_type == "markdown"]


def test_notebook_is_valid_and_holds_no_results():
    nbformat.validate(nbformat.read(PATH, as_version=nbformat.NO_CONVERT))
    assert not [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")]
    assert all("%pip" in cell.source for cell in CELLS if cell.metadata)


def test_links_of_the_prose_exist():
    links = re.findall(r"\]\(([^)#]+)", "\n".join(PROSE))
    assert links and all((PATH.parent / link).is_file() for link in links)
