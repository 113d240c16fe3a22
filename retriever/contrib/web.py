"""Web search by SerpAPI (https://serpapi.com/search-api), Serper or SearXNG, within a budget.

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

import httpx

from retriever.contrib.web_apis import APIS, BadReply, line, problem_of
from retriever.errors import RequestFailed, RetrieverError, explained_proxies
from retriever.files import atomic_write
from retriever.interfaces import Hits

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
    """Searches the web by an API of `web_apis`, at its own endpoint or another address of the same API.

    Args:
        options: Options of the service: `cache_path`, `web_budget`, `web_endpoint` and `retriever_name`.

    Attributes:
        budget: Counts the requests.
        manifest: Kind and encoder, as of an index.

    Raises:
        RetrieverError: There is no key in the environment, no address is known, or the count of requests is
            damaged.
    """

    def __init__(self, options: argparse.Namespace):
        self._api = APIS[options.retriever_name]
        self.budget = Budget(Path(f"{options.cache_path}.budget"), options.web_budget)
        variable = self._api.key_variable
        self._key = os.environ.get(variable, "") if variable else ""
        if variable and not self._key:
            raise RetrieverError(f"{variable} is not set; web search needs it in the environment")
        self._endpoint = options.web_endpoint or self._api.endpoint
        if not self._endpoint:
            raise RetrieverError(
                f"--web_endpoint is missing: {self._api.name} has no address of its own; give yours, such as "
                "http://127.0.0.1:8080/search"
            )
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
        name = self._api.name
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
                response = self._http.request(url=self._endpoint, **self._api.request(self._key, query, k))
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                problem = type(error).__name__  # not the text: it shows the address with the key
                continue
            try:
                reply = response.json()
            except (ValueError, RecursionError) as error:  # no JSON, or too many brackets
                reply = None
                problem = f"no JSON ({line(error, PROBLEM_LENGTH)})"
            else:
                problem = problem_of(reply)
            if response.status_code == 200:
                if reply is None:
                    return RequestFailed(502, f"{name}: unusable answer: {problem}")
                try:
                    return self._api.hits(reply, k)
                except BadReply as error:
                    problem = line(error, PROBLEM_LENGTH * 3)
                    if not error.may_pass:
                        return RequestFailed(502, f"{name}: unusable answer: {problem}")
                    continue
            problem = f"status {response.status_code}: {problem}"
            may_pass = response.status_code == 429 or response.status_code >= 500
            if not may_pass:
                return RequestFailed(502, f"{name}: {problem}; {self._advice()}")
        return RequestFailed(502, f"{name}: no answer after {len(DELAYS)} attempts ({problem})")

    def _advice(self) -> str:
        """Return what to do about a refused request."""
        if self._api.key_variable:
            return "check key and quota"
        return "check the address, and that the instance allows the format json (search.formats)"
