"""Contracts, limits, tokens, identity and errors of the service over a real index; large replies."""

import asyncio
import json
import re
import shutil
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice, pairwise
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from retriever_rig import NAMES, Counting, Held, opened, served, town_rows, write_rows

from retriever.backends import BuildOptions
from retriever.corpus.pages import Pages
from retriever.corpus.passages import load_corpus
from retriever.errors import RequestFailed, RetrieverError, Unavailable
from retriever.indexes.build import build_index
from retriever.options import parse
from retriever.service.app import make_app
from retriever.service.cache import ResultCache
from retriever.service.identity import index_identity
from retriever.service.limits import Limits
from retriever.service.middleware import ROUTES, BodyLimit
from retriever.service.replies import PIECE
from retriever.service.schemas import RetrieveRequest
from retriever.service.search_engine import MAX_QUERY_LENGTH

ROWS = town_rows()
TOKEN, QUERY = {"Authorization": "Bearer secret"}, {"queries": ["ada"]}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
fields = [*RetrieveRequest.model_fields, "urls", "more"]
values = json_values | st.lists(st.text(max_size=20), max_size=3)
bodies = st.fixed_dictionaries({}, optional=dict.fromkeys(fields, values))


@pytest.fixture(scope="module")
def client(towns):
    with TestClient(make_app(towns, 2)) as client:
        yield client


@pytest.fixture(scope="module")
def guarded(index):
    """A service with a token and a small limit of bodies."""
    with TestClient(make_app(index, 1, token="secret", limits=Limits(max_body=200))) as client:
        yield client


def test_contracts_of_the_three_clients(client):
    """Search-R1's, RLinf's with the service's own depth, and CalibAdv's, whose documents are texts."""

    def results(**body):
        return client.post("/retrieve", json={"queries": ["port elton", "Zürich"]} | body).json()["result"]

    (documents, _) = results(topk=3, return_scores=True)
    assert len(documents) == 3 and documents[0]["document"] == ROWS[2]
    assert documents[0]["score"] >= documents[1]["score"]
    plain = results(return_scores=False)
    assert [rows[0] for rows in plain] == [ROWS[2], ROWS[3]] and len(plain[0]) == 2
    (texts, _) = results(topk_retrieval=3, return_scores=True, not_sort=False)
    assert len(texts) == 3 and texts[0]["document"] == ROWS[2]["contents"] and texts[0]["id"] == "2"
    assert texts[0]["score"] > texts[1]["score"] >= texts[2]["score"]
    assert results(topk_retrieval=3)[0] == [item["document"] for item in texts]
    assert len(results(topk=1, topk_rerank=3, not_sort=True)[0]) == 2  # topk is of the other contracts


def test_health_describes_the_index(client):
    state = client.get("/health").json()
    assert state["status"] == "ready"
    assert state["documents"] == len(ROWS)


def test_no_queries_have_no_results(index):
    counting = Counting(index)
    with TestClient(make_app(counting, 1)) as client:
        for body in ({}, {"topk_retrieval": 3, "not_sort": True}):
            reply = client.post("/retrieve", json=body | {"queries": []})
            assert reply.status_code == 200
            assert reply.json() == {"result": []}
    assert not counting.batches


def test_overload_is_503_and_says_when_to_come_back(index):
    held = Held(index)
    limits = Limits(max_batch=1, max_queue=1)
    with TestClient(make_app(held, 1, limits=limits)) as client, ThreadPoolExecutor(6) as pool:
        requests = [pool.submit(client.post, "/retrieve", json=QUERY)]
        while not held.batches:
            time.sleep(0.01)
        requests += [pool.submit(client.post, "/retrieve", json=QUERY) for _ in range(5)]
        # One of these waits. It is answered after the search of the first one.
        refused = [request.result() for request in islice(as_completed(requests), 4)]
        held.go_on.set()
        statuses = sorted(request.result().status_code for request in requests)
    assert statuses == [200] * 2 + [503] * 4
    for reply in refused:
        assert reply.headers["retry-after"] == "1"
        assert "try again" in reply.json()["error"]


