"""Forks of the generated encyclopedia: nothing tells the way, and the wrong one is long."""

import itertools
import json

import numpy as np
import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.data.demonstrations import Flaws, imperfect, lookups
from calibadv_jax.data.word_tokenizer import build_word_tokenizer
from calibadv_jax.data.world import WORDY, draw_fork, generate_world, make_facts, write_passages, write_world

FORKS = WorldConfig(train_questions=600, eval_questions=50, one_hop=0.2, two_hop=0.2, comparison=0, fork=0.6)
COUNTS = {"person": 60, "city": 20, "company": 20, "work": 20}
LONG_START = WORDY.removesuffix("{}")


@pytest.fixture(scope="module")
def world():
    return generate_world(FORKS)


def drawn_forks(count):
    rng = np.random.default_rng(0)
    for number in range(count):
        if number % 10 == 0:
            facts = make_facts(rng, COUNTS, "train", forked=True)
            passages = dict(write_passages(facts, rng))
        yield facts, passages, *draw_fork(facts, rng)


def test_both_ways_of_a_fork_are_told_and_only_one_answer_is_right():
    for facts, passages, right, wrong in drawn_forks(40):
        assert right.text == wrong.text and right.searches[0] == wrong.searches[0]
        assert right.answer != wrong.answer
        for way in (right, wrong):
            told = passages[way.searches[0]], passages[way.searches[1]]
            assert all(f"{statement}." in text for statement, text in zip(way.statements, told, strict=True))
        assert wrong.searches[1] in facts.wordy and right.searches[1] not in facts.wordy
        assert len(wrong.statements[1].split()) > 2 * len(right.statements[1].split())


def test_the_order_of_the_statements_tells_nothing():
    first = 0
    for _, passages, right, wrong in drawn_forks(400):
        text = passages[right.searches[0]]
        first += text.index(right.statements[0]) < text.index(wrong.statements[0])
    assert first / 400 == pytest.approx(0.5, abs=0.1)


def test_right_ways_are_short_and_only_forks_are_forked(world):
    by_id = {passage.id: passage for passage in world.passages}
    kinds = {kind: 0 for kind in ("one_hop", "two_hop", "fork")}
    for question in world.train:
        kinds[question.data_source] += 1
        passages = [by_id[name] for name in question.supporting_ids]
        assert not any(LONG_START in passage.text for passage in passages)
        assert question.golden_answers[0] in passages[-1].text
        if question.data_source != "one_hop":
            assert f" {passages[1].title}." in passages[0].text
    shares = {kind: count / len(world.train) for kind, count in kinds.items()}
    assert shares == pytest.approx({"one_hop": 0.2, "two_hop": 0.2, "fork": 0.6}, abs=0.06)


def test_a_world_without_forks_has_no_long_sentence():
    plain = generate_world(WorldConfig(train_questions=50, eval_questions=50))
    assert not any(LONG_START in passage.text for passage in plain.passages)
    assert {question.data_source for question in plain.train} == {"one_hop", "two_hop", "comparison"}


def test_every_word_is_known(world):
    tokenizer = build_word_tokenizer()
    for text in (passage.text for passage in world.passages):
        assert tokenizer.unk_token_id not in tokenizer.encode(text, add_special_tokens=False), text


def test_demonstrations_take_either_way_and_are_seldom_hasty():
    right, hasty = [], []
    for demonstration in itertools.islice(imperfect(0, FORKS), 2000):
        if demonstration.question.data_source != "fork":
            continue
        assert all(turn.trained for turn in demonstration.turns)
        *searches, last = demonstration.turns
        hasty.append(len(searches) == 1)
        if len(searches) == 2:
            right.append(LONG_START not in last.text)
            assert f"<answer> {demonstration.question.golden_answers[0]} </answer>" in last.text
    assert np.mean(right) == pytest.approx(0.5, abs=0.1)
    assert np.mean(hasty) == pytest.approx(Flaws().hasty_fork, abs=0.04)


def test_look_ups_teach_to_quote_long_sentences():
    drawn = [turn.turns[-1].text for turn in itertools.islice(lookups(0, FORKS), 1000)]
    assert 0.15 < np.mean([LONG_START in text for text in drawn]) < 0.45
    assert not any("in the same city" in text for text in drawn)  # no comparisons where none are asked


def test_a_folder_that_is_older_than_a_key_is_the_same_world(tmp_path):
    config = WorldConfig(dir=str(tmp_path / "world"), people=40, train_questions=20, eval_questions=20)
    manifest = write_world(config) / "manifest.json"
    older = json.loads(manifest.read_text(encoding="utf-8"))
    del older["fork"]
    manifest.write_text(json.dumps(older), encoding="utf-8")
    assert write_world(config) == manifest.parent
