"""What stands in a step's row of metrics.jsonl: every part of the step puts its own metrics there."""

import json
from dataclasses import replace

import numpy as np
from trainer_rig import QUESTIONS, ScriptedRollouts, make_config, make_model

from calibadv_jax.commands import train
from calibadv_jax.core.stopping import Stop
from calibadv_jax.metrics.console import Console
from calibadv_jax.run.state import RunState


class Counting(ScriptedRollouts):
    """A sampler that counts something, and one worker that computes log-probabilities."""

    def __init__(self):
        super().__init__()
        self.logprobs = {"http://worker": np.full(14, -3.0, np.float32)}  # of tokens 1 to 14 of the text

    def metrics(self):
        return {"rollout/workers_lost": float(len(self.begun))}


def test_every_part_of_a_step_reports(tmp_path, monkeypatch):
    evaluated = []

    def validate(config, rollouts):
        evaluated.append(rollouts.loaded[-1][0])
        return {"0": {"all": {"f1": 0.25}}}

    monkeypatch.setattr(train, "validate", validate)
    config = make_config(tmp_path, learner={"steps": 2, "row_length": 16, "microbatch_rows": 8})
    config = replace(config, evaluate=replace(config.evaluate, every=2))
    rollouts, console = Counting(), Console(progress=False)
    state = RunState(config, make_model(), QUESTIONS, rollouts, tmp_path, console)
    with Stop() as stop, state:
        train.train(state, stop)
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())

    expected = {
        "reward/mean",  # the trajectories
        "rollout/sampled_perplexity",  # what the guards watch
        "guard/format_valid",  # what they say
        "advantage/answer/ratio_before",
        "actor/grad_norm",
        "actor/lr",
        "rollout/probe_logprob_diff_mean",  # publishing
        "timing_s/rollout",
        "timing_s/advantage",
        "timing_s/update",
        "timing_s/publish",
        "timing_s/step",
        "perf/tokens_per_second",
    }
    assert not expected - first.keys()
    assert [row["rollout/workers_lost"] for row in (first, second)] == [2.0, 4.0]
    # Evaluated is the policy that the step made, once it was published.
    assert evaluated == [2]
    assert "eval/all/f1/greedy" not in first and second["eval/all/f1/greedy"] == 0.25
    assert "timing_s/evaluate" in second
