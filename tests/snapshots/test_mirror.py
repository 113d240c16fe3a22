"""A run's folder in an object store: what another machine finds there, and what may not get mixed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
from trainer_rig import (
    GUARDED,
    Collapsing,
    ScriptedRollouts,
    checkpoints,
    make_config,
    make_trainer,
    rows,
    shared_programs,  # noqa: F401
)

from calibadv_jax.commands.train import train
from calibadv_jax.config.starts import add_start
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.stopping import Stop
from calibadv_jax.metrics.console import Console
from calibadv_jax.snapshots import mirror as mirror_module
from calibadv_jax.snapshots.mirror import MARKER, Mirror, bring_newest, open_mirror

pytestmark = pytest.mark.medium
HOLD = """
import sys
from pathlib import Path
from calibadv_jax.core.locking import locked_run
with locked_run(Path(sys.argv[1]), print):
    print("held", flush=True)
    sys.stdin.read()
"""


def config_at(folder, url, **sections):
    return make_config(folder, **sections | {"run": {"dir": str(folder), "mirror": str(url)}})


def start(config, rollouts=None, console=None):
    """What `calibadv train` does with run.mirror, on scripted rollouts."""
    folder, console = Path(config.run.dir), console or Console(progress=False)
    mirror = open_mirror(config, console)
    mirror.fetch()
    add_start(folder, "seed: 0\n", {})
    trainer = make_trainer(config, folder, rollouts or ScriptedRollouts(), console)
    with Stop() as stop, mirror:
        trainer.mirror = mirror
        with trainer:
            train(config, trainer, trainer.rollouts, folder, console, stop)
    return trainer


def marker(url):
    return json.loads(fsspec.core.url_to_fs(str(url))[0].cat_file(f"{url}/{MARKER}"))


def until(condition):
    for _ in range(600):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it never came")


def steps_at(url):
    return sorted(map(int, marker(url)["checkpoints"]))


def test_another_machine_goes_on_as_if_nothing_had_happened(tmp_path, s3):
    whole = make_config(tmp_path / "whole", learner={"steps": 6}, checkpoint={"every": 2})
    expected = make_trainer(whole, tmp_path / "whole")
    with Stop() as stop, expected:
        train(whole, expected, expected.rollouts, tmp_path / "whole", Console(progress=False), stop)

    url = f"{s3}/some/run"
    parts = {"learner": {"steps": 6}, "checkpoint": {"every": 2, "keep": 1}}
    with pytest.raises(RuntimeError, match="the machine is gone"):
        start(config_at(tmp_path / "a", url, **parts), ScriptedRollouts(fails_at=5))
    assert steps_at(url) == checkpoints(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    there = start(config_at(tmp_path / "b", url, **parts))
    assert there.step == 6 and steps_at(url) == [6]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(there.state), jax.device_get(expected.state))
    assert rows(tmp_path / "b") == rows(tmp_path / "whole")
    names = {path.relative_to(tmp_path / "b") for path in (tmp_path / "b").rglob("*") if path.is_file()}
    store, root = fsspec.core.url_to_fs(url)
    copied = {path.removeprefix(f"{root}/") for path in store.find(root)} - {MARKER}
    assert copied == {path.as_posix() for path in names}


def test_a_copy_that_was_broken_off_is_not_seen(tmp_path, monkeypatch):
    """The checkpoint is there but for its last file; the marker still names the one before."""
    store = tmp_path / "store"
    start(config_at(tmp_path / "a", store, learner={"steps": 2}))
    put, ask, tried = Mirror._put, Mirror.put, threading.Event()

    def broken_off(self, paths):
        paths = list(paths)
        if any(path.startswith("checkpoints/") for path in paths):
            put(self, paths[:-1])
            tried.set()
            raise OSError("the network is away")
        put(self, paths)

    def ask_and_wait(self, step):
        ask(self, step)
        if step == 4:
            tried.wait()

    monkeypatch.setattr(Mirror, "_put", broken_off)
    monkeypatch.setattr(Mirror, "put", ask_and_wait)
    monkeypatch.setattr(mirror_module, "PATIENCE", 0.0)
    start(config_at(tmp_path / "a", store, learner={"steps": 4}))
    assert steps_at(store) == [2] and (store / "checkpoints/4").is_dir()
    monkeypatch.undo()
    there = config_at(tmp_path / "b", store, learner={"steps": 2})
    assert open_mirror(there, Console(progress=False)).fetch()
    assert checkpoints(tmp_path / "b") == [2]
    # The first machine comes back: it has the newer step, and copies it.
    start(config_at(tmp_path / "a", store, learner={"steps": 4}))
    assert steps_at(store) == [2, 4]


def test_a_store_that_is_away_holds_nothing_up(tmp_path, monkeypatch, capsys):
    """Told once when it goes and once when it is back; what was missed is copied then."""
    store, away = tmp_path / "store", threading.Event()
    pipe = Mirror._write_marker

    def write(self, complete):
        if away.is_set():
            raise ConnectionError("no route to host")
        pipe(self, complete)

    class Watching(ScriptedRollouts):
        def load(self, version, params):
            super().load(version, params)
            if version == 2:
                away.set()
            if version == 4:
                until(lambda: copier._failure)
            if version == 6:
                away.clear()
                until(lambda: not copier._failure)

    monkeypatch.setattr(Mirror, "_write_marker", write)
    monkeypatch.setattr(mirror_module, "SLOWEST", 0.1)
    config = config_at(tmp_path / "a", store, learner={"steps": 8}, checkpoint={"every": 1})
    copier = open_mirror(config, Console())
    monkeypatch.setattr(mirror_module, "Mirror", lambda *_: copier)
    start(config, Watching(), Console())
    told = capsys.readouterr().err
    assert told.count("no route to host") == 1 and told.count("can be written again") == 1
    assert steps_at(store)[-1] == 8


def test_two_starts_do_not_mix(tmp_path):
    """The older one ends as soon as it would write; what the newer one wrote stays."""
    store = tmp_path / "store"
    config = config_at(tmp_path / "a", store, learner={"steps": 20}, checkpoint={"every": 1})

    class Overtaken(ScriptedRollouts):
        def load(self, version, params):
            super().load(version, params)
            if version == 3:
                start(config_at(tmp_path / "b", store, learner={"steps": 5}))
            elif version > 3:
                threading.Event().wait(0.2)  # the copying thread needs a moment to find it out

    with pytest.raises(UserError, match="was taken over by another start of this run \\(process [0-9]+ on "):
        start(config, Overtaken())
    assert steps_at(store)[-1] == 5
    assert checkpoints(tmp_path / "a")[-1] < 20


def test_a_step_that_was_trained_again_replaces_the_older_one(tmp_path):
    """As after a rollback: the number is the same, the checkpoint is not."""
    store, folder = tmp_path / "store", tmp_path / "a"
    config = config_at(folder, store, learner={"steps": 2})
    start(config)
    before = marker(store)["checkpoints"]["2"]["made"]
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(store, tmp_path / "kept")
    other = config_at(folder, store, learner={"steps": 2}, run={"seed": 1})
    trainer = make_trainer(replace(other, run=replace(other.run, mirror="")), folder)
    trainer.step = 2
    trainer.save()
    trainer.checkpoints.wait()
    with open_mirror(config, Console(progress=False)) as mirror:  # which copies it at once
        until(lambda: marker(store)["checkpoints"]["2"]["made"] != before)
        again = marker(store)["checkpoints"]["2"]["made"]
        shutil.rmtree(folder / "checkpoints/2")
        trainer.checkpoints._manager.reload()
        trainer.save()
        trainer.checkpoints.wait()
        mirror.put(2)
    found = marker(store)["checkpoints"]["2"]
    assert found["made"] not in (before, again)
    for path, size in found["files"].items():
        assert (store / path).read_bytes() == (folder / path).read_bytes() and size > 0


def test_a_checkpoint_that_a_rollback_deletes_goes_from_the_store_at_once(tmp_path):
    """Else a machine that is lost before the next checkpoint would go on from the bad one."""
    store, seen = tmp_path / "store", []

    class Back(Collapsing):
        def load(self, version, params):
            super().load(version, params)
            if version == 5:
                until(lambda: steps_at(store)[-1] == 4)  # bad, as step 5 will show
            if version == 3 and self.seed:
                until(lambda: steps_at(store) == [1, 2, 3])
                seen.append(version)

    guards = GUARDED | {"action": "rollback", "patience": 2}
    checkpoint = {"every": 1, "keep": 9, "asynchronous": False}
    start(
        config_at(tmp_path / "a", store, learner={"steps": 6}, checkpoint=checkpoint, guards=guards), Back()
    )
    assert seen == [3] and steps_at(store) == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_leaves_what_is_there_and_the_copy_goes_on_when_there_is_room(tmp_path, small_disk):
    """The marker above all: cut off, it would hide every checkpoint, and refuse every start."""
    store, folder = small_disk / "store", tmp_path / "a"
    start(config_at(folder, store, learner={"steps": 2}))
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    config = config_at(folder, store, learner={"steps": 2})
    mirror = open_mirror(config, Console(progress=False))
    with pytest.raises(UserError, match=r"run\.mirror=.* cannot be used \(.*No space left"), mirror:
        pass
    assert steps_at(store) == [2]
    ballast.unlink()
    with (mirror := open_mirror(config, Console(progress=False))):
        ballast.write_bytes(b"x" * max(0, shutil.disk_usage(small_disk).free - 8192))
        (folder / "larger").write_bytes(b"y" * 65536)
        mirror.put(2)
        until(lambda: mirror._failure)
        assert "No space left" in mirror._failure and steps_at(store) == [2]
        ballast.unlink()
    assert (store / "larger").read_bytes() == b"y" * 65536


def test_what_a_kill_leaves_of_a_fetch_is_no_other_run(tmp_path, monkeypatch):
    """No file has its name before it is whole, the first config neither, by which runs are told apart."""
    store = tmp_path / "store"
    start(config_at(tmp_path / "a", store, learner={"steps": 2}))
    config = config_at(tmp_path / "b", store)
    mirror = open_mirror(config, Console(progress=False))
    get = mirror._store.get

    def cut(theirs, ours):
        get(theirs, ours)
        for path in map(Path, ours):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(mirror._store, "get", cut)
        with pytest.raises(UserError, match="killed"):
            mirror.fetch()
    assert not (tmp_path / "b/configs/0.yaml").exists()
    assert mirror.has_newer() and mirror.fetch() and not mirror.has_newer()
    assert checkpoints(tmp_path / "b") == [2]


def test_a_command_that_reads_waits_for_no_lock_where_nothing_is_newer(tmp_path):
    store, console = tmp_path / "store", Console(progress=False)
    start(config_at(tmp_path / "a", store, learner={"steps": 2}))
    here, there = (config_at(tmp_path / name, store) for name in "ab")
    for config, is_newer in ((here, False), (there, True)):
        command = [sys.executable, "-c", HOLD, config.run.dir]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(UserError, match="run.dir=.*b") if is_newer else nullcontext():
                bring_newest(config, console)
            other.stdin.close()
    bring_newest(there, console)
    assert checkpoints(tmp_path / "b") == [2]


@pytest.mark.parametrize("name", ["", "copy", ".."])
def test_a_folder_within_the_other_is_refused(tmp_path, name):
    """The copy would hold copies of itself."""
    config = config_at(tmp_path / "a", tmp_path / "a" / name)
    with pytest.raises(UserError, match="lie in one another; choose a folder elsewhere"):
        open_mirror(config, Console(progress=False))


def test_no_file_of_a_store_lands_outside_of_the_run(tmp_path, s3):
    url = f"{s3}/deep/run"
    store = fsspec.filesystem("s3")
    entry = {"made": "x", "files": {"checkpoints/2/../../../stolen": 1}}
    store.pipe_file(f"{url}/{MARKER}", json.dumps({"format": 1, "checkpoints": {"2": entry}}).encode())
    with pytest.raises(UserError, match=r"checkpoints/2/\.\./\.\./\.\./stolen is no path inside of a run"):
        open_mirror(config_at(tmp_path / "a", url), Console(progress=False)).fetch()
    assert not list(tmp_path.rglob("stolen")) and checkpoints(tmp_path / "a") == []


def test_a_rewound_run_leaves_no_trajectories_of_dropped_steps(tmp_path):
    store, folder = tmp_path / "store", tmp_path / "a"
    start(config_at(folder, store, learner={"steps": 2}))
    stray = store / "rollouts/step_9.parquet"
    stray.write_bytes(b"x")
    start(config_at(folder, store, learner={"steps": 3}))
    assert not stray.exists() and (store / "rollouts/step_3.parquet").is_file()


def test_another_run_at_the_place_is_refused_and_nothing_is_changed(tmp_path):
    store = tmp_path / "store"
    start(config_at(tmp_path / "a", store, learner={"steps": 2}))
    config = config_at(tmp_path / "b", store)
    (tmp_path / "b/configs").mkdir(parents=True)
    (tmp_path / "b/configs/0.yaml").write_text("seed: 7\n")
    with pytest.raises(UserError, match=r"run\.mirror=.*store holds another run than run\.dir=.*b;"):
        open_mirror(config, Console(progress=False)).fetch()
    assert not (tmp_path / "b/checkpoints").exists()


def test_an_older_copy_of_another_run_is_not_written_over(tmp_path):
    store, folder = tmp_path / "store", tmp_path / "b"
    start(config_at(tmp_path / "a", store, learner={"steps": 2}))
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    add_start(folder, "seed: 7\n", {})
    trainer = make_trainer(config_at(folder, ""), folder)
    trainer.step = 4  # further than the other run
    trainer.save()
    trainer.checkpoints.wait()
    with pytest.raises(UserError, match=r"store holds another run than run\.dir=.*b;"):
        start(config_at(folder, store))
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a run's mirror of format 1"),
        ('{"format": 2, "checkpoints": {}}', "not a run's mirror of format 1"),
        ("[]", "not a run's mirror of format 1"),
    ],
)
def test_a_place_that_is_no_mirror_is_refused(tmp_path, text, message):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / MARKER).write_text(text)
    with pytest.raises(UserError, match=message):
        open_mirror(config_at(tmp_path / "a", tmp_path / "store"), Console(progress=False)).fetch()


def test_a_copy_with_a_cut_file_is_refused_and_leaves_no_checkpoint(tmp_path):
    store = tmp_path / "store"
    start(config_at(tmp_path / "a", store, learner={"steps": 2}))
    largest = max((store / "checkpoints/2").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{largest.name}.* not as long as mirror.json says"):
        open_mirror(config_at(tmp_path / "b", store), Console(progress=False)).fetch()
    assert checkpoints(tmp_path / "b") == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/run", r"gcsfs.*; pip install 'calibadv-jax\[gcs\]'"),
        ("floppy://a/run", "Protocol not known: floppy; use s3://, gs:// or a folder"),
    ],
)
def test_a_store_without_its_package_says_what_to_install(tmp_path, url, message):
    with pytest.raises(UserError, match=message):
        open_mirror(config_at(tmp_path, url), Console(progress=False))


def test_a_bucket_that_is_not_there_is_one_line_before_the_run_begins(tmp_path, s3):
    mirror = open_mirror(config_at(tmp_path, "s3://other/run"), Console(progress=False))
    assert not mirror.fetch()
    with (
        pytest.raises(UserError, match=r"^run\.mirror=s3://other/run cannot be used \(.*bucket.*\); check"),
        mirror,
    ):
        pass


def test_a_store_as_run_dir_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"s3://a/b is no folder.*set run\.mirror to it"):
        make_config(tmp_path, run={"dir": "s3://a/b"})


def written_checkpoint(folder, step, content):
    """As much of a checkpoint as the mirror reads."""
    place = folder / "checkpoints" / str(step)
    place.mkdir(parents=True, exist_ok=True)
    for name in (mirror_module.METADATA, "data"):
        (place / name).write_text(content)


@pytest.fixture
def small_mirror(tmp_path):
    """A mirror whose store has the checkpoint of step 2; it copies when `_copy` is called."""
    (tmp_path / "a").mkdir()
    written_checkpoint(tmp_path / "a", 2, "old")
    mirror = Mirror(str(tmp_path / "store"), tmp_path / "a", 2, Console(progress=False))
    mirror._write_marker({})
    mirror._copy(2)
    assert steps_at(mirror.url) == [2]
    return mirror


def test_replaced_checkpoint_is_unnamed_before_its_files_go(small_mirror, monkeypatch):
    removed = []
    remove = Mirror._remove

    def watched(self, paths):
        paths = list(paths)
        if paths:
            removed.append((paths, steps_at(self.url)))
        remove(self, paths)

    monkeypatch.setattr(Mirror, "_remove", watched)
    written_checkpoint(small_mirror.folder, 2, "new")
    small_mirror._copy(2)
    assert [(sorted(paths), named) for paths, named in removed] == [
        ([f"checkpoints/2/{mirror_module.METADATA}", "checkpoints/2/data"], [])
    ]
    assert steps_at(small_mirror.url) == [2]
    assert (Path(small_mirror.url) / "checkpoints/2/data").read_text() == "new"


def test_new_owner_during_a_copy_keeps_the_marker(small_mirror, monkeypatch):
    other = Mirror(small_mirror.url, small_mirror.folder, 2, Console(progress=False))
    put = Mirror._put

    def taken_over(self, paths):
        paths = list(paths)
        put(self, paths)
        if any(path.startswith("checkpoints/4/") for path in paths):
            other._write_marker({})

    monkeypatch.setattr(Mirror, "_put", taken_over)
    written_checkpoint(small_mirror.folder, 4, "newer")
    with pytest.raises(mirror_module._Taken):
        small_mirror._copy(4)
    assert marker(small_mirror.url) == {"format": 1, "owner": other._owner, "checkpoints": {}}
    assert (Path(small_mirror.url) / "checkpoints/2/data").is_file()  # nothing of the other's is removed


def test_mirror_keeps_the_newest_checkpoints(small_mirror):
    for step in (4, 6):
        written_checkpoint(small_mirror.folder, step, str(step))
        small_mirror._copy(step)
    assert steps_at(small_mirror.url) == [4, 6]
    assert (
        sorted(path.name for path in (Path(small_mirror.url) / "checkpoints").rglob("data")) == ["data"] * 2
    )
    small_mirror._copy(4)  # the run went back: later checkpoints are no longer its own
    assert steps_at(small_mirror.url) == [4]
