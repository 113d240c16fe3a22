"""The quickstart with tool calls, all of it, in a world of a few people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from calibadv_jax.config import load_config  # noqa: E402
from calibadv_jax.contrib.cli import quickstart  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    *("world.people=20", "world.cities=8", "world.companies=8", "world.train_questions=40"),
    *("world.eval_questions=6", "policy.init.hidden_size=32", "policy.init.intermediate_size=32"),
    *("policy.init.num_hidden_layers=1", "policy.init.head_dim=16", "rollout.questions_per_step=4"),
    *("rollout.group_size=4", "sampler.slots=16", "learner.microbatch_rows=8", "learner.steps=2"),
    *("sft.rows=8", "sft.phases=[{steps: 2, kind: lookups}]", "evaluate.resamples=100", "log.backends=[]"),
]


@pytest.mark.slow
def test_chain_runs_and_the_chat_template_goes_along(tmp_path):
    folder = tmp_path / "run"
    config = load_config(ROOT / "configs/quickstart_tool_calls.yaml", [*TINY, f"run.dir={folder}"])
    quickstart.run(config)
    template = (folder / "world/tokenizer/chat_template.jinja").read_bytes()
    for exported in ("sft", "hf"):
        assert (folder / exported / "chat_template.jinja").read_bytes() == template
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all("rollout/calls" in row for row in rows)
    for name in ("before", "after"):
        scores = json.loads((folder / f"evaluation_{name}.json").read_text())["scores"]
        assert scores["1"]["all"]["questions"] == 6
    assert "apply_chat_template" in (folder / "hf/README.md").read_text()
