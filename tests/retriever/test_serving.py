"""Batching, limits, store, pages and shutdown of the service, over a real index."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

import httpx
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retriever.batching import Overloaded, SearchBatcher
from retriever.cache import ResultCache
from retriever.corpus import load_corpus
from retriever.errors import RetrieverError
from retriever.index import build_index, load_index
from retriever.options import parse
from retriever.pages import Pages
from retriever.serve import listen
from retriever.service import Limits, make_app

NAMES = [f"{a} {b}" for a in ("ada", "bo", "cy", "di") for b in ("almson", "berkson", "carlson", "dorn")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(corpus file, index folder) of sixteen passages."""
    folder = tmp_path_factory.mktemp("service")
    corpus = folder / "corpus.jsonl"
    rows = [
        {"id": str(n), "contents": f'"{name}"\n{name} lives in town {n}.'} for n, name in enumerate(NAMES)
    ]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_index(load_corpus(corpus), folder / "index", "hashed", progress=False)
    return corpus, folder / "index"


@pytest.fixture(scope="module")
def index(files):
    return load_index(files[1], load_corpus(files[0]))


class Counting:
    """A real index that notes the size of every search, and can be slowed down."""

    def __init__(self, index, seconds=0.0):
        self.index, self.seconds, self.batches = index, seconds, []
        self.manifest = index.manifest

    def search(self, queries, k):
        self.batches.append((len(queries), k))
        time.sleep(self.seconds)
        return self.index.search(queries, k)


def test_queries_that_wait_together_share_a_search_and_get_their_own_results(index):
    counting = Counting(index, seconds=0.02)

    async def run():
        batcher = SearchBatcher(counting.search, max_batch=64)
        return await asyncio.gather(*(batcher.search([name], 3) for name in NAMES * 4))

    results = asyncio.run(run())
    for (found,), name in zip(results, NAMES * 4, strict=True):
        (alone,) = index.search([name], 3)
        assert [row for row, _ in found] == [row for row, _ in alone]
        # FAISS multiplies many queries by another kernel, which rounds otherwise.
        assert [score for _, score in found] == pytest.approx([score for _, score in alone], rel=1e-5)
    assert len(counting.batches) <= 3, counting.batches


def test_depths_are_not_mixed(index):
    counting = Counting(index)

    async def run():
        batcher = SearchBatcher(counting.search)
        return await asyncio.gather(batcher.search(["ada"], 2), batcher.search(["ada", "bo"], 5))

    one, two = asyncio.run(run())
    assert [len(found) for found in one + two] == [2, 5, 5]
    assert counting.batches == [(1, 2), (2, 5)]


def test_a_full_queue_refuses_and_the_rest_is_answered(index):
    counting = Counting(index, seconds=0.05)

    async def run():
        batcher = SearchBatcher(counting.search, max_batch=2, max_queue=4)
        tasks = [asyncio.create_task(batcher.search([name], 1)) for name in NAMES]
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    refused = [result for result in results if isinstance(result, Overloaded)]
    assert 0 < len(refused) <= len(NAMES) - 4
    assert all(len(result) == 1 for result in results if not isinstance(result, Overloaded))


def test_an_error_of_a_search_reaches_its_callers_and_the_next_search_works(index):
    def search(queries, k):
        if "bad" in queries:
            raise OSError("disk")
        return index.search(queries, k)

    async def run():
        batcher = SearchBatcher(search)
        (failed,) = await batcher.search(["bad"], 1)
        assert isinstance(failed, OSError) and str(failed) == "disk"
        return await batcher.search(["ada almson"], 1)

    assert asyncio.run(run())[0][0][0]["id"] == "0"


def test_a_client_that_has_gone_is_not_searched_for(index):
    counting = Counting(index, seconds=0.05)

    async def run():
        batcher = SearchBatcher(counting.search, max_batch=1)
        first = asyncio.create_task(batcher.search(["ada"], 1))
        gone = asyncio.create_task(batcher.search(["bo"], 1))
        last = asyncio.create_task(batcher.search(["cy"], 1))
        await asyncio.sleep(0.02)
        gone.cancel()
        await asyncio.gather(first, last)

    asyncio.run(run())
    assert len(counting.batches) == 2


def test_overload_is_503_with_retry_after(index):
    slow = Counting(index, seconds=0.3)
    with TestClient(make_app(slow, topk=1, limits=Limits(max_batch=1, max_queue=1))) as client:
        replies = []

        def ask():
            replies.append(client.post("/retrieve", json={"queries": ["ada"]}))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    codes = sorted(reply.status_code for reply in replies)
    assert codes[0] == 200 and codes[-1] == 503
    refused = next(reply for reply in replies if reply.status_code == 503)
    assert refused.headers["retry-after"] == "1" and "try again" in refused.json()["error"]


