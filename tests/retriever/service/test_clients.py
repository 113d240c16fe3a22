"""What the three clients send, with their batch sizes, and what they read of the reply without looking at its
status. Written from the contracts (service/contracts.py), against the service over a socket."""

import asyncio

import httpx
import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from retriever_rig import NAMES, served

from retriever.corpus.passages import Pages
from retriever.service.app import make_app
from retriever.service.engine import Depths

STEP = 512 * 5  # questions times trajectories of a paper run's step
LONG = "ada almson " * 900  # 9,900 characters: a policy that repeats itself


@pytest.fixture(scope="module")
def url(index, tmp_path_factory):
    pages = tmp_path_factory.mktemp("pages") / "pages.jsonl"
    pages.write_text('{"url": "https://w/index.php?title=Ada", "contents": "a page"}\n')
    with served(make_app(index, Depths(3), pages=Pages(pages))) as (host, port):
        yield f"http://{host}:{port}"


def post(url, route, body):
    with httpx.Client(trust_env=False, timeout=60) as http:
        return http.post(url + route, json=body).json()["result"]


def number(title):
    return str(NAMES.index(title))


def step(count=STEP):
    return [NAMES[n % len(NAMES)] for n in range(count)]


def search_r1(url, queries):
    """One request for all that search in a turn; the first line of the contents is the title."""
    result = post(url, "/retrieve", {"queries": queries, "topk": 3, "return_scores": True})
    titles = []
    for one in filter(None, result):
        for item in one:
            title, _, text = item["document"]["contents"].partition("\n")
            assert text and isinstance(item["score"], float)
        titles.append(one[0]["document"]["contents"].split("\n")[0].strip('"'))
        assert len(one) == 3
    return titles + [None] * result.count([])


def calibadv(url, queries):
    """The authors' request: depths of retrieval and reranking; documents are the contents alone."""
    body = {
        "queries": queries,
        "topk_retrieval": 20,
        "topk_rerank": 3,
        "return_scores": True,
        "not_sort": True,
    }
    result = post(url, "/retrieve", body)
    assert all(
        len(one) in (0, 3) and all(isinstance(item["document"], str) for item in one) for one in result
    )
    return [one[0]["document"].split("\n")[0].strip('"') if one else None for one in result]


@pytest.mark.medium
@pytest.mark.parametrize("client", [search_r1, calibadv])
def test_a_step_s_queries_in_one_request(url, client):
    assert client(url, step()) == step()


@pytest.mark.parametrize("client", [search_r1, calibadv])
def test_nobody_searches_in_a_turn(url, client):
    assert client(url, []) == []


@pytest.mark.parametrize("client", [search_r1, calibadv])
def test_one_long_query_costs_no_other_its_documents(url, client):
    assert client(url, ["bo dorn", LONG, "cy dorn", ""]) == ["bo dorn", "ada almson", "cy dorn", None]


@pytest.mark.medium
def test_rlinf_sends_each_query_by_itself_and_opens_pages(url):
    """Many at once; the rows are not wrapped; a page that is not known is null."""
    queries = step(200) + [LONG]

    async def run():
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:

            async def one(query):
                body = {"queries": [query], "topk": 1, "return_scores": False}
                return (await http.post(f"{url}/retrieve", json=body)).json()["result"][0][0]

            return await asyncio.gather(*(one(query) for query in queries))

    rows = asyncio.run(run())
    assert [row["id"] for row in rows[:-1]] == [number(query) for query in queries[:-1]]
    assert set(rows[0]) >= {"id", "contents"}
    assert post(url, "/retrieve", {"queries": [], "topk": 1, "return_scores": False}) == []
    urls = ["https://w/index.php/Ada", "https://nowhere"]
    assert post(url, "/access", {"urls": urls}) == [
        {"url": "https://w/index.php?title=Ada", "contents": "a page"},
        None,
    ]