def test_reranker_runs_in_one_thread(towns):
    """torch keeps buffers for each thread that calls it."""
    threads = set()

    def rerank(queries, hits, k):
        threads.add(threading.get_ident())
        time.sleep(0.02)
        return [hits_of_query[:k] for hits_of_query in hits]

    app = make_app(towns, 2, reranker=SimpleNamespace(model="m", rerank=rerank))
    body = {"queries": ["port elton"], "topk_retrieval": 2, "topk_rerank": 1}
    with TestClient(app) as client, ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda _: client.post("/retrieve", json=body), range(12)))
    assert {reply.status_code for reply in replies} == {200}
    assert len(threads) == 1


@pytest.mark.parametrize(("more", "depth"), [({}, 3), ({"rerank_topk": 2}, 2)])
def test_depth_that_a_request_leaves_open_is_the_services(towns, more, depth):
    """The app's own default is that of the option `--reranking_topk`."""
    depths = []

    def rerank(queries, hits, k):
        depths.append(k)
        return [hits_of_query[:k] for hits_of_query in hits]

    app = make_app(towns, 2, reranker=SimpleNamespace(model="m", rerank=rerank), **more)
    with TestClient(app) as client:
        client.post("/retrieve", json={"queries": ["port elton"], "topk_retrieval": 2}).raise_for_status()
    assert depths == [depth]
    assert parse(["--corpus_path", "c", "--index_path", "i"]).reranking_topk == 3


def test_query_without_hits_gets_empty_list(towns, tmp_path):
    cache = ResultCache(tmp_path / "store", towns.manifest, "use")
    queries = ["zzzz", "Limmat", "", "!!!"]
    with TestClient(make_app(towns, 2, cache=cache)) as client:
        for body in ({"topk": 3}, {"topk_retrieval": 3}) * 2:  # searched, then stored
            reply = client.post("/retrieve", json=body | {"queries": queries})
            first, (hit,), *others = reply.json()["result"]
            assert [first, *others] == [[]] * 3 and "Limmat" in str(hit)


def test_invalid_request_names_the_field(client):
    for body, field in (
        ({"queries": ["a"], "topk": 0}, "topk"),
        ({"queries": ["a"], "top_k": 3}, "top_k"),
        ({"queries": ["a"], "topk_retrieval": 3, "topk_rerank": 1}, "topk_rerank: no reranker is loaded"),
        ({}, "queries"),
        ({"queries": [1] * 1000}, "queries.0: Input should be a valid string"),
    ):
        reply = client.post("/retrieve", json=body)
        assert reply.status_code == 422 and field in reply.json()["error"] and len(reply.text) < 200


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RetrieverError("/i/index.faiss: cannot be read"), 500),
        (Unavailable("no Qdrant"), 503),
        (RequestFailed(503, "full"), 503),
        (RequestFailed(402, "no money"), 402),
        (ZeroDivisionError("secret"), 500),
    ],
    ids=str,
)
def test_error_of_the_index_is_json(error, status):
    failing = SimpleNamespace(manifest={}, search=Mock(side_effect=error))
    with TestClient(make_app(failing, 1), raise_server_exceptions=False) as client:
        reply = client.post("/retrieve", json={"queries": ["a"]})
        unexpected = "ZeroDivisionError in the service; its log has the details"
        message = unexpected if isinstance(error, ZeroDivisionError) else str(error)
        assert (reply.status_code, reply.json()) == (status, {"error": message})
        assert reply.headers.get("retry-after") == ("1" if status == 503 else None)
        assert f'route="/retrieve",status="{status}"' in client.get("/metrics").text


def test_docs_page_loads_from_the_service_only(client):
    """A cluster's nodes reach no CDN."""
    page = client.get("/docs").text
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(addresses) >= 2 and "http://" not in page and "https://" not in page
    assert all(len(client.get(address).raise_for_status().content) > 100 for address in addresses)


