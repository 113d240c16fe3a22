"""A whole cold start, small: its phases, its rows of metrics, and what it leaves behind."""

import itertools
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from config_rig import changed
from safetensors.numpy import load_file
from trainer_rig import rows

from calibadv_jax.commands import sft
from calibadv_jax.config import LoraConfig, OptimizerConfig, SftPhase, ToolConfig
from calibadv_jax.contrib.worlds.demonstrations import GENERATORS
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.console import Console
from calibadv_jax.run.folder import check_cold_start
from calibadv_jax.snapshots.checkpoint import newest_step
from calibadv_jax.snapshots.huggingface import read_hf_config

SHAPE = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "tie_word_embeddings": True}
PHASES = [SftPhase(steps=3, kind="drills"), SftPhase(steps=2, kind="drills")]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The config of a cold start, and the batches that it trained on."""
    folder = tmp_path_factory.mktemp("run")
    build_word_tokenizer().save_pretrained(folder / "tokenizer")
    optimizer = OptimizerConfig(lr=0.01, schedule="linear", warmup_steps=1)
    keys = {"demonstrations": "world", "phases": PHASES, "rows": 8, "row_length": 64, "optimizer": optimizer}
    config = changed(
        prompt={"template": "short", "chat": "off"},
        mesh={"fsdp": 8},
        run={"dir": str(folder), "seed": 3},
        policy={"init": SHAPE, "tokenizer": str(folder / "tokenizer")},
        log={"backends": [], "progress": False},
        sft={"output": str(folder / "sft")} | keys,
    )
    batches, update = [], sft.Learner.update

    def noted(self, state, packed, *rest):
        batches.extend(packed)
        return update(self, state, packed, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft.Learner, "update", noted)
        sft.run(config)
    return config, folder, batches


def test_every_step_of_every_phase_is_a_row(started):
    _, folder, batches = started
    trained = rows(folder / "sft_metrics")
    assert [row["step"] for row in trained] == [1, 2, 3, 4, 5]
    # One schedule over all phases: up in one update, then down to nothing.
    assert [row["sft/lr"] for row in trained] == pytest.approx([0, 0.01, 0.0075, 0.005, 0.0025])
    assert trained[-1]["sft/loss"] < trained[0]["sft/loss"]
    assert [row["sft/tokens"] for row in trained] == [float((b.segment_ids > 0).sum()) for b in batches]


def test_phases_and_seeds_see_other_demonstrations(started):
    config, _, batches = started
    assert len({batch.tokens.tobytes() for batch in batches}) == len(batches) == 5
    tokenizer = build_word_tokenizer()
    same = next(sft._batches(config, PHASES[0], (), tokenizer, seed=3))
    np.testing.assert_array_equal(same.tokens, batches[0].tokens)
    assert not np.array_equal(next(sft._batches(config, PHASES[0], (), tokenizer, 4)).tokens, same.tokens)


def test_no_demonstration_is_lost_between_two_batches(started):
    config, _, _ = started
    tokenizer = build_word_tokenizer()
    drawn = itertools.islice(GENERATORS[PHASES[0].kind](7, config.world), 400)
    samples = [sft.encode_demonstration(each, config, tokenizer, "sampled") for each in drawn]
    expected, start = [sample.tokens.tobytes() for sample in samples], 0
    for batch in itertools.islice(sft._batches(config, PHASES[0], (), tokenizer, 7), 3):
        assert batch.tokens.shape == (8, 64) and np.isclose(batch.weights.sum(), 1.0)
        rows = zip(batch.tokens, batch.segment_ids, strict=True)
        texts = [row[ids == n].tobytes() for row, ids in rows for n in range(1, ids.max() + 1)]
        assert sorted(texts) == sorted(expected[start : start + len(texts)])
        start += len(texts)
    assert start > 40


def test_finished_cold_start_leaves_policy_and_config(started, tmp_path):
    config, folder, _ = started
    written = read_hf_config(folder / "sft")
    assert written["vocab_size"] == 398 and written["hidden_size"] == 16
    assert (folder / "sft/model.safetensors").is_file() and (folder / "sft/tokenizer.json").is_file()
    assert yaml.safe_load((folder / "sft.yaml").read_text())["run"]["seed"] == 3
    check_cold_start(config)  # the same settings: it need not be made again
    check_cold_start(replace(config, sft=replace(config.sft, row_length=None)))
    tools = [ToolConfig("search"), ToolConfig("access")]
    for other, key in (
        (replace(config, tools=tools), "tools"),
        (replace(config, sft=replace(config.sft, row_length=128)), "sft.row_length"),
    ):
        with pytest.raises(UserError, match=rf"cold start with other settings \({key}\)"):
            check_cold_start(other)
    there = replace(config, run=replace(config.run, dir=str(tmp_path / "run")))
    with pytest.raises(UserError, match="^sft.output=.* lies in the folder of another run, "):
        sft.run(replace(there, sft=replace(config.sft, output=str(folder / "another"))))
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run/sft.yaml").write_text("run:\n  se")
    with pytest.raises(UserError, match="sft.yaml: empty or cut off .*; remove .*sft"):
        check_cold_start(there)


def moved(config, folder, **changes):
    """The same cold start in another folder, saved every two updates."""
    folder.mkdir()
    changes = {"output": str(folder / "sft"), "checkpoint_every": 2} | changes
    return changed(config, run={"dir": str(folder)}, sft=changes)


def interrupted(config, monkeypatch, end):
    """Runs until the fourth update, which calls `end`."""
    update, count = sft.Learner.update, itertools.count(1)

    def until(self, *arguments):
        done = update(self, *arguments)
        if next(count) == 4:
            end()
        return done

    with monkeypatch.context() as patch, pytest.raises(BaseException) as caught:
        patch.setattr(sft.Learner, "update", until)
        sft.run(config)
    return caught.value


def assert_the_same(folder, other):
    assert rows(folder / "sft_metrics") == rows(other / "sft_metrics")
    left, right = (load_file(item / "sft/model.safetensors") for item in (folder, other))
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)
    names = {path.name for path in other.iterdir()}
    assert names == {"sft", "sft.yaml", "sft_metrics"}, "what an interrupted one needs goes"


@pytest.mark.parametrize(
    ("number", "has_row_length"),
    [(signal.SIGTERM, False), pytest.param(signal.SIGINT, True, marks=pytest.mark.medium)],
)
def test_cold_start_resumes_bit_for_bit_after_signal(
    started, tmp_path, monkeypatch, number, has_row_length, capfd
):
    config, whole, _ = started
    folder = tmp_path / "run"
    config = moved(config, folder)
    ended = interrupted(config, monkeypatch, lambda: os.kill(os.getpid(), number))
    assert isinstance(ended, SystemExit) and ended.code == 128 + number
    assert "the same command goes on from the saved update" in capfd.readouterr().err
    assert newest_step(folder / "sft_checkpoints") == 4 and not (folder / "sft").exists()
    steps, update = [], sft.Learner.update
    monkeypatch.setattr(sft.Learner, "update", lambda *arguments: steps.append(1) or update(*arguments))
    if not has_row_length:  # the length of rows follows the unfinished start
        config = replace(config, sft=replace(config.sft, row_length=None))
        assert config.sft_row_length == config.rollout.max_length != 64
    sft.run(config)
    assert len(steps) == 1
    assert_the_same(whole, folder)


@pytest.mark.medium
@pytest.mark.parametrize(("slow", "newest"), [(False, 2), (True, 3)])
def test_killed_cold_start_resumes_with_same_settings_only(started, tmp_path, monkeypatch, slow, newest):
    config, whole, _ = started
    folder = tmp_path / "run"
    config = moved(config, folder)
    if slow:
        monkeypatch.setattr(sft, "MOST_SECONDS", 0.0)

    def killed():
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sft.ColdStart, "__exit__", lambda *_: None)  # nothing runs after kill -9
        assert isinstance(interrupted(config, monkeypatch, killed), MemoryError)
    assert newest_step(folder / "sft_checkpoints") == newest
    assert len(rows(folder / "sft_metrics")) == 3
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    init, tools = SHAPE | {"hidden_size": 32}, [ToolConfig("search"), ToolConfig("access")]
    phases = replace(config.sft, phases=[SftPhase(steps=9, kind="drills")])
    for changes, words in (
        ({"sft": phases}, r"unfinished .* \(sft.phases\); choose"),
        ({"policy": replace(config.policy, init=init)}, r"\(policy.init.hidden_size, policy.config\)"),
        ({"tools": tools}, r"\(tools, tools.content\)"),
    ):
        with pytest.raises(UserError, match=words):
            sft.run(replace(config, **changes))
    (folder / "sft_start.json").write_text("")
    with pytest.raises(UserError, match="sft_start.json: lost or damaged, .* remove .*sft_checkpoints"):
        sft.run(config)
    (folder / "sft_start.json").write_bytes(before[folder / "sft_start.json"])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    sft.run(config)
    assert_the_same(whole, folder)


class Killed(BaseException):
    """Nothing more is done."""


@pytest.mark.medium
@pytest.mark.parametrize("removed", [1, 2])
def test_kill_during_cleanup_loses_nothing(started, tmp_path, monkeypatch, removed):
    config, whole, _ = started
    config = moved(config, tmp_path / "run")
    left = iter(range(removed))

    def until(remove):
        def done(path, *arguments, **options):
            if str(path).startswith(str(tmp_path / "run/sft_")) and next(left, None) is None:
                raise Killed
            return remove(path, *arguments, **options)

        return done

    with monkeypatch.context() as patch:
        finish = sft.ColdStart.finish

        def killed(self):
            with patch.context() as inner:
                inner.setattr(os, "unlink", until(os.unlink))
                inner.setattr(sft.shutil, "rmtree", until(sft.shutil.rmtree))
                inner.setattr(os, "rename", until(os.rename))
                finish(self)

        patch.setattr(sft.ColdStart, "finish", killed)
        with pytest.raises(Killed):
            sft.run(config)
    sft.run(config)
    assert_the_same(whole, tmp_path / "run")


@pytest.mark.medium
@pytest.mark.parametrize("every", [0, 1])
def test_diverged_cold_start_writes_no_policy(started, tmp_path, monkeypatch, every):
    """The first update has rate 0; the second makes the parameters infinite."""
    folder = tmp_path / "run"
    optimizer = replace(started[0].sft.optimizer, lr=1e38)
    config = moved(started[0], folder, optimizer=optimizer, checkpoint_every=every)
    with pytest.raises(UserError, match="step 2: .* not finite.*; lower sft.optimizer.lr"):
        sft.run(config)
    assert not (folder / "sft").exists() and not (folder / "sft.yaml").exists()
    assert [row["actor/finite"] for row in rows(folder / "sft_metrics")] == [1, 0], "the row tells it"
    assert newest_step(folder / "sft_checkpoints") == (1 if every else None), "nothing to go on from"
    update = sft.Learner.update

    def skipped(*arguments):
        state, metrics = update(*arguments)
        return state, metrics | {"actor/skipped": 1.0}

    monkeypatch.setattr(sft.Learner, "update", skipped)
    config = moved(started[0], tmp_path / "skipped")
    with pytest.raises(UserError, match="step 5: no update was finite for 5 steps: .*sft.optimizer.lr"):
        sft.run(replace(config, guards=replace(config.guards, patience=99)))
    assert not (tmp_path / "skipped/sft").exists()


@pytest.mark.medium
def test_adapters_are_merged_into_written_policy(started, tmp_path):
    """Only the products that have one differ from the base, and by a matrix of the adapters' rank."""
    config, _, _ = started
    base = load_file(started[1] / "sft/model.safetensors")
    lora = LoraConfig(rank=2, targets=["q", "up"], base_dtype="float32")
    phases = [SftPhase(steps=2, kind="drills")]
    adapted = moved(config, tmp_path / "run", init_from=str(started[1] / "sft"), phases=phases)
    sft.run(changed(adapted, policy={"lora": lora}, mesh={"data": 8, "fsdp": 1}))
    result = load_file(tmp_path / "run/sft/model.safetensors")
    other = {name for name in base if not np.array_equal(base[name], result[name])}
    assert other == {f"model.layers.0.{name}_proj.weight" for name in ("self_attn.q", "mlp.up")}
    for name in other:
        assert np.linalg.matrix_rank(result[name] - base[name], tol=1e-6) == 2


class Kept:
    """Checkpoints in memory; notes which updates are saved."""

    def __init__(self, folder, keep):
        self.folder, self.saved = folder, []

    def save(self, step, state, extra):
        self.saved.append(step)

    def wait(self):
        return self.saved[-1]


@pytest.mark.parametrize(("every", "saved"), [(0, []), (4, [3, 4, 7, 8, 11, 12]), (100, [3, 6, 9, 12])])
def test_slow_updates_are_saved_every_ten_minutes(tmp_path, monkeypatch, every, saved):
    """Each update takes four minutes: ten minutes after the last save the next one is due."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=0)
    monkeypatch.setattr(sft, "time", clock)
    monkeypatch.setattr(sft, "CheckpointStore", Kept)
    config = changed(run={"dir": str(tmp_path)}, sft={"checkpoint_every": every})
    learner = SimpleNamespace(init=lambda params: params, policy=SimpleNamespace(adapters=None))
    state = sft.ColdStart(config, {}, learner, dict, Console(progress=False))
    for clock.now in range(240, 13 * 240, 240):
        state.updated({})
    assert state._store.saved == saved
