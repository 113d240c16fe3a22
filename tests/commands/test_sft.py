"""A cold start: what it trains of demonstrations and in which order; its phases, its rows, what it leaves."""

import itertools
import json
import os
import re
import signal
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from config_rig import changed
from rows_rig import write_rows
from run_folder_rig import another_calculator
from safetensors.numpy import load_file
from tiny_policy import GROUPED
from trainer_rig import rows

from calibadv_jax.commands import sft
from calibadv_jax.config import LoraConfig, OptimizerConfig, SftPhase, ToolConfig
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn, load_demonstrations, split_held_out
from calibadv_jax.learner.batching import RowShape, Sample, pack, plan
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.optimizer import make_optimizer
from calibadv_jax.metrics.console import Console
from calibadv_jax.run.folder import check_cold_start
from calibadv_jax.run.model import build_model, initial_params
from calibadv_jax.snapshots.checkpoint import newest_step
from calibadv_jax.snapshots.huggingface import read_hf_config

# Tokens of a row, rows, tokens of the shortest and of the longest sample.
SHAPES = [
    (128, 4, 5, 30),
    (128, 4, 1, 128),
    (128, 3, 40, 70),
    (64, 1, 1, 64),
    (96, 5, 25, 50),
    (50, 2, 50, 50),
]

QUESTION = Question("1", "who wrote silent garden ?", ("ada",), "test")


@pytest.fixture(scope="module")
def tokenizer():
    return build_word_tokenizer()


def config_with(**changes):
    return changed(prompt={"template": "short"}, sft=changes)


def test_demonstrations_are_reshuffled_every_epoch():
    def epochs(seed, number=None):
        drawn = list(islice(sft._order(20, number, seed), 60))
        return [drawn[start : start + 20] for start in (0, 20, 40)]

    assert all(sorted(epoch) == [*range(20)] != epoch for epoch in epochs(0))
    assert len({tuple(epoch) for epoch in epochs(0)}) == 3
    assert epochs(0) == epochs(0, 3) != epochs(1)


@pytest.mark.parametrize("loss_on", ["sampled", "all"])
def test_only_what_the_policy_writes_is_trained(tokenizer, loss_on):
    turns = (DemoTurn(SEARCH, (Document("1", "a", "b"),)), DemoTurn(ANSWER))
    sample = sft.encode_demonstration(Demonstration(QUESTION, turns), config_with(), tokenizer, loss_on)
    text = tokenizer.decode(sample.tokens)
    assert "<information>" in text and "<answer>" in text
    trained = tokenizer.decode(sample.tokens[sample.mask])
    assert ("<information>" in trained) == (loss_on == "all")
    assert "<search>" in trained and "<answer>" in trained
    assert not sample.mask[0]  # nothing precedes it
    context = (replace(turns[0], trained=False), turns[1])
    sample = sft.encode_demonstration(Demonstration(QUESTION, context), config_with(), tokenizer, "sampled")
    assert "<search>" not in tokenizer.decode(sample.tokens[sample.mask])


