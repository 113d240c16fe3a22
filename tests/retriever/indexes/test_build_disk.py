"""A full disk, two builds of one index, and files that are damaged later."""

import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("faiss")

from retriever.backends import BuildOptions, IndexOptions
from retriever.corpus.passages import load_corpus
from retriever.errors import RetrieverError
from retriever.indexes import backend as plan
from retriever.indexes import index as embeddings_module
from retriever.indexes.backend import MANIFEST, locked
from retriever.indexes.index import build_index, open_index


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [
        {"id": i, "contents": f'"Person {i}"\nlives in town {i % 7} {"street " * 20}{i}.'} for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_corpus(path)


@contextmanager
def largest_file(size):
    """No file may grow beyond this: writing then fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("options", "size", "where"),
    [
        (BuildOptions(), 500_000, "i.embeddings"),  # the vectors, 983,168 bytes
        (BuildOptions(shard_rows=8), 500_000, "i.unfinished"),  # a flat index, written by rows
        (BuildOptions(shard_rows=8, factory="SQfp16"), 300_000, "i.unfinished"),  # written by FAISS
        (BuildOptions("bm25"), 500, "i.unfinished"),
    ],
)
def test_a_disk_that_fills_up_is_one_line_and_the_build_goes_on(tmp_path, corpus, options, size, where):
    if options.retriever_name == "bm25":
        pytest.importorskip("bm25s")
    with (
        largest_file(size),
        pytest.raises(RetrieverError, match="cannot be written .*make room there") as caught,
    ):
        build_index(corpus, tmp_path / "i", options, progress=False)
    assert str(tmp_path / where) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "i").exists()
    build_index(corpus, tmp_path / "i", options, progress=False)
    assert open_index(tmp_path / "i", corpus).search(["person 17"], 1)[0][0][0]["id"] == "17"


def test_an_index_that_cannot_fit_on_the_disk_is_refused_before_it_is_written(tmp_path, corpus, monkeypatch):
    whole = type("Usage", (), {"free": 10**9})
    build_index(corpus, tmp_path / "i", BuildOptions(embeddings=tmp_path / "e"), progress=False)
    little = type("Usage", (), {"free": 982_999})
    monkeypatch.setattr(embeddings_module, "require_disk", lambda *_: None)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: little)
    with pytest.raises(RetrieverError, match="the index needs 983,040 bytes and the disk has 982,999 free"):
        build_index(corpus, tmp_path / "j", BuildOptions(embeddings=tmp_path / "e"), progress=False)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda _: whole)
    build_index(corpus, tmp_path / "j", BuildOptions(embeddings=tmp_path / "e"), progress=False)


HOLD = """
import sys
from pathlib import Path
from retriever.indexes.backend import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_two_builds_of_one_index(tmp_path, corpus):
    """The second says what is the matter; after the first has ended, or was killed, it may start."""
    for folder, kill in (("i", False), ("i", True), ("e", False)):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / folder)], **pipes)
        assert other.stdout.readline() == "held\n"
        options = BuildOptions(embeddings=tmp_path / "e")
        with pytest.raises(RetrieverError, match=f"/{folder}: another process is building it; wait until"):
            build_index(corpus, tmp_path / "i", options, progress=False)
        if kill:
            other.kill()
        other.communicate("end\n")
    build_index(corpus, tmp_path / "i", options, progress=False)
    assert sorted(os.listdir(tmp_path)) == ["e", "i"]  # no locks are left


def test_a_lock_is_given_back_by_a_build_that_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "i"):
        raise ZeroDivisionError
    with locked(tmp_path / "i"), pytest.raises(RetrieverError), locked(tmp_path / "i"):
        pass


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build_index(corpus, folder / "flat", progress=False)
    build_index(corpus, folder / "sq", BuildOptions(factory="SQ8"), progress=False)
    return folder


@pytest.mark.parametrize("kind", ["flat", "sq"])
@pytest.mark.parametrize("mmap", [False, True])
def test_random_bytes_inside_an_index_are_noticed(built, corpus, tmp_path, kind, mmap):
    copy = Path(shutil.copytree(built / kind, tmp_path / "copy"))
    open_index(copy, corpus, IndexOptions(mmap=mmap))
    data = bytearray((copy / "index.faiss").read_bytes())
    data[-1000:-900] = np.random.default_rng(0).bytes(100)
    (copy / "index.faiss").write_bytes(data)
    with pytest.raises(RetrieverError, match="index.faiss: damaged .its checksum.*build it again"):
        open_index(copy, corpus, IndexOptions(mmap=mmap))
    assert open_index(copy, corpus, IndexOptions(mmap=mmap, skip_checksum=True)).search(["person"], 1)


def test_every_file_of_an_index_has_a_checksum(built, corpus, tmp_path):
    copy = Path(shutil.copytree(built / "flat", tmp_path / "copy"))
    manifest = json.loads((copy / MANIFEST).read_text())
    assert set(manifest["checksums"]) == {path.name for path in copy.iterdir()} - {MANIFEST}
    del manifest["checksums"]  # as earlier versions wrote it
    (copy / MANIFEST).write_text(json.dumps(manifest))
    assert open_index(copy, corpus).search(["person 17"], 1)[0][0][0]["id"] == "17"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("indices", lambda rows: rows + 1000),
        ("indices", lambda rows: rows - 1000),
        ("indptr", lambda starts: starts * 3),
        ("indptr", lambda starts: starts[::-1].copy()),
        ("indptr", lambda starts: starts[:5]),
        ("data", lambda data: data[:-1]),
    ],
)
@pytest.mark.parametrize("mmap", [False, True])
def test_places_out_of_range_in_bm25_are_noticed(corpus, tmp_path_factory, tmp_path, name, change, mmap):
    pytest.importorskip("bm25s")
    whole = tmp_path_factory.getbasetemp() / "bm25-whole"
    if not whole.exists():
        build_index(corpus, whole, BuildOptions("bm25"), progress=False)
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    path = copy / "bm25" / f"{name}.csc.index.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(RetrieverError, match="not a whole BM25 index .places out of range.; build it again"):
        open_index(copy, corpus, IndexOptions(mmap=mmap))


def test_random_bytes_inside_bm25_are_noticed(corpus, tmp_path):
    pytest.importorskip("bm25s")
    build_index(corpus, tmp_path / "i", BuildOptions("bm25"), progress=False)
    path = tmp_path / "i" / "bm25" / "data.csc.index.npy"
    data = bytearray(path.read_bytes())
    data[-8:-4] = np.float32(7).tobytes()
    path.write_bytes(data)
    with pytest.raises(RetrieverError, match="data.csc.index.npy: damaged .its checksum"):
        open_index(tmp_path / "i", corpus)


def test_shards_are_files_of_numpy(tmp_path, corpus):
    options = BuildOptions(embeddings=tmp_path / "e", shard_rows=25, embedding_dtype="float16")
    build_index(corpus, tmp_path / "i", options, progress=False)
    shapes = [np.load(path, mmap_mode="r").shape for path in sorted((tmp_path / "e").glob("*.npy"))]
    assert shapes[-3:] == [(25, 4096), (25, 4096), (10, 4096)]
