"""A disk that is full: one line, nothing lost, and the next start goes on."""

import errno
import shutil

import pytest
from trainer_rig import ScriptedRollouts, make_config, rows, run

from calibadv_jax.core.errors import UserError

pytestmark = pytest.mark.medium


def test_full_disk_is_reported_and_next_start_continues(small_disk):
    folder = small_disk / "run"
    config = make_config(folder, learner={"steps": 6}, checkpoint={"every": 1}, log={"rollouts": "none"})
    ballast = small_disk / "ballast"
    first = make_config(folder, learner={"steps": 3}, checkpoint={"every": 1}, log={"rollouts": "none"})
    run(first, ScriptedRollouts(), folder)
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(b"x" * max(0, free - 8192))  # room for a row of metrics, not for a checkpoint
    with pytest.raises((UserError, OSError)) as caught:
        run(config, ScriptedRollouts(), folder)
    if isinstance(caught.value, UserError):
        assert "cannot be saved; the older checkpoints are whole" in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        assert caught.value.errno == errno.ENOSPC
    ballast.unlink()
    run(config, ScriptedRollouts(), folder)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6]
