"""Each room of the package imports only rooms below it, so that no circle can arise."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "retriever"
ROOMS = ("corpus", "encoders", "search", "indexing", "service")  # from the ground up
SHARED = {"errors", "files", "interfaces"}
ENTRY_POINTS = {"serve", "build_index", "prepare_corpus"}


def imported(path):
    """Names of this package that a file imports anywhere, without the package's own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1:] for name in names if name.split(".")[0] == "retriever")


def test_every_module_stands_in_a_known_room():
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert found == {*ROOMS, *SHARED, *ENTRY_POINTS, "options", "__init__"}


@pytest.mark.parametrize("number", range(len(ROOMS)), ids=ROOMS)
def test_a_room_imports_no_room_above_it(number):
    allowed = {*SHARED, *ROOMS[: number + 1]}
    if ROOMS[number] == "service":
        allowed.add("options")
    for path in (PACKAGE / ROOMS[number]).rglob("*.py"):
        assert {name[0] for name in imported(path)} <= allowed, path


@pytest.mark.parametrize("shared", sorted(SHARED | {"options"}))
def test_what_is_shared_imports_no_room(shared):
    assert {name[0] for name in imported(PACKAGE / f"{shared}.py")} <= SHARED
