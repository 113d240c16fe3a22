"""A disk that is full: one line, nothing lost, and the next start goes on."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from trainer_rig import QUESTIONS, ScriptedRollouts, make_config, make_model

from calibadv_jax.commands.train import train
from calibadv_jax.config import Config, dump_config
from calibadv_jax.config.kept import add_start, newest_start
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.stopping import Stop
from calibadv_jax.metrics.console import Console
from calibadv_jax.run.trainer import Trainer

pytestmark = pytest.mark.medium


def run(config, folder):
    trainer = Trainer(config, make_model(), QUESTIONS, ScriptedRollouts(), folder, Console(progress=False))
    with Stop() as stop, trainer:
        train(config, trainer, trainer.rollouts, folder, Console(progress=False), stop)


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_full_disk_is_one_line_and_the_next_start_goes_on(small_disk):
    folder = small_disk / "run"
    config = make_config(folder, learner={"steps": 6}, checkpoint={"every": 1}, log={"rollouts": "none"})
    ballast = small_disk / "ballast"
    first = make_config(folder, learner={"steps": 3}, checkpoint={"every": 1}, log={"rollouts": "none"})
    run(first, folder)
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(b"x" * max(0, free - 8192))  # room for a row of metrics, not for a checkpoint
    with pytest.raises((UserError, OSError)) as caught:
        run(config, folder)
    if isinstance(caught.value, UserError):
        assert "cannot be saved; the older checkpoints are whole" in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        assert caught.value.errno == errno.ENOSPC
    ballast.unlink()
    run(config, folder)
    assert steps(folder) == [1, 2, 3, 4, 5, 6]


def test_a_start_on_a_full_disk_leaves_the_older_start_whole(small_disk):
    """Whether there is no room at all, or for a part of the config."""
    folder, ballast = small_disk / "run", small_disk / "ballast"
    text = dump_config(Config())
    add_start(folder, text, {"data.content": "a"})
    for room in (0, 4096):
        free = shutil.disk_usage(small_disk).free
        ballast.write_bytes(b"x" * (free - room))
        with pytest.raises(OSError) as caught:
            add_start(folder, text * 3, {"data.content": "b"})
        assert caught.value.errno == errno.ENOSPC
        ballast.unlink()
        start = newest_start(folder)
        assert (start.path.name, start.identity, start.damaged) == ("0.yaml", {"data.content": "a"}, ())
    add_start(folder, text, {"data.content": "b"})
    assert newest_start(folder).path.name == "1.yaml"