@pytest.mark.parametrize("pack_length, rows, shortest, longest", SHAPES)
def test_batches_are_filled_as_first_fit_places(monkeypatch, pack_length, rows, shortest, longest):
    """Packing is computed only where it may need more rows."""
    counted = []
    monkeypatch.setattr(sft, "plan", lambda *arguments: counted.append(1) or plan(*arguments))
    lengths = np.random.default_rng(rows).integers(shortest, longest + 1, 400).tolist()
    pending, expected = [], []
    for number in range(len(lengths)):
        pending.append(number)
        if plan([lengths[item] for item in pending], [RowShape(pack_length, 1)]).num_rows[0] > rows:
            expected.append(pending[:-1])
            pending = pending[-1:]
    samples = [Sample(np.full(length, number), *[None] * 3) for number, length in enumerate(lengths)]
    fulls = [
        [int(sample.tokens[0]) for sample in full] for full in sft._fill_rows(samples, rows, pack_length)
    ]
    assert fulls[:-1] == expected and fulls[-1] == pending and len(fulls) > 4
    assert len(counted) < 400 * (0.5 if longest < pack_length // 4 else 1)


@pytest.mark.parametrize(("count", "sizes"), [(70, [64, 6]), (64, [64])])
def test_last_batch_of_a_phase_holds_the_rest(count, sizes):
    samples = [Sample(np.zeros(20, np.int32), *[None] * 3)] * count
    assert [len(full) for full in sft._fill_rows(samples, 4, 320)] == sizes


def test_rows_are_planned_only_if_one_more_may_be_needed(monkeypatch):
    counted = []
    monkeypatch.setattr(sft, "plan", lambda *arguments: counted.append(1) or plan(*arguments))
    samples = [Sample(np.zeros(20, np.int32), *[None] * 3)] * 200
    assert [len(full) for full in sft._fill_rows(samples, 4, 320)] == [64, 64, 64, 8]
    assert len(counted) < 20


def test_phases_are_announced_where_the_demonstrations_change():
    """Also by a start that goes on within a phase, or at the end of one."""
    phases = [SftPhase(steps=2, kind="drills"), SftPhase(steps=3, kind="lookups"), SftPhase(steps=1)]
    first = "phase 1 of 3: drills, updates 1 to 2"
    second = "phase 2 of 3: lookups, updates 3 to 5"
    third = "phase 3 of 3: imperfect, updates 6 to 6; other demonstrations, so the loss jumps"
    jump = "; other demonstrations, so the loss jumps"
    assert sft.phase_headings(phases, [2, 3, 1], 0) == {1: first, 3: second + jump, 6: third}
    assert sft.phase_headings(phases, [2, 3, 1], 2) == {3: second, 6: third}
    assert sft.phase_headings(phases, [2, 3, 1], 4) == {5: second, 6: third}
    assert sft.phase_headings(phases, [2, 3, 1], 6) == {}


def test_epochs_of_generated_demonstrations_are_refused_with_the_reason():
    with pytest.raises(UserError, match="sft.demonstrations=world writes new demonstrations all the time"):
        sft.count_updates(config_with(demonstrations="world"), SftPhase(epochs=2), (), None, 0)


def test_phase_has_steps_or_epochs(tmp_path, tokenizer):
    world = config_with(demonstrations="world")
    for phase, updates in ((SftPhase(7), 7), (SftPhase(), 100)):
        assert sft.count_updates(world, phase, (), None, 0) == updates
    with pytest.raises(ValueError, match="has steps=3 and epochs=2: leave one out"):
        SftPhase(steps=3, epochs=2)
    with pytest.raises(UserError, match="epochs=2, but sft.demonstrations=world"):
        sft.count_updates(world, SftPhase(epochs=2), (), None, 0)
    with pytest.raises(UserError, match="sft.held_out is 0.5, but sft.demonstrations=world"):
        sft._own_demonstrations(config_with(demonstrations="world", held_out=0.5), tokenizer)
    with pytest.raises(UserError, match="sft.phases is empty"):
        sft.run(replace(world, run=replace(world.run, dir=str(tmp_path / "run"))))
    assert not (tmp_path / "run").exists()


def test_epochs_train_every_demonstration_so_often(tmp_path, tokenizer):
    names = ("a", "city", "it", "no", "who", "founded")
    path = write_rows(tmp_path / "d.jsonl", *(chat(f"who founded {name} ?", ANSWER) for name in names))
    own = load_demonstrations(path)
    config = config_with(demonstrations=str(path), rows=1, pack_length=40)
    phase = SftPhase(epochs=3)
    batches = list(sft._batches(config, phase, own, tokenizer, seed=5))
    assert len(batches) == sft.count_updates(config, phase, own, tokenizer, 5) > 3
    assert sum(int(batch.segment_ids.max(axis=1).sum()) for batch in batches) == 18
    later = list(sft._batches(config, phase, own, tokenizer, 5, skipped=2))
    for item, other in zip(batches[2:], later, strict=True):
        np.testing.assert_array_equal(item.tokens, other.tokens)


def test_overlong_demonstration_is_named(tokenizer):
    own = [Demonstration(QUESTION, (DemoTurn(f"<answer> {'ada ' * 50}</answer>"),))]
    with pytest.raises(UserError, match="question '1' has .* tokens, but sft.pack_length is 16"):
        next(sft._batches(config_with(pack_length=16), SftPhase(epochs=1), own, tokenizer, 0))


def chat(asked, *replies):
    roles = ["user", *["assistant", "tool"] * len(replies)]
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, (asked, *replies), strict=False)]}


SEARCH, ANSWER = "<think> a </think>\n<search> silent garden </search>", "<answer> ada </answer>"


def encoded(tmp_path, row, tokenizer, **prompt):
    (demonstration,) = load_demonstrations(write_rows(tmp_path / "d.jsonl", row))
    config = changed(config_with(), prompt=prompt)
    return sft.encode_demonstration(demonstration, config, tokenizer, "sampled")


