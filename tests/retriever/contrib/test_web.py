"""Web search against a local server that speaks SerpAPI's format."""

import json
import re
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import pytest
from fastapi.testclient import TestClient
from http_rig import Handler, serving
from retriever_rig import refuses

from retriever.contrib import web
from retriever.contrib.web import WebSearch
from retriever.errors import RequestFailed
from retriever.options import parse
from retriever.service.app import make_app
from retriever.service.assembly import load
from retriever.service.cache import ResultCache

ITEMS = [{"title": f"T {n}\nx", "link": f"https://e.org/{n}", "snippet": f"s {n}\n y"} for n in range(12)]


@pytest.fixture
def api(monkeypatch):
    """Answers each query by `replies` to it: (status, body), one after the other."""
    monkeypatch.setenv("SERPAPI_API_KEY", "secret")
    monkeypatch.setattr(web, "DELAYS", (0.0, 0.01, 0.02))
    api = SimpleNamespace(asked=[], replies={})

    class Planned(Handler):
        def do_GET(self):
            api.asked.append(dict(parse_qsl(urlsplit(self.path).query)))
            planned = api.replies.get(api.asked[-1]["q"])
            self.reply(*(planned.pop(0) if planned else (200, {"organic_results": ITEMS})))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            api.asked.append(body | {"key": self.headers["x-api-key"]})
            self.reply(*api.replies[body["q"]].pop(0))

    with serving(Planned) as url:
        api.url = f"{url}/"
        yield api


@pytest.fixture
def open_search(api, tmp_path):
    """Opens a search at the local server, with a budget kept in a file."""

    def open_search(budget=5, url=None, name="serpapi"):
        paths = ["--cache_path", str(tmp_path / "store"), "--web_endpoint", url or api.url]
        return WebSearch(parse(["--retriever_name", name, "--web_budget", str(budget), *paths]))

    return open_search


def test_results_keep_the_order_of_the_web(api, open_search):
    search, other = open_search(), open_search()
    results, same = search.search(["who?", "who?"], 2)
    assert api.asked == [{"api_key": "secret", "engine": "google", "q": "who?", "num": "2"}]
    assert other.budget.spent() == 1 and same == results  # equal queries are sent once
    row = {"id": "https://e.org/0", "url": "https://e.org/0", "contents": '"T 0 x"\ns 0 y'}
    assert results[0] == (row, 1.0) and results[1][1] == 0.5 and len(results) == 2
    assert "secret" not in json.dumps(search.manifest)


def test_half_surrogate_pair_in_snippet_is_replaced(api, open_search, tmp_path):
    items = [{"title": "half \ud800", "link": "https://e.org/\udfff", "snippet": "whole \U0001f600"}]
    api.replies["q"] = [(200, {"organic_results": items})]
    search = open_search()
    store = ResultCache(tmp_path / "store", search.manifest, "use")
    with TestClient(make_app(search, 1, cache=store)) as client:
        replies = [client.post("/retrieve", json={"queries": ["q"]}) for _ in range(2)]
    ((row,),) = replies[0].json()["result"]
    assert row["contents"] == '"half \ufffd"\nwhole \U0001f600' and row["url"] == "https://e.org/\ufffd"
    assert replies[1].json() == replies[0].json() and len(api.asked) == 1


def test_no_results_are_no_error(api, open_search):
    none = {"error": "Google hasn't returned any results for this query."}
    api.replies = {"q": [(200, {"search_metadata": {}}), (200, none)]}
    assert [open_search().search(["q"], 3) for _ in "12"] == [[[]], [[]]]


