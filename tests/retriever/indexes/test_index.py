"""Building, stopped and continued, and opening an index of each kind; full disks, locks, damaged files."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from retriever_rig import bm25_scores, brute_force_ids, ids, people_corpus, refuses, write_flat

from retriever.backends import BuildOptions, IndexOptions
from retriever.encoders.hashed import HashedEncoder
from retriever.errors import RetrieverError
from retriever.indexes import bm25 as bm25_module
from retriever.indexes import build as build_module
from retriever.indexes import jax as jax_index
from retriever.indexes import progress as progress_module
from retriever.indexes.build import build_index, embed
from retriever.indexes.index import Index, open_index
from retriever.indexes.lock import locked
from retriever.indexes.manifest import MANIFEST

LINE = r"encode: (\d+) of 30 \((\d+\.\d) %\), +([\d.]+) passages/s, (\d\d:\d\d) left"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return people_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 30)


def device(platform, limit=None, in_use=0):
    """As much of a JAX device as the check of its memory reads; a platform may report nothing."""
    stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": in_use}
    return SimpleNamespace(platform=platform, memory_stats=lambda: stats)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([device("cpu")] * 8, None),
        ([device("cpu", 100)] * 8, None),  # simulated devices share the machine's memory
        ([device("gpu", 100, 30)], 70),
        ([device("gpu", 100, 30)] * 4, 280),
        ([device("tpu")] * 4, None),
    ],
)
def test_vectors_must_fit_all_devices(devices, expected):
    assert jax_index._free_memory(devices) == expected


def build(corpus, folder, progress=False, **options):
    build_index(corpus, folder, BuildOptions(**options), progress=progress)


def first_id(corpus, folder, **options):
    return open_index(folder, corpus, IndexOptions(**options)).search(["person 17"], 1)[0][0][0]["id"]


@pytest.fixture
def stop_after(monkeypatch):
    """Makes encoding fail after a number of passages, and counts those encoded."""
    encode = HashedEncoder.encode_passages
    state = {"encoded": 0, "limit": 10**9}

    def counted(self, rows):
        if state["encoded"] + len(rows) > state["limit"]:
            raise ZeroDivisionError
        state["encoded"] += len(rows)
        return encode(self, rows)

    monkeypatch.setattr(HashedEncoder, "encode_passages", counted)
    monkeypatch.setattr(build_module, "BLOCK", 4)
    return state


def test_stopped_build_continues(tmp_path, corpus, stop_after, monkeypatch, capsys):
    stop_after["limit"] = 20
    with pytest.raises(ZeroDivisionError):
        build(corpus, tmp_path / "i", shard_rows=8)
    assert not (tmp_path / "i").exists()
    assert sum(name.endswith(".npy") for name in os.listdir(tmp_path / "i.embeddings")) == 2
    (tmp_path / "i.embeddings/shard-00000.npy").unlink()
    stop_after.update(encoded=0, limit=10**9)
    monkeypatch.setattr(progress_module, "LOG_SECONDS", 1e-9)
    build(corpus, tmp_path / "i", progress=True, shard_rows=8)
    assert stop_after["encoded"] == 22  # of 30, without the 8 of a complete shard
    log = capsys.readouterr().err
    lines = [re.fullmatch(LINE, line) for line in log.splitlines() if line.startswith("encode")]
    counts = [int(line[1]) for line in lines if line]
    assert counts and counts[0] >= 8 and counts == sorted(counts) and "\r" not in log
    assert any(line.startswith("index: ") for line in log.splitlines())
    build(corpus, tmp_path / "whole")
    assert (tmp_path / "i/index.faiss").read_bytes() == (tmp_path / "whole/index.faiss").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["i", "whole"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retriever_name": "e6"}, "encoder 'e6' is unknown"),
        ({"factory": "Nonsense"}, "--factory 'Nonsense': not a FAISS factory string"),
        ({"kind": "web"}, "--kind 'web' is unknown"),
        ({"kind": "bm25"}, "--kind bm25"),
        ({"kind": "no_such_module:Class"}, "no_such_module:Class: not an importable"),
        ({"kind": "pathlib:Path"}, "--kind pathlib:Path: not a subclass of .*Backend"),
        ({"embedding_dtype": "int8"}, "--embedding_dtype 'int8'"),
        ({"shard_rows": 0}, "--shard_rows 0"),
        ({"kind": "jax", "factory": "HNSW8"}, "--factory HNSW8: --kind jax has none"),
        ({"settings": {"qdrant_on_disk": True}}, "--qdrant_on_disk True: --kind faiss has none"),
        ({"factory": "IVF64,Flat"}, "cannot be trained on 30 passages"),
        ({"search": "nprobe"}, "--search 'nprobe'"),
        ({"retriever_name": "bm25", "retriever_model": "x"}, "has no vectors"),
        ({"devices": "cpu,cpu"}, "--devices: hashed has no network; leave it out"),
    ],
)
def test_invalid_option_is_named(tmp_path, corpus, options, message):
    refuses(message, build, corpus, tmp_path / "i", **options)
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize(
    ("module", "options", "package"),
    [
        ("bm25s", {"retriever_name": "bm25"}, "bm25s"),
        ("sentence_transformers", {"retriever_name": "e5"}, r"'calibadv-jax\[dense\]'"),
        ("qdrant_client", {"kind": "qdrant"}, "qdrant-client"),
        ("faiss", {}, "faiss-cpu"),
    ],
)
def test_missing_package_is_named(tmp_path, corpus, monkeypatch, module, options, package):
    monkeypatch.setitem(sys.modules, module, None)
    refuses(f"pip install {package}", build, corpus, tmp_path / "x", **options)


def test_words_are_searched_without_an_accelerator(tmp_path, corpus):
    """A program that started JAX would fail here, and elsewhere take the trainer's TPU or GPU."""
    path = people_corpus(tmp_path / "c.jsonl", 30).path
    options = ["--corpus_path", path, "--index_path", tmp_path / "i", "--retriever_name", "bm25"]
    command = [sys.executable, "-m", "retriever.build_index", *map(str, options)]
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    assert first_id(corpus, tmp_path / "i") == "17"


