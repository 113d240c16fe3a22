"""A run with tool calls on real parts: trained, killed and resumed, replayed, shown and evaluated. Slow."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from packages import need
from tools_rig import END, THINKING_TEMPLATE, write_policy
from trainer_rig import rows
from transformers import AutoTokenizer

from benchmarks.kill import SMALL_WORLD, final_params
from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.rewards.score import format_flaw
from calibadv_jax.rollout_store.reader import find_step, read_step

pytest.importorskip("faiss")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/quickstart.yaml")
STEPS = 4
SETTINGS = [
    *SMALL_WORLD,
    *("rollout.protocol=tool_calls", "prompt.template=paper", "prompt.system=Answer.", "policy.tokenizer="),
    *("rollout.questions_per_step=4", "rollout.group_size=4", "rollout.max_searches=2"),
    *("rollout.max_prompt_length=1024", "rollout.max_observation_length=512", "rollout.max_length=2048"),
    *(
        "rollout.max_turn_length=24",
        "sampler.slots=16",
        "sampler.decode_chunk=8",
        "sampler.prefill_chunk=256",
    ),
    *("learner.pack_length=2048", "learner.microbatch_rows=4", "checkpoint.every=1", "mesh.fsdp=1"),
    *("log.backends=[]", f"learner.steps={STEPS}", "evaluate.every=4", "evaluate.sample_size=3"),
    # The policy hardly ever answers right: reward what it does vary in, so that there is something to learn.
    *("rollout.on_invalid=retry", "reward.format=false", "reward.answer=tests.helpers.tools_rig:has_called"),
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The policy and the world of all runs."""
    folder = tmp_path_factory.mktemp("parts")
    policy = write_policy(folder / "policy")
    overrides = [*SETTINGS, f"world.dir={folder}/world", f"run.dir={folder}/none"]
    write_world(load_config(CONFIG, overrides).world)
    return folder, policy


def words_of(parts, folder, *more):
    shared, policy = parts
    places = [f"run.dir={folder}", f"policy.path={policy}", f"world.dir={shared}/world"]
    data = [f"data.train={shared}/world/train.jsonl", f"data.eval={shared}/world/eval.jsonl"]
    corpus = [f"retriever.corpus={shared}/world/corpus.jsonl", f"retriever.index={shared}/index"]
    return ["--config", CONFIG, *SETTINGS, *places, *data, *corpus, *more]


def start(parts, folder, log, *more):
    """The training in a process of its own."""
    command = [sys.executable, "-m", "calibadv_jax", "train", *words_of(parts, folder, *more)]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": f"{ROOT}"}
    with log.open("ab") as stream:
        return subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream, env=environment)


