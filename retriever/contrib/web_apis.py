"""APIs of web search: how each is asked, and how its reply is read."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from retriever.interfaces import Hits

# Names of a result's address, title and text in the replies of all APIs; the first that is filled is taken.
LINKS = ("link", "url")
TITLES = ("title", "name")
TEXTS = ("snippet", "content", "description", "text")
# Keys shown of a reply of another API.
SHOWN_KEYS = 12
# Keys that only the reply of one API has -> the API, for messages.
_SIGNS = {
    "organic_results": "SerpAPI",
    "organic": "Serper",
    "unresponsive_engines": "SearXNG",
    "number_of_results": "SearXNG",
    "web": "Brave",
    "webPages": "Bing",
    "response_time": "Tavily",
    "items": "Google's Custom Search",
}


class BadReply(Exception):
    """A reply that is no list of results.

    Args:
        message: What the reply is, in one line.
        may_pass: Whether the same request may succeed later.
    """

    def __init__(self, message: str, may_pass: bool = False):
        super().__init__(message)
        self.may_pass = may_pass


@dataclass(frozen=True)
class WebApi:
    """An API of web search.

    Attributes:
        name: Value of --retriever_name.
        endpoint: Its address; empty if each user has one, as for SearXNG.
        key_variable: Variable of the environment that holds its key; empty if it needs none.
        results_key: Key of the list of results in a reply.
        own_keys: Keys of which every reply of the API has at least one, also a reply without results.
        request: Returns the arguments of an HTTP request, given the key, a query and a number of results.
    """

    name: str
    endpoint: str
    key_variable: str
    results_key: str
    own_keys: tuple[str, ...]
    request: Callable[[str, str, int], dict[str, Any]]

    def hits(self, reply: Any, k: int) -> Hits:
        """Return the first k results of a reply that have a link or a text, with scores 1 / rank.

        Args:
            reply: The provider's reply, as parsed from JSON.
            k: Largest number of results.

        Raises:
            BadReply: The search failed, or the reply is that of another API.
        """
        if not isinstance(reply, dict):
            raise BadReply(f"the reply is no object, but {type(reply).__name__}")
        results = reply.get(self.results_key)
        problem = problem_of(reply)
        is_empty = "any results" in problem  # SerpAPI's message for no results
        if problem and not results and not is_empty:
            raise BadReply(problem)
        if results is None:
            self._check_own(reply, is_empty)
            results = []
        if not isinstance(results, list):
            raise BadReply(f"{self.results_key} is no list, but {type(results).__name__}")
        hits = _hits(results, k)
        if results and not hits:
            raise BadReply(f"no result has a link or a text: {line(results[0], 200)}")
        if not results:
            _check_engines(reply)
        return hits

    def _check_own(self, reply: Mapping[str, Any], is_empty: bool) -> None:
        """Raise BadReply unless a reply without results is this API's."""
        state = reply.get("search_metadata")
        status = state.get("status", "Success") if isinstance(state, Mapping) else "Success"
        is_own = any(isinstance(reply.get(key), Mapping) for key in self.own_keys)
        if is_empty or (is_own and status == "Success"):
            return
        keys = line(", ".join(map(str, list(reply)[:SHOWN_KEYS])), 200) or "none"
        likely = next((api for key, api in _SIGNS.items() if key in reply), "")
        advice = "set --web_endpoint to the address of this API"
        if likely:
            advice = f"it looks like {likely}'s: set --retriever_name and --web_endpoint to one API"
        raise BadReply(f"the reply has no {self.results_key}; its keys are {keys}; {advice}")


def problem_of(reply: Any) -> str:
    """Return the message of a failed search in a reply; empty if there is none."""
    if not isinstance(reply, dict):
        return ""
    for key in ("error", "message", "detail"):
        problem = reply.get(key)
        if isinstance(problem, Mapping):
            problem = problem.get("message", problem.get("error"))
        if problem:
            return line(problem, 200)
    return ""


def _check_engines(reply: Mapping[str, Any]) -> None:
    """Raise BadReply if SearXNG's search engines did not answer: nothing was searched then."""
    engines = reply.get("unresponsive_engines")
    if isinstance(engines, list) and engines:
        raise BadReply(f"its search engines did not answer: {line(engines, 200)}", may_pass=True)


def _hits(results: list[Any], k: int) -> Hits:
    hits: Hits = []
    for result in results:
        if len(hits) == k:
            break
        if not isinstance(result, Mapping):
            continue
        title = _first(result, TITLES)
        text = _first(result, TEXTS)
        link = _first(result, LINKS)
        if not link and not text:
            continue
        contents = f'"{title}"\n{text}'
        row = {"id": link, "contents": contents, "url": link}
        if not link:
            digest = hashlib.sha256(contents.encode()).hexdigest()
            row = {"id": f"text-{digest[:16]}", "contents": contents}
        rank = len(hits) + 1
        hits.append((row, 1.0 / rank))
    return hits


def _first(result: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Return the first of these texts or numbers that is not empty, as a line."""
    for key in keys:
        value = result.get(key)
        if isinstance(value, str | int | float) and line(value) and not _is_nan(value):
            return line(value)
    return ""


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def line(text: Any, length: int | None = None) -> str:
    """Return text on one line, cut to a length; half of a surrogate pair becomes U+FFFD."""
    encodable = str(text or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(encodable.split())[:length]


def _ask_serpapi(key: str, query: str, k: int) -> dict[str, Any]:
    parameters = {"api_key": key, "engine": "google", "q": query, "num": str(k)}
    return {"method": "GET", "params": parameters}


def _ask_serper(key: str, query: str, k: int) -> dict[str, Any]:
    return {"method": "POST", "headers": {"X-API-KEY": key}, "json": {"q": query, "num": k}}


def _ask_searxng(key: str, query: str, k: int) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"method": "GET", "headers": headers, "params": {"q": query, "format": "json"}}


APIS = {
    "serpapi": WebApi(
        "serpapi",
        endpoint="https://serpapi.com/search.json",
        key_variable="SERPAPI_API_KEY",
        results_key="organic_results",
        own_keys=("search_metadata", "search_parameters", "search_information"),
        request=_ask_serpapi,
    ),
    "serper": WebApi(
        "serper",
        endpoint="https://google.serper.dev/search",
        key_variable="SERPER_API_KEY",
        results_key="organic",
        own_keys=("searchParameters",),
        request=_ask_serper,
    ),
    # Its reply always has the list of results.
    "searxng": WebApi(
        "searxng", endpoint="", key_variable="", results_key="results", own_keys=(), request=_ask_searxng
    ),
}
