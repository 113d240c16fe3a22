"""Whether a service is away, how long it asks to wait, and how long that is borne."""

import asyncio
import gzip
import tracemalloc
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from http_rig import replying
from pydantic import BaseModel

from calibadv_jax.core.errors import UserError
from calibadv_jax.services import http_client
from calibadv_jax.services.http_client import BadReply, HttpReply, Unreachable, open_session, request

AWAY = Unreachable("away")


class Text(BaseModel):
    text: str


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"text": "a \\ud83d"}', "a \ufffd"),  # high
        (b'{"text": "\\uDE00\\uD83D\\uDE00"}', "\ufffd\U0001f600"),  # low
        (b'{"text": "\\\\ud83d \\ud83d"}', "\\ud83d \ufffd"),  # escaped
        (b'{"text": "\\ud83d\\n\\u00e9"}', "\ufffd\n\u00e9"),  # other escapes
        (b'{"text": "caf\xe9 \xed\xa0\xbd"}', "caf\ufffd \ufffd\ufffd\ufffd"),  # no UTF-8
    ],
)
def test_invalid_text_of_a_reply_is_replaced(body, text):
    assert HttpReply(200, body).parse(Text).text == text


@pytest.mark.parametrize("is_zipped", [True, False])
def test_long_reply_is_refused_within_its_limit(is_zipped):
    body = b" " * 2**26
    sent = gzip.compress(body, 1) if is_zipped else body

    async def ask(url, longest):
        async with open_session(20) as http:
            return await request(http, "GET", url, longest)

    with replying((200, sent, {"Content-Encoding": "gzip"} if is_zipped else {})) as (url, _):
        tracemalloc.start()
        with pytest.raises(BadReply, match="longer than 4 MiB"):
            asyncio.run(ask(url, 2**22))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**24
        assert len(asyncio.run(ask(url, 2**26)).body) == 2**26


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": " 7200"}, 7200.0),
        *(
            ({"Retry-After": text}, 0.0)
            for text in ("-7200", "1.5", "2e4", "soon", "", f"Wed, 21 Oct {'9' * 30} 07:28:00 GMT")
        ),
        ({}, 0.0),
    ],
    ids=str,
)
def test_service_asks_to_wait_in_seconds(headers, seconds):
    assert HttpReply(503, b"", headers).retry_after == seconds


@pytest.mark.parametrize(
    ("date", "hours"),
    [
        ("Sat, 28 Nov 2026 21:00:00 GMT", 9),
        ("Sat, 28 Nov 2026 21:00:00", 9),  # without a time zone, which means UTC
        ("Sat, 28 Nov 2026 21:00:00 +0200", 7),
        ("Sat, 28 Nov 2026 03:00:00 GMT", 0),  # in the past
    ],
)
def test_service_asks_to_wait_until_a_date(monkeypatch, date, hours):
    noon = datetime(2026, 11, 28, 12, tzinfo=UTC)
    monkeypatch.setattr(http_client, "datetime", SimpleNamespace(now=noon.astimezone))
    assert HttpReply(503, b"", {"Retry-After": date}).retry_after == hours * 3600


def test_status_says_whether_a_service_is_away():
    statuses = (200, 404, 408, 422, 429, 500, 501, 503)
    assert [status for status in statuses if HttpReply(status, b"").is_unavailable] == [408, 429, 500, 503]


@pytest.mark.parametrize(
    ("patience", "failures", "pauses", "notices"),
    [
        # A reply, even a bad one, renews the patience.
        (2.0, [AWAY, AWAY, BadReply(), 5, AWAY, Unreachable("", 9), AWAY], [0.4, 0.6, 0.8, 1.8, 0.2], 2),
        (2.0, [BadReply()] * http_client.BAD_REPLIES, [0.2, 0.4], 0),
        (99.0, [AWAY] * 9 + [ValueError()], [0.4, 0.6, 1.0, 1.8, 3.4, 6.6, 10.2, 10.2, 10.2], 1),
        (99.0, [Unreachable("", 30), ValueError()], [30.0], 1),
        (http_client.SINGLE_ATTEMPT, [AWAY], [], 0),
        (0.0, [AWAY], [], 0),
    ],
)
def test_retries_end_with_patience_or_bad_replies(monkeypatch, patience, failures, pauses, notices):
    """Failures are raised in turn; a number is seconds that pass before the next one."""
    clock, slept, noted, left = SimpleNamespace(now=100.0), [], [], list(failures)

    async def sleep(seconds):
        slept.append(seconds)
        clock.now += seconds

    async def attempt():
        if isinstance(left[0], int):
            clock.now += left.pop(0)
        raise left.pop(0)

    monkeypatch.setattr(http_client, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(http_client.asyncio, "sleep", sleep)
    monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(http_client, "random", SimpleNamespace(uniform=lambda low, high: high))
    with pytest.raises(type(failures[-1])):
        asyncio.run(http_client.retry(attempt, patience, noted.append))
    assert slept == pytest.approx(pauses) and len(noted) == notices


def test_reply_counts_more_than_a_failed_look():
    async def run():
        is_asked, is_answered = asyncio.Event(), asyncio.Event()

        async def answer():
            await is_asked.wait()
            is_answered.set()
            return "reply"

        async def look():
            is_asked.set()
            await is_answered.wait()
            raise AWAY

        return await http_client.wait_with_health_check(answer(), look, 0.01)

    assert asyncio.run(run()) == "reply"


@pytest.mark.parametrize("status", [301, 302, 307])
def test_redirection_is_not_followed(monkeypatch, status):
    """A request, and its token, stay with the address that was given."""
    monkeypatch.setenv("TEST_TOKEN", "secret\n")

    async def send(url):
        async with open_session(5.0, "TEST_TOKEN") as http:
            return await request(http, "POST", url, json={})

    with replying((status, {}, {"Location": "/there"})) as (url, requests):
        assert asyncio.run(send(f"{url}/here")).status == status
    assert [(path, headers["Authorization"]) for path, headers in requests] == [("/here", "Bearer secret")]
    with pytest.raises(UserError, match="not a url: not a URL; give one such as"):
        asyncio.run(send("not a url"))


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 507])
def test_service_with_this_status_is_away(status):
    assert HttpReply(status, b"").is_unavailable
