"""calibadv_jax.core.errors: errors of libraries and of the system as one line."""

import errno

import pytest

from calibadv_jax.core.errors import (
    ENVIRONMENT_STATUS,
    INPUT_STATUS,
    EnvironmentFailure,
    Faults,
    SeveralErrors,
    UserError,
    cause_text,
    exit_status,
    is_lost_process,
    one_line,
    storage_errno,
    storage_path,
)


def test_errors_are_one_line():
    assert one_line(ValueError("two\n  lines")) == "two lines"
    assert one_line(ValueError("x" * 400)) == "x" * 300
    assert one_line(ValueError()) == "ValueError"
    assert one_line(PermissionError(errno.EACCES, "Permission denied", "/a")) == "Permission denied"
    assert one_line(OSError("a library's words")) == "a library's words"
    error = UserError("cannot be read")
    assert cause_text(error) == "cannot be read"
    error.__cause__ = ValueError("bad\nheader")
    assert cause_text(error) == "bad header"
    error.__cause__ = RuntimeError("I/O error: No space left on device (os error 28)")
    assert cause_text(error) == "No space left on device"


@pytest.mark.parametrize(
    ("error", "number", "path", "status"),
    [
        (OSError(errno.ENOSPC, "full", "/a/b"), errno.ENOSPC, "/a/b", 75),
        (PermissionError(errno.EACCES, "denied", "/a"), errno.EACCES, "/a", 2),
        (FileNotFoundError(errno.ENOENT, "none", "/a"), None, "/a", 2),
        (RuntimeError('writing "/x/d 1": Read-only file system'), errno.EROFS, "/x/d 1", 2),
        (ValueError("bad"), None, None, 2),
        (EnvironmentFailure("away"), None, None, 75),
    ],
    ids=repr,
)
def test_error_or_its_cause_names_disk_and_status(error, number, path, status):
    outer = UserError("cannot be saved")
    outer.__cause__ = error
    for caught in (error, outer):
        assert (storage_errno(caught), storage_path(caught), exit_status(caught)) == (number, path, status)


def test_lost_process_is_no_damage():
    for text, is_lost in (
        ("UNKNOWN: Gloo AllGather failed: [pair.cc:547] Connection closed by peer [127.0.0.1]:58091", True),
        ("INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited", True),
        ("DATA_LOSS: Error reading params/0.0: checksum mismatch", False),
        ("[Errno 104] Connection reset by peer", False),
    ):
        error = UserError("cannot be saved")
        error.__cause__ = ValueError(text)
        assert is_lost_process(error) == is_lost_process(error.__cause__) == is_lost


def test_faults_are_raised_together():
    faults = Faults()
    faults.raise_all()
    with faults.collected():
        raise EnvironmentFailure("a: away")
    with pytest.raises(EnvironmentFailure, match="^a: away$"):
        faults.raise_all()
    with faults.collected():
        raise SeveralErrors([UserError("a: away"), UserError("b: missing")])
    with pytest.raises(SeveralErrors, match=r"^2 faults: \(1\) a: away; \(2\) b: missing$") as raised:
        faults.raise_all()
    assert exit_status(raised.value) == INPUT_STATUS


def test_faults_of_the_environment_alone_may_pass():
    faults = Faults()
    for name in "ab":
        with faults.collected():
            raise EnvironmentFailure(f"{name}: away")
    with pytest.raises(EnvironmentFailure, match=r"^2 faults: \(1\) a: away; \(2\) b: away$") as raised:
        faults.raise_all()
    assert exit_status(raised.value) == ENVIRONMENT_STATUS


def test_other_errors_are_not_collected():
    with pytest.raises(KeyError), Faults().collected():
        raise KeyError("x")
