"""A run's folder in an object store: what another machine finds there, and what may not get mixed."""

from __future__ import annotations

import json
import queue
import re
import shutil
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from mirror_rig import (
    QUIET,
    acting,
    config_at,
    fail_with,
    is_whole,
    marker,
    opened,
    save_step,
    start,
    steps_at,
    until,
)
from trainer_rig import GUARDED, Collapsing, ScriptedRollouts, checkpoints, make_config, make_state, rows

from calibadv_jax.commands.train import train
from calibadv_jax.config.kept import add_start
from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.core.signals import Stop
from calibadv_jax.metrics.console import Console
from calibadv_jax.services import object_store
from calibadv_jax.services.object_store import ObjectStore
from calibadv_jax.snapshots import mirror as mirror_module
from calibadv_jax.snapshots.checkpoint import ROLLBACK, CheckpointStore, finish_rollback, note_rollback
from calibadv_jax.snapshots.mirror import fetch_newest, open_mirror
from calibadv_jax.snapshots.mirror_marker import MARKER, OBJECTS

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("shared_programs", "short_pauses")]


def test_another_machine_continues_bit_for_bit(tmp_path, s3):
    whole = make_config(tmp_path / "whole", learner={"steps": 6}, checkpoint={"every": 2})
    expected = make_state(whole, tmp_path / "whole")
    with Stop() as stop, expected:
        train(expected, stop)

    url = f"{s3}/some/run"
    parts = {"learner": {"steps": 6}, "checkpoint": {"every": 2, "keep": 1}}
    with pytest.raises(RuntimeError, match="the machine is gone"):
        start(config_at(tmp_path / "a", url, **parts), ScriptedRollouts(fails_at=5))
    assert steps_at(url) == checkpoints(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    there = start(config_at(tmp_path / "b", url, **parts))
    assert there.step == 6 and steps_at(url) == [6]
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get(there.learner_state),
        jax.device_get(expected.learner_state),
    )
    assert rows(tmp_path / "b") == rows(tmp_path / "whole")
    paths = {path for path in (tmp_path / "b").rglob("*") if path.is_file()}
    assert marker(url)["files"].keys() == {path.relative_to(tmp_path / "b").as_posix() for path in paths}
    assert len(fsspec.filesystem("s3").find(f"{url}/{OBJECTS}")) == len(paths)


def test_store_that_is_away_stops_nothing(tmp_path, monkeypatch, capsys):
    """Reported once when it goes and once when it is back; what was missed is copied then."""
    store, away, create = tmp_path / "store", threading.Event(), ObjectStore.create

    def create_or_fail(self, name, data):
        if away.is_set():
            raise ConnectionError("no route to host")
        return create(self, name, data)

    def act(version, _):
        if version == 2:
            away.set()
        if version == 4:
            until(lambda: copier._failure)
        if version == 6:
            away.clear()
            until(lambda: not copier._failure)

    monkeypatch.setattr(ObjectStore, "create", create_or_fail)
    config = config_at(tmp_path / "a", store, learner={"steps": 8}, checkpoint={"every": 1})
    copier = open_mirror(config, Console())
    monkeypatch.setattr(mirror_module, "Mirror", lambda *_: copier)
    start(config, acting(act), Console())
    lines = capsys.readouterr().err
    assert lines.count("no route to host") == 1 and lines.count("can be written again") == 1
    assert steps_at(store)[-1] == 8 and is_whole(store)


def test_broken_off_copy_is_not_seen_and_made_again(tmp_path, copied, monkeypatch):
    """All objects of the checkpoint are there but the last; the marker still names the checkpoint before."""
    config = config_at(tmp_path / "a", copied, learner={"steps": 4})
    put = DirFileSystem.put
    num_objects = len(list((copied / OBJECTS).iterdir()))

    def put_all_but_the_last(self, files, objects, **options):
        put(self, files[:-1], objects[:-1], **options)
        raise OSError("the network is away")

    with monkeypatch.context() as patch:
        patch.setattr(DirFileSystem, "put", put_all_but_the_last)
        patch.setattr(mirror_module, "PATIENCE", 1.0)
        start(config)
    assert steps_at(copied) == [2]
    assert len(list((copied / OBJECTS).iterdir())) > num_objects
    assert checkpoints(tmp_path / "a") == [2, 4]
    assert opened(tmp_path / "b", copied).fetch()
    assert checkpoints(tmp_path / "b") == [2]
    start(config)  # the first machine comes back with the newer step
    assert steps_at(copied) == [2, 4]
    assert is_whole(copied)


