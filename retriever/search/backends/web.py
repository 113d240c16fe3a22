"""Web search behind the service's contract: Google's Custom Search JSON API or SerpAPI, within a budget.

Every attempt counts against the budget before it is sent, on disk, so that neither a crash nor a restart
spends more than was allowed. Titles and snippets are returned; pages are not fetched.
"""

from __future__ import annotations

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from retriever.errors import RetrieverError
from retriever.files import replacing
from retriever.interfaces import Found

PARALLEL = 8  # requests under way at once
ATTEMPTS = 3
FIRST_DELAY = 0.5  # seconds before the second attempt; the third waits twice as long
TIMEOUT = 20.0  # seconds
PROBLEM_LENGTH = 200  # characters shown of what a provider says


class SearchFailed(Exception):
    """One query was not answered; `status` is what the service replies."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Provider(ABC):
    """One web search API."""

    name: str
    endpoint: str
    page_size: int  # results one request can bring at most

    @abstractmethod
    def parameters(self, query: str, k: int) -> dict[str, str]:
        """Of the GET request, key included."""

    @abstractmethod
    def results(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        """Items with title, link and snippet; raises ValueError if the reply reports an error."""

    @property
    def identity(self) -> dict[str, str]:
        """What, besides the query, decides the results."""
        return {}


class Google(Provider):
    """https://developers.google.com/custom-search/v1/reference/rest/v1/cse/list"""

    name = "google"
    endpoint = "https://customsearch.googleapis.com/customsearch/v1"
    page_size = 10

    def __init__(self) -> None:
        self._key, self._engine = _secret("GOOGLE_API_KEY"), _secret("GOOGLE_CSE_ID")

    def parameters(self, query: str, k: int) -> dict[str, str]:
        return {"key": self._key, "cx": self._engine, "q": query, "num": str(k)}

    def results(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = reply.get("items", [])
        return items

    @property
    def identity(self) -> dict[str, str]:
        return {"cx": self._engine}


class SerpApi(Provider):
    """https://serpapi.com/search-api"""

    name = "serpapi"
    endpoint = "https://serpapi.com/search.json"
    page_size = 10

    def __init__(self) -> None:
        self._key = _secret("SERPAPI_API_KEY")

    def parameters(self, query: str, k: int) -> dict[str, str]:
        return {"api_key": self._key, "engine": "google", "q": query, "num": str(k)}

    def results(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = reply.get("organic_results", [])
        problem = str(reply.get("error", ""))
        if problem and not items and "any results" not in problem:  # its way to say that there are none
            raise ValueError(problem)
        return items


PROVIDERS: dict[str, type[Provider]] = {provider.name: provider for provider in (Google, SerpApi)}


class Budget:
    """Counts requests in a file, and refuses those beyond a limit.

    Args:
        path: kept from run to run; delete it to start again.

    Raises:
        RetrieverError: the file exists but does not hold a count.
    """

    def __init__(self, path: Path, limit: int):
        self.path, self.limit = path, limit
        self._lock = threading.Lock()
        self.spent = 0
        if path.is_file():
            try:
                self.spent = int(json.loads(path.read_text(encoding="utf-8"))["requests"])
            except (ValueError, KeyError, TypeError) as error:
                raise RetrieverError(f"{path}: not a count of requests; delete it to count again") from error

    def spend(self) -> None:
        """Uses up one request, first on disk; raises SearchFailed (402) when none is left."""
        with self._lock:
            if self.spent >= self.limit:
                raise SearchFailed(
                    402,
                    f"the web search budget of {self.limit} requests is used up; raise --web_budget, or"
                    f" delete {self.path} to count again",
                )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as partial:
                partial.write_text(json.dumps({"requests": self.spent + 1}), encoding="utf-8")
            self.spent += 1


class WebSearch:
    """Implements `interfaces.Searcher` over a web search API.

    Args:
        provider: google or serpapi; keys come from GOOGLE_API_KEY and GOOGLE_CSE_ID, or SERPAPI_API_KEY.
        endpoint: another address of the same API, such as a proxy's.

    Raises:
        RetrieverError: unknown provider, or a key is not set.
    """

    def __init__(self, provider: str, budget: Budget, endpoint: str = ""):
        if provider not in PROVIDERS:
            raise RetrieverError(f"unknown web search {provider!r}; known are {', '.join(PROVIDERS)}")
        self._provider, self.budget = PROVIDERS[provider](), budget
        self._endpoint = endpoint or self._provider.endpoint
        self._http = httpx.Client(timeout=TIMEOUT)
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="web-search")
        self.manifest = {"kind": "web", "encoder": provider, **self._provider.identity}

    def search(self, queries: Sequence[str], k: int) -> list[Found | Exception]:
        """At most `page_size` results of each query, in the web's order, or why there are none.

        The score is 1 / rank: web search gives an order and no scores. Equal queries are sent once.
        """
        once = list(dict.fromkeys(queries))
        outcomes = dict(zip(once, self._pool.map(lambda query: self._outcome(query, k), once), strict=True))
        return [outcomes[query] for query in queries]

    def _outcome(self, query: str, k: int) -> Found | Exception:
        try:
            return self._ask(query, min(k, self._provider.page_size))
        except SearchFailed as error:
            return error

    def _ask(self, query: str, k: int) -> Found:
        delay, problem = FIRST_DELAY, ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(delay)
                delay *= 2
            self.budget.spend()
            try:
                response = self._http.get(self._endpoint, params=self._provider.parameters(query, k))
                reply = response.json()
                if response.status_code == 200:
                    return _rows(self._provider.results(reply)[:k])
            except httpx.HTTPError as error:
                problem = type(error).__name__  # not the text: it shows the address with the key
                continue
            except (ValueError, AttributeError, TypeError) as error:
                raise SearchFailed(502, f"{self._provider.name}: unusable answer: {_brief(error)}") from error
            problem = f"status {response.status_code}: {_brief(_problem(reply))}"
            if response.status_code != 429 and response.status_code < 500:
                raise SearchFailed(502, f"{self._provider.name}: {problem}; check key and quota")
        raise SearchFailed(502, f"{self._provider.name}: no answer after {ATTEMPTS} attempts ({problem})")


def _rows(items: Sequence[dict[str, Any]]) -> Found:
    return [
        (
            {
                "id": _line(item["link"]),
                "contents": f'"{_line(item.get("title"))}"\n{_line(item.get("snippet"))}',
                "url": _line(item["link"]),
            },
            1.0 / rank,
        )
        for rank, item in enumerate((item for item in items if item.get("link")), 1)
    ]


def _line(text: Any) -> str:
    """On one line: the first line of a passage is its title. Half a surrogate pair becomes U+FFFD."""
    whole = str(text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(whole.split())


def _problem(reply: Any) -> str:
    error = reply.get("error", "") if isinstance(reply, dict) else ""
    return str(error.get("message", "") if isinstance(error, dict) else error)


def _brief(text: object) -> str:
    return _line(text)[:PROBLEM_LENGTH]


def _secret(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise RetrieverError(f"{name} is not set; web search needs it in the environment")
    return value
