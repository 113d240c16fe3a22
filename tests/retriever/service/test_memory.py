"""Memory that is freed between others goes back to the system."""

import ctypes
import os

import pytest

from benchmarks.retrieval.load import process_bytes
from retriever.service import engine as memory


def own_bytes():
    return process_bytes(os.getpid(), "RssAnon")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_holes_go_back():
    blocks = [b"x" * size for size in range(20_000, 24_000)]  # 88 MB, each too small for a mapping of its own
    full = own_bytes()
    pins = blocks[::50]
    del blocks
    memory.trim_memory()
    assert own_bytes() < full - 40e6
    assert all(set(pin) == {120} for pin in pins)


def test_once_in_so_many_queries(monkeypatch):
    trims = []
    monkeypatch.setattr(memory, "trim_memory", lambda: trims.append(1))

    def search(queries, k):
        if k < 0:
            raise ValueError
        return [(query, k) for query in queries]

    trimmed = memory.trimmed(search)
    for _ in range(3):
        assert trimmed(["a"] * 300, 2) == [("a", 2)] * 300
    assert not trims
    with pytest.raises(ValueError):
        trimmed(["a"] * 300, -1)
    assert len(trims) == 1
    trimmed(["a"] * 999, 1)
    assert len(trims) == 1
