"""How long a service asks to wait, in every form of the header."""

import time
from email.utils import formatdate

import pytest

from calibadv_jax.services.http_client import Reply

HOUR = 3600


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
