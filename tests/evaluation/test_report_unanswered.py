"""An evaluation in which nobody answered says so above its table; one in which somebody did does not."""

import pytest

from calibadv_jax.commands import evaluate
from calibadv_jax.config import Config
from calibadv_jax.evaluation.report import ScoreReport
from calibadv_jax.metrics.console import Console


@pytest.mark.parametrize(
    ("answered", "is_warned"), [({"answered": 0.0}, True), ({"answered": 0.1}, False), ({}, False)]
)
def test_only_where_nobody_answered(monkeypatch, answered, is_warned):
    scores, lines = {"f1": 0.0, "questions": 3.0, "trajectories": 3.0, "failed": 0.0}, []
    report = ScoreReport({"0": {"all": scores}, "1": {"all": scores | answered}})
    monkeypatch.setattr(evaluate, "choose_policy", lambda config: "a policy")
    monkeypatch.setattr(evaluate, "evaluate_policy", lambda *_: report)
    for name in ("say", "note", "warn"):
        monkeypatch.setattr(Console, name, lambda _, text, name=name: lines.append(f"{name}: {text}"))
    evaluate.run(Config())
    (place,) = (place for place, line in enumerate(lines) if line.startswith("say: temperature  data"))
    warnings = [line for line in lines[:place] if line.startswith("warn: temperature 1: nobody answered")]
    assert len(warnings) == is_warned == len([line for line in lines if line.startswith("warn")])
    assert all("calibadv sft" in line and "transcripts are in" in line for line in warnings)
