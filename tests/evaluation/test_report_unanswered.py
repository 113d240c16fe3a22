"""An evaluation in which nobody answered says so above its table; one in which somebody did does not."""

import re

import pytest

from calibadv_jax.commands import evaluate
from calibadv_jax.config import Config
from calibadv_jax.evaluation.report import ScoreReport


def printed(monkeypatch, answered):
    scores = {"f1": 0.0, "questions": 3.0, "trajectories": 3.0, "failed": 0.0}
    report = ScoreReport({"0": {"all": scores}, "1": {"all": scores | answered}})
    monkeypatch.setattr(evaluate, "choose_policy", lambda config: "a policy")
    monkeypatch.setattr(evaluate, "evaluate_policy", lambda *_: report)
    order = []
    monkeypatch.setattr(
        "calibadv_jax.metrics.console.Console._print", lambda _, text, **__: order.append(text)
    )
    monkeypatch.setattr("calibadv_jax.metrics.console.Console.say", lambda _, text: order.append(text))
    evaluate.run(Config())
    return order


@pytest.mark.parametrize(
    ("answered", "is_said"), [({"answered": 0.0}, True), ({"answered": 0.1}, False), ({}, False)]
)
def test_only_where_nobody_answered(monkeypatch, answered, is_said):
    order = printed(monkeypatch, answered)
    (table,) = (place for place, text in enumerate(order) if text.startswith("temperature  data"))
    warnings = [
        place for place, text in enumerate(order) if re.match("warning: temperature 1: nobody answered", text)
    ]
    assert len(warnings) == is_said and all(place < table for place in warnings)
    for place in warnings:
        assert "calibadv sft" in order[place] and "transcripts are in" in order[place]
