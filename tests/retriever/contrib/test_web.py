"""Web search against a local server that speaks the providers' formats."""

import json
import sqlite3
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import pytest
from fastapi.testclient import TestClient
from http_rig import Handler, serving
from retriever_rig import refuses

from retriever.contrib import web
from retriever.contrib.web import PROVIDERS, Budget, WebSearch
from retriever.errors import RequestFailed, RetrieverError
from retriever.options import parse
from retriever.service.app import make_app
from retriever.service.cache import ResultCache
from retriever.service.server import load

ITEMS = [{"title": f"T {n}\nx", "link": f"https://e.org/{n}", "snippet": f"s {n}\n y"} for n in range(12)]


@pytest.fixture
def api(monkeypatch):
    """Answers each query by `replies` to it: (status, body), one after the other."""
    for name in ("GOOGLE_API_KEY", "GOOGLE_CSE_ID", "SERPAPI_API_KEY"):
        monkeypatch.setenv(name, f"secret-{name}")
    monkeypatch.setattr(web, "FIRST_DELAY", 0.01)
    api = SimpleNamespace(asked=[], replies={})

    class Planned(Handler):
        def do_GET(self):
            api.asked.append(dict(parse_qsl(urlsplit(self.path).query)))
            planned = api.replies.get(api.asked[-1]["q"])
            self.reply(*(planned.pop(0) if planned else (200, {"items": ITEMS, "organic_results": ITEMS})))

    with serving(Planned) as url:
        api.url = f"{url}/"
        yield api


@pytest.fixture
def budget(tmp_path):
    return Budget(tmp_path / "budget", 5)


@pytest.mark.parametrize(
    ("provider", "address", "sent"),
    [
        ("google", "customsearch.googleapis.com/customsearch/v1", {"key": "API_KEY", "cx": "CSE_ID"}),
        ("serpapi", "serpapi.com/search.json", {"api_key": "API_KEY"}),
    ],
)
def test_results_keep_the_order_of_the_web(api, budget, provider, address, sent):
    assert PROVIDERS[provider].endpoint == f"https://{address}"
    search = WebSearch(provider, budget, api.url)
    results, same = search.search(["who?", "who?"], 2)
    secrets = {name: f"secret-{provider.upper()}_{variable}" for name, variable in sent.items()}
    more = {"engine": "google"} if provider == "serpapi" else {}
    assert api.asked == [{**secrets, **more, "q": "who?", "num": "2"}]
    assert budget.spent == 1 and same == results  # equal queries are sent once
    row = {"id": "https://e.org/0", "url": "https://e.org/0", "contents": '"T 0 x"\ns 0 y'}
    assert results[0] == (row, 1.0) and results[1][1] == 0.5 and len(results) == 2
    assert "secret-GOOGLE_API_KEY" not in json.dumps(search.manifest)


def test_half_surrogate_pair_in_snippet_is_replaced(api, budget, tmp_path):
    items = [{"title": "half \ud800", "link": "https://e.org/\udfff", "snippet": "whole \U0001f600"}]
    api.replies["q"] = [(200, {"items": items})]
    search = WebSearch("google", budget, api.url)
    store = ResultCache(tmp_path / "store", search.manifest, "use")
    with TestClient(make_app(search, 1, cache=store)) as client:
        replies = [client.post("/retrieve", json={"queries": ["q"]}) for _ in range(2)]
    ((row,),) = replies[0].json()["result"]
    assert row["contents"] == '"half \ufffd"\nwhole \U0001f600' and row["url"] == "https://e.org/\ufffd"
    assert replies[1].json() == replies[0].json() and len(api.asked) == 1


def test_no_results_are_no_error(api, budget):
    api.replies = {
        "g": [(200, {"searchInformation": {}})],
        "s": [(200, {"error": "Google hasn't returned any results for this query."})],
    }
    assert WebSearch("google", budget, api.url).search(["g"], 3) == [[]]
    assert WebSearch("serpapi", budget, api.url).search(["s"], 3) == [[]]


