"""Token and body limit: refusals before anything is read or searched."""

import asyncio
import time

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient

from retriever.service.app import BodyLimit, make_app
from retriever.service.engine import Depths, Limits


def test_token_body_limit_and_unknown_routes(index):
    app = make_app(index, Depths(1), token="secret", limits=Limits(max_body=200))
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


@pytest.fixture(scope="module")
def guarded(index):
    with TestClient(make_app(index, Depths(1), token="secret")) as client:
        yield client


@pytest.mark.parametrize("value", ["Bearer secret", "bearer secret", "BEARER  secret"])
def test_the_scheme_is_case_insensitive(guarded, value):
    reply = guarded.post("/retrieve", json={"queries": ["ada"]}, headers={"Authorization": value})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("value", ["secret", "Bearer", "Bearer secrets", "Basic secret", "Bearersecret", ""])
def test_no_other_form_of_the_token_is_taken(guarded, value):
    reply = guarded.post("/retrieve", json={"queries": ["ada"]}, headers={"Authorization": value})
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"


def test_the_token_is_checked_before_the_body_is_read(index):
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/retrieve",
        "query_string": b"",
        "headers": [(b"content-length", b"9000000")],
    }
    asyncio.run(make_app(index, Depths(1), token="secret")(scope, receive, send))
    assert sent[0]["status"] == 401


def test_health_answers_head_and_needs_no_token(guarded):
    assert guarded.head("/health").status_code == 200


def test_a_body_in_parts_arrives_whole_and_is_limited():
    """Forty thousand parts: bytes that grow by `+=` would be copied once a part, 80 GB in all."""
    seen, sent = [], []

    async def app(scope, receive, send):
        seen.append(await receive())

    async def send(message):
        sent.append(message)

    def ask(count, limit):
        parts = iter([b"x" * 100] * count)
        left = count

        async def receive():
            nonlocal left
            left -= 1
            return {"type": "http.request", "body": next(parts), "more_body": left > 0}

        scope = {"type": "http", "method": "POST", "headers": []}
        asyncio.run(BodyLimit(app, limit)(scope, receive, send))
        return left

    begun = time.process_time()
    assert ask(40_000, 2**22) == 0
    assert time.process_time() - begun < 2
    assert seen == [{"type": "http.request", "body": b"x" * 4_000_000, "more_body": False}] and not sent
    assert ask(40_000, 500) == 40_000 - 6  # it stops where the limit is passed
    assert sent[0]["status"] == 413 and len(seen) == 1


def test_what_is_refused_is_counted(index):
    header = {"Authorization": "Bearer secret"}
    with TestClient(make_app(index, Depths(1), token="secret", limits=Limits(max_body=200))) as client:
        client.post("/retrieve", json={"queries": ["a" * 300]}, headers=header)
        assert 'route="/retrieve",status="413"' in client.get("/metrics", headers=header).text