def test_lost_answer_is_no_takeover(tmp_path, monkeypatch):
    """The store has created the marker's version, but the connection broke before it said so."""
    store, lost = tmp_path / "store", []
    create = ObjectStore.create

    def create_and_fail(self, name, data):
        is_created = create(self, name, data)
        if json.loads(data)["steps"] and len(lost) < 2:
            lost.append(name)
            raise ConnectionError("broken pipe")
        return is_created

    monkeypatch.setattr(ObjectStore, "create", create_and_fail)
    start(config_at(tmp_path / "a", store, learner={"steps": 4}))
    assert len(lost) == 2 and steps_at(store) == [2, 4] and is_whole(store)


def test_store_without_conditional_put_is_refused(tmp_path, monkeypatch):
    def replace_object(self, name, data):
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        return bool((tmp_path / "store" / name).write_bytes(data))

    monkeypatch.setattr(ObjectStore, "create", replace_object)
    mirror = opened(tmp_path / "a", tmp_path / "store")
    with pytest.raises(UserError, match="the store ignores conditional puts"):
        mirror.fetch(claim=True)


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_older_start_cannot_write_its_marker(tmp_path, monkeypatch, s3, kind):
    """It is taken over between its check and its write: it ends, and the store stays with the newer start."""
    url = tmp_path / "store" if kind == "folder" else f"{s3}/run"
    synchronous = {"every": 2, "asynchronous": False}
    older = config_at(tmp_path / "a", url, learner={"steps": 20}, checkpoint=synchronous)
    create, mirrors, taken = ObjectStore.create, [], threading.Event()

    def create_late(self, name, data):
        if mirrors and self is mirrors[0]._store and json.loads(data)["steps"] == [2, 4]:
            start(config_at(tmp_path / "b", url, learner={"steps": 3}, checkpoint={"every": 3}))
            taken.set()
        return create(self, name, data)

    def act(version, _):
        if version == 3:
            until(lambda: steps_at(url) == [2])
        if version > 4:
            taken.wait()
            until(lambda: mirrors[0]._marker.taken_over)  # the copying thread finds it out next

    match = "was taken over by another start of this run \\(process [0-9]+ on "
    with pytest.raises(UserError, match=match) as ended, monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "create", create_late)
        mirror_of = mirror_module.Mirror
        patch.setattr(mirror_module, "Mirror", lambda *rest: mirrors.append(mirror_of(*rest)) or mirrors[-1])
        start(older, acting(act))
    assert exit_status(ended.value) == 2  # a restart would take it from the newer one
    assert steps_at(url) == [2, 3] and checkpoints(tmp_path / "a")[-1] < 20
    assert opened(tmp_path / "c", url).fetch()
    assert checkpoints(tmp_path / "c") == [2, 3]


def test_start_that_comes_between_check_and_takeover_is_taken_over(tmp_path, copied, monkeypatch):
    mirror, other = opened(tmp_path / "b", copied), opened(tmp_path / "c", copied)
    claim, claims = mirror._claim, []

    def claim_late(is_newer):
        claims.append(is_newer)
        if len(claims) == 1:
            other.fetch(claim=True)
        claim(is_newer)

    monkeypatch.setattr(mirror, "_claim", claim_late)
    assert mirror.fetch(claim=True) and claims == [True, True]
    assert checkpoints(tmp_path / "b") == steps_at(copied) and marker(copied)["owner"] == mirror._marker.owner


