"""calibadv_jax.core.errors: errors of libraries and of the system as one line."""

import errno

import pytest

from calibadv_jax.core.errors import UserError, cause_text, is_lost_process, one_line


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


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:58091", True),
        ("INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited", True),
        ("DATA_LOSS: Error reading params/0.0: checksum mismatch", False),
        ("[Errno 104] Connection reset by peer", False),
    ],
)
def test_lost_process_is_no_damage(text, is_lost):
    error = UserError("cannot be saved")
    error.__cause__ = ValueError(text)
    assert is_lost_process(error) == is_lost_process(error.__cause__) == is_lost
