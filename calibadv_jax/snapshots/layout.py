"""What snapshots and checkpoints share: tensor names, damaged files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from calibadv_jax.core.errors import UserError


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
    if before is not _unraisable:
        _unraisable.before, sys.unraisablehook = before, _unraisable
    try:
        yield
        sys.unraisablehook = before
    except Exception as error:
        # What TensorStore finds wrong with the data comes as a bare Exception around the cause.
        if type(error) is not Exception and not isinstance(error, ValueError | KeyError | OSError):
            raise
        # Orbax reads tensors side by side. Of those that fail after the first one asyncio says that nobody
        # asked how they ended, or Python that the event loop is closed: on the terminal, at any later time.
        logging.getLogger("asyncio").addFilter(_is_retrieved)
        cause = " ".join(str(error.__cause__ or error).split())
        raise kind(f"{advice} ({cause[:300]})") from error


def _is_retrieved(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


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
