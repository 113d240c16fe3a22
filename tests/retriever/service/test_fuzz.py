"""No request makes the service fail."""

import json

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retriever.service.app import make_app
from retriever.service.engine import Depths

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


@pytest.mark.medium
def test_no_request_makes_the_service_fail(index):
    with TestClient(make_app(index, Depths(2)), raise_server_exceptions=False) as client:
        lone = client.post("/retrieve", content=b'{"queries": ["\\ud800"]}')
        assert lone.status_code == 422, lone.text
        fuzz(client, 300)


@pytest.mark.slow
def test_many_requests_do_not_make_it_fail(index, all_cases):
    """Some thousand; ten thousand with --all-cases."""
    with TestClient(make_app(index, Depths(2)), raise_server_exceptions=False) as client:
        fuzz(client, 8000 if all_cases else 1500)
