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
def damage_as_user_error(advice: str) -> Iterator[None]:
    """Turns what Orbax raises on damaged or missing files into a UserError that begins with `advice`."""
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
        raise UserError(f"{advice} ({cause[:300]})") from error


def _is_retrieved(record: logging.LogRecord) -> bool:
    return "exception was never retrieved" not in record.getMessage()


class _Unraisable:
    """Python's hook for errors that no code can catch, without those of a closed event loop."""

    def __init__(self) -> None:
        self.before: Callable[[Any], object] = sys.__unraisablehook__

    def __call__(self, unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            self.before(unraisable)


_unraisable = _Unraisable()