@pytest.mark.parametrize(
    ("replies", "spent", "message"),
    [
        ([(403, {"error": "API key not valid"})], 1, "403: API key not valid; check"),
        ([(500, {})] * 3, 3, "no answer after 3 attempts .status 500"),
        *[([(200, content)], 1, "unusable answer") for content in (b"<html>", [1])],
        ([(200, {"error": "Your account has run out of searches."})], 1, "run out of searches"),
    ],
)
def test_failures_name_their_cause_and_are_counted(api, open_search, replies, spent, message):
    api.replies = {"bad": list(replies)}
    search = open_search()
    bad, good = search.search(["bad", "good"], 1)
    assert isinstance(bad, RequestFailed) and bad.status == 502
    assert re.search(message, str(bad)) and "secret" not in str(bad) and len(good) == 1
    assert search.budget.spent() == spent + 1


PAGE = {"title": "Old Mill", "url": "https://e.org/mill", "content": "Built in 1702."}
SEARXNG = {"query": "q", "number_of_results": 1, "results": [PAGE], "unresponsive_engines": []}
OTHER_REPLIES = [
    (SEARXNG, "no organic_results; its keys are query, number_of_results.*looks like SearXNG's"),
    ({"searchParameters": {}, "organic": [PAGE]}, "organic.*looks like Serper's"),
    ({"query": "q", "results": [PAGE], "response_time": 0.4}, "looks like Tavily's"),
    ({"type": "search", "query": {}, "web": {"results": [PAGE]}}, "looks like Brave's"),
    ({"_type": "SearchResponse", "webPages": {"value": [PAGE]}}, "looks like Bing's"),
    ({"kind": "customsearch#search", "items": [PAGE]}, "looks like Google's"),
    ({"success": False, "message": "quota used up"}, "quota used up"),
    ({"error": {"code": "401", "message": "no access"}}, "unusable answer: no access"),
    ({}, "its keys are none; set --web_endpoint"),
    ({"search_metadata": {"status": "Processing"}}, "no organic_results"),
    ({"organic_results": {"0": PAGE}}, "organic_results is no list, but dict"),
    ({"organic_results": "many"}, "organic_results is no list, but str"),
    ({"organic_results": ["a", {"position": 1}]}, "no result has a link or a text"),
]


@pytest.mark.parametrize(("reply", "message"), OTHER_REPLIES)
def test_reply_of_another_api_is_an_error_and_is_not_stored(api, open_search, tmp_path, reply, message):
    api.replies["q"] = [(200, reply)]
    search = open_search()
    store = ResultCache(tmp_path / "store", search.manifest, "use")
    with TestClient(make_app(search, 3, cache=store)) as service:
        refused = service.post("/retrieve", json={"queries": ["good", "q"]})
        again = service.post("/retrieve", json={"queries": ["good", "q"]})
    assert refused.status_code == 502 and re.search(message, refused.json()["error"]), refused.text
    assert again.status_code == 200 and [len(hits) for hits in again.json()["result"]] == [3, 3]
    assert [asked["q"] for asked in api.asked].count("good") == 1  # the other queries of a request are kept


def test_result_without_link_keeps_its_text(api, open_search):
    items = [{"title": "A", "snippet": "first"}, {"title": "no text"}, {"url": "https://e.org", "name": "B"}]
    api.replies["q"] = [(200, {"organic_results": items})]
    (hits,) = open_search().search(["q"], 2)
    assert [row["contents"] for row, _ in hits] == ['"A"\nfirst', '"B"\n']
    assert hits[0][0]["id"].startswith("text-") and "url" not in hits[0][0]


def test_searxng_needs_an_address_and_no_key(api, open_search, tmp_path, monkeypatch):
    monkeypatch.delenv("SERPAPI_API_KEY")
    api.replies = {"q": [(200, SEARXNG)], "none": [(200, SEARXNG | {"results": []})]}
    hits, nothing = open_search(name="searxng").search(["q", "none"], 3)
    assert hits[0][0] == {"id": PAGE["url"], "url": PAGE["url"], "contents": '"Old Mill"\nBuilt in 1702.'}
    assert nothing == [] and {"q": "q", "format": "json"} in api.asked
    options = ["--retriever_name", "searxng", "--cache_path", str(tmp_path / "s"), "--web_budget", "3"]
    refuses("--web_endpoint is missing: searxng has no address", WebSearch, parse(options))


