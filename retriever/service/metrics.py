"""What Prometheus is told of one service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """In a registry of its own: one process may hold several services."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("retriever_requests", "Requests", ["route", "status"], registry=registry)
        self.seconds = Histogram("retriever_request_seconds", "Time to answer", ["route"], registry=registry)
        self.batch = Histogram(
            "retriever_batch_queries", "Queries of a search", buckets=BATCH_SIZES, registry=registry
        )
        self.queue = Gauge("retriever_queued_queries", "Queries that wait", registry=registry)
        self.cached = Counter("retriever_cached_queries", "Answered from the store", registry=registry)
        self.unstored = Counter(
            "retriever_unstored_queries", "Answered, but the store took no result", registry=registry
        )
        self.cut = Counter("retriever_cut_queries", "Longer than the limit, and cut to it", registry=registry)
        self.reranked = Counter("retriever_reranked_queries", "Reranked", registry=registry)
