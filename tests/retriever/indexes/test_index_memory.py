"""Bytes that are planned are those that are taken, and those that there are."""

import numpy as np
import pytest

pytest.importorskip("faiss")

import faiss

from retriever.indexes import backend as plan


@pytest.mark.medium
@pytest.mark.parametrize(
    "factory",
    ["Flat", "SQ8", "SQfp16", "PQ8x4", "IVF16,Flat", "IVF16,PQ8x4", "HNSW16", "PCA8,Flat", "IVF16_HNSW8,SQ4"],
)
def test_planned_bytes_are_those_of_the_file(tmp_path, factory):
    vectors = np.random.default_rng(0).standard_normal((20_000, 16), dtype=np.float32)
    index = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[:1000])
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "index"))
    assert plan.vector_bytes(20_000, 16, factory) == pytest.approx(
        (tmp_path / "index").stat().st_size, rel=0.1
    )


def test_wiki18_flat_is_the_published_size():
    assert plan.vector_bytes(21_015_324, 768, "Flat") == 64_559_075_328


def test_memory_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "CGROUP", tmp_path)
    whole = plan.available_memory()
    assert whole > 2**20
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert plan.available_memory() > 2**20
    (tmp_path / "memory.max").write_text("5000\n")
    assert plan.available_memory() == 4000


def test_cores_of_a_container_count(tmp_path, monkeypatch):
    monkeypatch.setattr(plan.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(plan, "CGROUP", tmp_path)
    assert plan.available_cores() == 8
    for text, cores in (("max 100000", 8), ("250000 100000", 3), ("20000 100000", 1), ("9900000 100000", 8)):
        (tmp_path / "cpu.max").write_text(text)
        assert plan.available_cores() == cores
