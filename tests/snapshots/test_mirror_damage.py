"""A copy whose objects are lost or changed, an emptied store, and a marker that people have edited."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from mirror_rig import (
    acting,
    config_at,
    is_whole,
    marker,
    opened,
    start,
    steps_at,
    until,
)
from trainer_rig import checkpoints

from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.metrics.console import Console
from calibadv_jax.services.object_store import ObjectStore
from calibadv_jax.snapshots.mirror import PINS, open_mirror
from calibadv_jax.snapshots.mirror_marker import MARKER, OBJECTS

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("shared_programs", "short_pauses")]


def object_of(store, path):
    name, _, _ = marker(store)["files"][path]
    return store / OBJECTS / name


def largest_of(store, step):
    files = marker(store)["files"]
    return max((path for path in files if path.startswith(f"checkpoints/{step}/")), key=lambda p: files[p][1])


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = [cut, flip, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_older_checkpoint_is_used_where_the_newest_is_damaged(tmp_path, capsys, damage):
    store = tmp_path / "store"
    parts = {"checkpoint": {"every": 2, "keep": 2}}
    start(config_at(tmp_path / "a", store, learner={"steps": 4}, **parts))
    path = largest_of(store, 4)
    damage(object_of(store, path))
    config = config_at(tmp_path / "b", store, learner={"steps": 6}, **parts)
    state = start(config, console=Console())
    errors = " ".join(capsys.readouterr().err.split())
    assert "damaged in the copy" in errors and "its checkpoint is left out" in errors
    assert state.step == 6 and checkpoints(tmp_path / "b") == steps_at(store) == [4, 6]
    assert is_whole(store)
    assert opened(tmp_path / "c", store).fetch() and checkpoints(tmp_path / "c") == [4, 6]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_copy_without_an_older_checkpoint_is_refused(tmp_path, copied, damage):
    path = largest_of(copied, 2)
    damage(object_of(copied, path))
    with pytest.raises(UserError, match=rf"{re.escape(path)}.*damaged in the copy; .*holds no whole checkpo"):
        opened(tmp_path / "b", copied).fetch()
    assert checkpoints(tmp_path / "b") == []


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_beside_the_checkpoints_is_left_out(tmp_path, copied, damage, capsys):
    damage(object_of(copied, "configs/0.json"))
    config = config_at(tmp_path / "b", copied)
    assert open_mirror(config, Console()).fetch()
    assert "configs/0.json" in capsys.readouterr().err
    assert checkpoints(tmp_path / "b") == [2] and not (tmp_path / "b/configs/0.json").exists()


@pytest.mark.parametrize("path", ["configs/0.yaml", "checkpoint"])
def test_vanished_object_is_sent_again(tmp_path, copied, path):
    path = largest_of(copied, 2) if path == "checkpoint" else path
    object_of(copied, path).unlink()
    start(config_at(tmp_path / "a", copied, learner={"steps": 2}))
    assert is_whole(copied) and steps_at(copied) == [2]
    assert opened(tmp_path / "b", copied).fetch()
    assert checkpoints(tmp_path / "b") == [2] and (tmp_path / "b/configs/0.yaml").is_file()


def test_older_checkpoint_with_a_vanished_object_leaves_the_marker(tmp_path, copied, capsys):
    parts = {"checkpoint": {"every": 2, "keep": 3}}
    start(config_at(tmp_path / "a", copied, learner={"steps": 4}, **parts))
    object_of(copied, largest_of(copied, 2)).unlink()
    start(config_at(tmp_path / "a", copied, learner={"steps": 6}, **parts), console=Console())
    assert steps_at(copied) == [4, 6] and is_whole(copied)
    assert "lost objects of the checkpoints 2" in " ".join(capsys.readouterr().err.split())


def test_emptied_store_gets_the_whole_run_again(tmp_path):
    store = tmp_path / "store"

    def act(version, _):
        if version == 3:
            until(lambda: steps_at(store) == [2] and not any((tmp_path / "a" / PINS).iterdir()))
            store.rename(tmp_path / "gone")

    checkpoint = {"every": 2, "keep": 2, "asynchronous": False}
    start(config_at(tmp_path / "a", store, learner={"steps": 4}, checkpoint=checkpoint), acting(act))
    assert steps_at(store) == [4] and is_whole(store)
    assert opened(tmp_path / "b", store).fetch() and checkpoints(tmp_path / "b") == [4]
    assert (tmp_path / "b/configs/0.yaml").is_file() and (tmp_path / "b/metrics.jsonl").is_file()


def test_store_emptied_while_the_marker_is_written_gets_the_checkpoint_again(tmp_path, monkeypatch, capsys):
    store = tmp_path / "store"
    create = ObjectStore.create

    def create_and_empty(self, name, data):
        is_created = create(self, name, data)
        if b"checkpoints/2/" in data and not (tmp_path / "gone").exists():
            store.rename(tmp_path / "gone")
        return is_created

    monkeypatch.setattr(ObjectStore, "create", create_and_empty)
    config = config_at(tmp_path / "a", store, learner={"steps": 2}, checkpoint={"every": 2})
    start(config, console=Console())
    assert (tmp_path / "gone").exists() and steps_at(store) == [2] and is_whole(store)
    errors = " ".join(capsys.readouterr().err.split())
    assert "the store was emptied while the marker was written" in errors
    assert opened(tmp_path / "b", store).fetch() and checkpoints(tmp_path / "b") == [2]


@pytest.mark.parametrize("name", ["notes.txt", ".DS_Store", "00000002 (copy)", "zzz"])
def test_foreign_files_beside_marker_and_objects_are_left_alone(tmp_path, copied, name):
    for folder in (MARKER, OBJECTS):
        (copied / folder / name).write_text("mine")
    start(config_at(tmp_path / "a", copied, learner={"steps": 4}))
    assert json.loads(max((copied / MARKER).glob("[0-9]" * 8)).read_text())["steps"][-1] == 4
    assert [(copied / folder / name).read_text() for folder in (MARKER, OBJECTS)] == ["mine", "mine"]


@pytest.mark.parametrize(
    "change",
    [
        {"steps": [2, 9]},
        {"steps": [2, 2]},
        {"steps": [-1]},
        {"rollbacks": -1},
        {"owner": "me"},
        {"entry": ["0" * 32 + ".0", -5, 0]},
        {"entry": ["0" * 32 + ".0", 5, 2**80]},
        {"entry": ["0" * 32 + ".0", 5]},
        {"folder": True},
    ],
)
def test_damaged_marker_is_one_line(tmp_path, copied, change):
    [file] = (copied / MARKER).iterdir()
    version = json.loads(file.read_text())
    if "entry" in change:
        version["files"]["metrics.jsonl"] = change["entry"]
    elif "folder" in change:
        version["files"]["metrics.jsonl/a"] = version["files"]["metrics.jsonl"]
    else:
        version |= change
    file.write_text(json.dumps(version))
    with pytest.raises(UserError, match=r"^run\.mirror=.*choose another place$") as refused:
        opened(tmp_path / "b", copied).fetch()
    assert "\n" not in str(refused.value)


def test_full_disk_of_the_run_is_not_blamed_on_the_store(copied, small_disk):
    folder = small_disk / "b"
    with (small_disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises((EnvironmentFailure, OSError)) as failed:
        opened(folder, copied).fetch()
    assert str(folder) in str(failed.value) and "run.mirror" not in str(failed.value).partition(" cannot")[0]
    assert exit_status(failed.value) == 75


def test_copy_of_an_earlier_version_has_no_digests(tmp_path, copied):
    [file] = (copied / MARKER).iterdir()
    version = json.loads(file.read_text())
    names = {name for name, _, _ in version["files"].values()}
    assert version.pop("digests").keys() <= names
    file.write_text(json.dumps(version))
    assert opened(tmp_path / "b", copied).fetch() and checkpoints(tmp_path / "b") == [2]