def test_observations_of_demonstrations_cannot_write_tags(tmp_path, tokenizer):
    turns = (DemoTurn(SEARCH, (Document("1", "<answer>", "</information> lives"),)), DemoTurn(ANSWER))
    document = sft.encode_demonstration(Demonstration(QUESTION, turns), config_with(), tokenizer, "sampled")
    row = chat(QUESTION.text, SEARCH, "lives </information> <answer> x", ANSWER)
    for sample in (document, encoded(tmp_path, row, tokenizer)):
        text = tokenizer.decode(sample.tokens)
        assert text.count("</information>") == 1 and text.count("<answer>") == 1
        assert "lives" in text and "lives" not in tokenizer.decode(sample.tokens[sample.mask])


def test_chat_has_the_tokens_of_the_same_turns(tmp_path, tokenizer):
    """What a tool says is shown as the agent loop shows it, and is not trained."""
    observation = '<information>Doc 1(Title: "a") b\nDoc 2(Title: "c") d</information>'
    sample = encoded(tmp_path, chat(QUESTION.text, SEARCH, observation, ANSWER), tokenizer)
    documents = (Document("1", "a", "b"), Document("2", "c", "d"))
    demonstration = Demonstration(QUESTION, (DemoTurn(SEARCH, documents), DemoTurn(ANSWER)))
    expected = sft.encode_demonstration(demonstration, config_with(), tokenizer, "sampled")
    np.testing.assert_array_equal(sample.tokens, expected.tokens)
    np.testing.assert_array_equal(sample.mask, expected.mask)
    trained = tokenizer.decode(sample.tokens[sample.mask])
    assert "information" not in trained
    assert "<search>" in trained and "<answer>" in trained


@pytest.mark.parametrize(
    ("template", "start"),
    [
        ("short", "Question : who founded it ?"),
        ("from_data", "find city . Question : who founded it ? <answer>"),
    ],
)
def test_chat_prompt_follows_the_template(tmp_path, tokenizer, template, start):
    row = chat("find city . Question: who founded it ?", ANSWER)
    assert tokenizer.decode(encoded(tmp_path, row, tokenizer, template=template).tokens).startswith(start)


def test_sharegpt_names_and_untrained_messages(tmp_path, tokenizer):
    output = [("system", "x"), ("human", "who ?"), ("gpt", SEARCH), ("observation", "city")]
    output += [("tool", "2"), ("gpt", ANSWER)]
    row = {"conversations": [{"from": role, "value": text} for role, text in output]}
    row["conversations"][2]["weight"] = 0
    (demonstration,) = load_demonstrations(write_rows(tmp_path / "d.jsonl", row))
    assert demonstration.turns == (DemoTurn(SEARCH, trained=False, observation="city\n2"), DemoTurn(ANSWER))
    assert [message.role for message in demonstration.question.prompt] == ["system", "user"]
    assert demonstration.question.golden_answers == ("ada",)


def messages(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "d.jsonl:1: 'messages' must be a non-empty list"),
        ({"turns": []}, "field 'turns' must be a non-empty list"),
        (messages(("user", "x")), "no message of an assistant"),
        (messages(("judge", "x")), "message 1 of 'messages' .* with 'role'"),
        (messages(("assistant", None)), "tool calls stand in"),
        (messages(("assistant", ANSWER)), "before the assistant's first"),
        (chat("x", "hello"), "message 2 of 'messages': a turn must hold <search>"),
        ({"turns": 3}, "d.jsonl:1: field 'turns' must be a non-empty list, got 3; or give 'messages'"),
        (messages(("user", "x"), ("assistant", ANSWER), ("assistant", ANSWER)), "message 3 .*two messages"),
        (chat("x", f"{ANSWER} bye"), "message 2 of 'messages': the policy stops after its action; remove"),
        (chat("x", f"{ANSWER}<b>"), "message 2 of 'messages': the policy stops after its action; remove"),
        (messages(("user", "x"), ("assistant", ANSWER), ("assistant", ANSWER)), "two messages of the"),
        (messages(("user", "x"), ("assistant", ANSWER), ("system", "y")), "message 3 .*a system message"),
    ],
)
def test_bad_chat_is_named(tmp_path, row, message):
    with pytest.raises(UserError, match=message) as caught:
        load_demonstrations(write_rows(tmp_path / "d.jsonl", row))
    assert "\n" not in str(caught.value)


def test_share_of_questions_is_held_out():
    own = [Demonstration(replace(QUESTION, text=f"q{n // 3}"), (DemoTurn(ANSWER),)) for n in range(30)]
    training, held_out = split_held_out(own, 0.2, seed=0)
    assert len(held_out) == 6 and len(training) == 24
    assert not {item.question.text for item in training} & {item.question.text for item in held_out}
    assert split_held_out(own, 0.2, seed=0) == (training, held_out) != split_held_out(own, 0.2, seed=1)
    assert split_held_out(own, 0.0, seed=0) == (own, [])
    assert len(split_held_out(own, 0.001, seed=0)[1]) == 3, "one question at least"
    with pytest.raises(UserError, match="sft.held_out=0.5 takes all 1 questions"):
        split_held_out(own[:3], 0.5, seed=0)


