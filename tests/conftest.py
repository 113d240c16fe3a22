"""Eight simulated CPU devices, fixed seeds, and the fixtures every stage's tests share."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

# Set here and not in the environment, so that programs which a test starts see the machine as it is.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # tests compile far longer than they compute
if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # Timings vary on a shared machine, and a failure must come back at the next run.
    settings.register_profile("repeatable", deadline=None, derandomize=True)
    settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent


SLOW_TIMEOUT = 1800  # seconds: vLLM alone needs minutes to start where other work holds the machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def strict_promotion() -> Iterator[None]:
    """Mixing dtypes is an error. Not for every test: optax and others mix integers and floats inside."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of reference values and real data that is not part of the project; skips where it is absent."""
    folder = Path(os.environ.get("CALIBADV_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder} (set CALIBADV_SHARED)")
    return folder