def test_searxng_without_engines_or_json_is_an_error(api, open_search):
    blocked = SEARXNG | {"results": [], "unresponsive_engines": [["google", "CAPTCHA"]]}
    api.replies = {"q": [(200, blocked)] * 3, "html": [(403, b"<html>")]}
    blocked_error, html_error = open_search(9, name="searxng").search(["q", "html"], 3)
    assert "did not answer: [['google', 'CAPTCHA']]" in str(blocked_error)
    assert "the instance allows the format json" in str(html_error)


def test_serper_is_asked_by_post(api, open_search, monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "secret")
    item = {"title": "Old Mill", "link": "https://e.org/mill", "snippet": "Built in 1702.", "position": 1}
    api.replies = {"q": [(200, {"searchParameters": {"q": "q"}, "organic": [item]})]}
    api.replies["bad"] = [(400, {"message": "Not enough credits", "statusCode": 400})]
    hits, error = open_search(name="serper").search(["q", "bad"], 3)
    assert [row["contents"] for row, _ in hits] == ['"Old Mill"\nBuilt in 1702.']
    assert {"q": "q", "num": 3, "key": "secret"} in api.asked
    assert "status 400: Not enough credits; check key and quota" in str(error) and "secret" not in str(error)


def test_passing_failure_is_retried(api, open_search):
    api.replies = {"q": [(429, {"error": "slow down"}), (503, {})]}
    search = open_search()
    (results,) = search.search(["q"], 1)
    assert len(results) == 1 and search.budget.spent() == 3
    (away,) = open_search(9, "http://127.0.0.1:9/").search(["q"], 1)
    assert str(away) == "serpapi: no answer after 3 attempts (ConnectError)"  # no key in it


def test_budget_and_paid_results_outlive_the_process(api, open_search, tmp_path):
    """Of three queries in one request two fit the budget: they are stored, and come from the store later."""
    for budget, requests in ((2, [(["a", "b", "c"], 402)]), (3, [(["a", "b", "c"], 200), (["d"], 402)])):
        search = open_search(budget)
        store = ResultCache(tmp_path / "store", search.manifest, "use")
        with TestClient(make_app(search, 3, cache=store)) as service:
            for queries, status in requests:
                reply = service.post("/retrieve", json={"queries": queries})
                assert reply.status_code == status, reply.text
        assert f"budget of {budget} requests is used up; raise --web_budget" in reply.json()["error"]
        assert len(api.asked) == budget


def test_options_start_the_web_service(api, tmp_path, monkeypatch):
    options = ["--retriever_name", "serpapi", "--web_endpoint", api.url]
    for name, value in (("cache_path", str(tmp_path / "store")), ("web_budget", "4")):
        refuses(f"--{name} is missing", parse, options)
        options += [f"--{name}", value]
    for name in ("index_path", "corpus_path", "retriever_model"):
        refuses(f"--{name}: has no meaning for --retriever_name serpapi", parse, [*options, f"--{name}", "x"])
    for ignored in (["--mmap"], ["--faiss_gpu"], ["--engine", "jax"], ["--qdrant_search", "exact=true"]):
        refuses(f"{ignored[0]}: has no meaning for --retriever_name serpapi", parse, [*options, *ignored])
    index = ["--index_path", "x", "--corpus_path", "y"]
    refuses("--web_budget: has no meaning for an index", parse, [*index, "--web_budget", "3"])
    with TestClient(load(parse(options))) as service:
        body = {"queries": ["q"], "topk": 1, "return_scores": True}
        (items,) = service.post("/retrieve", json=body).json()["result"]
        assert items[0]["document"]["id"] == "https://e.org/0"
    assert json.loads((tmp_path / "store.budget").read_text()) == {"requests": 1}
    monkeypatch.delenv("SERPAPI_API_KEY")
    refuses("SERPAPI_API_KEY is not set", load, parse(options))
    (tmp_path / "store.budget").write_text("many")
    refuses("not a count of requests", load, parse(options))
