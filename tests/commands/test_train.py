"""The whole trainer on real parts, small: resume, stops, bad input. Slow: it compiles and starts services."""

import json
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import pytest
from small_run import SMALL
from trainer_rig import checkpoints, rows
from transformers import AutoTokenizer

from calibadv_jax import cli
from calibadv_jax.commands import train
from calibadv_jax.config import Config, load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run import model

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

ROOT = Path(__file__).resolve().parents[2]


def config_of(folder: Path, *overrides: str) -> Config:
    return load_config(ROOT / "configs/quickstart.yaml", [*SMALL, f"run.dir={folder}", *overrides])


@pytest.fixture
def noisy_rewards(monkeypatch):
    """Scores that depend on the sampled tokens, as those of a real policy do."""

    def score_groups(groups, *_):
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.format_valid = True
                trajectory.answer_score = float(trajectory.response_ids.sum() % 7) / 7
                trajectory.metrics |= {"f1": 0.0, "em": 0.0, "cover_em": 0.0, "format": 0.0}
        return groups

    monkeypatch.setattr(train, "score_groups", score_groups)


@pytest.mark.slow
def test_interrupted_and_resumed_elsewhere_equals_uninterrupted(tmp_path, noisy_rewards, monkeypatch, s3):
    whole = config_of(tmp_path / "whole")
    write_world(whole.world)
    train.run(whole)
    expected = rows(tmp_path / "whole")
    assert [row["step"] for row in expected] == [1, 2, 3, 4]
    assert all(row["actor/grad_norm"] > 0 for row in expected)

    # Two steps are left after the resume, so that questions are drawn; only the failure saves a checkpoint.
    checkpoint = replace(whole.checkpoint, every=0)
    place = replace(whole.run, dir=str(tmp_path / "parts"), mirror=f"{s3}/runs/parts")
    parts = replace(whole, run=place, checkpoint=checkpoint)
    begin, failed = Rollouts.begin, Future()
    failed.set_exception(UserError("retriever http://x: no usable answer"))

    def fail_in_the_third_step(self, number, question):
        future = begin(self, number, question)
        return failed if number == 2 * 4 + 1 else future

    with monkeypatch.context() as patch, pytest.raises(UserError, match="no usable answer"):
        patch.setattr(Rollouts, "begin", fail_in_the_third_step)
        train.run(parts)
    assert checkpoints(tmp_path / "parts") == [2]
    train.run(replace(parts, run=replace(place, dir=str(tmp_path / "elsewhere"))))
    assert rows(tmp_path / "elsewhere") == expected


@pytest.mark.slow
def test_chain_from_cold_start_to_export(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    overrides = [*SMALL, f"run.dir={folder}", "sft.phases=[{steps: 2, kind: drills}]", "mesh.fsdp=1"]
    overrides += ["policy.path=${run.dir}/sft", "learner.steps=1"]
    overrides += ["evaluate.every=1", "evaluate.sample_size=3"]
    arguments = ["--config", "configs/quickstart.yaml", *overrides]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)

    def call(*words):
        """The status and what is printed, in this process, which need not import all again."""
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.calibadv([*words])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    def run(command, *more):
        status, out, err = call(command, *arguments, *more)
        assert status == 0, out + err[-3000:]
        return out

    command = [sys.executable, "-m", "calibadv_jax", "quickstart", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "F1 before" in done.stdout
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(model, "make_mesh", partial(make_mesh, devices=jax.devices()[:1]))
    report = json.loads((folder / "quickstart.json").read_text())
    assert set(report["before"]) == set(report["after"]) == {"0", "1"}
    assert rows(folder)[0]["eval/all/questions/greedy"] == 3
    evaluations = [str(folder / f"evaluation_{name}.json") for name in ("before", "after")]
    status, out, err = call("compare", *evaluations)
    assert status == 0 and "95% interval" in out, err
    assert json.loads((folder / "hf/config.json").read_text())["model_type"] == "qwen3"
    assert len(AutoTokenizer.from_pretrained(folder / "hf")) == 398
    steps = list((folder / "rollouts").glob("step_*.parquet"))
    assert len(steps) == config.learner.steps
    with monkeypatch.context() as patched:  # a finished run, given again, starts no service
        patched.setattr(train, "open_rollouts", None)
        status, out, err = call("train", *arguments)
    assert status == 0 and f"step {config.learner.steps} is trained already" in out + err
    assert "soft penalty ON" in out
    assert "every check passed; warnings: 0, not checked: 0" in run("doctor")
    status, out, _ = call("doctor", *arguments, "data.eval=none.jsonl")
    assert status == 1 and "FAIL questions" in out
    trained = run("evaluate")  # without evaluate.policy: what was trained, not where it began
    assert f"policy: checkpoint {folder}/checkpoints" in trained
    exported = run("evaluate", f"evaluate.policy={folder}/hf")
    assert f"policy: huggingface {folder}/hf" in exported and "cover_em" in exported
    assert trained.splitlines()[1:] == exported.splitlines()[1:]