def test_rate_counts_this_start_only(monkeypatch):
    """Passages of an earlier start would make the rate too high, and the time left too short."""
    monkeypatch.setattr(progress_module, "LOG_SECONDS", 1e-9)
    with progress_module.progress_bar(1000, "encode", done=900) as bar:
        bar.update(50)
        state = bar.format_dict
    assert state["n"] == 950
    assert state["initial"] == 900


def test_kept_embeddings_serve_several_indexes(tmp_path, corpus, stop_after):
    build(corpus, tmp_path / "flat", embeddings=tmp_path / "e")
    build(corpus, tmp_path / "hnsw", embeddings=tmp_path / "e", factory="HNSW8")
    assert stop_after["encoded"] == 30  # once for both
    flat = open_index(tmp_path / "flat", corpus).search(["person 17"], 1)
    hnsw = open_index(tmp_path / "hnsw", corpus).search(["person 17"], 1)
    assert flat == hnsw
    assert ids(flat) == [["17"]]


def test_index_of_float16_shards_is_searched(tmp_path, corpus):
    build(corpus, tmp_path / "i", embeddings=tmp_path / "e", embedding_dtype="float16")
    assert np.load(tmp_path / "e" / "shard-00000.npy").dtype == np.float16
    assert first_id(corpus, tmp_path / "i") == "17"


@pytest.mark.parametrize("kind", ["faiss", "jax", pytest.param("qdrant", marks=pytest.mark.medium)])
def test_number_of_shards_does_not_change_results(tmp_path, corpus, monkeypatch, kind):
    if kind == "qdrant":
        pytest.importorskip("qdrant_client")
        monkeypatch.setattr("retriever.contrib.qdrant.BATCH", 2)  # several uploads for each shard, too
    build(corpus, tmp_path / "one")
    build(corpus, tmp_path / "many", kind=kind, shard_rows=5)
    queries = ["person 3 lives in town 3", "person 16", "town 5", "person 22 lives"]
    expected = open_index(tmp_path / "one", corpus).search(queries, 5)
    results = open_index(tmp_path / "many", corpus, IndexOptions(kind=kind)).search(queries, 5)
    assert ids(expected)[0][0] == "3"
    assert ids(expected)[1][0] == "16"
    assert ids(results) == ids(expected)
    for hits, expected_hits in zip(results, expected, strict=True):
        scores = [score for _, score in hits]
        assert scores == pytest.approx([score for _, score in expected_hits], abs=1e-3)


