"""Web search by Google's Custom Search JSON API or SerpAPI, within a budget.

Each attempt is counted on disk before it is sent, so that neither a crash nor a restart exceeds the budget.
Titles and snippets are returned; pages are not fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx

from retriever.errors import RequestFailed, RetrieverError
from retriever.files import replacing
from retriever.interfaces import Hits

PARALLEL = 8  # requests at the same time
DELAYS = (0.0, 0.5, 1.0)  # seconds before each attempt
TIMEOUT = 20.0  # seconds
PROBLEM_LENGTH = 200  # characters shown of a provider's message
PAGE_SIZE = 10  # results of a request at most


@dataclass(frozen=True)
class Provider:
    """A web search API with GET requests."""

    endpoint: str
    secrets: dict[str, str]  # parameter -> environment variable of its value
    results: Callable[[dict[str, Any]], list[dict[str, Any]]]  # items with title, link and snippet
    parameters: dict[str, str] = field(default_factory=dict)
    public: tuple[str, ...] = ()  # secrets that decide the results and may be shown


def _serpapi_results(reply: dict[str, Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = reply.get("organic_results", [])
    problem = str(reply.get("error", ""))
    if problem and not items and "any results" not in problem:  # its message for no results
        raise ValueError(problem)
    return items


PROVIDERS = {
    "google": Provider(  # https://developers.google.com/custom-search/v1/reference/rest/v1/cse/list
        "https://customsearch.googleapis.com/customsearch/v1",
        {"key": "GOOGLE_API_KEY", "cx": "GOOGLE_CSE_ID"},
        lambda reply: reply.get("items", []),
        public=("cx",),
    ),
    "serpapi": Provider(  # https://serpapi.com/search-api
        "https://serpapi.com/search.json",
        {"api_key": "SERPAPI_API_KEY"},
        _serpapi_results,
        {"engine": "google"},
    ),
}


class Budget:
    """Counts requests in a file that is kept from run to run, and refuses those beyond a limit."""

    def __init__(self, path: Path, limit: int):
        self.path, self.limit = path, limit
        self._lock = threading.Lock()
        self.spent = 0
        if path.is_file():
            try:
                self.spent = int(json.loads(path.read_text(encoding="utf-8"))["requests"])
            except (ValueError, KeyError, TypeError) as error:
                raise RetrieverError(f"{path}: not a count of requests; delete it to count again") from error

    def spend(self) -> bool:
        """Use up one request, first on disk; return whether one was left."""
        with self._lock:
            if self.spent >= self.limit:
                return False
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as partial:
                partial.write_text(json.dumps({"requests": self.spent + 1}), encoding="utf-8")
            self.spent += 1
            return True


class WebSearch:
    """Searches the web by a provider of PROVIDERS, at its own endpoint or another address of the same API."""

    def __init__(self, options: argparse.Namespace):
        name = self._name = options.retriever_name
        provider = self._provider = PROVIDERS[name]
        self.budget = Budget(Path(f"{options.cache_path}.budget"), options.web_budget)
        for variable in provider.secrets.values():
            if not os.environ.get(variable):
                raise RetrieverError(f"{variable} is not set; web search needs it in the environment")
        self._secrets = {key: os.environ[variable] for key, variable in provider.secrets.items()}
        self._endpoint = options.web_endpoint or provider.endpoint
        self._http = httpx.Client(timeout=TIMEOUT)
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="web-search")
        self.manifest = {"kind": "web", "encoder": name} | {
            key: self._secrets[key] for key in provider.public
        }

    def search(self, queries: Sequence[str], k: int) -> list[Hits | Exception]:
        """Return each query's results, at most PAGE_SIZE, with scores 1 / rank, or its error."""
        distinct = list(dict.fromkeys(queries))
        outcomes = self._pool.map(self._ask, distinct, repeat(min(k, PAGE_SIZE)))
        by_query = dict(zip(distinct, outcomes, strict=True))
        return [by_query[query] for query in queries]

    def _ask(self, query: str, k: int) -> Hits | Exception:
        problem = ""
        parameters = self._secrets | self._provider.parameters | {"q": query, "num": str(k)}
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
                    return _hits(self._provider.results(reply)[:k])
            except httpx.HTTPError as error:
                problem = type(error).__name__  # not the text: it shows the address with the key
                continue
            except (ValueError, AttributeError, TypeError) as error:
                return RequestFailed(502, f"{self._name}: unusable answer: {_line(error, PROBLEM_LENGTH)}")
            cause = reply.get("error", "") if isinstance(reply, dict) else ""
            message = cause.get("message", "") if isinstance(cause, dict) else cause
            problem = f"status {response.status_code}: {_line(message, PROBLEM_LENGTH)}"
            if response.status_code != 429 and response.status_code < 500:
                return RequestFailed(502, f"{self._name}: {problem}; check key and quota")
        return RequestFailed(502, f"{self._name}: no answer after {len(DELAYS)} attempts ({problem})")


def _hits(items: Sequence[dict[str, Any]]) -> Hits:
    hits: Hits = []
    for item in items:
        if link := _line(item.get("link")):
            contents = f'"{_line(item.get("title"))}"\n{_line(item.get("snippet"))}'
            hits.append(({"id": link, "contents": contents, "url": link}, 1.0 / (len(hits) + 1)))
    return hits


def _line(text: Any, length: int | None = None) -> str:
    """Return text on one line, cut to a length; half a surrogate pair becomes U+FFFD."""
    whole = str(text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(whole.split())[:length]