def test_a_run_is_repeated_from_the_store_exactly_and_a_miss_is_named(index, tmp_path):
    counting = Counting(index)
    body = {"queries": ["ada almson", "bo dorn"], "topk": 3, "return_scores": True}
    path = tmp_path / "store.sqlite"
    with TestClient(make_app(counting, 3, cache=ResultCache(path, index.manifest, "use"))) as client:
        first = client.post("/retrieve", json=body).json()
        assert client.post("/retrieve", json=body).json() == first
        assert sum(size for size, _ in counting.batches) == 2
        assert "retriever_cached_queries_total 2.0" in client.get("/metrics").text
    with TestClient(make_app(counting, 3, cache=ResultCache(path, index.manifest, "replay"))) as client:
        assert client.post("/retrieve", json=body).json() == first
        missed = client.post("/retrieve", json=body | {"queries": ["cy carlson"]})
        assert missed.status_code == 409 and "'cy carlson' was not recorded" in missed.json()["error"]
        assert client.post("/retrieve", json=body | {"topk": 2}).status_code == 409
    assert sum(size for size, _ in counting.batches) == 2
    other = ResultCache(path, index.manifest | {"encoder": "other"}, "use")
    assert other.look_up(["ada almson"], 3) == [None]


def test_a_damaged_or_missing_store_is_refused(index, tmp_path):
    path = tmp_path / "store.sqlite"
    with pytest.raises(RetrieverError, match="nothing was recorded here"):
        ResultCache(path, index.manifest, "replay")
    path.write_bytes(b"no database at all, but long enough to look like a file" * 50)
    with pytest.raises(RetrieverError, match="not a result store"):
        ResultCache(path, index.manifest, "use")


def test_pages_by_url(index, tmp_path):
    path = tmp_path / "pages.jsonl"
    rows = [{"url": "https://w/index.php?title=A", "contents": "a"}, {"url": "u", "contents": "ü"}]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    with TestClient(make_app(index, 1, pages=Pages(path))) as client:
        urls = ["https://w/index.php/A", "u", "nowhere"]
        assert client.post("/access", json={"urls": urls}).json() == {"result": [*rows, None]}
    path.write_text('{"url": "u"}\n{"contents": "no url"}\n')
    with pytest.raises(RetrieverError, match="pages.jsonl:2: expected a JSON object with 'url'"):
        Pages(path)
    with TestClient(make_app(index, 1)) as client:
        assert (
            "start the service with --pages_path"
            in client.post("/access", json={"urls": ["u"]}).json()["error"]
        )


def test_token_body_limit_and_unknown_routes(index):
    app = make_app(index, 1, token="secret", limits=Limits(max_body=200))
    with TestClient(app) as client:
        assert client.get("/health").status_code == 200
        refused = client.post("/retrieve", json={"queries": ["ada"]})
        assert refused.status_code == 401 and "Authorization" in refused.json()["error"]
        header = {"Authorization": "Bearer secret"}
        assert client.post("/retrieve", json={"queries": ["ada"]}, headers=header).status_code == 200
        large = client.post("/retrieve", json={"queries": ["a" * 300]}, headers=header)
        assert large.status_code == 413 and "larger than 200 bytes" in large.json()["error"]
        assert "POST /retrieve" in client.get("/nothing", headers=header).json()["error"]
        assert "POST /retrieve" in client.get("/retrieve", headers=header).json()["error"]
        assert 'route="/retrieve",status="401"' in client.get("/metrics", headers=header).text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
fields = ["queries", "topk", "return_scores", "topk_retrieval", "topk_rerank", "not_sort", "urls", "more"]
bodies = st.fixed_dictionaries(
    {}, optional={name: json_values | st.lists(st.text(max_size=20), max_size=3) for name in fields}
)


