"""Services that are neither well nor gone: replies that trickle, and failures of some or of all requests."""

import json
import time

import pytest
from http_rig import Handler, serving
from search_rig import client_of, search
from test_replicas import Service, ask
from test_retriever_client import ok, replying, search_all

from calibadv_jax.core.errors import RequestFailed
from calibadv_jax.services import retriever_client


@pytest.mark.timeout(60)  # it would trickle for 200 s
def test_reply_that_trickles_is_given_up():
    class Trickling(Handler):
        def do_POST(self):
            self.body()
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            for _ in range(1000):
                try:
                    self.wfile.write(b" ")
                except OSError:
                    return  # the client has gone
                time.sleep(0.2)

    with serving(Trickling) as url, pytest.raises(RequestFailed, match="no answer for 0.5 s .no whole reply"):
        search(url, ["a"], timeout=0.4, patience=0.5)


@pytest.mark.parametrize("status", [500, 507])
def test_service_that_fails_over_everything_is_away(status):
    requests = []

    def answer(body):
        return (status, b"oops") if len(requests) < 8 else ok(body)

    with replying([answer], requests) as url:
        assert search(url, ["a"], patience=30.0)[0][0].id == "a"
        assert len(requests) >= 8
        requests.clear()
    reason = pytest.raises(RequestFailed, match=f"no answer for 0.3 s .status {status}: 'oops'")
    with replying([lambda body: (status, b"oops")], requests) as url, reason:
        search(url, ["a"], patience=0.3)


@pytest.mark.parametrize("count", [1, 16])
def test_query_that_breaks_a_service_fails_alone(count):
    def answer(body):
        return (500, b"oops") if "bad" in body["queries"] else ok(body)

    queries = [f"q{number}" for number in range(count - 1)] + ["bad"]
    requests = []
    with replying([answer], requests) as url:
        *good, bad = search_all(url, *queries)
    assert [documents[0].id for documents in good] == queries[:-1]
    assert isinstance(bad, RequestFailed) and "no usable answer in 3 attempts (status 500" in str(bad)
    assert len(requests) < 40


def test_broken_replica_is_replaced():
    broken, good = Service("broken"), Service("good")
    broken.status = broken.health = 500
    with client_of(broken, good) as (client, run):
        assert set(run(ask(client, 30))) == {"good"}
    assert len(broken.asked) <= 30
    for service in (broken, good):
        service.stop()


def test_service_without_the_route_for_its_health_is_one():
    """Small servers answer 501 where they know no GET."""

    class Small(Handler):
        def do_POST(self):
            self.reply(*ok(json.loads(self.body())))

    with serving(Small) as url:
        client = retriever_client.RetrieverClient(retriever_client.RetrieverConfig(patience=0.5), url)
        assert client.health() == {}
