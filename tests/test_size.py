"""The project stays small, and names say what they hold."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.size import sizes

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "core lines": 20_000,
    "retriever lines": 4_000,
    "optional lines": 6_500,
    "test lines": 34_000,
    "modules loaded by train": 95,
    "lines loaded by train": 14_500,
    "words in README and docs": 37_400,
}
# Everyday words that hide what a name holds (docs/glossary.md has the terms).
VAGUE = {"one", "found", "said", "told", "theirs", "wanted"}
FOLDERS = ("calibadv_jax", "retriever", "scripts", "benchmarks", "experiments", "examples", "tests")


def test_size_stays_within_limits():
    too_large = {name: size for name, size in sizes().items() if size > LIMITS[name]}
    assert not too_large


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_is_a_vague_word(folder):
    vague = {
        f"{path.relative_to(ROOT)}:{names[name]} {name}"
        for path in (ROOT / folder).rglob("*.py")
        if (names := bound_names(ast.parse(path.read_text(encoding="utf-8")))).keys() & VAGUE
        for name in names.keys() & VAGUE
    }
    assert not vague