def test_slow_store_gets_the_newest_checkpoint(tmp_path, monkeypatch):
    """Each upload takes longer than a checkpoint is kept in the run's folder."""
    store, folder, uploads = tmp_path / "store", tmp_path / "a", []
    put = DirFileSystem.put

    def put_slowly(self, *arguments, **options):
        step = max(checkpoints(folder))
        until(lambda: max(checkpoints(folder)) in (8, step + 3))
        uploads.append(step)
        return put(self, *arguments, **options)

    monkeypatch.setattr(DirFileSystem, "put", put_slowly)
    start(config_at(folder, store, learner={"steps": 8}, checkpoint={"every": 1, "keep": 1}))
    assert steps_at(store) == [8] and len(uploads) < 8 and is_whole(store)
    assert opened(tmp_path / "b", store).fetch()
    files = [path for path in (folder / "checkpoints/8").rglob("*") if path.is_file()]
    for path in files:
        assert (tmp_path / "b" / path.relative_to(folder)).read_bytes() == path.read_bytes()
    assert files and not (folder / ".mirror").exists()


def test_next_start_replaces_what_has_changed(tmp_path):
    """A step that was trained anew, as after a rollback, has another checkpoint; a file is gone."""
    store, folder = tmp_path / "store", tmp_path / "a"
    stray = folder / "rollouts/step_9.parquet"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"x")
    config = config_at(folder, store, learner={"steps": 2})
    start(config)
    before = {name for name, _, _ in marker(store)["files"].values()}
    shutil.rmtree(folder / "checkpoints/2")
    stray.unlink(missing_ok=True)
    save_step(config_at(folder, ""), 2)
    start(config)
    assert steps_at(store) == [2] and is_whole(store)
    assert not any("step_9" in path for path in marker(store)["files"])
    for path, (name, _, _) in marker(store)["files"].items():
        assert (store / OBJECTS / name).read_bytes() == (folder / path).read_bytes()
        assert not path.startswith("checkpoints/") or name not in before


def test_step_that_is_saved_again_is_copied_again(tmp_path, copied):
    """As after a rollback within a start: the number is the same, the checkpoint is not."""
    folder = tmp_path / "a"

    def objects_of_step():
        files = marker(copied)["files"]
        return {name for path, (name, _, _) in files.items() if path.startswith("checkpoints/2/")}

    before = objects_of_step()
    mirror = opened(folder, copied)
    mirror.fetch(claim=True)
    with mirror:
        until(lambda: not mirror._pins)
        assert objects_of_step() == before  # nothing had changed
        shutil.rmtree(folder / "checkpoints/2")
        save_step(config_at(folder, "", learner={"steps": 2}, run={"seed": 1}), 2)
        mirror.put(2)
    assert steps_at(copied) == [2]
    assert not objects_of_step() & before
    assert is_whole(copied)
    for path, (name, _, _) in marker(copied)["files"].items():
        assert (copied / OBJECTS / name).read_bytes() == (folder / path).read_bytes()


def test_rollback_drops_an_upload_in_progress(tmp_path, monkeypatch):
    store, uploading, rolled_back = tmp_path / "store", threading.Event(), threading.Event()
    put, ended = DirFileSystem.put, threading.Event()

    def put_late(self, files, *arguments, **options):
        is_bad = any("/checkpoints/4/" in file for file in files) and not uploading.is_set()
        if is_bad:
            uploading.set()
            rolled_back.wait()
        put(self, files, *arguments, **options)
        if is_bad:
            ended.set()

    def act(version, seed):
        if version == 5:
            uploading.wait()
        if version == 3 and seed:
            assert steps_at(store) == [1, 2, 3]
            rolled_back.set()
            ended.wait()
            until(lambda: is_whole(store))  # the next copy removes its objects
            assert steps_at(store) == [1, 2, 3]

    monkeypatch.setattr(DirFileSystem, "put", put_late)
    start(rollback_config(tmp_path / "a", store), acting(act, Collapsing))
    assert ended.is_set() and steps_at(store) == [1, 2, 3, 4, 5, 6] and is_whole(store)
    assert marker(store)["rollbacks"] == 1


