"""What the GPUs are given: rows, bytes, and what is refused. Parts are FAISS' own flat indexes on the CPU."""

import numpy as np
import pytest

pytest.importorskip("faiss")

import faiss

from retriever.errors import RetrieverError
from retriever.indexes import faiss as gpu
from retriever.indexes.faiss import FaissVectors, read_header, search_in_corpus_order

GIB = 2**30
WIKI, WIDTH = 21_015_324, 768  # passages of wiki-18, and E5's dimension


def test_wiki_18_fits_one_gpu_of_80_gb_and_four_of_24():
    (one,) = gpu.plan_shards(WIKI, WIDTH, [79 * GIB], "wiki")
    assert one == range(WIKI)
    four = gpu.plan_shards(WIKI, WIDTH, [23 * GIB] * 4, "wiki")
    assert [len(rows) for rows in four] == [5_253_831] * 4
    assert [rows.start for rows in four[1:]] == [rows.stop for rows in four[:-1]]


def test_each_device_gets_an_even_part_in_order():
    shards = gpu.plan_shards(10, 4, [4 * GIB] * 3, "x")
    assert [list(rows) for rows in shards] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [len(rows) for rows in gpu.plan_shards(2, 4, [4 * GIB] * 3, "x")] == [0, 1, 1]


def test_what_does_not_fit_is_refused_with_the_numbers():
    need = WIKI * (2 * WIDTH + 8) + gpu.WORKSPACE
    gpu.plan_shards(WIKI, WIDTH, [need], "wiki")
    with pytest.raises(
        RetrieverError, match="wiki in fp16 over 1 GPU.s. needs 32.7 GiB .*GPU 0 has 32.7 GiB"
    ):
        gpu.plan_shards(WIKI, WIDTH, [need - 1], "wiki")
    with pytest.raises(
        RetrieverError, match="over 2 GPU.s. needs 17.6 GiB .*GPU 1 has 10.0 GiB free; take more"
    ):
        gpu.plan_shards(WIKI, WIDTH, [40 * GIB, 10 * GIB], "wiki")


def test_inverted_lists_are_spread_and_checked():
    gpu.require_ivf_memory(20 * GIB, [14 * GIB, 14 * GIB], "x")
    with pytest.raises(
        RetrieverError, match="x over 2 GPU.s. needs 13.5 GiB on each, and GPU 1 has 13.0 GiB"
    ):
        gpu.require_ivf_memory(20 * GIB, [14 * GIB, 13 * GIB], "x")


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("k", [3, 40])
def test_shards_find_what_one_index_finds_in_corpus_order(devices, k):
    rng = np.random.default_rng(0)
    vectors = rng.integers(-500, 501, (500, 16)).astype(np.float32)  # exact products on every machine
    vectors[300:400] = vectors[0:100]  # equal vectors on different devices
    queries = vectors[rng.integers(0, 500, 20)]
    added = []

    class Part(faiss.IndexFlatIP):
        def add(self, rows):
            added.append(rows.base is not None)
            super().add(rows)

    shards = gpu.plan_shards(500, 16, [4 * GIB] * devices, "x")
    index, _held = gpu.fill(faiss, vectors, shards, lambda device: Part(16))
    assert added == [True] * devices  # one call each, of a view: nothing of the map was copied
    assert index.ntotal == 500
    _, found = search_in_corpus_order(lambda count: index.search(queries, count), k, 500)
    expected = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :k]
    assert found.tolist() == expected.tolist()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("factory", "allowed"),
    [
        ("Flat", True),
        ("IVF4,Flat", True),
        ("IVF4,PQ4x4", True),
        ("IVF4,SQ8", True),
        ("SQfp16", False),
        ("SQ8", False),
        ("PQ4x4", False),
        ("HNSW8", False),
        ("PCA8,Flat", False),
        ("OPQ4,IVF4,PQ4x4", False),
    ],
)
def test_what_would_stay_on_the_cpu_is_refused(tmp_path, factory, allowed):
    index = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    vectors = np.random.default_rng(0).standard_normal((1000, 16), dtype=np.float32)
    index.train(vectors)
    index.add(vectors)
    path = tmp_path / "index.faiss"
    faiss.write_index(index, str(path))
    if allowed:
        gpu.check_kind(read_header(path).kind, "x")
        message = "no GPU support"
    else:
        message = f"--faiss_gpu: {path} is of FAISS type .* would stay on the CPU; leave --faiss_gpu out"
    if hasattr(faiss, "GpuIndexFlatIP") and faiss.get_num_gpus() and allowed:
        assert FaissVectors(path, gpu=True).nearest(vectors[:3], 1)[1].shape == (3, 1)
        return
    with pytest.raises(RetrieverError, match=message):
        FaissVectors(path, gpu=True)


def test_without_a_driver_it_says_so(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpu.ctypes, "CDLL", missing)
    with pytest.raises(RetrieverError, match="no CUDA driver .libcuda.so.1: cannot open"):
        gpu.free_memory(1)