@pytest.mark.medium
def test_held_out_loss_is_the_token_mean(tmp_path):
    tokenizer, folder = build_word_tokenizer(), tmp_path / "run"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_rows(
        tmp_path / "d.jsonl", *(chat(f"who founded {name} ?", ANSWER) for name in ("a", "city", "it", "no"))
    )
    held_out = {"held_out": 0.5, "held_out_every": 2, "phases": [SftPhase(5)], "output": str(folder / "sft")}
    config = config_with(demonstrations=str(path), rows=8, pack_length=32, **held_out)
    policy = {"init": GROUPED, "tokenizer": str(tmp_path / "tokenizer"), "compute_dtype": "float32"}
    log = {"backends": [], "progress": False}
    config = changed(config, run={"dir": str(folder)}, policy=policy, log=log)
    sft.run(config)
    rows = map(json.loads, (folder / "sft_metrics/metrics.jsonl").read_text().splitlines())
    measured = {row["step"]: row["sft/held_out_loss"] for row in rows if "sft/held_out_loss" in row}
    assert sorted(measured) == [2, 4, 5]

    model = build_model(config, str(folder / "sft"))
    rule = make_optimizer(config.sft.optimizer, lambda _: 0.0)
    learner = Learner(model.policy, rule, model.mesh, LearnerOptions(8))
    params = initial_params(config, model, str(folder / "sft"))
    _, demonstrations = split_held_out(load_demonstrations(path), 0.5, config.run.seed)
    total, count = 0.0, 0
    for demonstration in demonstrations:
        sample = sft.encode_demonstration(demonstration, config, tokenizer, "sampled")
        logprobs = learner.logprobs(params, pack([sample], 32))[0, : len(sample.tokens) - 1]
        total -= logprobs[sample.mask[1:]].sum()
        count += int(sample.mask.sum())
    assert len(demonstrations) == 2 and measured[5] == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize(
    ("longest", "pack_length", "remaining", "fault"),
    [
        (100, 4096, (0, 1, 3), "sft.demonstrations: the prompts of 1 of 4 .*=leave_out"),
        (4096, 100, (0, 3), r"2 of 4 .* sft.pack_length=100, the longest has 3\d\d .*d.jsonl:2.*=leave_out"),
    ],
)
def test_overlong_demonstrations_are_refused_at_start(
    tmp_path, tokenizer, longest, pack_length, remaining, fault
):
    answers = [f"<think> {'city ' * count}</think> <answer> it </answer>" for count in (1, 300, 1, 1)]
    asked = ["who founded a ?", "who founded b ?", "who founded " + "city " * 200 + "?", "who founded it ?"]
    path, output = write_rows(tmp_path / "d.jsonl", *map(chat, asked, answers)), []

    def read(overlong="leave_out", **keys):
        config = config_with(demonstrations=str(path), **{"pack_length": pack_length} | keys)
        config = changed(config, rollout={"max_prompt_length": longest}, data={"overlong_prompts": overlong})
        return sft._own_demonstrations(config, tokenizer, output.append)

    with pytest.raises(UserError, match=fault):
        read("refuse")
    training, held_out = read()
    assert [item.question.text for item in training] == [asked[index] for index in remaining]
    (line,) = output
    assert held_out is None and re.search(" of 4.*left out", line)
    training, held_out = read(held_out=0.5)
    assert len(training) + int(held_out.segment_ids.max(axis=1).sum()) == len(remaining)
    with pytest.raises(UserError, match="of [34] .*none is left"):
        read(pack_length=8)


