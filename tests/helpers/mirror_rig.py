"""A run's folder and its copy in an object store: starts on scripted rollouts, and what the marker says."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
from trainer_rig import ScriptedRollouts, make_config, make_state

from calibadv_jax.commands.train import train
from calibadv_jax.config.kept import add_start
from calibadv_jax.core.signals import Stop
from calibadv_jax.metrics.console import Console
from calibadv_jax.snapshots import mirror as mirror_module
from calibadv_jax.snapshots.mirror import open_mirror
from calibadv_jax.snapshots.mirror_marker import MARKER, OBJECTS

QUIET = Console(progress=False)


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(mirror_module, "PAUSE", 0.1)


def config_at(folder, url, **sections):
    return make_config(folder, **sections | {"run": {"dir": str(folder), "mirror": str(url)}})


def opened(folder, url, **sections):
    return open_mirror(config_at(folder, url, **sections), QUIET)


def start(config, rollouts=None, console=QUIET, identity=None):
    """What `calibadv train` does with run.mirror, on scripted rollouts."""
    folder = Path(config.run.dir)
    mirror = open_mirror(config, console)
    mirror.fetch(claim=True)
    add_start(folder, "run: {seed: 0}\n", identity or {})
    state = make_state(config, folder, rollouts or ScriptedRollouts(), console)
    with Stop() as stop, mirror:
        state.mirror = mirror
        with state:
            train(state, stop)
    return state


@pytest.fixture
def copied(tmp_path):
    """A store with the copy of two steps, made by the run in the folder `a`."""
    start(config_at(tmp_path / "a", tmp_path / "store", learner={"steps": 2}))
    return tmp_path / "store"


def marker(url):
    """The newest version of the marker; an empty one where there is none."""
    for _ in range(5):
        with suppress(FileNotFoundError):  # replaced meanwhile
            store, root = fsspec.core.url_to_fs(str(url))
            store.invalidate_cache()
            return json.loads(store.cat_file(max(store.ls(f"{root}/{MARKER}", detail=False))))
    return {"steps": [], "files": {}}


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


def acting(act, kind=ScriptedRollouts):
    """Rollouts that call `act` with the version and the seed whenever they load a policy."""

    class Acting(kind):
        def load(self, version, params):
            super().load(version, params)
            act(version, self.seed)

    return Acting()


def until(condition):
    for _ in range(5000):  # less than pytest's limit
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it never came")


def steps_at(url):
    return marker(url)["steps"]


def save_step(config, step):
    """A checkpoint of another attempt in the run's folder, without a copy."""
    folder = Path(config.run.dir)
    state = make_state(config, folder)
    state.step = step
    state.save()
    state.checkpoints.wait()
    state.checkpoints.close()


def is_whole(store):
    """Whether the store holds all objects that the marker names, and no others."""
    names = {name for name, _, _ in marker(store)["files"].values()}
    return names == {path.name for path in (store / OBJECTS).iterdir()}
