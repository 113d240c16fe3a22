"""Random generators derived from seed, step and purpose, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib

import numpy as np


def attempt_seed(seed: int, rollbacks: int) -> int:
    """Return the seed of a run after a number of rollbacks, so that the draws differ after each of them.

    Args:
        seed: The run's seed.
        rollbacks: Number of rollbacks so far; 0: the run's seed itself is returned.
    """
    if rollbacks == 0:
        return seed
    return int(random_state(seed, rollbacks, "rollback").integers(2**31))


def random_state(seed: int, step: int, purpose: str) -> np.random.Generator:
    """Return the random generator for one purpose in one step.

    Args:
        seed: Seed of the run; see `attempt_seed`.
        step: Training step.
        purpose: Name of what is drawn, such as "minibatches".
    """
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))
