"""Full training checkpoints: parameters, optimizer, data position, counters."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from calibadv_jax.core.errors import EnvironmentFailure, UserError, cause_text, is_lost_process, storage_errno
from calibadv_jax.core.files import check_literal, read_json, write_json
from calibadv_jax.policy.weights import shape_problems, summarise_problems

# Items of a checkpoint: the pytree of arrays, and JSON values.
STATE = "state"
EXTRA = "extra"
# The entry of the state that holds the parameters.
PARAMS = "params"
# File in a run's folder that describes the run's last rollback.
ROLLBACK = "rollback.json"
# Beginnings of the errors of reads by Orbax that are abandoned half done: their event loop is closed, or they
# turn Python's request to end (GeneratorExit) into an error of their own.
LATE = ("Event loop is closed", "Encountered error while reading array index")
# Parts of asyncio's messages about such reads.
LATE_IN_ASYNCIO = ("exception was never retrieved", "destroyed but it is pending")


class CheckpointStore:
    """Checkpoints by step under one folder, written by Orbax. A checkpoint appears only when it is complete.

    Attributes:
        folder: the absolute path of the folder.
    """

    def __init__(self, folder: Path, keep: int, asynchronous: bool = False, barrier: Any = None):
        """Open a folder of checkpoints, and make it if it is missing.

        Args:
            folder: its path.
            keep: number of newest checkpoints that stay.
            asynchronous: write a checkpoint while the caller goes on, until `wait`.
            barrier: a `distributed.save_barrier.SaveBarrier` that several processes share; None: one process.

        Raises:
            ValueError: the path has characters that Orbax takes for a pattern.
        """
        check_literal(folder)
        self.folder = folder.absolute()
        self._barrier = barrier
        async_options = ocp.AsyncOptions(
            barrier_sync_fn=barrier,
            # Orbax does not look for errors of a folder that process 0 creates in a thread, and waits for it.
            create_directories_asynchronously=not barrier,
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=asynchronous,
            async_options=async_options,
        )
        self._manager = _open(self.folder, options)
        self._writing: int | None = None  # step of the save that `wait` has not ended
        self._has_failed = False  # whether the last save that was waited for failed

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint; None: there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending; the last one may still be being written."""
        return sorted(self._manager.all_steps())

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, once a save in progress has ended.

        Raises:
            UserError: that save failed; see `wait`.
        """
        self.wait()
        for later in self.steps():
            if later > step:
                self._manager.delete(later)

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Write a checkpoint; an asynchronous one is complete after `wait`.

        Args:
            step: of the checkpoint, later than all steps in the folder.
            state: a pytree of arrays, which may be donated after the return.
            extra: JSON values.

        Raises:
            UserError: the folder holds this step or a later one, or this save or the last one failed.
            TypeError: `extra` holds a value that is not JSON.
        """
        self.wait()
        newest = self.latest_step()
        if newest is not None and newest >= step:
            raise UserError(
                f"{self.folder}: holds step {newest} of an earlier run, step {step} cannot follow it; resume"
                " that run, or choose another run.dir"
            )
        json.dumps(extra)  # a value that is not JSON must fail before anything is written
        items = {STATE: ocp.args.PyTreeSave(state), EXTRA: ocp.args.JsonSave(extra)}
        arguments = ocp.args.Composite(**items)
        if self._barrier:
            self._barrier.reset()
        with damage_as_user_error(self._failure(step), EnvironmentFailure):
            self._manager.save(step, args=arguments, force=True)
        self._writing = step

    def is_writing(self) -> bool:
        """Return whether a checkpoint is being written. If not, `wait` returns or raises at once."""
        if self._writing is None:
            return False
        if self._barrier is not None and self._barrier.is_broken:
            return False
        return self._manager.is_saving_in_progress()

    def wait(self) -> int | None:
        """Wait for the last save and verify it.

        Returns:
            The step of that save; None if it has been waited for before, or there was none.

        Raises:
            UserError: the checkpoint could not be written.
        """
        step = self._writing
        self._writing = None
        if step is None:
            return None
        self._has_failed = True
        try:
            with damage_as_user_error(self._failure(step), EnvironmentFailure):
                self._manager.wait_until_finished()
                self._manager.item_metadata(step)  # opens every tensor
        except UserError:
            self._manager.reload()  # after a failed save Orbax has forgotten the older checkpoints
            raise
        self._has_failed = False
        return step

    def _failure(self, step: int) -> str:
        return f"{self.folder}: step {step} cannot be saved; the older checkpoints are complete"

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """Read a checkpoint.

        Args:
            step: of the checkpoint.
            abstract_state: a pytree of ShapeDtypeStructs, with shardings on any mesh.

        Returns:
            The state in these dtypes and shardings, and the extra.

        Raises:
            UserError: the checkpoint is damaged, or its shapes are not those of `abstract_state`.
        """
        return _restore(self._manager, step, abstract_state)

    def close(self) -> None:
        """Close Orbax' threads; the error of a save that `wait` has raised is not raised again."""
        try:
            self._manager.close()
        except Exception:  # any error of the last save
            if not self._has_failed:
                raise


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in any order; none without the folder."""
    if not folder.is_dir():
        return []
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint in a folder; None if there is none."""
    return max(saved_steps(folder), default=None)


