"""Prometheus metrics of the service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# Upper bounds of the buckets of the sizes of searches, in queries.
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Prometheus metrics in a registry of their own, because one process may hold several services.

    Attributes:
        registry: The registry of the others.
        requests: Number of requests by route and status.
        seconds: Seconds to answer a request, by route.
        batch: Queries of a search.
        queue: Queries that wait for their search.
        cached: Queries that were answered from the store.
        unstored: Queries that were answered, but whose results could not be stored.
        cut: Queries that were longer than the limit and were cut to it.
        reranked: Queries whose documents were reranked.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
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
