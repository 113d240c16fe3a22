"""Qdrant's engine behind as much of the server's REST interface as the retriever uses.

The engine (qdrant-edge-py) runs in process and is one shard: replicas and several shards are not tested.
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


def make_shard(folder: Path, settings: dict[str, Any]) -> edge.EdgeShard:
    """A collection by the body of the request that makes it, with int8 codes."""
    vectors = settings["vectors"]
    assert (vectors["distance"], settings["quantization_config"]["scalar"]["type"]) == ("Dot", "int8")
    codes = edge.ScalarQuantizationConfig(type=edge.ScalarType.Int8, always_ram=True)
    params = edge.EdgeVectorParams(size=vectors["size"], distance=edge.Distance.Dot)
    folder.mkdir(parents=True)
    return edge.EdgeShard.create(str(folder), edge.EdgeConfig(vectors=params, quantization_config=codes))


class QdrantServer:
    """Attributes: `settings`, the body of the request that made the collection; `searches`."""

    def __init__(self, folder: Path):
        self.folder, self.shard, self.settings, self.searches = folder, None, {}, []
        self.lock = threading.Lock()

    def answer(self, method: str, route: str, body: dict[str, Any]) -> Any:
        """The result of a request about the one collection."""
        if (method, route) == ("PUT", ""):
            self.settings, self.shard = body, make_shard(self.folder, body)
            return True
        if route == "/exists":
            return {"exists": self.shard is not None}
        if route == "":
            vectors = {"size": self.settings["vectors"]["size"], "distance": "Dot"}
            hnsw = {"m": 4, "ef_construct": 16, "full_scan_threshold": 10}
            optimizer = {"default_segment_number": 1, "flush_interval_sec": 5, "deleted_threshold": 0.2}
            optimizer["vacuum_min_vector_number"] = 1000
            config = {"params": {"vectors": vectors}, "hnsw_config": hnsw, "optimizer_config": optimizer}
            state = {"status": "green", "optimizer_status": "ok", "segments_count": 1}
            return state | {"config": config, "payload_schema": {}}
        if (method, route) == ("PUT", "/points"):
            batch = body["batch"]
            rows = zip(batch["ids"], batch["vectors"], batch["payloads"], strict=True)
            points = [edge.Point(number, vector, payload) for number, vector, payload in rows]
            self.shard.update(edge.UpdateOperation.upsert_points(points))
            return {"operation_id": 0, "status": "completed"}
        if route == "/points/count":
            return {"count": self.shard.count(edge.CountRequest())}
        if route == "/points/query/batch":
            self.searches += body["searches"]
            requests = [
                edge.QueryRequest(limit=item["limit"], query=edge.Query.Nearest(item["query"]["nearest"]))
                for item in body["searches"]
            ]
            names = ("id", "version", "score")
            return [
                {"points": [{name: getattr(point, name) for name in names} for point in points]}
                for points in self.shard.query_batch(edge.QueryBatchRequest(requests))
            ]
        raise AssertionError(f"{method} {route}: not a request of the retriever")


@contextmanager
def qdrant_server(folder: Path) -> Iterator[tuple[str, QdrantServer]]:
    """Its URL, and the server."""
    server = QdrantServer(folder)

    class Rest(Handler):
        protocol_version = "HTTP/1.1"

        def serve(self) -> None:
            body = self.body()
            path = self.path.partition("?")[0]
            if path == "/":
                self.reply(200, {"title": "qdrant - vector search engine", "version": "1.20.0"})
                return
            _, _, collection, *rest = path.split("/")
            assert collection == "passages"
            with server.lock:
                route = "".join(f"/{part}" for part in rest)
                result = server.answer(self.command, route, json.loads(body or b"{}"))
            self.reply(200, {"result": result, "status": "ok", "time": 0.0})

        do_GET = do_PUT = do_POST = serve

    with serving(Rest) as url:
        yield url, server
    if server.shard is not None:
        server.shard.close()