def test_other_folders_are_left_alone(tmp_path, corpus):
    (tmp_path / "thesis.txt").write_text("all of it")
    refuses("exists and is not an index", build, corpus, tmp_path)
    refuses("holds no embeddings", build, corpus, tmp_path / "i", embeddings=tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


def test_small_disk_is_refused_before_the_work(tmp_path, corpus, stop_after, monkeypatch):
    disk, arguments = SimpleNamespace(free=1000), (build, corpus, tmp_path / "i")
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)
    refuses("need 491,520 bytes and the disk has 1,000 free", *arguments)
    assert stop_after["encoded"] == 0
    monkeypatch.setattr(build_module, "require_disk", lambda *_: None)
    disk.free = 491_519
    refuses("the index needs 491,520 bytes and the disk has 491,519 free", *arguments)
    disk.free = 491_520
    build(corpus, tmp_path / "i")


@contextmanager
def largest_file(size):
    """Writing beyond this size fails as on a full disk; Python would cut the bytecode of an import."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes_none


@pytest.mark.parametrize(
    ("options", "size", "where"),
    [
        ({}, 250_000, "i.embeddings"),  # the vectors, 491,648 bytes
        ({"shard_rows": 8}, 250_000, "i.unfinished"),  # a flat index, written by rows
        ({"shard_rows": 8, "factory": "SQfp16"}, 150_000, "i.unfinished"),  # written by FAISS
        ({"retriever_name": "bm25"}, 200, "i.unfinished"),
    ],
)
def test_full_disk_names_the_folder(tmp_path, corpus, options, size, where):
    with largest_file(size), pytest.raises(RetrieverError, match="cannot be written") as caught:
        build(corpus, tmp_path / "i", **options)
    assert str(tmp_path / where) in str(caught.value) and "\n" not in str(caught.value)
    assert "shard_rows" in options or "cannot be written (File too large); make room" in str(caught.value)
    assert "make room or name another folder, and start again: what was encoded is kept" in str(caught.value)
    assert not (tmp_path / "i").exists()
    build(corpus, tmp_path / "i", **options)
    assert first_id(corpus, tmp_path / "i") == "17"


def test_second_build_of_a_folder_is_refused(tmp_path, corpus):
    options = {"embeddings": tmp_path / "e"}
    for folder in ("i", "e"):
        with pytest.raises(ZeroDivisionError), locked(tmp_path / folder):
            refuses(f"/{folder}: another process is building it", build, corpus, tmp_path / "i", **options)
            raise ZeroDivisionError
    (tmp_path / "i.lock").touch()  # the system has released it
    build(corpus, tmp_path / "i", **options)
    assert sorted(os.listdir(tmp_path)) == ["e", "i"]  # no locks are left
    (tmp_path / "file").touch()
    refuses("/file/i: cannot be written", build, corpus, tmp_path / "file/i")


HOLD = """
import sys
from pathlib import Path
from retriever.indexes.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.medium
@pytest.mark.parametrize("is_killed", [False, True])
def test_lock_of_another_process_ends_with_it(tmp_path, corpus, is_killed):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "i")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        refuses("/i: another process is building it; wait until it has ended", build, corpus, tmp_path / "i")
        if is_killed:
            other.kill()
        other.communicate("end\n")
    build(corpus, tmp_path / "i")
    assert os.listdir(tmp_path) == ["i"]


