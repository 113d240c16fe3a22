"""A run's folder without a run: a stand-in of the model, and what a training leaves behind."""

import functools
import json
from contextlib import nullcontext

import numpy as np
from safetensors.numpy import save_file

from calibadv_jax.config import load_config
from calibadv_jax.core.trajectory import Question
from calibadv_jax.metrics.console import Console
from calibadv_jax.run import configured_actions
from calibadv_jax.run.folder import enter_run_folder
from calibadv_jax.snapshots.mirror import open_mirror
from examples.own_tool import Calculator

QUESTIONS = [Question("1", "Who?", ("Ann",), "test"), Question("2", "Where?", ("Here",), "test")]


class StandInModel:
    """As much of `model.Model` as the run folder reads."""

    tokenizer_hash = "words"
    pins = ()

    def __init__(self, folder, **hf_config):
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text("{}")
        self.tokenizer_folder, self.hf_config = folder, {"model_type": "qwen2"} | hf_config


CALCULATOR = "tools=[search, 'examples.own_tool:Calculator']"


def another_calculator(monkeypatch, purpose):
    """As if a new process found another version of the user's code, or a server said so."""
    monkeypatch.setattr(Calculator, "purpose", purpose)
    monkeypatch.setattr(
        configured_actions, "_build_actions", functools.cache(configured_actions._build_actions.__wrapped__)
    )


def write_inputs(folder, scale=1.0, adapters=1.0, prompt="Judge."):
    """Write the files that a config only names: weights, adapters and the judge's prompt."""
    (folder / "hf").mkdir(exist_ok=True)
    save_file({"w": np.full(3, scale, np.float32)}, folder / "hf/model.safetensors")
    save_file({"a": np.full(3, adapters, np.float32)}, folder / "adapter_model.safetensors")
    (folder / "prompt.txt").write_text(prompt)


def make_run(tmp_path):
    """Enters the folder of one run, copied to run.mirror if that is set; returns what was said."""
    path = tmp_path / "config.yaml"
    path.write_text("learner: {steps: 10, optimizer: {schedule: cosine}}\n")
    folder = tmp_path / "run"

    def enter(*overrides, questions=QUESTIONS, **hf_config):
        lines = []
        config = load_config(path, [f"run.dir={folder}", *overrides])
        model = StandInModel(tmp_path / "tokenizer", **hf_config)
        mirror = open_mirror(config, Console(progress=False))
        with mirror.inputs(config.policy.path) if mirror else nullcontext():
            enter_run_folder(config, model, questions, lines.append, mirror)
        with mirror or nullcontext():
            pass
        return "\n".join(lines)

    enter.folder = folder
    return enter


def with_checkpoint(run):
    run()
    trained(run, 3)
    (run.folder / "checkpoints" / "3").mkdir(parents=True)


def trained(run, steps):
    """Writes the metrics of so many steps."""
    rows = [json.dumps({"step": step}) for step in range(1, steps + 1)]
    (run.folder / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
