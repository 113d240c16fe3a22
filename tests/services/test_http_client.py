"""Whether a service is away, how long it asks to wait, and how long that is borne."""

import asyncio
import gzip
import time
import tracemalloc
from email.utils import formatdate
from types import SimpleNamespace

import pytest
from http_rig import Handler, serving
from pydantic import BaseModel

from calibadv_jax.services import waiting
from calibadv_jax.services.http_client import BadReply, Reply, open_session, request

HOUR = 3600


class Text(BaseModel):
    text: str


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"text": "a \\ud83d"}', "a \ufffd"),
        (b'{"text": "\\uDE00\\uD83D\\uDE00"}', "\ufffd\U0001f600"),
        (b'{"text": "\\\\ud83d \\ud83d"}', "\\ud83d \ufffd"),
        (b'{"text": "caf\xe9 \xed\xa0\xbd"}', "caf\ufffd \ufffd\ufffd\ufffd"),
        (b'{"text": "\\ud83d\\n\\u00e9"}', "\ufffd\n\u00e9"),
    ],
    ids=["high", "low", "escaped", "no UTF-8", "other escapes"],
)
def test_lone_surrogate_of_a_reply_is_replaced(body, text):
    assert Reply(200, body).parse(Text).text == text


@pytest.mark.parametrize("is_zipped", [True, False])
def test_long_reply_is_refused_within_its_limit(is_zipped):
    body = b" " * 2**26
    sent = gzip.compress(body, 1) if is_zipped else body

    class Long(Handler):
        def do_GET(self):
            self.reply(200, sent, {"Content-Encoding": "gzip"} if is_zipped else {})

    async def ask(url, longest):
        async with open_session(20) as http:
            return await request(http, "GET", url, longest)

    with serving(Long) as url:
        tracemalloc.start()
        with pytest.raises(BadReply, match="longer than 4 MiB"):
            asyncio.run(ask(url, 2**22))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**24
        assert len(asyncio.run(ask(url, 2**26)).body) == 2**26


@pytest.mark.parametrize(
    ("header", "hours"),
    [
        ("7200", 2),
        (" 7200 ", 2),
        (formatdate(time.time() + 9 * HOUR, usegmt=True), 9),
        (formatdate(time.time() + 9 * HOUR), 9),  # "-0000": of no time zone, which is UTC
        (formatdate(time.time() + 9 * HOUR).replace("-0000", "+0200"), 7),
        (formatdate(time.time() - 9 * HOUR, usegmt=True), 0),
        ("-7200", 0),
        ("2e4", 0),
        ("soon", 0),
        ("", 0),
    ],
    ids=["seconds", "spaces", "date", "utc", "zone", "past", "negative", "exponent", "words", "empty"],
)
def test_seconds_or_a_date(header, hours):
    """Half an hour is for the time between the test's collection and its run."""
    assert Reply(503, b"", {"Retry-After": header}).retry_after == pytest.approx(hours * HOUR, abs=HOUR / 2)


def test_a_reply_that_does_not_say():
    assert Reply(503, b"", {}).retry_after == 0


@pytest.mark.parametrize("status", [200, 404, 408, 422, 429, 500, 501, 503])
def test_status_says_whether_a_service_is_away(status):
    assert Reply(status, b"").is_away == (status in (408, 429, 500, 503))


def test_pauses_double_and_a_reply_renews_patience(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(waiting.asyncio, "sleep", sleep)
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(waiting, "random", SimpleNamespace(uniform=lambda low, high: high))

    async def run():
        waits = waiting.Waits(patience=2.0)
        assert await waits.for_a_service(0) and await waits.for_a_service(0)
        assert pauses == [0.4, pytest.approx(0.6)]
        assert await waits.for_a_good_reply() and pauses[-1] == 0.8
        clock.now += 5  # the service was there meanwhile
        assert await waits.for_a_service(0) and pauses[-1] == pytest.approx(1.8)
        assert await waits.for_a_service(9) and pauses[-1] == pytest.approx(0.2)  # what is left
        assert not await waits.for_a_service(0)
        assert await waits.for_a_good_reply() and not await waits.for_a_good_reply()
        return waiting.Waits(patience=99.0)

    waits = asyncio.run(run())
    pauses.clear()
    for _ in range(9):
        asyncio.run(waits.for_a_service(0))
    assert pauses[-1] == pytest.approx(waiting.LONGEST_PAUSE + waiting.FIRST_PAUSE)
    asyncio.run(waiting.Waits(patience=99.0).for_a_service(30))
    assert pauses[-1] == 30
