"""A service with a token asks for it everywhere but at /health."""

from importlib.util import find_spec

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient

from retriever.service.app import ROUTES, make_app
from retriever.service.engine import Depths

HEADER = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def client(index):
    with TestClient(make_app(index, Depths(1), token="secret")) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "route", "status"),
    [
        ("POST", "/retrieve", 200),
        ("POST", "/access", 404),  # no pages are loaded
        ("GET", "/metrics", 200),
        ("GET", "/docs", 200 if find_spec("fastapi_offline") else 404),
        ("GET", "/openapi.json", 200),
        ("GET", "/nothing", 404),
        ("GET", "/health/", 307),  # not /health itself: starlette would redirect
        ("GET", "//health", 404),
        ("POST", "/health", 405),
        ("PUT", "/health", 405),
        ("OPTIONS", "/health", 405),
    ],
)
def test_every_route_but_health_asks_for_the_token(client, method, route, status):
    body = {"queries": ["ada"]} if route == "/retrieve" else {"urls": ["u"]}

    def ask(**headers):
        json = body if method == "POST" else None
        url = f"http://testserver{route}"
        return client.request(method, url, json=json, headers=headers, follow_redirects=False).status_code

    assert ask() == 401
    assert ask(Authorization="Bearer other") == 401
    assert ask(**HEADER) == status


def test_health_alone_is_open(client):
    assert client.get("/health").json()["status"] == "ready"
    tried = {"/retrieve", "/access", "/metrics"}
    assert tried | {"/health"} == ROUTES  # a new route belongs into the list above