@pytest.mark.parametrize(
    ("provider", "replies", "spent", "message"),
    [
        ("google", [(403, {"error": {"message": "API key not valid"}})], 1, "403: API key not valid; check"),
        ("google", [(500, {})] * 3, 3, "no answer after 3 attempts .status 500"),
        ("google", [(200, b"<html>")], 1, "unusable answer"),
        ("google", [(200, [1])], 1, "unusable answer"),
        ("serpapi", [(200, {"error": "Your account has run out of searches."})], 1, "run out of searches"),
    ],
)
def test_failures_name_their_cause_and_are_counted(api, budget, provider, replies, spent, message):
    api.replies = {"bad": list(replies)}
    bad, good = WebSearch(provider, budget, api.url).search(["bad", "good"], 1)
    assert isinstance(bad, RequestFailed) and bad.status == 502
    with pytest.raises(RequestFailed, match=message):
        raise bad
    assert "secret" not in str(bad) and len(good) == 1
    assert budget.spent == spent + 1


def test_passing_failure_is_retried(api, budget, tmp_path):
    api.replies = {"q": [(429, {"error": {"message": "slow down"}}), (503, {})]}
    (results,) = WebSearch("google", budget, api.url).search(["q"], 1)
    assert len(results) == 1 and budget.spent == 3
    away = WebSearch("google", Budget(tmp_path / "other", 5), "http://127.0.0.1:9/")
    assert (
        str(away.search(["q"], 1)[0]) == "google: no answer after 3 attempts (ConnectError)"
    )  # no key in it


def test_budget_and_paid_results_outlive_the_process(api, tmp_path):
    """Of three queries in one request two fit the budget: they are stored, and come from the store later."""
    store = tmp_path / "store"

    def client(limit):
        search = WebSearch("google", Budget(tmp_path / "budget", limit), api.url)
        return TestClient(make_app(search, 3, cache=ResultCache(store, search.manifest, "use")))

    with client(2) as service:
        reply = service.post("/retrieve", json={"queries": ["a", "b", "c"]})
        assert reply.status_code == 402, reply.text
        assert "budget of 2 requests is used up; raise --web_budget" in reply.json()["error"]
    assert len(api.asked) == 2
    (kept,) = sqlite3.connect(store).execute("SELECT count(*) FROM results").fetchone()
    assert kept == 2
    with client(3) as service:
        assert service.post("/retrieve", json={"queries": ["a", "b", "c"]}).status_code == 200
        assert service.post("/retrieve", json={"queries": ["d"]}).status_code == 402
    assert len(api.asked) == 3


def test_options_start_the_web_service(api, tmp_path, monkeypatch):
    options = ["--retriever_name", "serpapi", "--web_endpoint", api.url]
    for name, value in (("cache_path", str(tmp_path / "store")), ("web_budget", "4")):
        refuses(f"--{name} is missing", parse, options)
        options += [f"--{name}", value]
    for name in ("index_path", "corpus_path", "retriever_model"):
        refuses(f"--{name}: has no meaning for --retriever_name serpapi", parse, [*options, f"--{name}", "x"])
    with pytest.raises(RetrieverError, match="--web_budget: has no meaning for an index"):
        parse(["--index_path", "x", "--corpus_path", "y", "--web_budget", "3"])
    with TestClient(load(parse(options))) as service:
        body = {"queries": ["q"], "topk": 1, "return_scores": True}
        (items,) = service.post("/retrieve", json=body).json()["result"]
        assert items[0]["document"]["id"] == "https://e.org/0"
    assert json.loads((tmp_path / "store.budget").read_text()) == {"requests": 1}
    monkeypatch.delenv("SERPAPI_API_KEY")
    refuses("SERPAPI_API_KEY is not set", load, parse(options))
    (tmp_path / "store.budget").write_text("many")
    refuses("not a count of requests", load, parse(options))