def fuzz(client, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies | json_values, st.sampled_from(["/retrieve", "/access"]))
    def ask(body, route):
        reply = client.post(route, content=json.dumps(body), headers={"content-type": "application/json"})
        assert reply.status_code < 500, (body, reply.text)
        assert ("result" if reply.status_code == 200 else "error") in reply.json()

    @settings(max_examples=examples // 4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=60))
    def ask_bytes(data):
        reply = client.post("/retrieve", content=data, headers={"content-type": "application/json"})
        assert reply.status_code < 500 and "error" in reply.json()

    ask()
    ask_bytes()


def test_no_request_makes_the_service_fail(index):
    with TestClient(make_app(index, 2), raise_server_exceptions=False) as client:
        lone = client.post("/retrieve", content=b'{"queries": ["\\ud800"]}')
        assert lone.status_code == 422, lone.text
        fuzz(client, 300)


@pytest.mark.slow
def test_ten_thousand_requests_do_not_make_it_fail(index):
    with TestClient(make_app(index, 2), raise_server_exceptions=False) as client:
        fuzz(client, 8000)


def test_connections_send_at_once():
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_sigterm_under_load_drops_no_accepted_request(files, tmp_path):
    corpus, folder = files
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "retriever.serve", "--corpus_path", str(corpus), "--port", "0"]
    command += ["--index_path", str(folder), "--port_file", str(port_file), "--max_batch", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not port_file.is_file():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        url = f"http://127.0.0.1:{port_file.read_text()}/retrieve"
        outcomes = []

        async def one(client):
            try:
                reply = await client.post(url, json={"queries": NAMES * 8, "topk": 16})
                outcomes.append(reply.status_code)
            except httpx.ConnectError:
                outcomes.append("refused")  # it came after the door was closed
            except httpx.TransportError as error:
                outcomes.append(f"dropped: {error!r}")

        async def load():
            async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                await one(client)
                tasks = [asyncio.create_task(one(client)) for _ in range(12)]
                await asyncio.sleep(0.15)
                process.send_signal(signal.SIGTERM)
                await asyncio.gather(*tasks)

        asyncio.run(load())
        assert process.wait(30) in (0, -signal.SIGTERM)  # uvicorn raises the signal again when it is done
        assert outcomes.count(200) >= 2
        assert set(outcomes) <= {200, "refused"}, outcomes
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("retrieval_top: 3", [], "unknown key 'retrieval_top'; did you mean 'retrieval_topk'"),
        ("retrieval_topk: many", [], "retrieval_topk must be of type int, got 'many'"),
        ("faiss_gpu: 3", [], "faiss_gpu must be true or false, got 3"),
        ("cache_mode: keep", [], "cache_mode is 'keep'; known are use, replay"),
        ("- a", [], "expected keys and values"),
        ("port: 1", [], "--corpus_path is missing"),
        ("{corpus_path: c, index_path: i}", ["--max_queue", "0"], "--max_queue is 0"),
        ("{corpus_path: c, index_path: i}", ["--threads", "-1"], "--threads is -1, but must be at least 1"),
    ],
)
def test_bad_options_are_one_line(tmp_path, text, arguments, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RetrieverError, match=message):
        parse(["--config", str(path), *arguments])


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("{corpus_path: c, index_path: i, retrieval_topk: 20, mmap: true}")
    options = parse(["--config", str(path), "--retrieval_topk", "5"])
    assert (options.retrieval_topk, options.mmap, str(options.corpus_path)) == (5, True, "c")


def test_the_reranker_orders_and_keeps(index, tmp_path):
    """A randomly initialised cross-encoder: the wiring, not the quality."""
    pytest.importorskip("sentence_transformers")
    model = tiny_cross_encoder(tmp_path)
    from retriever.rerank import Reranker

    reranker = Reranker(str(model), batch_size=3)
    found = index.search(["ada almson", "bo dorn"], 6)
    best = reranker.rerank(["ada almson", "bo dorn"], found, 3, not_sort=False)
    kept = reranker.rerank(["ada almson", "bo dorn"], found, 3, not_sort=True)
    for one, same, before in zip(best, kept, found, strict=True):
        scores = [score for _, score in one]
        assert len(one) == 3 and scores == sorted(scores, reverse=True)
        order = [row["id"] for row, _ in before]
        assert sorted((row["id"] for row, _ in one), key=order.index) == [row["id"] for row, _ in same]
    with TestClient(make_app(index, 6, reranker=reranker)) as client:
        body = {"queries": ["ada almson"], "topk_retrieval": 6, "topk_rerank": 3, "return_scores": True}
        (items,) = client.post("/retrieve", json=body).json()["result"]
        assert [item["document"] for item in items] == [row["contents"] for row, _ in best[0]]
        plain = client.post("/retrieve", json={"queries": ["ada almson"], "topk": 6, "return_scores": True})
        assert len(plain.json()["result"][0]) == 6


def tiny_cross_encoder(folder):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for name in NAMES for word in name.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder
