"""The commands one after the other on real parts, small. Slow: it compiles and starts services."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import pytest
from small_run import SMALL
from trainer_rig import rows
from transformers import AutoTokenizer

from calibadv_jax import cli
from calibadv_jax.commands import train
from calibadv_jax.config import load_config
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.run import model

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

ROOT = Path(__file__).resolve().parents[2]


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
    assert f"policy: the newest checkpoint in {folder}/checkpoints" in trained
    exported = run("evaluate", f"evaluate.policy={folder}/hf")
    assert f"policy: HuggingFace folder {folder}/hf" in exported and "cover_em" in exported
    assert trained.splitlines()[1:] == exported.splitlines()[1:]
