"""Small inputs made from public reports (``../shared/cases``): each behaves as its README says.

Skipped where the folder is absent. Every case also has a test beside the module it concerns, which makes its own
input, so that a public clone notices the same faults.
"""

from __future__ import annotations

import json

from calibadv_jax.report.gather import gather
from calibadv_jax.report.runs import read_runs
from calibadv_jax.report.settings import group_runs

# ---- models: tokenizers, chat templates, shapes of checkpoints ----


# ---- lora: adapters of PEFT and verl ----


# ---- rows: layouts of question files ----


# ---- retriever: queries without a hit, indexes with their own ids ----


# ---- metrics: names with a slash ----


def test_data_source_with_slash_has_a_curve(tmp_path):
    """No input lies in the folder: the README names the metric."""
    name = "eval/hotpotqa/hotpot_qa/f1/greedy"
    rows = [{"step": step, "reward/mean": step / 4, name: step / 2} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section, _ = gather(group_runs(read_runs([tmp_path]))).sections
    curves = {chart.figure.key: chart.panels[0].curves[0].mean.tolist() for chart in section.charts}
    assert curves == {"reward": [0.25, 0.5], "evaluation_f1": [0.5, 1.0]}


# ---- versions: bounds of dependencies ----
