"""Training with estimators that ask a policy for the golden answer's probability after every turn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trainer_rig import (
    QUESTIONS,
    ScriptedRollouts,
    make_config,
    resumed,
    rows,
    run,
    shared_programs,  # noqa: F401
)

from calibadv_jax import cli
from calibadv_jax.contrib.commands.replay import equal_turns, kept_config, replay
from calibadv_jax.record.reader import find_step, read_step

pytestmark = pytest.mark.medium
LEARNER = {"steps": 4, "row_length": 64, "microbatch_rows": 8, "row_widths": 1}


def probed_config(folder, name, learner=None, **sections):
    learner = (
        LEARNER | {"optimizer": replace(make_config(folder).learner.optimizer, lr=0.05)} | (learner or {})
    )
    advantage = {"name": name} if isinstance(name, str) else name
    return make_config(folder, learner=learner, advantage=advantage, **sections)


def kept_values_of(folder, step, policy):
    groups = read_step(find_step(folder, step)).groups
    return [
        t.golden_logprobs[policy]
        for group in groups
        for trajectory in group.trajectories
        for t in trajectory.turns
    ]


@pytest.mark.parametrize(
    ("name", "policy", "shares"),
    [("igpo", "current", True), pytest.param("tips", "initial", False, marks=pytest.mark.slow)],
)
def test_resumed_probed_run_is_equal_and_replayed(tmp_path, name, policy, shares):
    learner = {"share_prefixes": shares}
    whole = run(probed_config(tmp_path / "a", name, learner), ScriptedRollouts(), tmp_path / "a")
    second = resumed(probed_config(tmp_path / "b", name, learner), tmp_path / "b", 5)
    np.testing.assert_equal(second.loaded[-1][1], whole.loaded[-1][1])
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    row = json.loads((tmp_path / "a/metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < row[f"advantage/golden/{policy}/first"] < 1 and row["timing_s/probe"] > 0
    for step in (1, 4):
        assert kept_values_of(tmp_path / "a", step, policy) == kept_values_of(tmp_path / "b", step, policy)
        kept = read_step(find_step(tmp_path / "a", step))
        equal, total = equal_turns(
            kept.credits, replay(kept, kept_config(kept, Path("step"))).advantages.credits, rounding=0
        )
        assert equal == total == 12
        assert any(turns[0] != turns[1] for credit in kept.credits for turns in credit.turns)


def test_probes_use_the_named_policies(tmp_path):
    probes = {"name": "grpo", "probes": ["initial", "current"]}

    class Again(ScriptedRollouts):
        def begin(self, number, question):
            return super().begin(number % 2, QUESTIONS[number % 2])

    plain = run(probed_config(tmp_path / "a", "grpo"), Again(), tmp_path / "a")
    probed = run(probed_config(tmp_path / "b", probes), Again(), tmp_path / "b")
    np.testing.assert_equal(plain.loaded[-1][1], probed.loaded[-1][1])
    first = kept_values_of(tmp_path / "b", 1, "initial")
    assert (
        first == kept_values_of(tmp_path / "b", 1, "current") == kept_values_of(tmp_path / "b", 4, "initial")
    )
    assert first != kept_values_of(tmp_path / "b", 4, "current")


def test_replay_without_probes_is_refused(tmp_path, capsys):
    run(probed_config(tmp_path, "grpo"), ScriptedRollouts(), tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(["replay", str(tmp_path), "advantage.name=igpo"])
    assert stop.value.code == 2
    output = capsys.readouterr().err
    assert "train with advantage.probes='[current]'" in output and output.count("\n") == 1