def test_rollback_spares_objects_of_an_upload(tmp_path, monkeypatch):
    config, put = config_at(tmp_path / "a", tmp_path / "store"), DirFileSystem.put
    save_step(config, 1)
    mirror = open_mirror(config, QUIET)
    mirror.fetch(claim=True)
    monkeypatch.setattr(mirror_module, "PATIENCE", 10.0)
    monkeypatch.setattr(DirFileSystem, "put", lambda *of, **more: put(*of, **more) or mirror.drop_after(1))
    with mirror:
        pass
    assert steps_at(tmp_path / "store") == [1]


def rollback_config(folder, store):
    guards = GUARDED | {"action": "rollback", "patience_steps": 2}
    checkpoint = {"every": 1, "keep": 9, "asynchronous": False}
    return config_at(folder, store, learner={"steps": 6}, checkpoint=checkpoint, guards=guards)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_deleted_checkpoint_stays_deleted_after_kill(tmp_path, monkeypatch, is_deleted):
    """The store is away at the rollback, and the run is killed then; an older machine comes back too."""
    store, folder, killed = tmp_path / "store", tmp_path / "a", RuntimeError("killed")
    create = ObjectStore.create

    def act(version, seed):
        if version == 5:
            until(lambda: steps_at(store)[-1] == 4)
            shutil.copytree(folder, tmp_path / "older", ignore=shutil.ignore_patterns(".*"))
            monkeypatch.setattr(ObjectStore, "create", fail_with(ConnectionError("no route to host")))
        if version == 3 and seed:
            raise killed

    monkeypatch.setattr(mirror_module, "HURRY", 0.0)
    with pytest.raises(RuntimeError, match="killed"), monkeypatch.context() as patch:
        if not is_deleted:
            patch.setattr(CheckpointStore, "delete_after", fail_with(killed))
        start(rollback_config(folder, store), acting(act, Collapsing))
    monkeypatch.setattr(ObjectStore, "create", create)
    assert steps_at(store)[-1] == 4 and checkpoints(folder) == [1, 2, 3] + [4] * (not is_deleted)
    finish_rollback(folder)
    assert checkpoints(folder) == [1, 2, 3]
    mirror = open_mirror(rollback_config(folder, store), QUIET)
    assert not mirror.fetch(claim=True)
    assert checkpoints(folder) == steps_at(store) == [1, 2, 3]
    with mirror:
        pass
    older = open_mirror(rollback_config(tmp_path / "older", store), QUIET)
    assert checkpoints(tmp_path / "older")[-1] == 4
    assert older.fetch() and checkpoints(tmp_path / "older") == [1, 2, 3]


def test_copy_that_missed_two_rollbacks_drops_the_checkpoints_of_both(tmp_path):
    """The second rollback went to a later step: what it would keep in the store is of the first attempt."""
    store, folder = tmp_path / "store", tmp_path / "a"
    start(config_at(folder, store, learner={"steps": 4}, checkpoint={"every": 1, "keep": 9}))
    assert steps_at(store) == [1, 2, 3, 4]
    note_rollback(folder, 2, 1)
    note_rollback(folder, 3, 2)
    assert json.loads((folder / ROLLBACK).read_text())["history"] == [2, 3]
    mirror = opened(folder, store)
    mirror._marker.version = mirror._marker.read()
    assert mirror._marker.rolled_back(mirror._marker.version).steps == (1, 2)
    assert mirror._marker.rolled_back(mirror._marker.version).rollbacks == 2


