"""What a cold start carries from update to update, and continues from when it was interrupted."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from calibadv_jax.config import Config
from calibadv_jax.config.keys import among
from calibadv_jax.config.load import kept_values
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.learner.learner import Learner, State
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.transformer import Params
from calibadv_jax.run.folder import COLD_START_KEYS, differences, offers_same, with_defaults
from calibadv_jax.snapshots.checkpoint import CheckpointStore, newest_step

CHECKPOINTS, START = "sft_checkpoints", "sft_start.json"  # in the run's folder, until the policy is written
GONE = "sft_checkpoints.removed"  # the first of them, on its way out
COMPARED = (
    *COLD_START_KEYS,
    "policy.compute_dtype",
    "policy.param_dtype",
    "rollout.max_prompt_length",
    "rollout.max_observation_length",
)
FREE = (  # of those; what files hold is compared by content
    "sft.output",
    "sft.init_from",
    "sft.demonstrations",
    "sft.held_out_every",
    "sft.checkpoint_every",
    "sft.optimizer.offload",
    "world.dir",
)

MOST_SECONDS = 600.0  # of work that a kill may cost where updates are slow


def kept_row_length(folder: Path) -> int | None:
    """Return the row length of the unfinished cold start in a run's folder; None where none is known."""
    if newest_step(folder / CHECKPOINTS) is None:
        return None
    try:
        start = json.loads((folder / START).read_text(encoding="utf-8"))
        return start["config"]["sft"]["row_length"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # `_check` names the damage
        return None


class SftState:
    """Parameters and optimizer of a cold start, and their checkpoints; a block that saves how far it came.

    Args:
        identity: hashes of what the cold start is made of beside its config.
        initial: the parameters to begin with, which are donated; not called where a checkpoint has them.

    Raises:
        UserError: the folder holds an unfinished cold start of other settings, or a damaged one.
    """

    def __init__(
        self,
        config: Config,
        identity: Mapping[str, str],
        learner: Learner,
        initial: Callable[[], Params],
        console: Console,
    ):
        self.folder, self.every, self.console = Path(config.run.dir), config.sft.checkpoint_every, console
        now = {"config": kept_values(config), "identity": dict(identity)}
        if (self.folder / GONE).exists():
            shutil.rmtree(self.folder / GONE)
        newest = newest_step(self.folder / CHECKPOINTS)
        if newest is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / START, now)
        else:
            _check(self.folder, now["config"], identity)
        self.state: State = {}
        if newest is None or learner.policy.adapters:  # a checkpoint holds adapters without their base
            self.state = learner.init(initial())
        self._store = CheckpointStore(self.folder / CHECKPOINTS, keep=1)
        self.step = self._saved = 0
        self._saved_at = time.monotonic()
        if newest is not None:
            self.state, _ = self._store.restore(newest, learner.abstract_state())
            self.step = self._saved = newest
            console.note(f"going on from update {newest}")

    def updated(self, state: State) -> None:
        """Takes the state after one more update; saves it if that is due."""
        self.state, self.step = state, self.step + 1
        if self.every and (self.step % self.every == 0 or time.monotonic() - self._saved_at > MOST_SECONDS):
            self._save()

    def finish(self) -> None:
        """Removes what an interrupted cold start would have needed."""
        self._saved = self.step
        self._store.close()
        # All checkpoints go at once: of what a kill leaves, the next cold start goes on or begins anew.
        (self.folder / CHECKPOINTS).rename(self.folder / GONE)
        (self.folder / START).unlink(missing_ok=True)
        shutil.rmtree(self.folder / GONE)

    def __enter__(self) -> SftState:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        if kind is None or not whole or self.step == self._saved:
            return
        try:
            self._save()
            self.console.note(f"update {self.step} is saved; the same command goes on from there")
        except Exception as error:  # whatever Orbax raises: it must not hide why the cold start stopped
            self.console.note(f"update {self.step} could not be saved: {' '.join(str(error).split())}")

    def _save(self) -> None:
        self._store.save(self.step, self.state, {})
        self._store.wait()
        self._saved, self._saved_at = self.step, time.monotonic()


def _check(folder: Path, config: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    advice = f"choose another run.dir, or remove {folder / CHECKPOINTS} to begin again"
    try:
        start = json.loads((folder / START).read_text(encoding="utf-8"))
        before, known = with_defaults(start["config"]), start["identity"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / START}: lost or damaged, so that nobody knows what {CHECKPOINTS} is of; {advice}"
        ) from error
    changed = [
        name
        for name, _, _ in differences(before, config)
        if among(COMPARED, name) and not among(FREE, name)
        if name != "tools" or not offers_same(before, config)
    ]
    changed += [name for name, _, _ in differences(known, identity)]
    if changed:
        raise UserError(
            f"run.dir={folder} holds an unfinished cold start with other settings ({', '.join(changed)});"
            f" {advice}"
        )