@pytest.fixture(scope="module")
def built(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(corpus, folder / "flat")
    build(corpus, folder / "sq", factory="SQ8")
    build(corpus, folder / "bm25", retriever_name="bm25")
    return folder


@pytest.fixture
def copy(built, tmp_path):
    """A copy of a flat index that a test may damage."""
    return Path(shutil.copytree(built / "flat", tmp_path / "copy"))


@pytest.mark.parametrize("kind", ["flat", "sq"])
@pytest.mark.parametrize("mmap", [False, True])
def test_random_bytes_are_noticed(built, corpus, tmp_path, kind, mmap):
    copy = Path(shutil.copytree(built / kind, tmp_path / "copy"))
    assert first_id(corpus, copy, mmap=mmap) == "17"
    data = bytearray((copy / "index.faiss").read_bytes())
    data[-1000:-900] = np.random.default_rng(0).bytes(100)
    (copy / "index.faiss").write_bytes(data)
    refuses("index.faiss: damaged .its checksum.*build it again", first_id, corpus, copy, mmap=mmap)
    assert first_id(corpus, copy, mmap=mmap, skip_checksum=True)


@pytest.mark.parametrize("kind", ["flat", "sq", "bm25"])
def test_every_file_of_an_index_has_a_checksum(built, kind):
    folder = built / kind
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    manifest = json.loads((folder / MANIFEST).read_text())
    assert set(manifest["checksums"]) == files - {MANIFEST}


def test_words_of_index_and_queries_are_split_alike(copy, corpus):
    manifest = json.loads((copy / MANIFEST).read_text())
    assert manifest.pop("words") == 2
    for words in ({}, {"words": 1}, {"words": 3}):
        (copy / MANIFEST).write_text(json.dumps(manifest | words))
        refuses("split into words by another version .*build it again with", open_index, copy, corpus)


def test_shards_and_samples_follow_corpus_order(tmp_path, corpus):
    embeddings = embed(corpus, tmp_path / "vectors", BuildOptions(shard_rows=8), progress=False)
    assert [len(shard) for shard in embeddings.shards()] == [8, 8, 8, 6]
    expected = embeddings.encoder.encode_passages(corpus[:])
    np.testing.assert_allclose(np.concatenate(list(embeddings.shards())), expected, rtol=1e-6)
    for count in (1, 3, 7, 10, 29, 30, 100):
        step = -(-30 // count)
        np.testing.assert_allclose(embeddings.sample(count), expected[::step], rtol=1e-6)


def test_shards_of_other_settings_are_refused(tmp_path, corpus, monkeypatch):
    settings = {"shard_rows": 5, "embedding_dtype": "float16"}
    embed(corpus, tmp_path, BuildOptions(**settings), progress=False)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for changes, message in (
        ({"embedding_dtype": "float32"}, "dtype was 'float16' and is 'float32'"),
        ({"shard_rows": 6}, "shard_rows was 5 and is 6"),
        ({"retriever_name": "bm25"}, "encoder was 'hashed' and is 'bm25'"),
        ({"retriever_model": "other"}, "model was .* and is 'other'"),
        ({}, "words was 2 and is 3"),
    ):
        if not changes:
            monkeypatch.setattr("retriever.encoders.tokenizer.WORDS_VERSION", 3)
        message = rf"started with other settings \(.*{message}.*\); restore or delete it"
        refuses(message, embed, corpus, tmp_path, BuildOptions(**settings | changes), progress=False)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"engine": "jax"}, {"retriever_name": "hashed"}])
def test_every_engine_finds_rows_of_brute_force(built, corpus, options):
    index = open_index(built / "flat", corpus, IndexOptions(**options))
    encoder = HashedEncoder.load(built / "flat")
    queries = ["person 2 lives", "town 3", "person 16 in town 2"]
    assert ids(index.search(queries, 7)) == brute_force_ids(encoder, corpus, queries, 7)
    assert (index.manifest["documents"], index.manifest["kind"]) == (30, options.get("engine", "faiss"))
    json.dumps(index.manifest)
    assert index.search([], 3) == []
    assert index.search(["zzzz", "", "!!!"], 3) == [[]] * 3
    (ranked,) = brute_force_ids(encoder, corpus, ["zzzz 5"], 30)  # the projection gives all a little noise
    assert ids(index.search(["zzzz 5"], 1000)) == [[name for name in ranked if int(name) % 7 == 5]]