def test_kill_at_any_operation_leaves_whole_copy(tmp_path, monkeypatch):
    """Of a start that takes the copy over, rolls back and copies its next checkpoint.

    A killed upload has stored all objects but the last.
    """
    left, put = [0], DirFileSystem.put

    def mortal(method):
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] == -1 and method is put:
                store, files, objects = arguments
                put(store, files[:-1], objects[:-1], **options)
            if left[0] < 0:
                raise ConnectionError("killed")
            return method(*arguments, **options)

        return call

    for name in ("ls", "cat_file", "put", "get", "rm"):
        monkeypatch.setattr(DirFileSystem, name, mortal(getattr(DirFileSystem, name)))
    monkeypatch.setattr(ObjectStore, "create", mortal(ObjectStore.create))
    monkeypatch.setattr(mirror_module, "PATIENCE", 0.0)

    def machine(number, name):
        folder = tmp_path / f"{name}-{number}"
        mirror = opened(folder, tmp_path / f"store-{number}")
        return folder, mirror, mirror.fetch(claim=True)

    def train_to(folder, mirror, step):
        (folder / f"checkpoints/{step}").mkdir(parents=True)
        (folder / f"checkpoints/{step}/state").write_text(f"step {step}")
        mirror.put(step)
        until(lambda: not mirror._pins or mirror._failure)

    seen = []
    for number in range(1, 99):
        left[0] = 999
        folder, mirror, _ = machine(number, "first")
        add_start(folder, "run: {seed: 0}\n", {})
        with mirror:
            for step in (1, 2):
                train_to(folder, mirror, step)
        left[0] = number
        with suppress(EnvironmentFailure):
            folder, mirror, _ = machine(number, "second")
            note_rollback(folder, 1, 1)
            with mirror:
                mirror.drop_after(1)
                shutil.rmtree(folder / "checkpoints/2")
                train_to(folder, mirror, 3)
        is_killed, left[0] = left[0] < 0, 999
        folder, mirror, is_newer = machine(number, "third")
        seen.append(steps_at(tmp_path / f"store-{number}"))
        assert is_newer and checkpoints(folder) == seen[-1] and is_whole(tmp_path / f"store-{number}")
        for step in seen[-1]:
            assert (folder / f"checkpoints/{step}/state").read_text() == f"step {step}"
        if not is_killed:
            break
    assert {tuple(steps) for steps in seen} == {(1, 2), (1,), (1, 3)} and seen[-1] == [1, 3]


def test_killed_fetch_restores_no_dropped_checkpoint(tmp_path, monkeypatch):
    """The note of the rollback comes last: until then the store is newer than the dropped checkpoints."""
    store = tmp_path / "store"
    start(rollback_config(tmp_path / "a", store), Collapsing())
    older = tmp_path / "older"
    shutil.copytree(tmp_path / "a", older)
    (older / ROLLBACK).unlink()
    save_step(config_at(older, ""), 9)
    mirror = open_mirror(rollback_config(older, store), QUIET)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
        patch.setattr(mirror_module.shutil, "rmtree", fail_with(OSError("killed")))
        mirror.fetch()
    assert checkpoints(older)[-1] == 9 and mirror.fetch()
    assert checkpoints(older) == steps_at(store)


def test_cut_file_is_not_fetched(tmp_path, copied, monkeypatch):
    """No file has its name before it is whole, the first config neither, by which runs are told apart."""
    mirror = opened(tmp_path / "b", copied)
    get = DirFileSystem.get

    def cut(self, objects, files):
        get(self, objects, files)
        for path in map(Path, files):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    with monkeypatch.context() as patch:
        patch.setattr(DirFileSystem, "get", cut)
        with pytest.raises(UserError, match=r"configs/0.* not as long as its marker says"):
            mirror.fetch()
    assert not (tmp_path / "b/configs/0.yaml").exists() and checkpoints(tmp_path / "b") == []
    assert mirror.has_newer() and mirror.fetch() and not mirror.has_newer()
    assert checkpoints(tmp_path / "b") == [2]


