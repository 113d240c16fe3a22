"""Index folders that somebody else made: what opening them would run, contact and read, in every command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from retriever_rig import opened, refuses, write_rows

from retriever.backends import KINDS
from retriever.corpus import offsets, passages
from retriever.errors import RetrieverError
from retriever.options import parse
from retriever.service.assembly import load

ROOT = Path(__file__).parents[2]
EVIL = "given.evil:Own"


@pytest.fixture
def given(files, tmp_path, monkeypatch):
    """Returns an index folder with other entries in its manifest, beside a module that leaves a mark."""
    corpus, index = files
    monkeypatch.delenv("QDRANT_API_KEY", raising=False)
    (tmp_path / "given").mkdir()
    (tmp_path / "given/evil.py").write_text("open('mark', 'w').close()\n")
    shutil.copy(corpus, tmp_path / "corpus.jsonl")
    folder = tmp_path / "given/index"
    shutil.copytree(index, folder)

    def given(**entries):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | entries))
        return tmp_path / "corpus.jsonl", folder

    return given


def options_of(corpus, index, *more):
    return ["--corpus_path", str(corpus), "--index_path", str(index), *more]


@pytest.mark.parametrize(
    ("entries", "deed", "kind"),
    [
        ({"kind": EVIL}, f"import '{EVIL}'", EVIL),
        ({"kind": "qdrant", "url": "", "collection": "c"}, "unpickle '.*/given/index'", "qdrant"),
        ({"kind": "qdrant", "url": "/elsewhere", "collection": "c"}, "unpickle '/elsewhere'", "qdrant"),
        (
            {"kind": "qdrant", "url": "http://far:6333", "collection": "c"},
            "contact 'http://far:6333'",
            "qdrant",
        ),
        (
            {"kind": "qdrant", "url": "http://127.0.0.1.far", "collection": "c"},
            "contact 'http://127.0.0.1.far'",
            "qdrant",
        ),
    ],
)
def test_index_that_does_more_than_hold_data_needs_its_kind(given, monkeypatch, entries, deed, kind):
    corpus, index = given(**entries)
    monkeypatch.chdir(corpus.parent)
    message = f"{index}: opening this index would {deed}.*; if you trust whoever made it, add --kind '{kind}'"
    refuses(message, opened, corpus, index)
    for more in ([], ["--build_if_missing"]):
        refuses(message, load, parse(options_of(corpus, index, *more)))
    refuses("--kind faiss: .* was built with", load, parse(options_of(corpus, index, "--kind", "faiss")))
    assert not (corpus.parent / "mark").exists()


def test_key_of_a_qdrant_server_is_not_sent_even_to_this_machine(given, monkeypatch):
    corpus, index = given(kind="qdrant", url="http://127.0.0.1:1", collection="c")
    assert KINDS["qdrant"].deeds(index, json.loads((index / "manifest.json").read_text())) == []
    monkeypatch.setenv("QDRANT_API_KEY", "secret")
    refuses("would contact 'http://127.0.0.1:1' and send it QDRANT_API_KEY", opened, corpus, index)


def test_model_of_an_index_is_not_downloaded(given):
    pytest.importorskip("huggingface_hub")
    corpus, index = given(encoder="dense", model="somebody/model", words=None)
    refuses(
        "would download the model 'somebody/model'; if you want it, add --retriever_model",
        opened,
        corpus,
        index,
    )


@pytest.mark.parametrize("name", ["../../corpus.jsonl", "/etc/hostname"])
def test_manifest_names_files_of_its_folder_only(given, name):
    corpus, index = given(checksums={name: "00000000"})
    refuses(f"names the file {name}, which is not in its folder", opened, corpus, index)


def test_pickled_arrays_are_refused(given):
    np = pytest.importorskip("numpy")
    corpus, index = given(checksums={})
    np.savez(index / "encoder.npz", weights=np.array([print], object))
    with pytest.raises(RetrieverError, match=r"encoder.npz: cannot be read .*; build the index again"):
        opened(corpus, index)


def test_service_writes_nothing_beside_a_corpus_that_it_only_serves(given, monkeypatch, tmp_path):
    monkeypatch.setattr(passages, "CACHED_FROM", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    corpus, index = given()
    before = sorted(corpus.parent.rglob("*"))
    load(parse(options_of(corpus, index, "--build_if_missing")))
    kept = offsets.cache_file(corpus, is_beside=False)
    after = sorted(path for path in corpus.parent.rglob("*") if not path.is_relative_to(tmp_path / "cache"))
    assert kept.is_file() and after == before
    monkeypatch.setattr(passages, "scan", None)  # the kept offsets are used
    assert len(passages.load_corpus(corpus)) == 16
    monkeypatch.undo()
    monkeypatch.setattr(passages, "CACHED_FROM", 1)
    passages.load_corpus(write_rows(tmp_path / "own.jsonl", [{"id": "1", "contents": '"a"\nb'}]))
    assert (tmp_path / "own.jsonl.offsets").is_file()  # a corpus of a build


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "retriever.serve"], ["-m", "calibadv_jax", "retriever"]])
def test_index_with_a_kind_of_its_own_is_refused_by_every_start(given, command):
    """The current folder holds the module; the command's own folder must not be a place of modules."""
    corpus, index = given(kind=EVIL)
    home = corpus.parent
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *command, *options_of(corpus, index, "--port", "0")]
    ended = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and f"opening this index would import '{EVIL}'" in ended.stderr
    assert not (home / "mark").exists()
    named = subprocess.run(
        [*words, "--kind", EVIL], cwd=home, env=environment, capture_output=True, text=True, timeout=120
    )
    # The module is imported, and has no such class.
    assert named.returncode == 2 and (home / "mark").exists() and "no attribute 'Own'" in named.stderr


@pytest.mark.slow
def test_calibadv_retriever_imports_nothing_from_the_current_folder(tmp_path):
    """Neither by `-m`, nor by an empty entry of PYTHONPATH, which `PYTHONPATH=$PYTHONPATH:DIR` makes."""
    (tmp_path / "fastapi.py").write_text("open('mark', 'w').close()\n")
    words = options_of("corpus.jsonl", "index", "--port", "0")
    ended = subprocess.run(
        [sys.executable, "-m", "calibadv_jax", "retriever", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2 and "corpus.jsonl: no such corpus" in ended.stderr
    assert not (tmp_path / "mark").exists()
