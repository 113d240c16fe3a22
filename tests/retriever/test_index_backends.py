"""The registry of backends: a new kind is built and searched over HTTP; packages import lower ones only."""

import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from retriever_rig import refuses
from test_architecture import imports

from retriever import build_index
from retriever.backends import KINDS, Kind, Option
from retriever.options import BUILD_OPTIONS, parse
from retriever.service.assembly import load

PACKAGE = Path(__file__).parents[2] / "retriever"
ADDRESS = "matrix_backend:MatrixBackend"
LAYERS = ("corpus", "encoders", "indexes", "service", "contrib")  # from the ground up
SHARED = {"backends", "errors", "files", "interfaces", "opening"}
COMMANDS = {"serve", "build_index", "prepare_corpus"}


def search(paths, *options):
    with TestClient(load(parse([*paths, *options]))) as client:
        reply = client.post("/retrieve", json={"queries": ["cy dorn"], "topk": 2, "return_scores": True})
        return client.get("/health").json(), reply.json()["result"][0]


@pytest.mark.parametrize("is_registered", [False, True])
def test_new_backend_is_searched_over_http(tmp_path, files, monkeypatch, capsys, is_registered):
    """By its address, or by an entry of the table with an option of its own."""
    kind, options = ADDRESS, []
    if is_registered:
        kind, options = "matrix", ["--matrix_scale", "2"]
        build = {"matrix_scale": Option("factor", 1)}
        monkeypatch.setitem(KINDS, kind, Kind(ADDRESS, package="numpy", build_options=build))
        monkeypatch.setitem(BUILD_OPTIONS, "matrix_scale", build["matrix_scale"])
    paths = ["--corpus_path", str(files[0]), "--index_path", str(tmp_path / "index")]
    state, items = search(paths, "--build_if_missing", "--kind", kind, *options)
    assert [item["document"]["id"] for item in items] == ["11"] + [items[1]["document"]["id"]]
    assert (state["kind"], state["factory"], state["dimension"]) == (kind, kind, 4096)
    _, exact = search(["--corpus_path", str(files[0]), "--index_path", str(files[1])])
    factor = 2 if is_registered else 1
    assert items[0]["score"] == pytest.approx(factor * exact[0]["score"], rel=1e-5)
    manifest = json.loads((tmp_path / "index" / "manifest.json").read_text())
    assert set(manifest["checksums"]) == {"encoder.npz", "matrix.npy"} and manifest["scale"] == factor
    refuses(f"--mmap: has no meaning for an index of kind {kind}", search, [*paths, "--kind", kind], "--mmap")
    paths[-1] = str(tmp_path / "another")  # the backend's own check
    assert build_index.main([*paths, "--kind", ADDRESS, "--search", "slow"]) == 2
    assert capsys.readouterr().err == "error: --search slow: fast or nothing\n"


def imported(path):
    """Parts of this package that a file imports anywhere."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("retriever.")}


def test_every_module_has_a_layer():
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert names == {*LAYERS, *SHARED, *COMMANDS, "options", "__init__"}


def test_layers_import_lower_layers_only():
    """The core loads contrib by name only."""
    allowed = dict.fromkeys([*SHARED, "options"], SHARED)
    for number, layer in enumerate(LAYERS):
        allowed[layer] = {*SHARED, *LAYERS[: number + 1]} | ({"options"} if layer == "service" else set())
    for name, names in allowed.items():
        paths = [*PACKAGE.glob(f"{name}.py"), *(PACKAGE / name).rglob("*.py")]
        assert paths and not [path for path in paths if not imported(path) <= names]
