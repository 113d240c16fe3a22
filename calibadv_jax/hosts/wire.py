"""Values on their way between the processes of a run: bytes, and values again.

The coordination service takes what anybody sends who reaches its port. So only the plain values, arrays and
trajectories that a run exchanges are read: bytes cannot name a function to call.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from calibadv_jax.core import trajectory

_TRAJECTORIES = {"Document", "Group", "Message", "Question", "Trajectory", "Turn"}
_ARRAYS = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ARRAYS or (module == trajectory.__name__ and name in _TRAJECTORIES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that processes of a run send each other")


def to_bytes(value: Any) -> bytes:
    """Of plain values, NumPy arrays and groups of trajectories."""
    return pickle.dumps(value, protocol=5)


def from_bytes(sent: bytes) -> Any:
    """
    Raises:
        pickle.UnpicklingError: it holds anything else.
    """
    return _Reader(io.BytesIO(sent)).load()
