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

from retriever.errors import RequestFailed, RetrieverError, explained_proxies
from retriever.files import atomic_write
from retriever.interfaces import Hits

ENDPOINT = "https://serpapi.com/search.json"
# Variable of the environment that holds the key of the API.
KEY_VARIABLE = "SERPAPI_API_KEY"
# Requests at the same time.
PARALLEL = 8
# Seconds to wait before each attempt of a query.
DELAYS = (0.0, 0.5, 1.0)
# Seconds for the provider to answer.
TIMEOUT = 20.0
# Characters shown of the provider's message.
PROBLEM_LENGTH = 200
# Results of a request at most.
PAGE_SIZE = 10


class Budget:
    """Counts requests in a file that is kept from run to run, and refuses those beyond a limit.

    Args:
        path: The file; it is made with the first request.
        limit: Number of requests in all.

    Attributes:
        path: The file.
        limit: As above.

    Raises:
        RetrieverError: The file is damaged.
    """

    def __init__(self, path: Path, limit: int):
        self.path = path
        self.limit = limit
        self.spent()  # refuses a damaged file at the start

    def spend(self) -> bool:
        """Use up one request, on disk before it is sent.

        Returns:
            Whether a request was left.

        Raises:
            RetrieverError: The file is damaged.
            OSError: The file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{self.path}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # other threads and services count in the same file
            spent = self.spent()
            if spent >= self.limit:
                return False
            with atomic_write(self.path) as partial:
                partial.write_text(json.dumps({"requests": spent + 1}), encoding="utf-8")
            return True

    def spent(self) -> int:
        """Return the requests so far, of all services that share the file.

        Raises:
            RetrieverError: The file is damaged.
        """
        try:
            return int(json.loads(self.path.read_text(encoding="utf-8"))["requests"])
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError) as error:
            raise RetrieverError(f"{self.path}: not a count of requests; delete it to count again") from error


class WebSearch:
    """Searches the web by SerpAPI, at its own endpoint or another address of the same API.

    Args:
        options: Options of the service: `cache_path`, `web_budget`, `web_endpoint` and `retriever_name`.

    Attributes:
        budget: Counts the requests.
        manifest: Kind and encoder, as of an index.

    Raises:
        RetrieverError: There is no key in the environment, or the count of requests is damaged.
    """

    def __init__(self, options: argparse.Namespace):
        self.budget = Budget(Path(f"{options.cache_path}.budget"), options.web_budget)
        self._key = os.environ.get(KEY_VARIABLE, "")
        if not self._key:
            raise RetrieverError(f"{KEY_VARIABLE} is not set; web search needs it in the environment")
        self._endpoint = options.web_endpoint or ENDPOINT
        with explained_proxies():
            self._http = httpx.Client(timeout=TIMEOUT)
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="web-search")
        self.manifest = {"kind": "web", "encoder": options.retriever_name}

    def search(self, queries: Sequence[str], k: int) -> list[Hits | Exception]:
        """Search the web for queries; equal ones are sent once.

        Args:
            queries: The texts.
            k: Largest number of results for each query; more than PAGE_SIZE count as PAGE_SIZE.

        Returns:
            For each query its results in the order of the web, with scores 1 / rank, or its error.
        """
        size = min(k, PAGE_SIZE)
        futures = {}
        for query in queries:
            if query not in futures:
                futures[query] = self._pool.submit(self._ask, query, size)
        return [futures[query].result() for query in queries]

    def _ask(self, query: str, k: int) -> Hits | Exception:
        """Return the results of a query, after as many attempts as it takes, or its error."""
        parameters = {"api_key": self._key, "engine": "google", "q": query, "num": str(k)}
        problem = ""
        for delay in DELAYS:
            time.sleep(delay)
            if not self.budget.spend():
                return RequestFailed(
                    402,
                    f"the web search budget of {self.budget.limit} requests is used up; raise --web_budget,"
                    f" or delete {self.budget.path} to count again",
                )
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
            may_pass = response.status_code == 429 or response.status_code >= 500
            if not may_pass:
                return RequestFailed(502, f"serpapi: {problem}; check key and quota")
        return RequestFailed(502, f"serpapi: no answer after {len(DELAYS)} attempts ({problem})")


def _hits(reply: dict[str, Any], k: int) -> Hits:
    """Return those of the first k results that have a link.

    Args:
        reply: The provider's reply.
        k: Number of results to look at.

    Raises:
        ValueError: The search has failed, with the provider's message.
    """
    results: list[dict[str, Any]] = reply.get("organic_results", [])
    problem = str(reply.get("error", ""))
    is_empty = "any results" in problem  # the provider's message for no results
    if problem and not results and not is_empty:
        raise ValueError(problem)
    hits: Hits = []
    for result in results[:k]:
        link = _line(result.get("link"))
        if not link:
            continue
        title = _line(result.get("title"))
        snippet = _line(result.get("snippet"))
        row = {"id": link, "contents": f'"{title}"\n{snippet}', "url": link}
        rank = len(hits) + 1
        hits.append((row, 1.0 / rank))
    return hits


def _line(text: Any, length: int | None = None) -> str:
    """Return text on one line, cut to a length; half of a surrogate pair becomes U+FFFD."""
    encodable = str(text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(encodable.split())[:length]
