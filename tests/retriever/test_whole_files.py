"""A file of the retriever is there whole or not at all; nothing in the package renames one in another way."""

import errno
import re
from pathlib import Path

import pytest

from retriever.errors import RetrieverError, Unavailable, status_of
from retriever.files import replacing, replacing_folder

PACKAGE = Path(__file__).parents[2] / "retriever"


@pytest.mark.parametrize("by_many", [False, True])
def test_failure_leaves_the_old_file(tmp_path, by_many):
    path = tmp_path / "a"
    with replacing(path, by_many) as partial:
        partial.write_text("old")
    with pytest.raises(OSError, match="full"), replacing(path, by_many) as partial:
        partial.write_text("ne")
        raise OSError(errno.ENOSPC, "full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_failed_exchange_gives_back_the_old_folder(tmp_path, monkeypatch):
    def failing(path, target, rename=Path.rename):
        if path.name.endswith(".unfinished"):
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="broken"), replacing_folder(tmp_path / "a"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_two_processes_write_under_different_names(tmp_path, monkeypatch):
    with replacing(tmp_path / "a", by_many=True) as first:
        first.write_text("first")
        monkeypatch.setattr("retriever.files.os.getpid", lambda: 1)
        with replacing(tmp_path / "a", by_many=True) as second:
            second.write_text("second")
    assert (tmp_path / "a").read_text() == "first"


def test_files_are_renamed_in_one_module():
    paths = [
        path
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\.rename\(|os\.replace", path.read_text("utf-8"))
    ]
    assert paths == [PACKAGE / "files.py"]


@pytest.mark.parametrize(
    ("error", "cause", "status"),
    [
        (RetrieverError("a/b: cannot be written"), OSError(errno.ENOSPC, "full"), 75),
        (RetrieverError("a/b: cannot be written"), PermissionError(errno.EACCES, "no"), 2),
        (RetrieverError("--topk 0: at least 1"), None, 2),
        (Unavailable("Qdrant is away"), None, 75),
    ],
    ids=str,
)
def test_exit_status_tells_input_from_environment(error, cause, status, capsys):
    def work():
        raise error from cause

    assert status_of(work) == status and capsys.readouterr().err == f"error: {error}\n"