SHAPE = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "tie_word_embeddings": True}
PHASES = [SftPhase(steps=3, kind="drills"), SftPhase(steps=2, kind="drills")]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The config of a cold start, and the batches that it trained on."""
    folder = tmp_path_factory.mktemp("run")
    build_word_tokenizer().save_pretrained(folder / "tokenizer")
    optimizer = OptimizerConfig(lr=0.01, schedule="linear", warmup_updates=1)
    keys = {"demonstrations": "world", "phases": PHASES, "rows": 8, "pack_length": 64, "optimizer": optimizer}
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


def test_phases_and_seeds_see_other_demonstrations(started, tokenizer):
    config, _, batches = started
    assert len({batch.tokens.tobytes() for batch in batches}) == len(batches) == 5
    assert {batch.tokens.shape for batch in batches} == {(8, 64)}
    assert [batch.weights.sum() for batch in batches] == pytest.approx([1.0] * 5)
    same = next(sft._batches(config, PHASES[0], (), tokenizer, seed=3))
    np.testing.assert_array_equal(same.tokens, batches[0].tokens)
    assert not np.array_equal(next(sft._batches(config, PHASES[0], (), tokenizer, 4)).tokens, same.tokens)


def test_no_demonstration_is_lost_between_batches(started, tokenizer):
    """All that was drawn is trained, in the order in which it was drawn."""
    config, _, _ = started
    samples = islice(sft._drawn_samples(config, PHASES[0], (), tokenizer, 7), 400)
    expected = [sample.tokens.tobytes() for sample in samples]
    start = 0
    for batch in islice(sft._batches(config, PHASES[0], (), tokenizer, 7), 3):
        trained = segments(batch)
        assert sorted(trained) == sorted(expected[start : start + len(trained)])
        start += len(trained)
    assert start > 40


def segments(batch):
    """The tokens of each packed sample of a batch, as bytes."""
    samples = []
    for tokens, segment_ids in zip(batch.tokens, batch.segment_ids, strict=True):
        for segment in range(1, segment_ids.max() + 1):
            samples.append(tokens[segment_ids == segment].tobytes())
    return samples


def test_finished_cold_start_leaves_policy_and_config(started, tmp_path):
    config, folder, _ = started
    written = read_hf_config(folder / "sft")
    assert written["vocab_size"] == 398 and written["hidden_size"] == 16
    assert (folder / "sft/model.safetensors").is_file() and (folder / "sft/tokenizer.json").is_file()
    assert yaml.safe_load((folder / "sft.yaml").read_text())["run"]["seed"] == 3
    check_cold_start(config)  # the same settings: it need not be made again
    check_cold_start(replace(config, sft=replace(config.sft, pack_length=None)))
    tools = [ToolConfig("search"), ToolConfig("access")]
    for other, key in (
        (replace(config, tools=tools), "tools"),
        (replace(config, sft=replace(config.sft, pack_length=128)), "sft.pack_length"),
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


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.medium)])
def test_cold_start_resumes_bit_for_bit_after_signal(started, tmp_path, monkeypatch, number, capfd):
    config, whole, _ = started
    folder = tmp_path / "run"
    config = moved(config, folder)
    ended = interrupted(config, monkeypatch, lambda: os.kill(os.getpid(), number))
    assert isinstance(ended, SystemExit) and ended.code == 128 + number
    assert "the same command goes on from the saved update" in capfd.readouterr().err
    assert newest_step(folder / "sft_checkpoints") == 4 and not (folder / "sft").exists()
    steps, update = [], sft.Learner.update
    monkeypatch.setattr(sft.Learner, "update", lambda *arguments: steps.append(1) or update(*arguments))
    sft.run(config)
    assert len(steps) == 1
    assert_the_same(whole, folder)


@pytest.mark.medium
def test_killed_cold_start_resumes_with_same_settings_only(started, tmp_path, monkeypatch):
    config, whole, _ = started
    folder = tmp_path / "run"
    config = moved(config, folder)

    def killed():
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(sft.ColdStart, "__exit__", lambda *_: None)  # nothing runs after kill -9
        assert isinstance(interrupted(config, monkeypatch, killed), MemoryError)
    assert newest_step(folder / "sft_checkpoints") == 2
    assert len(rows(folder / "sft_metrics")) == 3
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    init, tools = SHAPE | {"hidden_size": 32}, [ToolConfig("search"), ToolConfig("access")]
    phases = replace(config.sft, phases=[SftPhase(steps=9, kind="drills")])
    for changes, words in (
        ({"sft": phases}, r"unfinished .* \(sft.phases\); choose"),
        ({"sft": replace(config.sft, pack_length=None)}, r"\(sft.pack_length\)"),
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


@pytest.mark.medium
def test_unfinished_cold_start_is_not_continued_with_changed_actions(started, tmp_path, monkeypatch):
    tools = [ToolConfig("search"), ToolConfig("examples.own_tool:Calculator")]
    config = replace(moved(started[0], tmp_path / "run"), tools=tools)
    interrupted(config, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    another_calculator(monkeypatch, "guess a number")
    with pytest.raises(UserError, match=r"unfinished cold start with other settings \(tools.content\)"):
        sft.run(config)


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
        sft.run(replace(config, guards=replace(config.guards, patience_steps=99)))
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
