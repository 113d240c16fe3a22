"""Serialise the values that the processes of a run send each other.

The format is pickle. Everyone who reaches JAX's coordination service can write there, so the bytes must not
be able to name a function that is called while they are read: `from_bytes` knows a fixed list of types.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from calibadv_jax.core import trajectory

# Types of `core.trajectory` that a value may hold.
_TRAJECTORY_TYPES = {
    "Document",
    "Group",
    "Message",
    "Question",
    "Trajectory",
    "Turn",
}
# (module, name) of what the pickles of NumPy arrays and NumPy scalars refer to.
_NUMPY_TYPES = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
}


def to_bytes(value: Any) -> bytes:
    """Serialise a value that processes exchange.

    Args:
        value: None, numbers, texts, bytes, NumPy arrays and scalars, and the types of `core.trajectory`, also
            in lists, tuples and dictionaries. Values of other types are serialised as well, but `from_bytes`
            refuses them.

    Returns:
        The pickle, protocol 5.
    """
    return pickle.dumps(value, protocol=5)


def from_bytes(data: bytes) -> Any:
    """Deserialise the result of `to_bytes`.

    Args:
        data: A result of `to_bytes`, or anything: it is not trusted.

    Returns:
        A copy of the value.

    Raises:
        pickle.UnpicklingError: The data refer to any other type or function, or are damaged.
        EOFError: The data are empty.
    """
    return _RestrictedUnpickler(io.BytesIO(data)).load()


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the type or function of a name in the pickle, if it is in the fixed list."""
        is_trajectory_type = module == trajectory.__name__ and name in _TRAJECTORY_TYPES
        if is_trajectory_type or (module, name) in _NUMPY_TYPES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}: the processes of a run do not exchange such values")
