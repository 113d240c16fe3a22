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
from calibadv_jax.core.files import check_literal, read_json
from calibadv_jax.policy.weights import shape_problems, summary

STATE, EXTRA, PARAMS = "state", "extra", "params"
ROLLBACK = "rollback.json"  # in the run's folder: the last one
# Ends of Orbax' reads that are thrown away half done: at the closed event loop, or by turning even Python's
# request to end (GeneratorExit) into an error of their own.
LATE = ("Event loop is closed", "Encountered error while reading array index")


class CheckpointStore:
    """Checkpoints by step under one folder (Orbax; a checkpoint appears only when it is complete).

    The newest `keep` stay. An `asynchronous` one is written while the caller goes on, until `wait`. Several
    processes share a `barrier` (see `distributed.save_barrier`). Raises ValueError as `check_literal`.
    """

    def __init__(self, folder: Path, keep: int, asynchronous: bool = False, barrier: Any = None):
        check_literal(folder)
        self.folder, self._barrier = folder.absolute(), barrier
        # A folder that process 0 creates in a thread is waited for without a look at its errors.
        threads = ocp.AsyncOptions(barrier_sync_fn=barrier, create_directories_asynchronously=not barrier)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=asynchronous,
            async_options=threads,
        )
        self._manager = _open(self.folder, options)
        self._writing: int | None = None
        self._has_failed = False  # the last save that was waited for

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending; the last one may still be being written."""
        return sorted(self._manager.all_steps())

    def delete_after(self, step: int) -> None:
        """Delete the checkpoints of later steps, once a save in progress has ended; raises as `wait`."""
        self.wait()
        for later in self.steps():
            if later > step:
                self._manager.delete(later)

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Write a checkpoint, or begin to, until `wait`: on return the `state`, a pytree, may be donated.

        The `extra` holds JSON values. Raises UserError if the folder holds this step or a later one, or if
        this save or the last cannot be written.
        """
        self.wait()
        newest = self.latest_step()
        if newest is not None and newest >= step:
            fault = f"{self.folder}: holds step {newest} of an earlier run, step {step} cannot follow it"
            raise UserError(f"{fault}; resume that run, or choose another run.dir")
        json.dumps(extra)  # a value that is not JSON must fail before anything is written
        arguments = ocp.args.Composite(**{STATE: ocp.args.PyTreeSave(state), EXTRA: ocp.args.JsonSave(extra)})
        if self._barrier:
            self._barrier.reset()
        with damage_as_user_error(self._failed(step), EnvironmentFailure):
            self._manager.save(step, args=arguments, force=True)
        self._writing = step

    def is_writing(self) -> bool:
        """Whether a checkpoint is being written; once it is not, `wait` says at once how that ended."""
        has_failed = self._barrier is not None and self._barrier.is_broken
        return self._writing is not None and not has_failed and self._manager.is_saving_in_progress()

    def wait(self) -> int | None:
        """Wait for the last save and verify it; return its step, once. UserError if it is not whole."""
        step, self._writing = self._writing, None
        if step is None:
            return None
        self._has_failed = True
        try:
            with damage_as_user_error(self._failed(step), EnvironmentFailure):
                self._manager.wait_until_finished()
                self._manager.item_metadata(step)  # opens every tensor
        except UserError:
            self._manager.reload()  # Orbax has forgotten the older ones
            raise
        self._has_failed = False
        return step

    def _failed(self, step: int) -> str:
        return f"{self.folder}: step {step} cannot be saved; the older checkpoints are whole"

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """Return the state in these shardings, of any mesh, and the extra; UserError if it does not fit."""
        return _restore(self._manager, step, abstract_state)

    def close(self) -> None:
        """Close Orbax' threads; the error of a save that `wait` has raised is not raised again."""
        try:
            self._manager.close()
        except Exception:  # whatever the save met
            if not self._has_failed:
                raise


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in any order; none without the folder."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return [int(path.name) for path in paths if path.name.isdecimal()]


def newest_step(folder: Path) -> int | None:
    return max(saved_steps(folder), default=None)


def read_rollback(run: Path) -> dict[str, Any]:
    """Return the last rollback of a run: its step, and the number of rollbacks; empty if there is none."""
    path = run / ROLLBACK
    return read_json(path, "remove it") if path.is_file() else {}


def finish_rollback(run: Path) -> None:
    """Delete the checkpoints that a killed start had rolled back, and those that it had half deleted."""
    last, folder = read_rollback(run), run / "checkpoints"
    for path in [folder / str(step) for step in saved_steps(folder) if last and step > last["step"]]:
        extra = path / EXTRA / "metadata"
        guards = read_json(extra, f"delete {path}")["guards"] if extra.is_file() else {}
        if guards.get("rollbacks", 0) < last["rollbacks"]:
            shutil.rmtree(path)


def restore_params(folder: Path, abstract_params: Any, step: int | None = None) -> tuple[Any, int]:
    """Return the parameters alone of a checkpoint (None: the newest), and its step.

    They get the dtypes and shardings of `abstract_params`, ShapeDtypeStructs. Raises UserError if there is no
    such checkpoint, it is damaged, or it is of another policy.
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
    source = Path(manager.directory) / str(step)
    damaged = f"{source}: damaged checkpoint; delete it to use an older checkpoint"
    with damage_as_user_error(damaged):
        saved = manager.item_metadata(step)[STATE]
    if saved is None:
        raise UserError(f"{damaged} (no {STATE})")
    saved_shapes = tensor_shapes(saved.tree)
    if partial:
        saved_shapes = {name: saved_shapes[name] for name in saved_shapes if name.split(".")[0] in abstract}
    if problems := shape_problems(saved_shapes, tensor_shapes(abstract)):
        fault = f"{source}: does not fit this policy and optimizer"
        raise UserError(f"{fault}; use its own config, or another run.dir: {summary(problems)}")
    shardings = ocp.checkpoint_utils.construct_restore_args(abstract)
    arguments = ocp.args.PyTreeRestore(abstract, shardings, partial_restore=partial)
    items = ocp.args.Composite(**{STATE: arguments, EXTRA: ocp.args.JsonRestore()})
    with damage_as_user_error(damaged):
        restored = manager.restore(step, args=items)
    return restored[STATE], restored[EXTRA]


def tensor_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Dotted path -> shape of every array-like leaf, sequences by index and named tuples by field."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@contextmanager
def damage_as_user_error(advice: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn errors of Orbax on damaged, missing or unwritable files into one that begins with `advice`."""
    try:
        yield
    except Exception as error:
        # What TensorStore finds wrong with the data comes as a bare Exception around the cause.
        is_damage = type(error) is Exception or isinstance(error, ValueError | KeyError | OSError)
        if is_lost_process(error) or (not is_damage and storage_errno(error) is None):
            raise
        raise kind(f"{advice} ({cause_text(error)})") from error


@cache
def _hide_late_errors() -> None:
    """Hide the errors of tensors that fail after the first one, which the caller gets, and Orbax' tracebacks.

    Orbax handles tensors side by side. Of the later ones asyncio says that nobody asked how they ended, or
    Python that the event loop is closed: on the terminal, at any later time.
    """
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(LATE):
            before(unraisable)

    def is_retrieved(record: logging.LogRecord) -> bool:
        texts = ("exception was never retrieved", "destroyed but it is pending")
        return not any(text in record.getMessage() for text in texts)

    sys.unraisablehook = report
    logging.getLogger("asyncio").addFilter(is_retrieved)
    logging.getLogger("absl").addFilter(lambda record: not (record.exc_info and "orbax" in record.pathname))
