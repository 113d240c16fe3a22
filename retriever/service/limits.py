"""Limits of the service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the service takes at most, and how it searches.

    Attributes:
        max_batch: Queries of one search.
        max_queue: Queries that wait; a request beyond them gets 503.
        max_queries: Queries of one request; a larger one gets 422.
        max_results: Queries of one request times the documents looked up for each; beyond, 422.
        max_wait: Seconds that a search waits for other requests to join.
        workers: Searches at the same time.
        max_body: Bytes of the body of a request; a larger one gets 413.
        max_bodies: Bytes of the bodies of all requests that are not answered yet; beyond, 503.
        request_seconds: Seconds that a client may take to send the body of a request; then 408.
    """

    max_batch: int = 256
    max_queue: int = 8192
    max_queries: int = 8192
    max_results: int = 2**16
    max_wait: float = 0.002
    workers: int = 1
    max_body: int = 16 * 2**20
    max_bodies: int = 2**27
    request_seconds: float = 30.0