def note_rollback(run: Path, step: int, rollbacks: int) -> None:
    """Write the file that describes a run's last rollback.

    Args:
        run: the run's folder.
        step: to which the run is rolled back.
        rollbacks: number of rollbacks of the run, with this one.
    """
    history = read_rollback(run).get("history", [])[: rollbacks - 1]
    # Earlier versions noted the last rollback alone.
    history += [step] * (rollbacks - len(history))
    write_json(run / ROLLBACK, {"step": step, "rollbacks": rollbacks, "history": history})


def lowest_rollback(rollback: dict[str, Any], rollbacks: int) -> int | None:
    """Return the lowest step to which a run was rolled back after its first `rollbacks` rollbacks.

    Args:
        rollback: as `read_rollback` returns it.
        rollbacks: number of rollbacks before; a checkpoint or a copy of the run was made after them.

    Returns:
        The step; later steps of that checkpoint or copy were dropped since. None: no rollback since.
    """
    since = rollback.get("history", [])[rollbacks:]
    return min(since, default=None)


def read_rollback(run: Path) -> dict[str, Any]:
    """Return the last rollback of a run.

    Args:
        run: the run's folder.

    Returns:
        `step`, to which it was rolled back, `rollbacks`, the number of rollbacks of the run, and `history`,
        the steps of all of them in their order; empty if there was none.

    Raises:
        UserError: the file is damaged.
    """
    path = run / ROLLBACK
    if not path.is_file():
        return {}
    rollback = read_json(path, "remove it")
    step = rollback.get("step")
    rollbacks = rollback.get("rollbacks")
    history = rollback.get("history", [step] * rollbacks if isinstance(rollbacks, int) else [])
    numbers = [step, rollbacks, *history] if isinstance(history, list) else [None]
    is_whole = all(isinstance(number, int) for number in numbers) and len(history) == rollbacks
    if not is_whole:
        raise UserError(f"{path}: damaged; remove it")
    return {**rollback, "history": history}


def finish_rollback(run: Path) -> None:
    """Delete checkpoints that a rollback was to delete before its process was killed.

    A checkpoint goes if its step is after that of a rollback since it was saved, or if it is half deleted and
    after the last one.

    Args:
        run: the run's folder.

    Raises:
        UserError: the file of a rollback or of a checkpoint is no JSON object.
    """
    rollback = read_rollback(run)
    folder = run / "checkpoints"
    if not rollback:
        return
    for step in saved_steps(folder):
        if step <= min(rollback["history"]):
            continue
        path = folder / str(step)
        extra = path / EXTRA / "metadata"
        guards = {}
        if extra.is_file():
            guards = read_json(extra, f"delete {path}")["guards"]
        lowest = lowest_rollback(rollback, guards.get("rollbacks", 0))
        if lowest is not None and step > lowest:
            shutil.rmtree(path)


