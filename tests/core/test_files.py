"""A file is there whole or not at all; nothing in the package writes one in another way."""

import ast
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from calibadv_jax.core.errors import ENVIRONMENT_STATUS, UserError, exit_status
from calibadv_jax.core.files import (
    atomic_folder,
    atomic_write,
    content_hash,
    read_json,
    write_json,
    write_text,
)

PACKAGE = Path(__file__).resolve().parents[2] / "calibadv_jax"
# Files of folders that appear as a whole, or that are written line by line; and the logs of child services.
APPENDED = {
    *("core/files.py", "contrib/cli/prepare_data.py", "contrib/worlds/world.py"),
    *("services/object_store.py", "snapshots/huggingface.py", "snapshots/peft.py"),
    "evaluation/records.py",
}


def test_text_and_json_replace_the_file(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "é")
    assert path.read_bytes() == "é".encode()
    write_json(path, {"a": 1})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]
    assert content_hash({"b": 1, "a": 2}) == content_hash({"a": 2, "b": 1}) != content_hash({"a": 1, "b": 2})


def test_folder_replaces_the_older_one(tmp_path):
    path = tmp_path / "deep" / "a"
    for name in ("first", "second"):
        with atomic_folder(path) as partial:
            (partial / name).mkdir()
            (partial / name / "b").touch()
        assert [entry.relative_to(path.parent).as_posix() for entry in path.parent.rglob("*")] == [
            *("a", f"a/{name}", f"a/{name}/b")
        ]


def test_folder_replaces_files_of_the_same_name(tmp_path):
    path = tmp_path / "a"
    for text in ("first", "second"):
        with atomic_folder(path) as partial:
            (partial / "inner").mkdir()
            (partial / "inner/b").write_text(text)
        assert (path / "inner/b").read_text() == text


def of_killed_process(path, end, is_namesake=False):
    """Return the name that an ended process, of another number or of this one's, wrote to beside `path`."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    number = os.getpid() if is_namesake else ended.pid
    return path.with_name(f".{path.name}.{socket.gethostname()}.{number}{end}")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
@pytest.mark.parametrize("write", [atomic_write, atomic_folder])
@pytest.mark.parametrize("is_namesake", [False, True])
def test_failed_write_leaves_the_older_alone(tmp_path, is_namesake, write, error):
    def content(place):
        return place / "b" if write is atomic_folder else place

    path = tmp_path / "a"
    leftover = content(of_killed_process(path, ".partial", is_namesake))
    leftover.parent.mkdir(exist_ok=True)
    leftover.touch()
    with write(path) as partial:
        assert not content(partial).exists()
        content(partial).write_text("old")
    with pytest.raises(type(error)), write(path) as partial:
        content(partial).write_text("ne")
        raise error
    assert content(path).read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_two_writers_of_a_file_do_not_mix(tmp_path):
    path = tmp_path / "a"
    of_killed_process(path, ".partial").touch()
    other = "from pathlib import Path; from calibadv_jax.core.files import write_text;"
    with atomic_write(path) as partial:
        partial.write_text("first")
        code = f"{other} write_text(Path({str(path)!r}), 'second')"
        subprocess.run([sys.executable, "-c", code], check=True)
        assert path.read_text() == "second" and partial.read_text() == "first"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_file_of_another_users_process_stays(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    other = of_killed_process(tmp_path / "a", ".partial")
    other.touch()
    monkeypatch.setattr(os, "kill", refuse)
    write_text(tmp_path / "a", "text")
    assert other.exists()


def test_data_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    done = []

    def note(owner, name, kind):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: done.append(kind) or function(*arguments))

    for owner, name, kind in ((os, "fsync", "data"), (os, "replace", "name"), (Path, "rename", "name")):
        note(owner, name, kind)
    write_text(tmp_path / "a", "text")
    with atomic_folder(tmp_path / "b") as partial:
        (partial / "c").touch()
    assert done == ["data", "name"] * 2


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_kill_during_the_exchange_loses_nothing(tmp_path, is_exchanged):
    """The older one has its other name, the new one its own or not yet; then the next attempt fails."""
    previous, partial = (of_killed_process(tmp_path / "a", end) for end in (".previous", ".partial"))
    for folder, name in ((previous, "old"), (partial, "new")):
        folder.mkdir()
        (folder / name).touch()
    if is_exchanged:
        partial.rename(tmp_path / "a")
    with pytest.raises(RuntimeError, match="no room"), atomic_folder(tmp_path / "a"):
        raise RuntimeError("no room")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "new" if is_exchanged else "old"]


def test_all_writers_use_core_files():
    """``write_text`` and its like, ``open(…, "w")`` and ``os.replace`` stand where they may."""
    writers = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            modes = [entry.value for entry in node.args if isinstance(entry, ast.Constant)]
            opens = node.func.attr == "open" and any(mode in ("w", "wb", "x", "xb") for mode in modes)
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            replaces = node.func.attr == "replace" and owner == "os"
            if opens or replaces or node.func.attr in ("write_text", "write_bytes"):
                writers.add(path.relative_to(PACKAGE).as_posix())
    assert not writers - APPENDED


@pytest.mark.parametrize(
    ("text", "fault"), [("{", "not valid JSON"), ("[1]", "expected a JSON object, got list")]
)
def test_damaged_json_is_refused_with_way_out(tmp_path, text, fault):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"a\.json: {fault}.*; make it again$"):
        read_json(path, "make it again")


@pytest.mark.parametrize("write", [atomic_write, atomic_folder])
def test_full_disk_names_the_file_and_other_errors_stay(tmp_path, write):
    path = tmp_path / "a.json"
    words = 'RESOURCE_EXHAUSTED: Failed writing "/x/d/1": No space left on device [os_error_code=28]'
    for error in (OSError(errno.ENOSPC, "No space left on device"), ValueError(words)):
        with pytest.raises(OSError) as caught, write(path):
            raise error
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
        assert exit_status(caught.value) == exit_status(error) == ENVIRONMENT_STATUS
    elsewhere = PermissionError(errno.EACCES, "Permission denied", "/elsewhere/input")
    for error in (elsewhere, UserError("No space left on device"), OSError("library's words")):
        with pytest.raises(type(error)) as caught, write(path):
            raise error
        assert caught.value is error


def test_links_in_a_folder_are_replaced_and_not_followed(tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("mine")
    (tmp_path / "page.html").symlink_to(notes)
    (tmp_path / f".page.html.{socket.gethostname()}.{os.getpid()}.partial").symlink_to(notes)
    with atomic_write(tmp_path / "page.html") as partial:
        assert not partial.is_symlink()
        partial.write_text("new")
    assert notes.read_text() == "mine" and (tmp_path / "page.html").read_text() == "new"
    assert not (tmp_path / "page.html").is_symlink()
