"""Evaluations with the embedded sampler and a real, small policy, by the entry point's own function."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
import tiny_policy
from config_rig import changed
from evaluation_rig import QUESTIONS, Stopped

from calibadv_jax.commands.evaluate import run as run_evaluation
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.data.questions import write_questions
from calibadv_jax.evaluation.records import RowFile
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.run import model
from calibadv_jax.snapshots.checkpoint import CheckpointStore
from calibadv_jax.snapshots.huggingface import save_folder
from calibadv_jax.snapshots.publish import SnapshotStore

pytestmark = pytest.mark.slow

SHAPE = tiny_policy.SHAPE | {"eos_token_id": 1}


@pytest.fixture
def params(tmp_path):
    """Random parameters; the run's folder ``policy`` has them as a HuggingFace folder."""
    tokenizer = tmp_path / "tokenizer"
    build_word_tokenizer().save_pretrained(tokenizer)
    params = jax.jit(tiny_policy.tiny(SHAPE).init)(jax.random.key(0))
    save_folder(params, SHAPE, tmp_path / "run/policy", "float32", tokenizer)
    write_questions(tmp_path / "eval.jsonl", QUESTIONS)
    return params


@pytest.fixture
def evaluate(params, tmp_path, monkeypatch):
    """Evaluates a policy of the run without search, on one device, into files of this name."""
    monkeypatch.setattr(model, "make_mesh", lambda config: make_mesh(config, jax.devices()[:1]))

    def evaluate(name, policy="run/policy", **keys):
        evaluation = {
            "policy": str(tmp_path / policy),
            "method": "direct",
            "template": "Question: {question}\n",
            "resamples": 100,
            "output": str(tmp_path / f"{name}.json"),
        }
        config = changed(
            run={"dir": str(tmp_path / "run")},
            data={"eval": str(tmp_path / "eval.jsonl")},
            prompt={"chat": "off"},
            rollout={"max_turn_length": 24, "max_prompt_length": 64, "max_length": 128},
            sampler={"slots": 3, "decode_chunk": 8, "prefill_chunk": 16},
            mesh={"fsdp": 1},
            log={"progress": False},
            evaluate=evaluation | keys,
        )
        run_evaluation(config)

    return evaluate


def texts(path):
    rows = map(json.loads, path.read_text().splitlines())
    return [row["trajectories"][0]["turns"][0]["text"] for row in rows]


def test_interrupted_evaluation_ends_with_the_same_table(evaluate, tmp_path, monkeypatch):
    """After the interruption the sampler decodes other questions together."""
    keys = {"temperatures": [0.0, 1.0], "samples": 2}
    evaluate("whole", **keys)
    add = RowFile.add

    def stop(file, row):
        if len(file.rows) == 5:
            raise Stopped
        add(file, row)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(RowFile, "add", stop)
        evaluate("parts", **keys)
    assert len((tmp_path / "parts.jsonl").read_text().splitlines()) == 5
    evaluate("parts", **keys)
    for end in (".json", ".md", ".csv", ".jsonl"):
        assert (tmp_path / f"parts{end}").read_bytes() == (tmp_path / f"whole{end}").read_bytes()
    assert len(set(texts(tmp_path / "whole.jsonl"))) > len(QUESTIONS)  # equal files say something


def test_folder_checkpoint_and_snapshot_are_the_same_policy(evaluate, params, tmp_path):
    store = CheckpointStore(tmp_path / "run/checkpoints", keep=2)
    for step, values in ((3, params), (4, jax.tree.map(jnp.zeros_like, params))):
        state = {"params": values, "opt_state": jax.tree.leaves(values), "updates": jnp.int32(0)}
        store.save(step, state, {})
    store.close()
    snapshots = SnapshotStore(tmp_path / "run/snapshots", keep=1, dtype=jnp.float32)
    snapshots.publish(3, params, hf_config=SHAPE, tokenizer_hash="")
    policies = {
        "folder": "run/policy",
        "checkpoint": "run/checkpoints/3",
        "snapshot": "run/snapshots/v000003",
        "newest": "run",
    }
    for name, policy in policies.items():
        evaluate(name, policy)
    answers = {name: texts(tmp_path / f"{name}.jsonl") for name in policies}
    assert answers["folder"] == answers["checkpoint"] == answers["snapshot"] != answers["newest"]
    steps = [json.loads((tmp_path / f"{name}.json").read_text())["policy"]["step"] for name in policies]
    assert steps == [None, 3, 3, 4]
