"""Randomness as a function of what it is for, so that a resumed run draws what an uninterrupted one draws."""

from __future__ import annotations

import hashlib

import numpy as np


def attempt_seed(seed: int, rollbacks: int) -> int:
    """The run's seed, and another seed after every rollback, so that what collapsed is not drawn again."""
    return seed if not rollbacks else int(random_state(seed, rollbacks, "rollback").integers(2**31))


def random_state(seed: int, step: int, purpose: str) -> np.random.Generator:
    """A generator for one purpose in one step of a run with this seed."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))
