"""The folder of a run: which changes a start may make, and what a failed start leaves there."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from config_rig import changed
from run_folder_rig import contents, make_run, trained, with_checkpoint
from safetensors.numpy import save_file

from calibadv_jax.config import Config, dump_config
from calibadv_jax.config.kept import add_start, newest_start
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.folder import MAX_CELL, SERVICE_FILE, check_service, holds_training


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def test_first_start_keeps_config_policy_and_tokenizer(run):
    assert run() == ""
    start = newest_start(run.folder)
    assert start.path == run.folder / "configs/0.yaml"
    assert start.config["learner"]["steps"] == 10
    assert {"data.content", "policy.config", "policy.vocabulary"} <= start.identity.keys()
    assert json.loads((run.folder / "policy/config.json").read_text()) == {"model_type": "qwen2"}
    assert (run.folder / "policy/tokenizer.json").read_text() == "{}"
    assert not holds_training(run.folder)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("checkpoints/3/extra/metadata", "{}", True),
        ("metrics.jsonl", '{"step": 1}\n', True),
        ("metrics.jsonl", "", False),
        ("rollouts/step_1.parquet", "", True),
        ("rollouts/notes.txt", "", False),
        ("checkpoints/notes.txt", "", False),
    ],
)
def test_trained_steps_make_a_run(tmp_path, path, text, expected):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert holds_training(tmp_path) == expected


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (3, ""),
        (4, "1 step is trained again: the newest checkpoint is that of step 3 (checkpoint.every)"),
        (6, "3 steps are trained again: the newest checkpoint is that of step 3 (checkpoint.every)"),
    ],
)
def test_steps_after_the_newest_checkpoint_are_counted(run, steps, words):
    with_checkpoint(run)
    trained(run, steps)
    assert run() == words


def test_long_values_are_cut_in_the_table(run):
    with_checkpoint(run)
    fits, long = "x" * MAX_CELL, "y" * (MAX_CELL + 1)
    table = run(f"data.train={fits}", "checkpoint.allow_change=[data.train]")
    assert fits in table
    table = run(f"data.train={long}", "checkpoint.allow_change=[data.train]")
    assert f"{'y' * (MAX_CELL - 4)}… " in table and long not in table


CHANGED = (
    "learner.optimizer.lr=0.001",
    "rollout.group_size=7",
    "rollout.questions_per_step=3",
    "rollout.temperature=0.5",
    "retriever.topk=5",
    "sampler.name=vllm",
    "loss.clip_low=0.1",
    "learner.steps=11",  # the cosine ends later
    "run.seed=1",
    "advantage.name=grpo",
    "prompt.template=short",
    "data.shuffle=false",
    "policy.lora.rank=4",
)


@pytest.mark.medium
@pytest.mark.parametrize("override", CHANGED)
def test_another_experiment_is_refused_and_nothing_is_written(run, override):
    """The error names both ways out: another folder, and accepting the change."""
    with_checkpoint(run)
    before = contents(run.folder)
    key, _, value = override.partition("=")
    with pytest.raises(UserError, match=rf"holds another experiment: {key} changed") as caught:
        run(override)
    message = str(caught.value)
    assert "choose another run.dir" in message
    assert "\n" not in message
    assert f"checkpoint.allow_change=[{key}]" in message
    assert contents(run.folder) == before
    table = run(override, f"checkpoint.allow_change=[{key}]")
    assert any(key in line and value in line and "accepted" in line for line in table.splitlines())


def test_every_key_that_changes_the_results_is_named(run):
    """All change in one start, beside two keys that change no result."""
    binding = {
        "sampler.name": "vllm",
        "retriever.encoder": "e5",
        "retriever.topk": 5,
        "retriever.rerank_candidates": 20,
        "retriever.reranker": "judge",
        "prompt.template": "short",
        "advantage.name": "grpo",
        "rollout.max_searches": 2,
        "rollout.max_observation_length": 99,
        "loss.clip_high": 0.5,
        "learner.epochs": 2,
        "policy.compute_dtype": "float32",
        "run.seed": 1,
    }
    with_checkpoint(run)
    overrides = [f"{key}={value}" for key, value in binding.items()]
    with pytest.raises(UserError, match="holds another experiment: ") as caught:
        run("sampler.slots=7", "retriever.threads=2", *overrides)
    named = str(caught.value).partition("experiment: ")[2].partition(" changed")[0]
    assert set(named.split(", ")) == binding.keys()


@pytest.mark.parametrize("override", ["advantage.name=grpo", "run.seed=1", "data.shuffle=false"])
def test_another_experiment_is_refused_before_the_first_checkpoint(run, override):
    run()
    trained(run, 8)
    before = contents(run.folder)
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=rf"holds another experiment: {key} changed"):
        run(override)
    assert contents(run.folder) == before


def test_kept_trajectories_alone_identify_a_run(run):
    run()
    (run.folder / "rollouts").mkdir()
    (run.folder / "rollouts/step_1.parquet").touch()
    with pytest.raises(UserError, match="run.seed changed"):
        run("run.seed=1")
    assert run() == "1 step is trained again: there is no checkpoint yet (checkpoint.every)"


def test_changed_weight_of_a_mixture_is_shown_by_its_source(run):
    with_checkpoint(run)
    table = run("data.weights={nq: 2, popqa: 1}", "checkpoint.allow_change=[data.weights]")
    assert "data.weights.nq" in table
    assert "data.weights.popqa" in table


def test_refused_change_of_steps_names_the_learning_rate(run):
    with_checkpoint(run)
    with pytest.raises(UserError) as refused:
        run("learner.steps=20")
    reason = "the learning rate falls over learner.steps, unless decay_updates was set or it is constant"
    assert f"learner.steps changed (table above): {reason}" in str(refused.value)


def write_weights(folder, value):
    folder.mkdir(exist_ok=True)
    save_file({"w": np.full((3, 5), value, np.float32)}, folder / "model.safetensors")


def test_equal_weights_at_another_path_are_accepted(run, tmp_path):
    keys = ["loss.kl_coef=0.1", f"policy.path={tmp_path}/model"]
    write_weights(tmp_path / "model", 1.0)
    run(*keys)
    trained(run, 1)
    write_weights(tmp_path / "moved", 1.0)
    table = run(*keys, f"policy.path={tmp_path}/moved")
    assert "policy.path" in table
    assert "policy.weights" not in table


def test_weights_are_not_compared_once_the_reference_is_gone(run, tmp_path):
    """The last start had a KL term, and so a hash of the weights; this one has none."""
    path = f"policy.path={tmp_path}/model"
    write_weights(tmp_path / "model", 1.0)
    run(path, "loss.kl_coef=0.1")
    trained(run, 1)
    write_weights(tmp_path / "model", 2.0)
    table = run(path, "checkpoint.allow_change=[loss.kl_coef]")
    assert "policy.weights" not in table


def test_full_disk_leaves_no_half_start(run, monkeypatch):
    """The config cannot be written, and the start after it goes on."""
    with_checkpoint(run)
    write_text = Path.write_text

    def cut_off(path, text, **options):
        if "learner:" not in text:
            return write_text(path, text, **options)
        write_text(path, text[:100], **options)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", cut_off)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device"):
            run()
    assert [path.name for path in (run.folder / "configs").glob("*.yaml")] == ["0.yaml"]
    assert run() == ""


@pytest.mark.parametrize("room", [0, 4096])
def test_start_on_a_full_disk_leaves_the_older_start_whole(small_disk, room):
    """Whether there is no room at all, or for a part of the config."""
    folder = small_disk / "run"
    ballast = small_disk / "ballast"
    text = dump_config(Config())
    add_start(folder, text, {"data.content": "a"})
    free = shutil.disk_usage(small_disk).free
    ballast.write_bytes(b"x" * (free - room))
    with pytest.raises(OSError) as caught:
        add_start(folder, text * 3, {"data.content": "b"})
    assert caught.value.errno == errno.ENOSPC
    ballast.unlink()
    start = newest_start(folder)
    assert (start.path.name, start.identity) == ("0.yaml", {"data.content": "a"})
    add_start(folder, text, {"data.content": "b"})
    assert newest_start(folder).path.name == "1.yaml"


def test_damaged_hashes_are_refused_until_they_are_removed(run):
    with_checkpoint(run)
    path = run.folder / "configs/0.json"
    path.write_text("")
    before = contents(run.folder)
    with pytest.raises(UserError, match=r"0\.json: .*; remove it, and its hashes count as lost") as refused:
        run()
    assert "\n" not in str(refused.value)
    assert contents(run.folder) == before
    path.unlink()
    assert "accepted" in run("checkpoint.allow_change=[data.content, policy.config, policy.vocabulary]")
    run()
    assert run() == ""


INDEX = {"status": "ready", "corpus_sha256": "c1", "encoder": "hashed", "documents": 7, "identity": "aa"}


@pytest.fixture
def indexed_run(tmp_path):
    """A folder with a checkpoint that was trained with INDEX."""
    check_service(Config(), tmp_path, INDEX)
    (tmp_path / "checkpoints/10").mkdir(parents=True)
    return tmp_path


def test_service_without_description_is_another_index(indexed_run):
    with pytest.raises(UserError, match="corpus_sha256 None instead of 'c1'"):
        check_service(Config(), indexed_run, {})


def test_full_disk_leaves_the_description_of_the_index(indexed_run, monkeypatch):
    path = indexed_run / SERVICE_FILE
    before = path.read_text()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    accepting = changed(checkpoint={"allow_change": ["retriever.content"]})
    with pytest.raises(UserError, match=rf"{SERVICE_FILE} cannot be written \(No space left on device\)"):
        check_service(accepting, indexed_run, INDEX | {"corpus_sha256": "c2"})
    assert path.read_text() == before
    assert sorted(path.name for path in indexed_run.iterdir()) == ["checkpoints", SERVICE_FILE]