def test_reading_command_takes_the_lock_only_to_fetch(tmp_path, copied, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(mirror_module, "locked_run", fail_with(UserError("in use")))
        fetch_newest(config_at(tmp_path / "a", copied), QUIET)
        with pytest.raises(UserError, match="in use"):
            fetch_newest(config_at(tmp_path / "b", copied), QUIET)
    assert checkpoints(tmp_path / "b") == []
    fetch_newest(config_at(tmp_path / "b", copied), QUIET)
    assert checkpoints(tmp_path / "b") == [2]


@pytest.mark.parametrize("name", ["", "copy", ".."])
def test_folder_within_the_other_is_refused(tmp_path, name):
    """The copy would hold copies of itself."""
    with pytest.raises(UserError, match="one is inside the other; choose a folder elsewhere"):
        opened(tmp_path / "a", tmp_path / "a" / name)


def test_store_as_folder_of_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"s3://a/b is not a folder .*; set run\.mirror to it"):
        make_config(tmp_path, run={"dir": "s3://a/b"})


def test_missing_bucket_is_named_before_the_run_begins(tmp_path, s3):
    mirror = opened(tmp_path / "a", "s3://other/run")
    assert not mirror.fetch()
    with pytest.raises(UserError, match=r"^run\.mirror=s3://other/run cannot be used \(.*bucket.*\); check"):
        mirror.fetch(claim=True)


