"""calibadv_jax.metrics.timing: seconds by name on a clock that the test holds."""

from __future__ import annotations

import pytest

from calibadv_jax.core.stopping import Stop
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.timing import Phases


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("calibadv_jax.metrics.timing.time.monotonic", lambda: now[0])
    return now


def test_seconds_add_up_by_name(clock):
    watch = Phases(Console(progress=False), Stop())
    for seconds in (2.0, 3.0):
        with watch("rollout", "rollouts"):
            clock[0] += seconds
    with watch("update", "update"):
        clock[0] += 4.0
    clock[0] += 1.0
    watch.counts["tokens"], watch.counts["searches"] = (500, "step"), (20, "rollout")
    assert watch.metrics() == {
        "timing_s/rollout": 5.0,
        "timing_s/update": 4.0,
        "timing_s/step": 10.0,
        "perf/tokens_per_second": 50.0,
        "perf/searches_per_second": 4.0,
    }


def test_failing_part_is_counted(clock):
    watch = Phases(Console(progress=False), Stop())
    with pytest.raises(OSError), watch("rollout", "rollouts"):
        clock[0] += 2.0
        raise OSError
    assert watch.metrics()["timing_s/rollout"] == 2.0
