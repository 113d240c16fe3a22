"""calibadv_jax.core.errors: errors of libraries and of the system as one line."""

import errno

import pytest

from calibadv_jax.core.errors import UserError, cause_text, one_line


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (ValueError("x" * 400), "x" * 300),
        (ValueError(), "ValueError"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), "Permission denied"),
        (OSError("a library's words"), "a library's words"),
    ],
)
def test_errors_are_one_line(error, text):
    assert one_line(error) == text


def test_cause_text_names_the_cause():
    error = UserError("cannot be read")
    assert cause_text(error) == "cannot be read"
    error.__cause__ = ValueError("bad\nheader")
    assert cause_text(error) == "bad header"
    error.__cause__ = RuntimeError("I/O error: No space left on device (os error 28)")
    assert cause_text(error) == "No space left on device"
