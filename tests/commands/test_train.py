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


QUESTION = '{"id": "1", "question": "Who?", "golden_answers": ["Ann"], "data_source": "test"}\n'


@pytest.mark.parametrize(
    ("overrides", "status", "message"),
    [
        (["data.train={}/none.jsonl"], 2, "none.jsonl: no such file of questions"),  # before anything heavy
        ([], 2, "sft/config.json: no such file; give a HuggingFace folder"),
        # The policy is missing too: waiting for the service would not help.
        (["retriever.url=http://127.0.0.1:9", "retriever.patience=0.2"], 2, "cannot be reached"),
        (["rollout.group_sise=3"], 2, "did you mean 'rollout.group_size'"),
        (["policy.path="], 2, "no tokenizer files there"),
        (["learner.pack_length=10"], 2, "learner.pack_length is 10"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, overrides, status, message):
    monkeypatch.chdir(ROOT)
    (tmp_path / "questions.jsonl").write_text(QUESTION)
    places = [f"run.dir={tmp_path}/run", f"data.train={tmp_path}/questions.jsonl"]
    arguments = ["--config", "configs/quickstart.yaml", *places]
    with pytest.raises(SystemExit) as ended:
        cli.calibadv(["train", *arguments, *(override.format(tmp_path) for override in overrides)])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert ended.value.code == status


@pytest.mark.slow
def test_chain_from_cold_start_to_export(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    overrides = [*SMALL, f"run.dir={folder}", "sft.phases=[{steps: 2, kind: drills}]", "mesh.fsdp=1"]
    overrides += ["policy.path=${run.dir}/sft", "learner.steps=1"]
    overrides += ["evaluate.every=1", "evaluate.sample_size=3", "evaluate.temperatures=[0.0, 1.0]"]
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
    assert "F1 before" in done.stdout and f"page  {(folder / 'report.html').as_uri()}" in done.stdout
    assert "<title>CalibAdv: " in (folder / "report.html").read_text(encoding="utf-8")
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
