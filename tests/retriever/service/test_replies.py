"""Large replies: bounded, made beside the event loop, sent in pieces, and the same bytes as before."""

import asyncio
import json
import tracemalloc
from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient
from retriever_rig import NAMES, Counting, served, write_rows

from retriever.corpus.passages import Pages
from retriever.service.app import PIECE, make_app
from retriever.service.cache import ResultCache
from retriever.service.engine import Limits

TEXT = '"Zürich"\n' + "on the river Limmat \ud83d \u2028" * 50  # 1.1 kB, as Wikipedia's
ROW = {"id": "7", "contents": TEXT}


class Wide:
    """Finds the same passage k times: what a reply takes of memory is then the reply's own."""

    manifest = {"documents": 1000}

    def search(self, queries, k):
        return [[(ROW, 0.25)] * k for _ in queries]


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
    with served(make_app(Wide(), 3)) as (host, port):
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
        asyncio.run(request(make_app(Wide(), 3), body, asyncio.Event(), lambda part: sizes.append(len(part))))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(sizes) > 70 * 10**6 and max(sizes) < 2 * PIECE and most < 20 * 10**6


@pytest.mark.parametrize(
    ("limits", "queries", "body", "message"),
    [
        (Limits(), 300, {"topk": 1000}, "300 with 1000 documents each are 300,000, and 65,536 are taken"),
        (Limits(), 66, {"topk_retrieval": 1000, "not_sort": True}, "send at most 65 queries at once"),
        (Limits(max_results=10), 4, {}, "4 with 3 documents each are 12, and 10 are taken; send at most 3"),
        (Limits(max_results=10), 1, {"topk": 11}, "send topk 10 at most"),
        (Limits(max_results=10), 1, {"topk": 10}, ""),
        (Limits(max_results=10), 3, {}, ""),
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
    class Odd(Wide):
        def search(self, queries, k):
            return [[(ROW, 0.5)] * (k - 1) + [(ROW, float("nan"))] for _ in queries]

    with TestClient(make_app(Odd(), 3), raise_server_exceptions=False) as client:
        reply = client.post("/retrieve", json={"queries": ["q"], "topk": 1000, "return_scores": True})
        assert reply.status_code == 500 and reply.json()["error"].startswith("ValueError in the service")


def test_pages_of_any_size_are_sent_in_pieces(index, tmp_path):
    rows = [{"url": f"u{n}", "contents": "é" * 100_000} for n in range(8)]
    pages = Pages(write_rows(tmp_path / "pages.jsonl", rows))
    with served(make_app(index, 3, pages=pages)) as (host, port):
        for results, length in (([*rows, None], None), ([None], "17")):
            urls = [row["url"] if row else "nowhere" for row in results]
            reply = httpx.post(f"http://{host}:{port}/access", json={"urls": urls}, trust_env=False)
            whole = json.dumps({"result": results}, ensure_ascii=False, separators=(",", ":"))
            assert (reply.content, reply.headers.get("content-length")) == (whole.encode(), length)


@pytest.mark.parametrize("is_stored", [False, True])
def test_queries_of_absent_client_are_not_searched(index, tmp_path, is_stored):
    """But with a store: they may have been paid for, and the client comes back for them."""
    searched = []

    async def run():
        loop, begun, go_on, gone = asyncio.get_running_loop(), *(asyncio.Event() for _ in range(3))

        def search(queries, k):
            searched.extend(queries)
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
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

    statuses = asyncio.run(asyncio.wait_for(run(), 60))
    assert (statuses[0], statuses[2]) == (200, 200)
    assert sorted(searched) == sorted(NAMES[:4] if is_stored else [NAMES[0], NAMES[3]])


async def metrics(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        return (await client.get("/metrics")).text