@pytest.mark.parametrize("mmap", [False, True])
def test_bm25_is_its_definition(built, corpus, mmap):
    texts = [re.findall(r"\w+", row["contents"].lower()) for row in corpus]
    index = open_index(built / "bm25", corpus, IndexOptions("bm25", mmap=mmap))
    expected = bm25_scores(["person", "town", "5"], texts)
    (results,) = index.search(["Person, of town 5!"], 10)
    order = np.argsort(-expected.round(5), kind="stable")[:10]
    assert [row["id"] for row, _ in results] == [str(i) for i in order]
    np.testing.assert_allclose([score for _, score in results], expected[order], rtol=1e-4)
    assert index.search(["zzzz", "", "!!!"], 3) == [[]] * 3
    assert ids(index.search(["zzzz 29", "town"], 3)) == [["29"], ["0", "1", "2"]]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("indices", lambda rows: rows + 1000),
        ("indices", lambda rows: rows - 1000),
        ("indptr", lambda starts: starts * 3),
        ("indptr", lambda starts: starts[::-1].copy()),
        ("indptr", lambda starts: starts[:5]),
        ("data", lambda scores: scores[:-1]),
        ("data", lambda scores: np.append(scores[:-1], np.float32(7))),
    ],
    ids=range(7),
)
@pytest.mark.parametrize("mmap", [False, True])
def test_changed_array_of_bm25_is_noticed(built, tmp_path, corpus, name, change, mmap):
    """A place out of range would be read by compiled code."""
    copy = Path(shutil.copytree(built / "bm25", tmp_path / "copy"))
    path = copy / "bm25" / f"{name}.csc.index.npy"
    array = change(np.load(path))
    np.save(path, array)
    refuses(f"{path.name}: damaged .its checksum", open_index, copy, corpus, IndexOptions(mmap=mmap))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("indices", lambda rows: rows + 1000),
        ("indices", lambda rows: rows - 1000),
        ("indices", lambda rows: np.append(rows[:-1], 30)),  # the corpus has 30 passages
        ("indptr", lambda starts: starts * 3),
        ("indptr", lambda starts: starts + 1),
        ("indptr", lambda starts: starts[::-1].copy()),
        ("indptr", lambda starts: starts[:0]),
        ("indptr", lambda starts: np.append(starts[:4], starts[-1])),  # fewer columns than words
        ("data", lambda scores: scores[:-1]),
    ],
    ids=range(9),
)
@pytest.mark.parametrize("mmap", [False, True])
def test_places_out_of_range_are_noticed_without_checksums(
    built, tmp_path, corpus, monkeypatch, name, change, mmap
):
    monkeypatch.setattr(bm25_module, "CHECKED_ROWS", 7)  # the last row is in a later block
    options = IndexOptions(mmap=mmap, skip_checksum=True)
    copy = Path(shutil.copytree(built / "bm25", tmp_path / "copy"))
    assert open_index(copy, corpus, options).search(["person 17"], 1)[0][0][0]["id"] == "17"
    path = copy / "bm25" / f"{name}.csc.index.npy"
    np.save(path, change(np.load(path)))
    message = r"not a whole BM25 index \(places out of range\); build it again"
    refuses(message, open_index, copy, corpus, options)


