"""Requests of the three clients, with their batch sizes, and what they read of the replies, over a socket."""

import asyncio

import httpx
import pytest
from retriever_rig import NAMES, served, write_rows

from retriever.corpus.pages import Pages
from retriever.service.app import make_app

STEP = 512 * 5  # questions of a paper run's step times trajectories of each
LONG = "ada almson " * 900  # 9,900 characters: a policy that repeats itself
PAGE = {"url": "https://w/index.php?title=Ada", "contents": "a page"}


@pytest.fixture(scope="module")
def url(index, tmp_path_factory):
    pages = Pages(write_rows(tmp_path_factory.mktemp("pages") / "pages.jsonl", [PAGE]))
    with served(make_app(index, 3, pages=pages)) as (host, port):
        yield f"http://{host}:{port}"


def post(url, route, body):
    with httpx.Client(trust_env=False, timeout=250) as client:
        return client.post(url + route, json=body).json()["result"]


def repeated_names(count):
    return [NAMES[n % len(NAMES)] for n in range(count)]


def title_of(contents):
    return contents.partition("\n")[0].strip('"')


def ask_as_search_r1(url, queries):
    """Send one request for all that search in a turn; return the title of each query's best document."""
    result = post(url, "/retrieve", {"queries": queries, "topk": 3, "return_scores": True})
    titles = []
    for items in result:
        assert len(items) in (0, 3)
        for item in items:
            _, _, text = item["document"]["contents"].partition("\n")
            assert text
            assert isinstance(item["score"], float)
        titles.append(title_of(items[0]["document"]["contents"]) if items else None)
    return titles


def ask_as_calibadv(url, queries):
    """Send depths of retrieval and reranking, as the authors; documents are the contents alone."""
    body = {
        "queries": queries,
        "topk_retrieval": 20,
        "topk_rerank": 3,
        "return_scores": True,
        "not_sort": True,
    }
    titles = []
    for items in post(url, "/retrieve", body):
        assert len(items) in (0, 3)
        assert all(isinstance(item["document"], str) for item in items)
        titles.append(title_of(items[0]["document"]) if items else None)
    return titles


CLIENTS = [ask_as_search_r1, ask_as_calibadv]


@pytest.mark.medium
@pytest.mark.parametrize("ask", CLIENTS)
def test_queries_of_a_step_fit_one_request(url, ask):
    assert ask(url, repeated_names(STEP)) == repeated_names(STEP)


@pytest.mark.parametrize("ask", CLIENTS)
def test_turn_without_a_search_gets_no_results(url, ask):
    assert ask(url, []) == []


@pytest.mark.parametrize("ask", CLIENTS)
def test_long_query_costs_no_other_its_documents(url, ask):
    assert ask(url, ["bo dorn", LONG, "cy dorn", ""]) == ["bo dorn", "ada almson", "cy dorn", None]


@pytest.mark.medium
def test_rlinf_sends_each_query_by_itself(url):
    """Many at once; the rows are not wrapped."""
    queries = [*repeated_names(200), LONG]

    async def run():
        async with httpx.AsyncClient(trust_env=False, timeout=250) as client:

            async def ask(query):
                body = {"queries": [query], "topk": 1, "return_scores": False}
                reply = await client.post(f"{url}/retrieve", json=body)
                return reply.json()["result"][0][0]

            return await asyncio.gather(*(ask(query) for query in queries))

    rows = asyncio.run(run())
    assert [title_of(row["contents"]) for row in rows] == [*repeated_names(200), "ada almson"]
    assert [row["id"] for row in rows[:16]] == [str(n) for n in range(16)]


def test_rlinf_opens_pages(url):
    """A page that is not known is null."""
    urls = ["https://w/index.php/Ada", "https://nowhere"]
    assert post(url, "/access", {"urls": urls}) == [PAGE, None]
