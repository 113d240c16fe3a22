"""Collapse guards: when they trip, what they ask for, and the metrics made for them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from calibadv_jax.config import GuardsConfig
from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.metrics.guards import GUARDS, Guards, guard_metrics

QUESTION = Question("q", "?", ("x",), "test")
METRICS = [guard.metric for guard in GUARDS.values()]
HEALTHY = dict(zip(METRICS, (0.3, 0.9, 0.05, 1.4, 1.1), strict=True))
COLLAPSED = dict(zip(METRICS, (0.001, 0.05, 0.8, 40.0, 9.0), strict=True))


def guards(**values):
    return Guards(GuardsConfig(**values))


def feed(watch, *steps, start=1):
    return [watch.check(step, HEALTHY | metrics) for step, metrics in enumerate(steps, start)]


def bad(name, value=None):
    metric = GUARDS[name].metric
    return {metric: COLLAPSED[metric] if value is None else value}


@pytest.mark.parametrize("name", GUARDS)
def test_guard_trips_once_after_its_patience(name):
    watch = guards(action="stop", patience=2)
    verdicts = feed(watch, {}, bad(name), bad(name), bad(name))
    assert [verdict.action for verdict in verdicts] == ["go_on", "go_on", "stop", "go_on"]
    assert [verdict.metrics[f"guard/{name}"] for verdict in verdicts] == [0, 1, 1, 1]
    others = {f"guard/{other}": 0 for other in GUARDS if other != name}
    assert all(others.items() <= verdict.metrics.items() for verdict in verdicts)
    ((finding,),) = (verdict.findings for verdict in verdicts if verdict.findings)
    guard = GUARDS[name]
    assert finding.startswith(f"step 3: {guard.cause} ({guard.metric} {COLLAPSED[guard.metric]:.4g}, ")
    assert f"guards.{guard.threshold}=" in finding and "for 2 steps" in finding


@pytest.mark.parametrize("name", GUARDS)
def test_null_switches_guard_off_and_limit_is_good(name):
    limit = getattr(GuardsConfig(), GUARDS[name].threshold)
    at_the_limit = feed(guards(patience=1, action="stop"), {}, bad(name, limit))[-1]
    assert (at_the_limit.action, at_the_limit.metrics[f"guard/{name}"]) == ("go_on", 0)
    off = feed(guards(patience=1, action="stop", **{GUARDS[name].threshold: None}), {}, bad(name))[-1]
    assert off.action == "go_on" and f"guard/{name}" not in off.metrics and len(off.metrics) == 4


def test_good_steps_unarmed_guards_and_nan():
    nan = [bad("entropy", float("nan"))] * 2
    for patience, last, steps in (
        (2, "go_on", [{}, bad("entropy"), {}, bad("entropy"), bad("format_valid")]),
        (1, "stop", [bad("format_valid"), bad("format_valid"), {}, bad("format_valid")]),
        (2, "stop", nan),
    ):
        *before, newest = feed(guards(action="stop", patience=patience), *steps)
        assert not any(verdict.findings or verdict.action != "go_on" for verdict in before)
        assert newest.action == last and bool(newest.findings) == (last == "stop")
    verdicts = feed(guards(action="stop", patience=1), bad("format_valid"), {}, bad("format_valid"))
    assert [verdict.metrics["guard/format_valid"] for verdict in verdicts] == [0, 0, 1]


def test_step_without_the_metric_is_ignored():
    watch = guards(action="stop", patience=2)
    watch.check(1, HEALTHY)
    watch.check(2, HEALTHY | bad("entropy"))
    nothing_trained = {name: value for name, value in HEALTHY.items() if name != "actor/entropy"}
    assert "guard/entropy" not in watch.check(3, nothing_trained).metrics
    assert watch.check(4, HEALTHY | bad("entropy")).action == "stop"


def test_log_never_stops():
    watch = guards(patience=1)
    assert GuardsConfig().action == "log"
    (_, verdict) = feed(watch, {}, COLLAPSED)
    assert verdict.action == "go_on" and len(verdict.findings) == 5
    assert set(verdict.metrics.values()) == {1.0}


def test_rollback_stops_at_its_limit():
    watch = guards(action="rollback", patience=2, max_rollbacks=2)
    feed(watch, {}, {}, {})
    for attempt in (1, 2):
        verdicts = feed(watch, bad("entropy"), bad("entropy"), start=4)
        assert [verdict.action for verdict in verdicts] == ["go_on", "rollback"]
        assert watch.last_good_step == 3
        watch.rolled_back(3)
        assert watch.rollbacks == attempt
    assert feed(watch, bad("entropy"), bad("entropy"), start=4)[-1].action == "stop"


def test_rollback_to_older_checkpoint_is_last_good():
    watch = guards(action="rollback", patience=1)
    feed(watch, {}, {}, {}, bad("entropy"))
    watch.rolled_back(2)
    assert watch.last_good_step == 2
    assert feed(watch, bad("entropy"), start=3)[-1].action == "rollback"  # still armed
    assert watch.last_good_step == 2


@pytest.mark.parametrize("cut", range(6))
def test_resumed_guards_equal_uninterrupted_ones(cut):
    steps = [{}, bad("entropy"), bad("entropy"), {}, bad("entropy"), bad("entropy"), bad("entropy")]
    whole = guards(action="rollback", patience=3)
    expected = feed(whole, *steps)
    first, second = guards(action="rollback", patience=3), guards(action="rollback", patience=3)
    verdicts = feed(first, *steps[:cut])
    second.restore(json.loads(json.dumps(first.state())))
    assert verdicts + feed(second, *steps[cut:], start=cut + 1) == expected
    assert expected[-1].action == "rollback"
    assert second.state() == whole.state()


@pytest.mark.parametrize(
    ("action", "before", "expected"),
    [("rollback", 0, "rollback"), ("rollback", 3, "stop"), ("stop", 0, "go_on"), ("log", 0, "go_on")],
)
def test_due_rollback_survives_a_restart(action, before, expected):
    """A signal came in the step that tripped the guard, or there was no checkpoint to go back to."""
    first, second = guards(action=action, patience=2), guards(action=action, patience=2)
    first.rollbacks = before
    feed(first, {}, bad("entropy"), bad("entropy"))
    second.restore(json.loads(json.dumps(first.state())))
    (again,) = feed(second, bad("entropy"), start=4)
    assert again.action == expected and bool(again.findings) == (action == "rollback")
    assert second.last_good_step == 1


def test_switched_off_guard_is_dropped():
    """Its count would stand for ever, and a later rollback would find no checkpoint that is old enough."""
    first = guards(action="stop", patience=2)
    assert feed(first, {}, bad("entropy"), bad("entropy"))[-1].action == "stop"
    second = guards(action="rollback", patience=2, min_entropy=None)
    second.restore(json.loads(json.dumps(first.state())))
    feed(second, *[bad("entropy")] * 3, start=4)
    assert second.last_good_step == 6


def group(*turns):
    observed = {"observation_ids": np.zeros(50, np.int32)}
    searches = [Turn("search", np.int32(ids), np.float32(logprobs), **observed) for ids, logprobs in turns]
    return Group(QUESTION, [Trajectory(QUESTION, np.zeros(1, np.int32), [search]) for search in searches])


def repetition(*groups):
    return guard_metrics(groups)["rollout/think_repetition"]


def test_repetition_counts_sampled_tokens_of_a_turn():
    loop, other = [7, 8] * 6, list(range(12))
    flat = [-1.0] * 12
    assert repetition(group((other, flat), (other, flat))) == 0
    # Nine 4-grams, two of them distinct; the other turn has nine that are all distinct.
    assert repetition(group((loop, flat))) == pytest.approx(7 / 9)
    assert repetition(group((loop, flat)), group((other, flat))) == pytest.approx(7 / 18)
    rng = np.random.default_rng(0)
    for high in (2, 3, 150_000):
        ids = rng.integers(0, high, 500).tolist()
        grams = [tuple(ids[start : start + 4]) for start in range(497)]
        assert repetition(group((ids, [0.0] * 500))) == pytest.approx(1 - len(set(grams)) / 497)


def test_perplexity_is_a_mean_over_tokens():
    metrics = guard_metrics([group(([1], [-1.0]), ([1, 2, 3], [-2.0, -3.0, -4.0]))])
    assert metrics["rollout/sampled_perplexity"] == pytest.approx(np.exp(2.5))


def test_no_sampled_tokens_give_no_metrics():
    assert guard_metrics([group(([], []))]) == {}
    assert guard_metrics([Group(QUESTION, [Trajectory(QUESTION, np.zeros(1, np.int32))])]) == {}
    assert set(guard_metrics([group(([1, 2], [-1.0, -1.0]))])) == {"rollout/sampled_perplexity"}


def test_diverging_critic_is_named_with_its_key():
    """Also in steps that train nothing but the critic."""
    for more in ({}, {"actor/skipped": 0.0, "actor/finite": 1.0}):
        row = {"critic/skipped": 1.0, "critic/finite": 1.0} | more
        guards = Guards(GuardsConfig(patience=2))
        assert guards.check(1, row).action == "go_on" and guards.in_doubt
        verdict = guards.check(2, row)
        assert verdict.action == "stop" and guards.is_broken
        (finding,) = verdict.findings
        assert finding.startswith("step 2: no update of the critic was finite for 2 steps")
        assert finding.endswith("lower critic.optimizer.lr")
        lost = Guards(GuardsConfig()).check(1, row | {"critic/finite": 0.0})
        assert "the parameters of the critic are not finite" in lost.findings[0]


def numbers(skipped, finite=1.0):
    return {"actor/skipped": skipped, "actor/finite": finite}


@pytest.mark.parametrize(
    ("action", "expected"), [("log", "stop"), ("stop", "stop"), ("rollback", "rollback")]
)
def test_steps_without_finite_updates_end_the_run(action, expected):
    guards = Guards(GuardsConfig(action=action, patience=2))
    assert guards.check(1, numbers(0.0)).metrics == {"guard/numbers": 0}
    verdict = guards.check(2, numbers(1.0))
    assert (verdict.action, verdict.metrics, guards.in_doubt) == ("go_on", {"guard/numbers": 1}, True)
    assert guards.check(3, {}).action == "go_on"  # nothing was trained
    verdict = guards.check(4, numbers(1.0))
    assert (verdict.action, guards.is_broken, guards.last_good_step) == (expected, True, 1)
    assert "no update was finite for 2 steps" in verdict.findings[0]
    guards.rolled_back(1)
    assert not guards.is_broken and not guards.in_doubt


def test_some_finite_updates_are_no_divergence():
    guards = Guards(GuardsConfig(action="stop", patience=2))
    for step, skipped in enumerate((0.5, 1.0, 0.0, 1.0, 0.8), 1):
        assert guards.check(step, numbers(skipped)).action == "go_on"
    other = Guards(GuardsConfig(action="stop", patience=2))
    other.check(1, numbers(1.0))
    again = Guards(GuardsConfig(action="stop", patience=2))
    again.restore(other.state())
    assert again.check(2, numbers(1.0)).action == "stop"  # a resumed run counts on


def test_nonfinite_parameters_end_the_run():
    guards = Guards(GuardsConfig(patience=9))
    verdict = guards.check(1, numbers(0.0, finite=0.0))
    assert verdict.action == "stop" and guards.is_broken
    assert verdict.findings[0].startswith("step 1: the parameters are not finite")


@pytest.mark.parametrize(
    ("action", "step", "keep", "expected"),
    [
        ("rollback", 5, 2, False),  # 3, the newest good one, would go
        ("rollback", 5, 3, True),
        ("rollback", 4, 1, True),  # the newest good one itself
        ("stop", 5, 2, True),
    ],
)
def test_checkpoint_before_bad_steps_stays(action, step, keep, expected):
    watch = guards(action=action, patience=9)
    watch.last_good_step = 4 if step == 4 else 3
    assert watch.may_save(step, [1, 3, 4][: step - 2], keep) == expected
    watch.is_broken = True
    assert not watch.may_save(step, [1, 3, 4], 9)