def call(capsys, *words):
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.calibadv([*words])
    out, err = capsys.readouterr()
    assert not end.value.code, out + err[-3000:]
    return out


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    """The folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    log = folder.with_name("log")
    assert start(parts, folder, log).wait(900) == 0, log.read_text()[-3000:]
    return folder


def test_run_trains_on_tool_calls(whole):
    assert [row["step"] for row in rows(whole)] == [1, 2, 3, 4]
    steps = [read_step(find_step(whole, step)) for step in range(1, STEPS + 1)]
    trajectories = [
        trajectory for step in steps for group in step.groups for trajectory in group.trajectories
    ]
    assert {trajectory.protocol for trajectory in trajectories} == {"tool_calls"}
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    called = [turn for turn in turns if turn.documents]
    assert called and all(turn.calls and turn.kind == "search" for turn in called)
    assert any(len(turn.calls) > 1 for turn in called)
    for trajectory in trajectories:
        assert trajectory.format_valid == (not format_flaw(trajectory))
    assert len({trajectory.answer_score for trajectory in trajectories}) > 1
    assert all(row["actor/finite"] for row in rows(whole))
    assert sum(row["rollout/calls"] for row in rows(whole)) > 0


def test_killed_run_ends_as_an_undisturbed_one(parts, whole, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start(parts, folder, log)
    while process.poll() is None and len(list((folder / "checkpoints").glob("[0-9]*"))) < 2:
        time.sleep(0.05)
    assert process.poll() is None, log.read_text()[-3000:]
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert start(parts, folder, log).wait(900) == 0, log.read_text()[-3000:]
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    expected = final_params(whole, STEPS)
    for path, leaf in final_params(folder, STEPS).items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)
    for step in range(1, STEPS + 1):
        pairs = [read_step(find_step(run, step)) for run in (whole, folder)]
        for group, other in zip(pairs[0].groups, pairs[1].groups, strict=True):
            for trajectory, twin in zip(group.trajectories, other.trajectories, strict=True):
                np.testing.assert_array_equal(trajectory.response_ids, twin.response_ids)
                assert [turn.calls for turn in trajectory.turns] == [turn.calls for turn in twin.turns]


def test_commands_read_the_run(parts, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    replayed = call(capsys, "replay", str(whole), "--step", "2", "--trust-run")
    kept = re.search(r"replayed: (\d+) of (\d+) turns have the advantage that was kept", replayed)
    assert kept and kept[1] == kept[2]
    call(capsys, "audit", str(whole), "--trust-run")
    shown = call(capsys, "inspect", str(whole), "--print")
    assert "search" in shown
    page = tmp_path / "page.html"
    call(capsys, "inspect", str(whole), "--page", str(page))
    assert "search(query=" in page.read_text(encoding="utf-8").replace("&#34;", '"')
    output = tmp_path / "evaluation.json"
    call(capsys, "evaluate", *words_of(parts, whole, f"evaluate.output={output}", "data.eval_limit=3"))
    assert json.loads(output.read_text())
    compared = call(capsys, "compare", str(output), str(output))
    assert "f1" in compared


def test_vllm_samples_tool_calls_ahead_of_the_steps(parts, tmp_path):
    """Asynchronous mode: turns end at the template's control token, and log-probabilities agree."""
    need("vllm", "torch")
    folder, log = tmp_path / "run", tmp_path / "log"
    words = ["sampler.name=vllm", "rollout.max_staleness=1", "loss.importance_cap=2", "learner.steps=3"]
    assert start(parts, folder, log, *words, "evaluate.every=0").wait(1200) == 0, log.read_text()[-3000:]
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]
    assert rows(folder)[-1]["rollout/staleness/max"] == 1
    assert max(row["rollout/probe_logprob_diff_max"] for row in rows(folder)) < 1e-3
    steps = [read_step(find_step(folder, step)) for step in (1, 2, 3)]
    trajectories = [
        trajectory for step in steps for group in step.groups for trajectory in group.trajectories
    ]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    assert any(turn.calls and turn.documents for turn in turns)
    tokenizer = AutoTokenizer.from_pretrained(parts[1])
    for turn in turns:
        if turn.stop_reason == "eos":
            assert tokenizer.decode(turn.token_ids[-1:]) == END and END not in turn.text


def test_adapters_and_a_critic_learn_from_tool_calls(parts, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    words = ["advantage.name=gae", "policy.lora.rank=2", "policy.lora.base_dtype=float32", "learner.steps=2"]
    assert start(parts, folder, log, *words, "evaluate.every=0").wait(900) == 0, log.read_text()[-3000:]
    assert all(row["actor/finite"] and row["rollout/calls"] > 0 for row in rows(folder))


def test_thoughts_are_closed_at_their_budget(parts, tmp_path):
    """The chat template opens a thought, which this policy hardly ever closes."""
    shared, _ = parts
    policy = write_policy(tmp_path / "thinker", THINKING_TEMPLATE)
    folder, log = tmp_path / "run", tmp_path / "log"
    words = ["tool_calls.max_thinking_tokens=6", "learner.steps=2", "evaluate.every=0"]
    assert start((shared, policy), folder, log, *words).wait(900) == 0, log.read_text()[-3000:]
    assert all(row["rollout/closed_thoughts"] > 0 for row in rows(folder))
    assert max(row["actor/sampler_mismatch"] for row in rows(folder)) < 1e-4
    step = read_step(find_step(folder, 1))
    closing = AutoTokenizer.from_pretrained(policy).encode("\n</think>\n\n", add_special_tokens=False)
    num_answers = 0
    for trajectory in (trajectory for group in step.groups for trajectory in group.trajectories):
        for number, turn in enumerate(trajectory.turns):
            if turn.is_closed_thought:
                assert len(turn.token_ids) == 6 and turn.observation_ids.tolist() == closing
                assert trajectory.opening_of(number + 1) == ""
            elif number and trajectory.turns[number - 1].is_closed_thought:
                num_answers += turn.kind == "answer"
    assert num_answers > 0
