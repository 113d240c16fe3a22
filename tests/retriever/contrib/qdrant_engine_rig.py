"""Qdrant's engine behind as much of the server's REST interface as the retriever uses.

The engine (package qdrant-edge-py) runs in this process. It quantises vectors and searches approximately; the
client's embedded mode does neither.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import qdrant_edge as edge
from http_rig import Handler, serving

# Few links, and no search through all vectors: an index of a few thousand must be approximate.
HNSW = {"m": 4, "ef_construct": 16, "full_scan_threshold": 10}
OPTIMIZER = {
    "default_segment_number": 1,
    "deleted_threshold": 0.2,
    "flush_interval_sec": 5,
    "vacuum_min_vector_number": 1000,
}


def make_shard(folder: Path, settings: dict[str, Any]) -> edge.EdgeShard:
    """Make a collection by the body of the request that creates it."""
    assert settings["vectors"]["distance"] == "Dot"
    quantization = None
    if settings.get("quantization_config"):
        assert settings["quantization_config"]["scalar"]["type"] == "int8"
        quantization = edge.ScalarQuantizationConfig(type=edge.ScalarType.Int8, always_ram=True)
    config = edge.EdgeConfig(
        vectors=edge.EdgeVectorParams(size=settings["vectors"]["size"], distance=edge.Distance.Dot),
        quantization_config=quantization,
        hnsw_config=edge.HnswIndexConfig(**HNSW),
        optimizers=edge.EdgeOptimizersConfig(indexing_threshold=10, default_segment_number=1),
    )
    folder.mkdir(parents=True)
    return edge.EdgeShard.create(str(folder), config)


def without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def search_params(body: dict[str, Any] | None) -> edge.SearchParams:
    values = without_nulls(body or {})
    quantization = values.pop("quantization", None)
    if quantization is not None:
        values["quantization"] = edge.QuantizationSearchParams(**without_nulls(quantization))
    return edge.SearchParams(**values)


class QdrantServer:
    """One collection.

    Attributes:
        settings: The body of the request that created the collection.
        shard: The engine; None before the collection was created.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shard: edge.EdgeShard | None = None
        self.settings: dict[str, Any] = {}
        self.lock = threading.Lock()

    def answer(self, method: str, route: str, body: dict[str, Any]) -> Any:
        """Return the result of a request about the collection."""
        match method, route:
            case "PUT", "":
                self.settings = body
                self.shard = make_shard(self.folder, body)
                return True
            case _, "/exists":
                return {"exists": self.shard is not None}
            case _, "":
                return self._description()
            case "PUT", "/points":
                self._upsert(body["batch"])
                return {"operation_id": 0, "status": "completed"}
            case _, "/points/count":
                return {"count": self.shard.count(edge.CountRequest())}
            case _, "/points/query/batch":
                return self._query(body["searches"])
        raise AssertionError(f"{method} {route}: not a request of the retriever")

    def _description(self) -> dict[str, Any]:
        vectors = {"size": self.settings["vectors"]["size"], "distance": "Dot"}
        config = {"params": {"vectors": vectors}, "hnsw_config": HNSW, "optimizer_config": OPTIMIZER}
        return {
            "config": config,
            "optimizer_status": "ok",
            "payload_schema": {},
            "segments_count": 1,
            "status": "green",
        }

    def _upsert(self, batch: dict[str, Any]) -> None:
        points = []
        for number, vector, payload in zip(batch["ids"], batch["vectors"], batch["payloads"], strict=True):
            points.append(edge.Point(number, vector, payload))
        self.shard.update(edge.UpdateOperation.upsert_points(points))

    def _query(self, searches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        requests = []
        for search in searches:
            requests.append(
                edge.QueryRequest(
                    limit=search["limit"],
                    query=edge.Query.Nearest(search["query"]["nearest"]),
                    params=search_params(search.get("params")),
                    with_payload=False,
                )
            )
        results = []
        for points in self.shard.query_batch(edge.QueryBatchRequest(requests)):
            hits = [{"id": point.id, "version": point.version, "score": point.score} for point in points]
            results.append({"points": hits})
        return results


@contextmanager
def qdrant_server(folder: Path) -> Iterator[tuple[str, QdrantServer]]:
    """Yield the URL of a server with no collection, and the server."""
    server = QdrantServer(folder)

    class Rest(Handler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.body()
            path = self.path.partition("?")[0]
            if path == "/":
                self.reply(200, {"title": "qdrant - vector search engine", "version": "1.20.0"})
                return
            route = path.removeprefix("/collections/passages")
            assert route != path, f"{path}: not the collection"
            with server.lock:
                result = server.answer(self.command, route, json.loads(body or b"{}"))
            self.reply(200, {"result": result, "status": "ok", "time": 0.0})

        do_GET = do_PUT = do_POST = answer

    with serving(Rest) as url:
        yield url, server
    if server.shard is not None:
        server.shard.close()
