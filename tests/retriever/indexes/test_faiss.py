"""FAISS, JAX and BM25 against a brute-force search; memory that is planned."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from retriever_rig import refuses, write_flat

from retriever.indexes import faiss as backend
from retriever.indexes import faiss_gpu as gpu
from retriever.indexes import resources
from retriever.indexes.embeddings import Embeddings
from retriever.indexes.faiss import FaissVectors
from retriever.indexes.faiss_build import make_empty, vector_bytes, write_faiss
from retriever.indexes.faiss_files import map_flat, read_header
from retriever.indexes.jax import JaxVectors
from retriever.indexes.ranking import EXTRA_ROWS, MAX_ROWS, search_in_corpus_order, top_k

DIMENSION = 24
GIB = 2**30
WIKI, WIDTH = 21_015_324, 768  # passages of wiki-18, and E5's dimension


def whole(seed, *shape):
    """Whole numbers as float32: their inner products are exact, so that every machine ranks them alike."""
    return np.random.default_rng(seed).integers(-500, 501, shape).astype(np.float32)


VECTORS = whole(0, 1000, DIMENSION)  # 100 of them occur twice or more
VECTORS[np.random.default_rng(3).permutation(1000)[:200]] = VECTORS[np.arange(200) % 100]
QUERIES = whole(1, 30, DIMENSION)


def embeddings_of(folder, vectors):
    for number in range(4):
        np.save(folder / f"shard-{number:05d}.npy", vectors[300 * number : 300 * (number + 1)])
    return Embeddings(folder, SimpleNamespace(dimension=DIMENSION), 1000, 300)


@pytest.fixture(scope="module")
def embeddings(tmp_path_factory):
    return embeddings_of(tmp_path_factory.mktemp("shards"), VECTORS)


def built(folder, embeddings, factory="Flat", search=""):
    path = folder / "index.faiss"
    write_faiss(path, embeddings, factory, search, progress=False)
    return path


def written(path, factory, vectors, ids=None, metric=faiss.METRIC_INNER_PRODUCT):
    """The file of an index as FAISS itself writes it."""
    index = faiss.index_factory(vectors.shape[1], factory, metric)
    index.train(vectors[:1000] if len(vectors) > 100 else whole(1, 500, vectors.shape[1]))
    index.add(vectors) if ids is None else index.add_with_ids(vectors, np.array(ids))
    faiss.write_index(index, str(path))
    return path


def brute_force(vectors, queries, k):
    """int64 [Q, k] by a stable sort of the full product."""
    return np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("engine", ["faiss", "mmap", "jax"])
def test_flat_index_equals_brute_force(tmp_path, embeddings, engine):
    path = built(tmp_path, embeddings)
    index = JaxVectors(map_flat(path), "test") if engine == "jax" else FaissVectors(path, engine == "mmap")
    assert index.documents == 1000
    for k in (1, 3, 10, 150, 1000):
        scores, ids = index.nearest(QUERIES, k)
        expected = brute_force(VECTORS, QUERIES, k)
        np.testing.assert_array_equal(scores, np.take_along_axis(QUERIES @ VECTORS.T, expected, 1))
        assert ids.tolist() == expected.tolist() and ids.dtype == np.int64


def test_equal_scores_are_in_corpus_order(tmp_path):
    """499 of 500 passages tie for the second place."""
    vectors = np.ones((500, 4), np.float32)
    vectors[400] = 2
    index = FaissVectors(write_flat(tmp_path / "flat.index", vectors))
    _, ids = index.nearest(np.ones((40, 4), np.float32), 3)
    assert ids.tolist() == [[400, 0, 1]] * 40


def test_scores_do_not_depend_on_the_batch(tmp_path):
    """A matrix product, which several queries share, rounds otherwise than a pass for one query."""
    vectors = np.random.default_rng(1).standard_normal((1000, DIMENSION), dtype=np.float32)
    queries = vectors[::40] + vectors[:25]
    index = FaissVectors(built(tmp_path, embeddings_of(tmp_path, vectors)))
    scores, ids = index.nearest(queries, 10)
    for number, query in enumerate(queries):
        alone_scores, alone_ids = index.nearest(query[None], 10)
        assert alone_scores[0].tolist() == scores[number].tolist()
        assert alone_ids[0].tolist() == ids[number].tolist()


def test_four_queries_share_one_matrix_product():
    """Until 1.14 the limit was a number of queries, from 1.15 on of their elements."""
    for version, limit in (("1.12.0", 4), ("1.14.1", 4), ("1.15.1", 4 * DIMENSION)):
        stand_in = SimpleNamespace(__version__=version, cvar=SimpleNamespace())
        backend.set_product_threshold(stand_in, DIMENSION)
        assert stand_in.cvar.distance_compute_blas_threshold == limit


@pytest.mark.parametrize("count", [1, 7, 8, 17])
def test_jax_finds_no_padding(count):
    vectors = -np.abs(whole(2, count, 4)) - 1
    queries = np.ones((3, 4), np.float32)  # every score is negative: a row of padding would win
    _, ids = JaxVectors(vectors, "test").nearest(queries, count)
    assert ids.tolist() == brute_force(vectors, queries, count).tolist()


@given(st_numpy.arrays(np.int8, st.integers(1, 60), elements=st.integers(0, 5)), st.integers(1, 60))
@settings(deadline=None)
def test_top_k_is_a_stable_sort(scores, k):
    results, ids = top_k(scores.astype(np.float32), k)
    expected = np.argsort(-scores, kind="stable")[:k]
    assert ids.tolist() == expected.tolist()
    assert results.tolist() == scores[expected].tolist()


@pytest.mark.parametrize(
    "factory",
    ["Flat", "IVF16,Flat", "HNSW16", "HNSW16_SQ8", "SQfp16", "SQ8", "IVF8,SQ8", "PCA20,Flat"],
)
def test_factories_find_results_of_brute_force(tmp_path, embeddings, monkeypatch, factory):
    path = built(tmp_path, embeddings, factory, "nprobe=16" if "IVF" in factory else "")
    small = FaissVectors(path, threads=2)
    _, ids = small.nearest(QUERIES, 10)
    expected = brute_force(VECTORS, QUERIES, 10)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ids, expected, strict=True)])
    assert recall > (0.5 if "PCA" in factory else 0.9)
    monkeypatch.setattr(backend, "LARGE", path.stat().st_size)
    large = FaissVectors(path, threads=2)
    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(lambda _: large.nearest(QUERIES, 10), range(8))]
    for _, rows in (*results, FaissVectors(path, mmap=True).nearest(QUERIES, 10)):
        assert rows.tolist() == ids.tolist()
    assert small._search_thread is None and (large._search_thread is not None) == (
        factory in ("Flat", "SQfp16", "SQ8")
    )
    assert not large._search_thread or large._search_thread.submit(faiss.omp_get_max_threads).result() == 2


def test_files_are_those_of_faiss_with_search_parameters(tmp_path, embeddings):
    own = written(tmp_path / "own", "Flat", VECTORS)
    assert built(tmp_path, embeddings).read_bytes() == own.read_bytes()
    assert faiss.read_index(str(built(tmp_path, embeddings, "IVF16,Flat", "nprobe=5"))).nprobe == 5
    assert faiss.read_index(str(built(tmp_path, embeddings, "IVF16,Flat"))).nprobe == 4
    assert faiss.read_index(str(built(tmp_path, embeddings, "HNSW16"))).hnsw.efSearch == 128
    refuses("--search 'nprob=5'", make_empty, 8, "IVF16,Flat", "nprob=5")


@pytest.mark.parametrize("mmap", [False, True])
def test_damaged_file_is_refused(tmp_path, embeddings, mmap):
    path = built(tmp_path, embeddings)
    path.write_bytes(path.read_bytes()[:-1])
    refuses(r"index.faiss: has 96,044 bytes, but .* take 96,045", FaissVectors, path, mmap)
    path = built(tmp_path, embeddings, "SQ8")
    path.write_bytes(path.read_bytes()[:-10])
    refuses("index.faiss: FAISS cannot read it", FaissVectors, path)
    refuses("FAISS type IxSQ; --engine jax needs factory Flat", map_flat, path)
    path.write_text("nothing")
    refuses("not a FAISS index", read_header, path)
    written(path, "Flat", VECTORS, metric=faiss.METRIC_L2)
    refuses("metric is FAISS number 1", read_header, path)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(
    ("factory", "ids", "example"),
    [
        ("IDMap,Flat", [1, 2, 3, 4], "there is id 4"),
        ("IDMap2,Flat", [0, 1, -1, 3], "there is id -1"),
        ("IDMap,HNSW8", [0, 1, 1, 3], "some occur twice"),
        ("IVF2,Flat", [5, 6, 7, 8], "there is id [5678]"),
        ("IVF2,Flat", [3, 2, 2, 0], "some occur twice"),
        ("PCA8,IVF2,Flat", [0, 1, 2, 2**40], f"there is id {2**40}"),
        ("PCA8,IDMap,Flat", [0, 0, 1, 2], "some occur twice"),
        ("IDMap,IVF2,Flat", [0, 1, 2, 4], "there is id 4"),
        ("IDMap,Flat", [2, 0, 3, 1], None),
        ("IVF2,Flat", [2, 0, 3, 1], None),
        ("PCA8,IVF2,Flat", [0, 1, 2, 3], None),
    ],
)
def test_ids_must_be_row_numbers(tmp_path, factory, ids, example, mmap):
    """In any order: each passage is then found under its own row number."""
    vectors = whole(0, 4, DIMENSION)
    path = written(tmp_path / "x.index", factory, vectors, ids)
    if example:
        refuses(rf"x.index: its ids are not .* 0 … 3 .*{example}", FaissVectors, path, mmap)
    elif factory == "IDMap,Flat":
        order = np.argsort(-(vectors @ vectors[0]), kind="stable")
        assert FaissVectors(path, mmap).nearest(vectors[:1], 4)[1][0].tolist() == [ids[i] for i in order]
    else:
        assert FaissVectors(path, mmap).documents == 4


def test_index_above_the_memory_is_refused(tmp_path, embeddings, monkeypatch):
    path, again = built(tmp_path, embeddings), tmp_path / "again"
    monkeypatch.setattr(resources, "available_memory", lambda: 90_000)
    refuses(r"needs 0.0 GiB .*--mmap.* --factory IVF4096,PQ64", FaissVectors, path)
    FaissVectors(path, mmap=True)
    write_faiss(again, embeddings, "Flat", "", progress=False)  # streamed, not held
    refuses("factory IVF16,Flat: needs", write_faiss, again, embeddings, "IVF16,Flat", "", progress=False)


def engine(scores, counts):
    """Gives the best `count` of each row, of those that tie the last ones first, as engines may."""

    def search(count):
        counts.append(count)
        places = np.arange(scores.shape[1])[None].repeat(len(scores), 0)
        order = np.lexsort((-places, -scores), axis=1)[:, :count]
        return np.take_along_axis(scores, order, 1), order

    return search


@pytest.mark.parametrize("k", [1, 3, 20])
@pytest.mark.parametrize("documents", [1, 5, EXTRA_ROWS + 4, 300])
@pytest.mark.parametrize("levels", [1, 3, 1000], ids="{} scores".format)
def test_ties_do_not_depend_on_the_batch(k, documents, levels):
    rng = np.random.default_rng(k * documents)
    scores = rng.integers(0, levels, (6, documents)).astype(np.float32)
    scores[1] = np.arange(documents)  # none tie
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    together, ids = search_in_corpus_order(engine(scores, []), k, documents)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(together, np.take_along_axis(scores, expected, 1))
    for number, row in enumerate(scores):
        _, alone = search_in_corpus_order(engine(row[None], []), k, documents)
        np.testing.assert_array_equal(alone[0], expected[number])


def test_fetching_ends_with_the_tie():
    for scores, expected in (
        (np.arange(5000), [3 + EXTRA_ROWS]),
        (np.zeros(5000), [19, 76, 304, MAX_ROWS]),
    ):
        counts = []
        search_in_corpus_order(engine(scores[None], counts), 3, 5000)
        assert counts == expected
    results = np.array([[0.5, 0.5, 0.0]], np.float32), np.array([[4, 2, -1]])  # of a search that finds fewer
    scores, ids = search_in_corpus_order(lambda count: results, 3, 9)
    assert ids.tolist() == [[2, 4, -1]] and scores[0, 2] == -np.inf


def test_wiki_18_fits_one_gpu_of_80_gb():
    (rows,) = gpu.plan_shards(WIKI, WIDTH, [79 * GIB], "wiki")
    assert rows == range(WIKI)


def test_wiki_18_fits_four_gpus_of_24_gb():
    shards = gpu.plan_shards(WIKI, WIDTH, [23 * GIB] * 4, "wiki")
    assert [len(rows) for rows in shards] == [5_253_831] * 4
    assert [rows.start for rows in shards[1:]] == [rows.stop for rows in shards[:-1]]


def test_devices_get_even_parts_that_fit():
    shards = gpu.plan_shards(10, 4, [4 * GIB] * 3, "x")
    assert [list(rows) for rows in shards] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [len(rows) for rows in gpu.plan_shards(2, 4, [4 * GIB] * 3, "x")] == [0, 1, 1]
    need = WIKI * (2 * WIDTH + 8) + gpu.WORKSPACE
    gpu.plan_shards(WIKI, WIDTH, [need], "wiki")
    message = "wiki in fp16 over 1 GPU.s. needs 32.7 GiB on each, and GPU 0 has 32.7 GiB free; take more GPUs"
    refuses(message, gpu.plan_shards, WIKI, WIDTH, [need - 1], "wiki")
    message = "wiki in fp16 over 2 GPU.s. needs 17.6 GiB on each, and GPU 1 has 10.0 GiB free; take more GPUs"
    refuses(message, gpu.plan_shards, WIKI, WIDTH, [40 * GIB, 10 * GIB], "wiki")
    gpu.require_ivf_memory(20 * GIB, [14 * GIB, 14 * GIB], "x")
    message = "x over 2 GPU.s. needs 13.5 GiB on each, and GPU 1 has 13.0 GiB free"
    refuses(message, gpu.require_ivf_memory, 20 * GIB, [14 * GIB, 13 * GIB], "x")


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("k", [3, 40])
def test_gpu_shards_find_results_of_one_index(devices, k):
    vectors = whole(0, 500, 16)
    vectors[300:400] = vectors[0:100]  # equal vectors on different devices
    queries = vectors[np.random.default_rng(0).integers(0, 500, 20)]
    added = []

    class Part(faiss.IndexFlatIP):
        def add(self, rows):
            added.append(rows.base is not None)
            super().add(rows)

    shards = gpu.plan_shards(500, 16, [4 * GIB] * devices, "x")
    index, _held = gpu.fill_shards(faiss, vectors, shards, lambda device: Part(16))
    assert added == [True] * devices  # one call each, of a view: nothing of the map was copied
    assert index.ntotal == 500
    _, results = search_in_corpus_order(lambda count: index.search(queries, count), k, 500)
    assert results.tolist() == brute_force(vectors, queries, k).tolist()


@pytest.mark.medium
def test_type_that_stays_on_the_cpu_is_refused(tmp_path, monkeypatch):
    on_cpu = ("SQfp16", "SQ8", "PQ4x4", "HNSW8", "PCA8,Flat", "OPQ4,IVF4,PQ4x4")
    for factory in ("Flat", "IVF4,Flat", "IVF4,PQ4x4", "IVF4,SQ8", *on_cpu):
        path = written(tmp_path / "index.faiss", factory, whole(0, 1000, 16))
        if hasattr(faiss, "GpuIndexFlatIP") and faiss.get_num_gpus() and factory not in on_cpu:
            assert FaissVectors(path, gpu=True).nearest(whole(1, 3, 16), 1)[1].shape == (3, 1)
            continue
        message = (
            f"--faiss_gpu: {path} would stay on the CPU; build one of Flat, "
            if factory in on_cpu
            else "no GPU support"
        )
        refuses(message, FaissVectors, path, gpu=True)
    monkeypatch.setattr(gpu.ctypes, "CDLL", Mock(side_effect=OSError("libcuda.so.1: cannot open")))
    refuses("no CUDA driver .libcuda.so.1: cannot open", gpu.free_memory, 1)


@pytest.mark.medium
@pytest.mark.parametrize(
    "factory",
    ["Flat", "SQ8", "SQfp16", "PQ8x4", "IVF16,Flat", "IVF16,PQ8x4", "HNSW16", "PCA8,Flat", "IVF16_HNSW8,SQ4"],
)
def test_planned_bytes_are_those_of_the_file(tmp_path, factory):
    size = written(tmp_path / "index", factory, whole(0, 20_000, 16)).stat().st_size
    assert vector_bytes(20_000, 16, factory) == pytest.approx(size, rel=0.1)


def test_planned_bytes_of_wiki_18_are_those_of_the_published_index():
    assert vector_bytes(WIKI, WIDTH, "Flat") == 64_559_075_328


def test_memory_and_cores_of_a_container_count(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    assert resources.available_memory() > 2**20
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert resources.available_memory() > 2**20
    (tmp_path / "memory.max").write_text("5000\n")
    assert resources.available_memory() == 4000
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert resources.available_cores() == 8
    for text, cores in (("max 100000", 8), ("250000 100000", 3), ("20000 100000", 1), ("9900000 100000", 8)):
        (tmp_path / "cpu.max").write_text(text)
        assert resources.available_cores() == cores


def test_lists_in_another_file_are_neither_opened_nor_written(tmp_path):
    """An index may name any file as that of its inverted lists; FAISS would open it for writing."""
    other = tmp_path / "other/lists"
    other.parent.mkdir()
    index = make_empty(DIMENSION, "IVF4,Flat")
    index.train(VECTORS)
    lists = faiss.OnDiskInvertedLists(4, index.code_size, str(other))  # must live as long as the index
    index.replace_invlists(lists)
    index.add(VECTORS)
    expected, _ = index.search(QUERIES, 3)
    path = tmp_path / "given/index.faiss"
    path.parent.mkdir()
    faiss.write_index(index, str(path))
    refuses("FAISS cannot read it .*could not open", FaissVectors, path)
    refuses("lists are in another file, lists, .*; leave the option out", FaissVectors, path, mmap=True)
    # The file beside the index is the one that may be read.
    (path.parent / "lists").write_bytes(other.read_bytes())
    other.unlink()
    scores, _ = FaissVectors(path).nearest(QUERIES, 3)
    np.testing.assert_array_equal(scores, expected)
