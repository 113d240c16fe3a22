"""CalibAdv (arXiv 2604.18235) in JAX: reinforcement learning of search agents with turn-level credit.

The names here are the public Python interface; docs/calibadv.md and docs/record.md show how to use them.
"""

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import Config, load_config
from calibadv_jax.core.errors import ActionRefused
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn

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
