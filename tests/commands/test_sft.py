"""The cold start's data: what is trained in a demonstration, and in which order they come."""

import json
import re
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from config_rig import changed
from rows_rig import write_rows
from tiny_policy import GROUPED

from calibadv_jax.commands import sft
from calibadv_jax.config import SftPhase
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn, load_demonstrations, split_off
from calibadv_jax.learner.batching import Sample, pack, place
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.optimizer import make_optimizer
from calibadv_jax.run.model import build_model, initial_params

# Tokens of a row, rows, tokens of the shortest and of the longest sample.
SHAPES = [(128, 4, 5, 30), (128, 4, 1, 128), (128, 3, 40, 70), (64, 1, 1, 64), (50, 2, 50, 50)]

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


@pytest.mark.parametrize("row_length, rows, shortest, longest", SHAPES)
def test_batches_are_filled_as_first_fit_places(monkeypatch, row_length, rows, shortest, longest):
    """Packing is computed only where it may need more rows."""
    counted = []
    monkeypatch.setattr(sft, "place", lambda *arguments: counted.append(1) or place(*arguments))
    lengths = np.random.default_rng(rows).integers(shortest, longest + 1, 400).tolist()
    pending, expected = [], []
    for number in range(len(lengths)):
        pending.append(number)
        if place([lengths[item] for item in pending], row_length)[1] > rows:
            expected.append(pending[:-1])
            pending = pending[-1:]
    samples = [Sample(np.full(length, number), *[None] * 3) for number, length in enumerate(lengths)]
    fulls = [[int(sample.tokens[0]) for sample in full] for full in sft._row_fulls(samples, rows, row_length)]
    assert fulls[:-1] == expected and fulls[-1] == pending and len(fulls) > 4
    assert len(counted) < 400 * (0.5 if longest < row_length // 4 else 1)


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
    config = config_with(demonstrations=str(path), rows=1, row_length=40)
    phase = SftPhase(epochs=3)
    batches = list(sft._batches(config, phase, own, tokenizer, seed=5))
    assert len(batches) == sft.count_updates(config, phase, own, tokenizer, 5) > 3
    assert sum(int(batch.segment_ids.max(axis=1).sum()) for batch in batches) == 18
    later = list(sft._batches(config, phase, own, tokenizer, 5, skipped=2))
    for item, other in zip(batches[2:], later, strict=True):
        np.testing.assert_array_equal(item.tokens, other.tokens)


def test_overlong_demonstration_is_named(tokenizer):
    own = [Demonstration(QUESTION, (DemoTurn(f"<answer> {'ada ' * 50}</answer>"),))]
    with pytest.raises(UserError, match="question '1' has .* tokens, but sft.row_length is 16"):
        next(sft._batches(config_with(row_length=16), SftPhase(epochs=1), own, tokenizer, 0))


def chat(asked, *replies):
    roles = ["user", *["assistant", "tool"] * len(replies)]
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, (asked, *replies), strict=False)]}


SEARCH, ANSWER = "<think> a </think>\n<search> silent garden </search>", "<answer> ada </answer>"


def encoded(tmp_path, row, tokenizer, **prompt):
    (demonstration,) = load_demonstrations(write_rows(tmp_path / "d.jsonl", row))
    config = changed(config_with(), prompt=prompt)
    return sft.encode_demonstration(demonstration, config, tokenizer, "sampled")


def test_chat_encodes_like_the_same_turns(tmp_path, tokenizer):
    output = '<information>Doc 1(Title: "a") b\nDoc 2(Title: "c") d</information>'
    sample = encoded(tmp_path, chat(QUESTION.text, SEARCH, output, ANSWER), tokenizer)
    documents = (Document("1", "a", "b"), Document("2", "c", "d"))
    turns = (DemoTurn(SEARCH, documents), DemoTurn(ANSWER))
    expected = sft.encode_demonstration(Demonstration(QUESTION, turns), config_with(), tokenizer, "sampled")
    np.testing.assert_array_equal(sample.tokens, expected.tokens)
    np.testing.assert_array_equal(sample.mask, expected.mask)
    trained = tokenizer.decode(sample.tokens[sample.mask])
    assert "information" not in trained and "<search>" in trained and "<answer>" in trained


