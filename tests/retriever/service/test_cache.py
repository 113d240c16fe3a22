"""A run is repeated from the store, exactly."""

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from retriever_rig import Counting

from retriever.errors import RetrieverError
from retriever.service.app import make_app
from retriever.service.cache import ResultCache
from retriever.service.engine import Depths


def test_a_run_is_repeated_from_the_store_exactly_and_a_miss_is_named(index, tmp_path):
    counting = Counting(index)
    body = {"queries": ["ada almson", "bo dorn"], "topk": 3, "return_scores": True}
    path = tmp_path / "store.sqlite"
    with TestClient(make_app(counting, Depths(3), cache=ResultCache(path, index.manifest, "use"))) as client:
        first = client.post("/retrieve", json=body).json()
        assert client.post("/retrieve", json=body).json() == first
        assert sum(size for size, _ in counting.batches) == 2
        assert "retriever_cached_queries_total 2.0" in client.get("/metrics").text
    with TestClient(
        make_app(counting, Depths(3), cache=ResultCache(path, index.manifest, "replay"))
    ) as client:
        assert client.post("/retrieve", json=body).json() == first
        missed = client.post("/retrieve", json=body | {"queries": ["cy carlson"]})
        assert missed.status_code == 409 and "'cy carlson' was not recorded" in missed.json()["error"]
        assert client.post("/retrieve", json=body | {"topk": 2}).status_code == 409
    assert sum(size for size, _ in counting.batches) == 2
    other = ResultCache(path, index.manifest | {"encoder": "other"}, "use")
    assert other.look_up(["ada almson"], 3) == [None]


def test_a_damaged_or_missing_store_is_refused(index, tmp_path):
    path = tmp_path / "store.sqlite"
    with pytest.raises(RetrieverError, match="nothing was recorded here"):
        ResultCache(path, index.manifest, "replay")
    path.write_bytes(b"no database at all, but long enough to look like a file" * 50)
    with pytest.raises(RetrieverError, match="not a result store"):
        ResultCache(path, index.manifest, "use")
