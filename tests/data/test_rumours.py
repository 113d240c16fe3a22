"""Rumours of the generated encyclopedia: an answer that may be false stands in the first passage."""

import itertools
import json

import numpy as np
import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.demonstrations import Flaws, imperfect, lookups
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.contrib.worlds.world import (
    RUMOUR,
    ask,
    generate_world,
    make_facts,
    write_passages,
    write_world,
)

RUMOURS = WorldConfig(
    train_questions=600,
    eval_questions=50,
    one_hop=0.2,
    two_hop=0.2,
    comparison=0,
    rumour=0.6,
    rumour_truth=0.4,
    misread=0.7,
)
COUNTS = {"person": 60, "city": 20, "company": 20, "work": 20}
SAID = RUMOUR.removesuffix("{}")


@pytest.fixture(scope="module")
def world():
    return generate_world(RUMOURS)


def believed(passage):
    """The one sentence of a passage that may be false."""
    (sentence,) = [one for one in passage.removesuffix(".").split(". ") if one.startswith(SAID)]
    return sentence.removeprefix(SAID)


@pytest.mark.parametrize("truth", [0.0, 0.4, 1.0])
def test_rumours_are_as_often_true_as_asked_for(truth):
    rng = np.random.default_rng(0)
    right = []
    for _ in range(10):
        facts = make_facts(WorldConfig(rumour=1, rumour_truth=truth), rng, COUNTS, "train")
        passages = dict(write_passages(facts, rng))
        for _ in range(40):
            asked = ask(facts, "rumour", rng)
            name, bridge = asked.searches
            assert f"{asked.statements[0]}." in passages[name]
            assert f"{asked.statements[1]}." in passages[bridge]
            said = believed(passages[name])
            assert said.startswith(bridge)
            right.append(said == asked.statements[1])
            assert asked.answer not in asked.text and facts.rumours[name].object not in asked.text
    assert np.mean(right) == pytest.approx(truth, abs=0.1)


def test_every_passage_has_one_rumour_and_only_its_questions_are_answered_by_it(world):
    by_id = {passage.id: passage for passage in world.passages}
    kinds = dict.fromkeys(("one_hop", "two_hop", "rumour"), 0)
    for question in world.train:
        kinds[question.data_source] += 1
        passages = [by_id[name] for name in question.supporting_ids]
        said = believed(passages[0].text)
        if question.data_source == "rumour":
            assert said.startswith(passages[1].title)
        if question.data_source == "two_hop":
            assert question.golden_answers[0] not in said or not said.startswith(passages[1].title)
    shares = {kind: count / len(world.train) for kind, count in kinds.items()}
    assert shares == pytest.approx({"one_hop": 0.2, "two_hop": 0.2, "rumour": 0.6}, abs=0.06)


def test_a_world_that_asks_no_rumours_holds_none():
    plain = generate_world(WorldConfig(train_questions=50, eval_questions=50))
    assert not any(SAID in passage.text for passage in plain.passages)
    assert {question.data_source for question in plain.train} == {"one_hop", "two_hop", "comparison"}


def test_the_smallest_world_has_rumours():
    """One true object and one other, which every false rumour names."""
    config = WorldConfig(
        people=2, cities=2, companies=2, works=1, one_hop=0, two_hop=0, comparison=0, rumour=1
    )
    assert len(generate_world(config).train) == config.train_questions


def test_every_word_is_known(world):
    tokenizer = build_word_tokenizer()
    for text in (passage.text for passage in world.passages):
        assert tokenizer.unk_token_id not in tokenizer.encode(text, add_special_tokens=False), text


@pytest.mark.medium
def test_demonstrations_believe_or_look_further_and_misread_as_often_as_said():
    credulous, misread = [], []
    for demonstration in itertools.islice(imperfect(0, RUMOURS), 3000):
        if demonstration.question.data_source != "rumour":
            continue
        assert all(turn.trained for turn in demonstration.turns)
        *searches, last = demonstration.turns
        shown = searches[-1].documents
        thought = last.text.partition("<think> ")[2].partition(" </think>")[0]
        answer = last.text.partition("<answer> ")[2].partition(" </answer>")[0]
        assert thought.endswith(answer) and any(f"{thought}." in document.text for document in shown)
        credulous.append(len(searches) == 1)
        if len(searches) == 1:
            assert thought == SAID + believed(shown[0].text)
        else:
            misread.append(demonstration.question.golden_answers[0] != answer)
    assert np.mean(credulous) == pytest.approx(Flaws().credulous, abs=0.05)
    assert np.mean(misread) == pytest.approx(RUMOURS.misread, abs=0.05)


def test_look_ups_teach_to_quote_rumours_and_nothing_of_looking_further():
    drawn = list(itertools.islice(lookups(0, RUMOURS), 1000))
    kinds = {demonstration.question.data_source for demonstration in drawn}
    assert kinds == {"drill", "one_hop", "rumour"}  # no comparisons where none are asked
    rumours = [one for one in drawn if one.question.data_source == "rumour"]
    assert 0.2 < len(rumours) / len(drawn) < 0.4
    assert all(len(one.turns) == 2 and SAID in one.turns[-1].text for one in rumours)


def test_a_folder_that_is_older_than_a_key_is_the_same_world(tmp_path):
    config = WorldConfig(dir=str(tmp_path / "world"), people=40, train_questions=20, eval_questions=20)
    manifest = write_world(config) / "manifest.json"
    older = json.loads(manifest.read_text(encoding="utf-8"))
    del older["rumour"]
    manifest.write_text(json.dumps(older), encoding="utf-8")
    assert write_world(config) == manifest.parent