def test_openapi_names_the_routes(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/retrieve", "/access", "/health", "/metrics"} <= set(paths)


def test_long_query_is_cut_and_counted(index):
    counting, fits = Counting(index), "b" * MAX_QUERY_LENGTH
    with TestClient(make_app(counting, 1)) as client:
        reply = client.post("/retrieve", json={"queries": ["ada " + "x" * 9000, "bo dorn", fits]})
        assert [len(rows) for rows in reply.json()["result"]] == [1, 1, 0]
        assert "retriever_cut_queries_total 1.0" in client.get("/metrics").text
    assert counting.queries == [("ada " + "x" * 9000)[:MAX_QUERY_LENGTH], "bo dorn", fits]


@pytest.mark.parametrize(
    ("method", "route", "status"),
    [
        ("POST", "/retrieve", 200),
        ("POST", "/access", 404),  # no pages are loaded
        ("GET", "/metrics", 200),
        ("GET", "/docs", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/nothing", 404),
        ("GET", "/health/", 307),  # not /health itself: starlette would redirect
        ("GET", "//health", 404),
        *[(method, "/health", 405) for method in ("POST", "PUT", "OPTIONS")],
    ],
)
def test_every_route_but_health_needs_the_token(guarded, method, route, status):
    def ask(value=None):
        options = {"json": {"urls": ["u"]} if route == "/access" else QUERY} if method == "POST" else {}
        options["headers"] = {} if value is None else {"Authorization": value}
        reply = guarded.request(method, f"http://testserver{route}", follow_redirects=False, **options)
        if reply.status_code == 401:
            assert reply.headers["www-authenticate"] == "Bearer" and "Authorization" in reply.json()["error"]
        return reply

    for value in (None, "secret", "Bearer", "Bearer secrets", "Basic secret", "Bearersecret", ""):
        assert ask(value).status_code == 401
    for value in ("Bearer secret", "bearer secret", "BEARER  secret"):
        assert ask(value).status_code == status
    assert route != "/nothing" or "POST /retrieve" in ask("Bearer secret").json()["error"]


def test_token_test_names_every_measured_route():
    """A new route belongs into the list of `test_every_route_but_health_needs_the_token`."""
    assert {"/retrieve", "/access", "/metrics", "/health"} == ROUTES


def test_wrong_method_is_answered_with_the_routes(client):
    reply = client.get("/retrieve")
    assert reply.status_code == 405
    assert "POST /retrieve" in reply.json()["error"]


def test_too_large_body_is_answered_with_the_limit(guarded):
    reply = guarded.post("/retrieve", json={"queries": ["a" * 300]}, headers=TOKEN)
    assert reply.status_code == 413
    assert "larger than 200 bytes" in reply.json()["error"]


def test_token_is_checked_before_the_body_is_read(index):
    receive = AsyncMock(side_effect=AssertionError("the body was read"))
    send = AsyncMock()
    scope = SCOPE | {"headers": [(b"content-length", b"9000000")]}
    asyncio.run(make_app(index, 1, token="secret")(scope, receive, send))
    assert send.await_args_list[0].args[0]["status"] == 401
    receive.assert_not_awaited()


SCOPE = {"type": "http", "method": "POST", "path": "/retrieve", "query_string": b"", "headers": []}


@pytest.mark.parametrize(("limit", "unread"), [(2**22, 0), (500, 40_000 - 6)])
def test_body_in_parts_arrives_whole(limit, unread):
    """Forty thousand parts: bytes that grow by `+=` would be copied for each, 80 GB in all."""
    bodies, sent, parts = [], AsyncMock(), iter(range(39_999, -1, -1))

    async def receive():
        return {"type": "http.request", "body": b"x" * 100, "more_body": next(parts) > 0}

    async def app(scope, receive, send):
        bodies.append((await receive())["body"])

    begin = time.process_time()
    asyncio.run(BodyLimit(app, limit)(SCOPE, receive, sent))
    assert time.process_time() - begin < 2
    assert len(list(parts)) == unread  # it stops where the limit is passed
    assert bodies == ([] if unread else [b"x" * 4_000_000])
    assert [call.args[0].get("status") for call in sent.await_args_list] == [413, None] * bool(unread)


def test_half_surrogate_pair_in_a_query_is_refused(client):
    reply = client.post("/retrieve", content=b'{"queries": ["\\ud800"]}')
    assert reply.status_code == 422, reply.text


@pytest.mark.medium
def test_no_request_makes_the_service_fail(index, all_cases):
    examples = 8000 if all_cases else 300
    contents = st.builds(json.dumps, bodies | json_values) | st.binary(max_size=60)
    with TestClient(make_app(index, 2), raise_server_exceptions=False) as client:

        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
        @given(contents, st.sampled_from(["/retrieve", "/access"]))
        @example(b'{"queries": ["\\ud800"]}', "/retrieve")
        def ask(content, route):
            reply = client.post(route, content=content, headers={"content-type": "application/json"})
            assert reply.status_code < 500, (content, reply.text)
            assert ("result" if reply.status_code == 200 else "error") in reply.json()

        ask()


def identity(index, **more):
    with TestClient(make_app(index, 1, **more)) as client:
        state = client.get("/health").json()["identity"]
        for route, body in (("/retrieve", {"queries": ["port elton"]}), ("/access", {"urls": ["a"]})):
            assert client.post(route, json=body).headers["x-index-identity"] == state
        return state


def test_copies_of_an_index_have_one_identity(files, tmp_path):
    corpus, folder = files
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    moved = shutil.copy(corpus, tmp_path / "rows.jsonl")
    first = identity(opened(corpus, folder))
    assert int(first, 16) and len(first) == 32
    assert identity(opened(moved, copy)) == first == identity(opened(moved, copy, engine="jax"))
    qdrant = {"collection": "c", "documents": 3, "search": "hnsw_ef=8"}
    there, here = (index_identity(qdrant | {"url": f"http://{host}:6333"}, "") for host in "ab")
    assert there == here != index_identity(qdrant | {"search": "hnsw_ef=128"}, "")


@pytest.mark.medium
def test_identity_covers_everything_that_decides_results(files, tmp_path):
    changed = [*ROWS[:-1], ROWS[-1] | {"contents": ROWS[-1]["contents"] + " Indeed."}]
    index = opened(*files)
    identities = {identity(index), identity(index, reranker=SimpleNamespace(model="m"))}
    ivf = [{"factory": "IVF2,Flat", "search": f"nprobe={number}"} for number in (1, 2)]
    options = [{}, {"retriever_name": "bm25"}, {"factory": "SQ8"}, *ivf]
    builds = [(ROWS[:-1], {}), (changed, {}), *[(ROWS, values) for values in options]]
    for number, (rows, values) in enumerate(builds):
        file, folder = write_rows(tmp_path / f"{number}.jsonl", rows), tmp_path / str(number)
        build_index(load_corpus(file), folder, BuildOptions(**values), progress=False)
        identities.add(identity(opened(file, folder)))
    for blank, text in (("", "A"), ("", "B"), ("\n", "A")):  # blank lines are no part of the pages
        (tmp_path / "pages").write_text(blank + json.dumps({"url": "a", "contents": text}))
        identities.add(identity(index, pages=Pages(tmp_path / "pages")))
    assert len(identities) == 2 + len(builds) + 2


def test_replies_of_access_carry_the_identity_of_index_and_pages(index, tmp_path):
    path = write_rows(tmp_path / "pages.jsonl", [{"url": "a", "contents": "A"}])
    pages = Pages(path)
    with TestClient(make_app(index, 1, pages=pages)) as client:
        state = client.get("/health").json()
        assert state["pages_sha256"] == pages.sha256
        for urls, status in ((["a"], 200), (5, 422)):
            reply = client.post("/access", json={"urls": urls})
            assert reply.status_code == status
            assert reply.headers["x-index-identity"] == state["identity"]


def test_refusals_carry_the_identity_and_are_counted(guarded):
    state = guarded.get("/health").json()["identity"]  # without a token
    assert guarded.head("/health").status_code == 200
    large = ["a" * 300]
    for queries, headers, status in (
        (3, TOKEN, 422),
        ([], TOKEN, 200),
        (large, TOKEN, 413),
        (large, {}, 401),
    ):
        reply = guarded.post("/retrieve", json={"queries": queries}, headers=headers)
        assert (reply.status_code, reply.headers["x-index-identity"]) == (status, state)
        metrics = guarded.get("/metrics", headers=TOKEN).text
        assert f'route="/retrieve",status="{status}"' in metrics
    assert "x-index-identity" not in guarded.get("/health").headers


TEXT = '"Zürich"\n' + "on the river Limmat \ud83d \u2028" * 50  # 1.1 kB, as Wikipedia's
ROW = {"id": "7", "contents": TEXT}


# Finds the same passage k times: what a reply takes of memory is then the reply's own.
WIDE = SimpleNamespace(manifest={}, search=lambda queries, k: [[(ROW, 0.25)] * k for _ in queries])


@pytest.mark.parametrize("queries", [0, 1, 3])
@pytest.mark.parametrize(
    ("depth", "return_scores", "item"),
    [
        ("topk", True, {"document": ROW, "score": 0.25}),
        ("topk", False, ROW),
        ("topk_retrieval", True, {"document": TEXT, "score": 0.25, "id": "7"}),
        ("topk_retrieval", False, TEXT),
    ],
)
def test_reply_in_pieces_equals_a_whole_one(depth, return_scores, item, queries):
    """json.dumps as FastAPI's own replies are written; but half of a surrogate pair, which is no UTF-8."""
    body = {depth: 1000, "return_scores": return_scores, "queries": ["q"] * queries}
    with served(make_app(WIDE, 3)) as (host, port):
        reply = httpx.post(f"http://{host}:{port}/retrieve", json=body, trust_env=False)
    whole = json.dumps({"result": [[item] * 1000] * queries}, ensure_ascii=False, separators=(",", ":"))
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    assert reply.content == whole.replace("\ud83d", r"\ud83d").encode()
    assert ("content-length" in reply.headers) == (queries == 0)


async def request(app, body, gone, watch=lambda part: None):
    """The status of the reply, or None where there was none; the client leaves when `gone` is set."""
    status, messages = None, iter([json.dumps(body).encode()])

    async def receive():
        for content in messages:
            return {"type": "http.request", "body": content, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        nonlocal status
        status = message.get("status", status)
        if message["type"] == "http.response.body":
            watch(message["body"])

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/retrieve", "query_string": b"", "headers": headers}
    await app(scope, receive, send)
    return status


@pytest.mark.medium
def test_largest_reply_takes_little_memory():
    """65 queries times 1,000 documents, about 75 MB."""
    sizes, body = [], {"queries": ["q"] * 65, "topk": 1000, "return_scores": True}
    tracemalloc.start()
    try:
        asyncio.run(request(make_app(WIDE, 3), body, asyncio.Event(), lambda part: sizes.append(len(part))))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(sizes) > 70 * 10**6 and max(sizes) < 2 * PIECE and most < 20 * 10**6


def test_large_reply_lets_others_through_between_pieces():
    app = make_app(WIDE, 3)
    body = {"queries": ["q"] * 3, "topk": 1000, "return_scores": True}
    ticks = 0
    ticks_at_pieces = []

    async def count_ticks():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    def note(piece):
        if piece:  # the last message of a reply is empty
            ticks_at_pieces.append(ticks)

    async def run():
        ticking = asyncio.create_task(count_ticks())
        await request(app, body, asyncio.Event(), note)
        ticking.cancel()

    asyncio.run(run())
    assert len(ticks_at_pieces) > 5
    assert all(later > earlier for earlier, later in pairwise(ticks_at_pieces))


@pytest.mark.parametrize(
    "body",
    [
        {"queries": ["ada"] * 512, "topk": 3, "return_scores": True},  # Search-R1's batch
        {"queries": ["ada"] * 512 * 5, "topk_retrieval": 20, "topk_rerank": 3, "not_sort": True},
        pytest.param({"queries": ["ada"] * 8192, "topk": 8}, marks=pytest.mark.medium),
        {"queries": ["ada"], "topk": 1000},
    ],
    ids=["Search-R1", "CalibAdv", "most queries", "most documents"],
)
def test_real_clients_stay_within_the_limits(body):
    with TestClient(make_app(WIDE, 3)) as client:
        reply = client.post("/retrieve", json=body)
    assert reply.status_code == 200
    assert len(reply.json()["result"]) == len(body["queries"])


def test_pages_of_any_size_are_sent_in_pieces(index, tmp_path):
    rows = [{"url": f"u{n}", "contents": "é" * 100_000} for n in range(8)]
    pages = Pages(write_rows(tmp_path / "pages.jsonl", rows))
    with served(make_app(index, 3, pages=pages)) as (host, port), httpx.Client(trust_env=False) as client:
        url = f"http://{host}:{port}/access"
        many = client.post(url, json={"urls": [*(row["url"] for row in rows), "nowhere"]})
        few = client.post(url, json={"urls": ["nowhere"]})
    whole = json.dumps({"result": [*rows, None]}, ensure_ascii=False, separators=(",", ":"))
    assert many.content == whole.encode()
    assert "content-length" not in many.headers
    assert few.content == b'{"result":[null]}'
    assert few.headers["content-length"] == "17"


@pytest.mark.parametrize(
    ("limits", "queries", "body", "message"),
    [
        (
            Limits(),
            300,
            {"topk": 1000},
            "300 with 1000 documents each are 300,000, and 65,536 are taken; send at most 65 queries at once,"
            " or raise --max_results",
        ),
        (
            Limits(),
            66,
            {"topk_retrieval": 1000, "not_sort": True},
            "send at most 65 queries at once, or raise --max_results",
        ),
        (Limits(max_results=10), 4, {}, "4 with 3 documents each are 12, and 10 are taken; send at most 3"),
        (Limits(max_results=10), 3, {}, ""),
        (Limits(max_results=10), 1, {"topk": 11}, "send topk 10 at most, or raise --max_results"),
        (Limits(max_results=10), 1, {"topk": 10}, ""),
        (Limits(), 1, {"topk": 1000}, ""),
        (Limits(), 8193, {"topk": 1}, "8193 in one request, and 8192 are taken"),
        (Limits(max_queries=3), 4, {}, "4 in one request, and 3 are taken"),
        (Limits(max_queue=3), 4, {}, "4 in one request, and 3 are taken"),  # 503 would repeat for ever
        (Limits(max_queue=3), 3, {}, ""),
    ],
)
def test_too_large_request_is_refused_before_search(index, limits, queries, body, message):
    counting = Counting(index)
    with TestClient(make_app(counting, 3, limits=limits)) as client:
        reply = client.post("/retrieve", json=body | {"queries": ["ada"] * queries})
    assert (reply.status_code, bool(counting.batches)) == ((422, False) if message else (200, True))
    if message:
        assert message in reply.json()["error"] and "--max_" in reply.json()["error"]


def test_invalid_score_fails_before_the_reply():
    def search(queries, k):
        return [[(ROW, 0.5)] * (k - 1) + [(ROW, float("nan"))] for _ in queries]

    odd = SimpleNamespace(manifest={}, search=search)
    with TestClient(make_app(odd, 3), raise_server_exceptions=False) as client:
        reply = client.post("/retrieve", json={"queries": ["q"], "topk": 1000, "return_scores": True})
        assert reply.status_code == 500 and reply.json()["error"].startswith("ValueError in the service")


@pytest.mark.parametrize("is_stored", [False, True])
def test_queries_of_absent_client_are_not_searched(index, tmp_path, is_stored):
    """But with a store: they may have been paid for, and the client comes back for them."""
    searched = []

    async def run():
        loop, begun, go_on, gone = asyncio.get_running_loop(), *(asyncio.Event() for _ in range(3))

        def search(queries, k):
            searched.extend(queries)
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
            return index.search(queries, k)

        cache = ResultCache(tmp_path / "store", index.manifest, "use") if is_stored else None
        app = make_app(SimpleNamespace(manifest=index.manifest, search=search), 1, cache=cache)
        tasks = [asyncio.create_task(request(app, {"queries": NAMES[:1]}, asyncio.Event()))]
        await begun.wait()
        for names, leaves in ((NAMES[1:3], gone), (NAMES[3:4], asyncio.Event())):
            tasks.append(asyncio.create_task(request(app, {"queries": names}, leaves)))
        while "retriever_queued_queries 3.0" not in await metrics(app):
            await asyncio.sleep(0.01)
        gone.set()
        while not is_stored and not tasks[1].done():
            await asyncio.sleep(0.01)
        go_on.set()
        return await asyncio.gather(*tasks)

    statuses = asyncio.run(run())
    assert (statuses[0], statuses[2]) == (200, 200)
    assert sorted(searched) == sorted(NAMES[:4] if is_stored else [NAMES[0], NAMES[3]])


async def metrics(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        return (await client.get("/metrics")).text
