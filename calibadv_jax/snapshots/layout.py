"""What snapshots and checkpoints share: tensor names, damaged files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from calibadv_jax.core.errors import UserError, cause_text, storage_errno


def tensor_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Dotted path -> shape of every array-like leaf, sequences by index and named tuples by field."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@contextmanager
def damage_as_user_error(advice: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn errors of Orbax on damaged, missing or unwritable files into one that begins with `advice`."""
    before = sys.unraisablehook
    _hide_unraisable()
    try:
        yield
        sys.unraisablehook = before
    except Exception as error:
        # What TensorStore finds wrong with the data comes as a bare Exception around the cause.
        is_damage = type(error) is Exception or isinstance(error, ValueError | KeyError | OSError)
        if not is_damage and storage_errno(error) is None:
            raise
        logging.getLogger("asyncio").addFilter(_is_retrieved)
        raise kind(f"{advice} ({cause_text(error)})") from error


def hide_save_tracebacks() -> None:
    """Hide what Orbax' threads print of a save that fails; the one who waits for the save gets the error."""
    _hide_unraisable()
    logging.getLogger("asyncio").addFilter(_is_retrieved)
    logging.getLogger("absl").addFilter(_is_no_orbax_traceback)


def _is_no_orbax_traceback(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


def _hide_unraisable() -> None:
    # Orbax handles tensors side by side. Of those that fail after the first one asyncio says that nobody
    # asked how they ended, or Python that the event loop is closed: on the terminal, at any later time.
    if sys.unraisablehook is not _unraisable:
        _unraisable.before, sys.unraisablehook = sys.unraisablehook, _unraisable


def _is_retrieved(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not any(
        text in message for text in ("exception was never retrieved", "destroyed but it is pending")
    )


# How Orbax' reads of the other tensors end if they are thrown away half done: some at the closed event loop,
# some by turning even Python's request to end (GeneratorExit) into an error of their own.
_LATE = ("Event loop is closed", "Encountered error while reading array index")


class _Unraisable:
    """Python's hook for errors that no code can catch, without those of reads that were given up."""

    def __init__(self) -> None:
        self.before: Callable[[Any], object] = sys.__unraisablehook__

    def __call__(self, unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(_LATE):
            self.before(unraisable)


_unraisable = _Unraisable()
