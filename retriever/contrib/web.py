"""Web search by SerpAPI (https://serpapi.com/search-api), within a budget.

Each attempt is counted on disk before it is sent, so that neither a crash nor a restart exceeds the budget.
Titles and snippets are returned; pages are not fetched.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from retriever.errors import RequestFailed, RetrieverError
from retriever.files import atomic_write
from retriever.interfaces import Hits

ENDPOINT = "https://serpapi.com/search.json"
KEY_VARIABLE = "SERPAPI_API_KEY"
PARALLEL = 8  # requests at the same time
DELAYS = (0.0, 0.5, 1.0)  # seconds before each attempt
TIMEOUT = 20.0  # seconds
PROBLEM_LENGTH = 200  # characters shown of the provider's message
PAGE_SIZE = 10  # results of a request at most


class Budget:
    """Counts requests in a file that is kept from run to run, and refuses those beyond a limit."""

    def __init__(self, path: Path, limit: int):
        self.path, self.limit = path, limit
        self.spent()  # refuses a damaged file at the start

    def spend(self) -> bool:
        """Use up one request, first on disk; return whether one was left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{self.path}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other threads and services count in the same file
            spent = self.spent()
            if spent < self.limit:
                with atomic_write(self.path) as partial:
                    partial.write_text(json.dumps({"requests": spent + 1}), encoding="utf-8")
            return spent < self.limit

    def spent(self) -> int:
        """Return the requests so far, of all services that share the file."""
        try:
            return int(json.loads(self.path.read_text(encoding="utf-8"))["requests"])
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError) as error:
            raise RetrieverError(f"{self.path}: not a count of requests; delete it to count again") from error


class WebSearch:
    """Searches the web by SerpAPI, at its own endpoint or another address of the same API."""

    def __init__(self, options: argparse.Namespace):
        self.budget = Budget(Path(f"{options.cache_path}.budget"), options.web_budget)
        self._key = os.environ.get(KEY_VARIABLE, "")
        if not self._key:
            raise RetrieverError(f"{KEY_VARIABLE} is not set; web search needs it in the environment")
        self._endpoint = options.web_endpoint or ENDPOINT
        self._http = httpx.Client(timeout=TIMEOUT)
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="web-search")
        self.manifest = {"kind": "web", "encoder": options.retriever_name}

    def search(self, queries: Sequence[str], k: int) -> list[Hits | Exception]:
        """Return each query's results, at most PAGE_SIZE, with scores 1 / rank, or its error."""
        distinct, size = dict.fromkeys(queries), min(k, PAGE_SIZE)
        futures = {query: self._pool.submit(self._ask, query, size) for query in distinct}
        return [futures[query].result() for query in queries]

    def _ask(self, query: str, k: int) -> Hits | Exception:
        problem = ""
        parameters = {"api_key": self._key, "engine": "google", "q": query, "num": str(k)}
        for delay in DELAYS:
            time.sleep(delay)
            if not self.budget.spend():
                spent = f"the web search budget of {self.budget.limit} requests is used up"
                advice = f"raise --web_budget, or delete {self.budget.path} to count again"
                return RequestFailed(402, f"{spent}; {advice}")
            try:
                response = self._http.get(self._endpoint, params=parameters)
                reply = response.json()
                if response.status_code == 200:
                    return _hits(reply, k)
            except httpx.HTTPError as error:
                problem = type(error).__name__  # not the text: it shows the address with the key
                continue
            except (ValueError, AttributeError, TypeError) as error:
                return RequestFailed(502, f"serpapi: unusable answer: {_line(error, PROBLEM_LENGTH)}")
            cause = reply.get("error") if isinstance(reply, dict) else ""
            problem = f"status {response.status_code}: {_line(cause, PROBLEM_LENGTH)}"
            if response.status_code != 429 and response.status_code < 500:
                return RequestFailed(502, f"serpapi: {problem}; check key and quota")
        return RequestFailed(502, f"serpapi: no answer after {len(DELAYS)} attempts ({problem})")


def _hits(reply: dict[str, Any], k: int) -> Hits:
    """Return the first k results that have a link; raises ValueError with the message of a failed search."""
    items: list[dict[str, Any]] = reply.get("organic_results", [])
    problem = str(reply.get("error", ""))
    if problem and not items and "any results" not in problem:  # its message for no results
        raise ValueError(problem)
    hits: Hits = []
    for item in items[:k]:
        if link := _line(item.get("link")):
            contents = f'"{_line(item.get("title"))}"\n{_line(item.get("snippet"))}'
            hits.append(({"id": link, "contents": contents, "url": link}, 1.0 / (len(hits) + 1)))
    return hits


def _line(text: Any, length: int | None = None) -> str:
    """Return text on one line, cut to a length; half a surrogate pair becomes U+FFFD."""
    whole = str(text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(whole.split())[:length]