def test_observations_of_demonstrations_cannot_write_tags(tmp_path, tokenizer):
    turns = (DemoTurn(SEARCH, (Document("1", "<answer>", "</information> lives"),)), DemoTurn(ANSWER))
    document = sft.encode_demonstration(Demonstration(QUESTION, turns), config_with(), tokenizer, "sampled")
    row = chat(QUESTION.text, SEARCH, "lives </information> <answer> x", ANSWER)
    for sample in (document, encoded(tmp_path, row, tokenizer)):
        text = tokenizer.decode(sample.tokens)
        assert text.count("</information>") == 1 and text.count("<answer>") == 1
        assert "lives" in text and "lives" not in tokenizer.decode(sample.tokens[sample.mask])


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
        (messages(("assistant", None)), "write a tool call as <search>"),
        (messages(("assistant", ANSWER)), "before the assistant's first"),
        (chat("x", "hello"), "message 2 of 'messages': a turn must hold <search>"),
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
    training, held_out = split_off(own, 0.2, seed=0)
    assert len(held_out) == 6 and len(training) == 24
    assert not {item.question.text for item in training} & {item.question.text for item in held_out}
    assert split_off(own, 0.2, seed=0) == (training, held_out) != split_off(own, 0.2, seed=1)
    assert split_off(own, 0.0, seed=0) == (own, [])
    assert len(split_off(own, 0.001, seed=0)[1]) == 3, "one question at least"
    with pytest.raises(UserError, match="sft.held_out=0.5 takes all 1 questions"):
        split_off(own[:3], 0.5, seed=0)


@pytest.mark.medium
def test_held_out_loss_is_the_token_mean(tmp_path):
    tokenizer, folder = build_word_tokenizer(), tmp_path / "run"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_rows(
        tmp_path / "d.jsonl", *(chat(f"who founded {name} ?", ANSWER) for name in ("a", "city", "it", "no"))
    )
    held_out = {"held_out": 0.5, "held_out_every": 2, "phases": [SftPhase(5)], "output": str(folder / "sft")}
    config = config_with(demonstrations=str(path), rows=8, row_length=32, **held_out)
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
    _, demonstrations = split_off(load_demonstrations(path), 0.5, config.run.seed)
    total, count = 0.0, 0
    for demonstration in demonstrations:
        sample = sft.encode_demonstration(demonstration, config, tokenizer, "sampled")
        logprobs = learner.logprobs(params, pack([sample], 32))[0, : len(sample.tokens) - 1]
        total -= logprobs[sample.mask[1:]].sum()
        count += int(sample.mask.sum())
    assert len(demonstrations) == 2 and measured[5] == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize(
    ("longest", "row_length", "remaining", "fault"),
    [
        (100, 4096, (0, 1, 3), "sft.demonstrations: the prompts of 1 of 4 .*=leave_out"),
        (4096, 100, (0, 3), r"2 of 4 .* sft.row_length=100, the longest has 3\d\d .*d.jsonl:2.*=leave_out"),
    ],
)
def test_overlong_demonstrations_are_refused_at_start(
    tmp_path, tokenizer, longest, row_length, remaining, fault
):
    answers = [f"<think> {'city ' * count}</think> <answer> it </answer>" for count in (1, 300, 1, 1)]
    asked = ["who founded a ?", "who founded b ?", "who founded " + "city " * 200 + "?", "who founded it ?"]
    path, output = write_rows(tmp_path / "d.jsonl", *map(chat, asked, answers)), []

    def read(overlong="leave_out", **keys):
        config = config_with(demonstrations=str(path), **{"row_length": row_length} | keys)
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
        read(row_length=8)
