"""CalibAdv (arXiv 2604.18235) in JAX: reinforcement learning of search agents with turn-level credit.

The names here are the public Python interface; docs/calibadv.md and docs/record.md show how to use them.
`Config` and `load_config` are imported on first use, so that `calibadv_jax.advantages` needs only NumPy and
RapidFuzz.
"""

import importlib
from typing import TYPE_CHECKING, Any

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.core.errors import ActionRefused
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn

if TYPE_CHECKING:
    from calibadv_jax.config import Config, load_config

__all__ = [
    "Action",
    "ActionRefused",
    "Config",
    "Document",
    "Group",
    "Question",
    "Reply",
    "Trajectory",
    "Turn",
    "compute_advantages",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name in ("Config", "load_config"):
        return getattr(importlib.import_module("calibadv_jax.config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
