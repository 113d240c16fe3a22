"""Collapse guards: when they trip, what they ask for, and the metrics made for them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from calibadv_jax.config import GuardsConfig
from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.metrics.guards import GUARDS, Guards, guard_metrics

QUESTION = Question("q", "?", ("x",), "test")
THRESHOLDS = {threshold[4:]: threshold for threshold in GUARDS}  # by the guard's name
METRICS = {name: GUARDS[threshold][0] for name, threshold in THRESHOLDS.items()}
HEALTHY = dict(zip(METRICS.values(), (0.3, 0.9, 0.9, 1.2, 0.05, 1.4, 1.1), strict=True))
COLLAPSED = dict(zip(METRICS.values(), (0.001, 0.05, 0.1, 30.0, 0.8, 40.0, 9.0), strict=True))
BAD = {name: {metric: COLLAPSED[metric]} for name, metric in METRICS.items()}
LOW, FREE = BAD["entropy"], BAD["format_valid"]
NAN, ABSENT = ({METRICS["entropy"]: value} for value in (float("nan"), None))


def guards(**values):
    return Guards(GuardsConfig(**values))


def feed(watch, *steps, start=1):
    rows = [{n: v for n, v in (HEALTHY | metrics).items() if v is not None} for metrics in steps]
    return [watch.check(step, row) for step, row in enumerate(rows, start)]


def restarted(watch):
    """Guards of the same config that continue from the state of others, as a checkpoint holds it."""
    other = Guards(watch.config)
    other.restore(json.loads(json.dumps(watch.state())))
    return other


@pytest.mark.parametrize("name", METRICS)
def test_guard_trips_once_after_its_patience(name):
    verdicts = feed(guards(action="stop", patience_steps=2), {}, BAD[name], BAD[name], BAD[name])
    assert [verdict.action for verdict in verdicts] == ["go_on", "go_on", "stop", "go_on"]
    assert [verdict.metrics[f"guard/{name}"] for verdict in verdicts] == [0, 1, 1, 1]
    healthy = {f"guard/{other}": 0 for other in METRICS if other != name}
    assert all(healthy.items() <= verdict.metrics.items() for verdict in verdicts)
    ((finding,),) = (verdict.findings for verdict in verdicts if verdict.findings)
    threshold = THRESHOLDS[name]
    assert finding.startswith(f"step 3: {GUARDS[threshold][1]}") and f"{threshold}=" in finding


@pytest.mark.parametrize("name", METRICS)
def test_finding_names_metric_value_threshold_and_patience(name):
    verdicts = feed(guards(action="stop", patience_steps=2), {}, BAD[name], BAD[name])
    ((finding,),) = (verdict.findings for verdict in verdicts if verdict.findings)
    threshold, metric = THRESHOLDS[name], METRICS[name]
    limit = getattr(GuardsConfig(), threshold)
    direction = "below" if threshold.startswith("min_") else "above"
    value = f"{COLLAPSED[metric]:.4g}"
    cause = f"({metric} {value}, {direction} guards.{threshold}={limit:g} for 2 step(s))"
    assert finding == f"step 3: {GUARDS[threshold][1]} {cause}"


@pytest.mark.parametrize("name", METRICS)
def test_null_switches_guard_off_and_limit_is_good(name):
    limit = getattr(GuardsConfig(), THRESHOLDS[name])
    at_the_limit = feed(guards(patience_steps=1, action="stop"), {}, {METRICS[name]: limit})[-1]
    assert (at_the_limit.action, at_the_limit.metrics[f"guard/{name}"]) == ("go_on", 0)
    logged = feed(guards(patience_steps=1), {}, COLLAPSED)[-1]  # by default it never stops
    assert logged.action == "go_on"
    assert len(logged.findings) == len(GUARDS)
    assert set(logged.metrics.values()) == {1.0}
    off = feed(guards(patience_steps=1, action="stop", **{THRESHOLDS[name]: None}), {}, BAD[name])[-1]
    assert (
        off.action == "go_on" and f"guard/{name}" not in off.metrics and len(off.metrics) == len(GUARDS) - 1
    )


@pytest.mark.parametrize(
    ("patience", "steps", "last"),
    [
        (2, [{}, LOW, {}, LOW, FREE], "go_on"),  # a good step begins anew
        (1, [FREE, FREE, {}, FREE], "stop"),  # not armed at first
        (2, [NAN, NAN], "stop"),
        (2, [{}, LOW, ABSENT, LOW], "stop"),
    ],
)
def test_streak_of_armed_guard_stops(patience, steps, last):
    *before, newest = feed(guards(action="stop", patience_steps=patience), *steps)
    assert not any(verdict.findings or verdict.action != "go_on" for verdict in before)
    assert newest.action == last and bool(newest.findings) == (last == "stop")
    flagged = [verdict.metrics.get("guard/format_valid") for verdict in before]
    assert not any(flagged) and ("guard/entropy" in before[-1].metrics) == (ABSENT not in steps)


def test_rollback_stops_at_its_limit():
    watch = guards(action="rollback", patience_steps=2, max_rollbacks=2)
    feed(watch, {}, {}, {})
    for attempt, target in ((1, 3), (2, 2)):  # the second time to an older checkpoint: it is the last good
        verdicts = feed(watch, LOW, LOW, start=4)
        assert [verdict.action for verdict in verdicts] == ["go_on", "rollback"]
        assert watch.last_good_step == 3
        watch.reset_after_rollback(target)
        assert (watch.rollbacks, watch.last_good_step) == (attempt, target)
    assert feed(watch, LOW, LOW, start=3)[-1].action == "stop"
    assert watch.last_good_step == 2


@pytest.mark.parametrize("cut", range(6))
def test_resumed_guards_equal_uninterrupted_ones(cut):
    steps = [{}, LOW, LOW, {}, LOW, LOW, LOW]
    whole, first = (guards(action="rollback", patience_steps=3) for _ in range(2))
    expected = feed(whole, *steps)
    verdicts = feed(first, *steps[:cut])
    second = restarted(first)
    assert verdicts + feed(second, *steps[cut:], start=cut + 1) == expected
    assert expected[-1].action == "rollback" and second.state() == whole.state()


@pytest.mark.parametrize(
    ("action", "before", "expected"),
    [("rollback", 0, "rollback"), ("rollback", 3, "stop"), ("stop", 0, "go_on"), ("log", 0, "go_on")],
)
def test_due_rollback_survives_a_restart(action, before, expected):
    """A signal came in the step that tripped the guard, or there was no checkpoint to go back to."""
    first = guards(action=action, patience_steps=2)
    first.rollbacks = before
    feed(first, {}, LOW, LOW)
    second = restarted(first)
    (again,) = feed(second, LOW, start=4)
    assert again.action == expected and bool(again.findings) == (action == "rollback")
    assert second.last_good_step == 1


def test_switched_off_guard_is_dropped():
    """Its count would stand for ever, and a later rollback would find no checkpoint that is old enough."""
    first = guards(action="stop", patience_steps=2)
    feed(first, {}, LOW, LOW)
    first.config = GuardsConfig(action="rollback", patience_steps=2, min_entropy=None)
    second = restarted(first)
    feed(second, LOW, LOW, LOW, start=4)
    assert second.last_good_step == 6


def group(*turns):
    observed = {"observation_ids": np.zeros(50, np.int32)}
    searches = [Turn("search", np.int32(ids), np.float32(logprobs), **observed) for ids, logprobs in turns]
    return Group(QUESTION, [Trajectory(QUESTION, np.zeros(1, np.int32), [search]) for search in searches])


def repetition(*groups):
    return guard_metrics(groups)["rollout/think_repetition"]


def test_repetition_counts_sampled_tokens_of_a_turn():
    loop, other, flat = [7, 8] * 6, list(range(12)), [-1.0] * 12
    assert repetition(group((other, flat), (other, flat))) == 0
    # Nine 4-grams, two of them distinct; the other turn has nine that are all distinct.
    assert repetition(group((loop, flat))) == pytest.approx(7 / 9)
    assert repetition(group((loop, flat)), group((other, flat))) == pytest.approx(7 / 18)
    rng = np.random.default_rng(0)
    for high in (2, 3, 150_000):
        ids = rng.integers(0, high, 500).tolist()
        grams = [tuple(ids[start : start + 4]) for start in range(497)]
        assert repetition(group((ids, [0.0] * 500))) == pytest.approx(1 - len(set(grams)) / 497)


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2, 3, 4, 1, 2, 3, 5],  # the same three tokens with another fourth one
        [1, 2, 3, 4, 3, 2, 1],  # the same tokens in another order
    ],
)
def test_ngrams_that_differ_are_no_repetition(ids):
    assert repetition(group((ids, [-1.0] * 12))) == 0


def test_trajectory_without_turns_has_no_guard_metrics():
    assert guard_metrics([Group(QUESTION, [Trajectory(QUESTION, np.zeros(1, np.int32))])]) == {}


def test_perplexity_is_a_mean_over_tokens():
    metrics = guard_metrics([group(([1], [-1.0]), ([1, 2, 3], [-2.0, -3.0, -4.0]))])
    assert metrics == {"rollout/sampled_perplexity": pytest.approx(np.exp(2.5))}
    assert guard_metrics([group(([], []))]) == guard_metrics([Group(QUESTION, [])]) == {}


def numbers(skipped, finite=1.0, part="actor"):
    return {f"{part}/skipped": skipped, f"{part}/finite": finite}


@pytest.mark.parametrize("actor", [{}, numbers(0.0)])
def test_diverging_critic_is_named_with_its_key(actor):
    row, watch = numbers(1.0, part="critic") | actor, guards(patience_steps=2)
    assert watch.check(1, row).action == "go_on" and watch.has_nonfinite_updates
    verdict = watch.check(2, row)
    assert verdict.action == "stop" and watch.is_broken
    assert verdict.findings == [
        "step 2: no update of the critic was finite for 2 steps: training has diverged; lower"
        " critic.optimizer.lr"
    ]


@pytest.mark.parametrize(("part", "name"), [("actor", ""), ("critic", " of the critic")])
def test_lost_parameters_end_the_run_at_once(part, name):
    watch = guards(patience_steps=9)
    verdict = watch.check(1, numbers(0.0) | numbers(0.0, finite=0.0, part=part))
    assert verdict.action == "stop" and watch.is_broken
    assert verdict.findings[0].startswith(f"step 1: the parameters{name} are not finite")


@pytest.mark.parametrize(
    ("action", "expected"), [("log", "stop"), ("stop", "stop"), ("rollback", "rollback")]
)
def test_steps_without_finite_updates_end_the_run(action, expected):
    watch = guards(action=action, patience_steps=2)
    assert watch.check(1, numbers(0.0)).metrics == {"guard/numbers": 0}
    verdict = watch.check(2, numbers(1.0))
    assert (verdict.action, verdict.metrics, watch.has_nonfinite_updates) == (
        "go_on",
        {"guard/numbers": 1},
        True,
    )
    watch = restarted(watch)  # a resumed run counts on
    assert watch.check(3, {}).action == "go_on"  # nothing was trained
    verdict = watch.check(4, numbers(1.0))
    assert (verdict.action, watch.is_broken, watch.last_good_step) == (expected, True, 1)
    assert "no update was finite for 2 steps" in verdict.findings[0]
    watch.reset_after_rollback(1)
    assert not watch.is_broken and not watch.has_nonfinite_updates
    for step, skipped in enumerate((0.5, 1.0, 0.0, 1.0, 0.8), 2):
        assert watch.check(step, numbers(skipped)).action == "go_on"


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
    watch = guards(action=action, patience_steps=9)
    watch.last_good_step = 4 if step == 4 else 3
    assert watch.may_save(step, [1, 3, 4][: step - 2], keep) == expected
    watch.is_broken = True
    assert not watch.may_save(step, [1, 3, 4], 9)