def restore_params(folder: Path, abstract_params: Any, step: int | None = None) -> tuple[Any, int]:
    """Read the parameters alone of a checkpoint.

    Args:
        folder: a folder of checkpoints.
        abstract_params: ShapeDtypeStructs with the dtypes and shardings that the parameters get.
        step: of the checkpoint; None: the newest one.

    Returns:
        The parameters, and the checkpoint's step.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it is of another policy.
    """
    chosen = newest_step(folder) if step is None else step
    if chosen is None or chosen not in saved_steps(folder):
        name = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise UserError(f"{folder}: no complete {name} there; train first, or set export.source")
    options = ocp.CheckpointManagerOptions(create=False, enable_async_checkpointing=False)
    with _open(folder.absolute(), options) as manager:
        restored, _ = _restore(manager, chosen, {PARAMS: abstract_params}, partial=True)
    return restored[PARAMS], chosen


def _open(folder: Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    _hide_late_errors()
    handlers = {STATE: ocp.PyTreeCheckpointHandler(), EXTRA: ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)


def _restore(
    manager: ocp.CheckpointManager, step: int, abstract: dict[str, Any], partial: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Return the state and the extra of a checkpoint; `partial`: only the entries of `abstract`."""
    source = Path(manager.directory) / str(step)
    damaged = f"{source}: damaged checkpoint; delete it to use an older checkpoint"
    with damage_as_user_error(damaged):
        saved = manager.item_metadata(step)[STATE]
    if saved is None:
        raise UserError(f"{damaged} (no {STATE})")
    saved_shapes = tensor_shapes(saved.tree)
    if partial:
        saved_shapes = {name: shape for name, shape in saved_shapes.items() if name.split(".")[0] in abstract}
    problems = shape_problems(saved_shapes, tensor_shapes(abstract))
    if problems:
        raise UserError(
            f"{source}: does not fit this policy and optimizer; use its own config, or another run.dir:"
            f" {summarise_problems(problems)}"
        )
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    state_args = ocp.args.PyTreeRestore(abstract, restore_args, partial_restore=partial)
    items = {STATE: state_args, EXTRA: ocp.args.JsonRestore()}
    with damage_as_user_error(damaged):
        restored = manager.restore(step, args=ocp.args.Composite(**items))
    return restored[STATE], restored[EXTRA]


def tensor_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array-like leaf of a pytree.

    Returns:
        Shapes by dotted path, in which sequences are named by index and named tuples by field.
    """
    shapes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shapes[jax.tree_util.keystr(path, simple=True, separator=".")] = tuple(leaf.shape)
    return shapes


@contextmanager
def damage_as_user_error(advice: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn errors of Orbax on damaged, missing or unwritable files within the block into one for the user.

    Args:
        advice: the beginning of its message.
        kind: its class.

    Raises:
        UserError: the block raised such an error. Other errors, and lost processes, pass.
    """
    try:
        yield
    except Exception as error:
        # TensorStore reports damaged data as a bare Exception around the cause.
        is_damage = type(error) is Exception or isinstance(error, ValueError | KeyError | OSError)
        is_storage = storage_errno(error) is not None
        if is_lost_process(error) or not (is_damage or is_storage):
            raise
        raise kind(f"{advice} ({cause_text(error)})") from error


@cache
def _hide_late_errors() -> None:
    """Keep the errors of further tensors, and Orbax' tracebacks, from the terminal.

    Orbax reads and writes tensors concurrently, and the caller gets the first error. If more tensors fail,
    asyncio logs that their exceptions were never retrieved, or Python reports that the event loop is closed,
    at any later time.
    """
    original_hook = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(LATE):
            original_hook(unraisable)

    def is_relevant(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(text in message for text in LATE_IN_ASYNCIO)

    def is_no_traceback_of_orbax(record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)

    sys.unraisablehook = report
    logging.getLogger("asyncio").addFilter(is_relevant)
    logging.getLogger("absl").addFilter(is_no_traceback_of_orbax)
