"""Random states derived from seed, step and purpose, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib

import numpy as np


def attempt_seed(seed: int, rollbacks: int) -> int:
    """Return the run's seed, or another seed after every rollback, so that the draws differ."""
    return seed if not rollbacks else int(random_state(seed, rollbacks, "rollback").integers(2**31))


def random_state(seed: int, step: int, purpose: str) -> np.random.Generator:
    """Return the generator for one purpose in one step."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))