@pytest.mark.parametrize("steps", [None, 4])
def test_run_with_another_config_is_refused_and_nothing_is_changed(tmp_path, copied, steps):
    """It has no checkpoint yet, or is further than the run in the store."""
    folder = tmp_path / "b"
    add_start(folder, "run: {seed: 7}\n", {})
    if steps:
        save_step(config_at(folder, ""), steps)
    mirror = opened(folder, copied)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"run\.mirror=.*store holds another run than run\.dir=.*b;"):
        mirror.fetch(claim=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_object_that_is_cut_off_in_the_store_is_refused(tmp_path, copied):
    files = marker(copied)["files"]
    of_step = {path: name for path, (name, _, _) in files.items() if path.startswith("checkpoints/2/")}
    largest = max(of_step, key=lambda path: files[path][1])
    stored = copied / OBJECTS / of_step[largest]
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{re.escape(largest)}.* not as long as its marker says"):
        opened(tmp_path / "b", copied).fetch()
    assert checkpoints(tmp_path / "b") == []


def test_store_that_holds_no_run_is_refused(tmp_path, copied):
    """Not JSON, of an older format, or with paths outside of the run."""
    stolen, [file] = tmp_path / "elsewhere" / "stolen", (copied / MARKER).iterdir()
    version = json.loads(file.read_text())
    paths = [str(stolen), "../stolen", "a//b", "a/../../stolen", ".lock", "rollouts/.lock", ""]
    paths += [f"checkpoints/2/{stolen}", "checkpoints/2/../../../stolen", "checkpoints/02/x"]
    paths += ["checkpoints/other", "snapshots/v1/config.json"]
    foreign = {path: version["files"] | {path: version["files"]["metrics.jsonl"]} for path in paths}
    texts = {json.dumps(version | {"files": files}): repr(path) for path, files in foreign.items()}
    texts |= dict.fromkeys(("{", '{"files": {"a": 1}}', "[]"), MARKER)
    for text, words in texts.items():
        file.write_text(text)
        with pytest.raises(UserError, match=f"{re.escape(words)} is .*choose another place"):
            opened(tmp_path / "b", copied).fetch()
    file.rename(copied / "mirror.json")
    with pytest.raises(UserError, match=r"older format \(mirror.json\); choose another place"):
        opened(tmp_path / "b", copied).fetch()
    assert not list(tmp_path.rglob("stolen")) and not list((tmp_path / "b").rglob(".lock"))
    assert checkpoints(tmp_path / "b") == []


@pytest.mark.parametrize(("steps", "content"), [(1, "b"), (4, "b"), (1, None)])
def test_run_on_other_data_is_refused(tmp_path, steps, content):
    """Its config has the same text, or is lost; it may be behind the run in the store, or further."""
    store, folder = tmp_path / "store", tmp_path / "b"
    start(config_at(tmp_path / "a", store, learner={"steps": 2}), identity={"data.content": "a"})
    save_step(config_at(folder, ""), steps)
    if content:
        add_start(folder, "run: {seed: 0}\n", {"data.content": content})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"run\.mirror=.*store holds another run than run\.dir=.*b;"):
        opened(folder, store).fetch(claim=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_end_of_a_run_names_the_missing_step(tmp_path, monkeypatch, capsys):
    """A store that hangs holds up neither an orderly end nor one by a signal."""
    hanging = threading.Event()
    monkeypatch.setattr(DirFileSystem, "put", lambda *_, **__: hanging.wait())
    monkeypatch.setattr(mirror_module, "PATIENCE", 0.2)
    monkeypatch.setattr(mirror_module, "HURRY", 0.1)
    config = config_at(tmp_path / "a", tmp_path / "store", learner={"steps": 2})
    for seconds, ending in (("0.2", nullcontext()), ("0.1", pytest.raises(SystemExit))):
        mirror = open_mirror(config, Console())
        mirror.fetch(claim=True)
        save_step(config, 2) if not checkpoints(tmp_path / "a") else None
        with ending, mirror:
            if seconds == "0.1":
                raise SystemExit(143)
        lines = capsys.readouterr().err
        assert f"for at most {seconds} s" in lines
        assert re.search(r"lacks the checkpoint of step 2\s+\(copying takes too long\)", lines), lines
    hanging.set()


def test_fetch_goes_on_while_files_grow(tmp_path, copied, monkeypatch):
    """For longer than STALL_SECONDS."""
    get, wait = DirFileSystem.get, object_store.wait
    monkeypatch.setattr(object_store, "STALL_SECONDS", 3 * object_store.REPORT_SECONDS)
    sizes, grown = queue.Queue(), queue.Queue()

    def get_slowly(self, objects, files):
        Path(files[0]).parent.mkdir(parents=True, exist_ok=True)
        for size in range(8):
            sizes.put(size)
            grown.get()
            Path(files[0]).write_bytes(b"x" * size)
            grown.task_done()
        get(self, objects, files)

    def wait_while_it_grows(futures, seconds):
        """A report comes after each size, or after the end."""
        while True:
            state = wait(futures, 0.01)
            if state.done or not sizes.empty():
                break
        if not state.done:
            grown.put(sizes.get())
            grown.join()
        return state

    monkeypatch.setattr(object_store, "wait", wait_while_it_grows)
    monkeypatch.setattr(DirFileSystem, "get", get_slowly)
    with opened(tmp_path / "b", copied).inputs() as count:
        assert count == 2


def test_full_disk_leaves_the_copy_whole(tmp_path, small_disk):
    """The marker above all: cut off, it would hide every checkpoint, and refuse every start."""
    store, folder = small_disk / "store", tmp_path / "a"
    config, ballast = config_at(folder, store, learner={"steps": 2}), small_disk / "ballast"
    start(config)
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    mirror = open_mirror(config, QUIET)
    with pytest.raises(EnvironmentFailure, match=r"run\.mirror=.* cannot be used .*No space left.*make room"):
        mirror.fetch(claim=True)
    assert steps_at(store) == [2]
    ballast.unlink()
    mirror.fetch(claim=True)


def test_copy_goes_on_when_the_disk_has_room_again(tmp_path, small_disk):
    store, folder = small_disk / "store", tmp_path / "a"
    config, ballast = config_at(folder, store, learner={"steps": 2}), small_disk / "ballast"
    start(config)
    mirror = open_mirror(config, QUIET)
    mirror.fetch(claim=True)
    with mirror:
        until(lambda: not mirror._pins)
        ballast.write_bytes(b"x" * max(0, shutil.disk_usage(small_disk).free - 8192))
        (folder / "larger").write_bytes(b"y" * 65536)
        mirror.put(2)
        until(lambda: mirror._failure)
        assert "No space left" in mirror._failure
        assert steps_at(store) == [2]
        ballast.unlink()
    object_name, size, _ = marker(store)["files"]["larger"]
    assert size == 65536
    assert (store / OBJECTS / object_name).read_bytes() == b"y" * 65536