def test_damaged_or_too_large_bm25_is_refused(built, tmp_path, corpus, monkeypatch):
    bm25 = built / "bm25"
    with monkeypatch.context() as patch:
        patch.setattr("retriever.indexes.resources.available_memory", lambda: 10)
        refuses("bm25: needs .* are available; serve it with --mmap", open_index, bm25, corpus)
        assert open_index(bm25, corpus, IndexOptions(mmap=True)).search(["person"], 1)[0]
        options = (tmp_path / "i", BuildOptions("bm25"))
        refuses("BM25: needs .*; use --retriever_name hashed", build_index, corpus, *options)
    copy = Path(shutil.copytree(bm25, tmp_path / "copy"))
    data = copy / "bm25" / "data.csc.index.npy"
    data.write_bytes(data.read_bytes()[:-10])
    for message in ("data.csc.index.npy: damaged", r"bm25/.*: cannot be read \(No such file"):
        refuses(message, open_index, copy, corpus)
        refuses("bm25: not a whole BM25 index", open_index, copy, corpus, IndexOptions(skip_checksum=True))
        shutil.rmtree(copy / "bm25", ignore_errors=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *[
            ("encoder.npz", text, "cannot be read .*build the index again")
            for text in (None, b"", b"PK damaged")
        ],
        ("index.faiss", None, "no such index"),
        ("index.faiss", b"IxFI", "has 4 bytes and its manifest says 491,565; build it again"),
        *[
            (MANIFEST, text, ".*build it again")
            for text in (b"{", b"[]", b"{}", b'{"kind": "faiss"}', b'{"kind": "x"}')
        ],
    ],
)
def test_missing_or_damaged_file_is_refused(copy, corpus, name, content, message):
    (copy / name).unlink()
    if content is not None:
        (copy / name).write_bytes(content)
    refuses(f"{name}: {message}", open_index, copy, corpus)


@pytest.mark.parametrize("mmap", [False, True])
def test_truncated_index_is_refused_with_both_sizes(copy, corpus, mmap):
    path = copy / "index.faiss"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    message = f"index.faiss: has {size // 2:,} bytes and its manifest says {size:,}; build it again"
    refuses(message, open_index, copy, corpus, IndexOptions(mmap=mmap))


class SparseRanker:
    """Finds row 2 for every query, and fewer rows than asked for, as approximate indexes do."""

    def __init__(self, documents):
        self.documents = documents
        self.asked = []

    def rank(self, queries, k):
        self.asked.append(k)
        scores = np.full((len(queries), k), -np.inf, np.float32)
        rows = np.full((len(queries), k), -1, np.int64)
        scores[:, 0] = 0.5
        rows[:, 0] = 2
        return scores, rows


def test_rows_that_were_not_found_are_left_out():
    rows = [{"id": str(number)} for number in range(4)]
    ranker = SparseRanker(len(rows))
    index = Index(rows, ranker, {})
    assert index.search(["a", "b"], 3) == [[(rows[2], 0.5)]] * 2
    assert index.search(["a"], 9) == [[(rows[2], 0.5)]]
    assert ranker.asked == [3, 4]  # the corpus has four rows
    assert index.search([], 3) == []


def test_sizes_of_index_corpus_and_encoder_must_agree(copy, corpus, tmp_path):
    fewer = people_corpus(tmp_path / "c.jsonl", 29)
    refuses(r"built from another corpus \(30 passages; this one has 29\)", open_index, copy, fewer)
    for count, dimension, message in (
        (29, 4096, "holds 29 vectors and the corpus .* 30 passages"),
        (30, 8, "holds vectors of dimension 8, and hashed makes 4096"),
    ):
        write_flat(copy / "index.faiss", np.ones((count, dimension), np.float32))
        manifest = json.loads((copy / MANIFEST).read_text())
        manifest["bytes"] = (copy / "index.faiss").stat().st_size
        (copy / MANIFEST).write_text(json.dumps(manifest))
        refuses(message, open_index, copy, corpus)


def test_unsuitable_option_or_missing_index_is_named(built, tmp_path, corpus):
    for options, message in (
        ({"retriever_name": "e5"}, "--retriever_name: .* was built with hashed"),
        ({"engine": "tpu"}, "--engine 'tpu' is unknown"),
        ({"engine": "jax", "faiss_gpu": True}, "--faiss_gpu: has no meaning for an index of kind jax"),
        ({"retriever_model": "m"}, "--retriever_model m: hashed has no model"),
    ):
        refuses(message, open_index, built / "flat", corpus, IndexOptions(**options))
    refuses("no complete index; build it", open_index, tmp_path / "none", corpus)
    for name in ("", "hashed", "bm25"):
        file = built / "flat/index.faiss"
        refuses("set --retriever_name to e5, bge or dense", open_index, file, corpus, IndexOptions(name))
