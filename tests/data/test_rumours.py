"""Rumours of the generated encyclopedia: an answer that may be false stands in the first passage."""

import itertools
import json

import numpy as np
import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.articles import write_passages
from calibadv_jax.contrib.worlds.asking import ask
from calibadv_jax.contrib.worlds.demonstrations import Flaws, imperfect, lookups
from calibadv_jax.contrib.worlds.facts import RUMOUR, make_facts
from calibadv_jax.contrib.worlds.word_tokenizer import build_word_tokenizer
from calibadv_jax.contrib.worlds.world import generate_world, write_world

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
    (sentence,) = [part for part in passage.removesuffix(".").split(". ") if part.startswith(SAID)]
    return sentence.removeprefix(SAID)


@pytest.mark.parametrize("truth", [0.0, 0.4, 1.0])
def test_rumours_are_as_often_true_as_asked_for(truth):
    rng = np.random.default_rng(0)
    right = []
    for _ in range(10):
        facts = make_facts(rng, COUNTS, "train", truth)
        passages = dict(write_passages(facts, rng))
        for _ in range(40):
            asked = ask(facts, "rumour", rng)
            name, bridge = asked.searches
            assert f"{asked.statements[0]}." in passages[name]
            assert f"{asked.statements[1]}." in passages[bridge]
            output = believed(passages[name])
            assert output.startswith(bridge)
            right.append(output == asked.statements[1])
            assert asked.answer not in asked.text and facts.rumours[name].said not in asked.text
    assert np.mean(right) == pytest.approx(truth, abs=0.1)


def test_every_passage_has_one_relevant_rumour(world):
    by_id = {passage.id: passage for passage in world.passages}
    kinds = dict.fromkeys(("one_hop", "two_hop", "rumour"), 0)
    for question in world.train:
        kinds[question.data_source] += 1
        passages = [by_id[name] for name in question.supporting_ids]
        output = believed(passages[0].text)
        if question.data_source == "rumour":
            assert output.startswith(passages[1].title)
        if question.data_source == "two_hop":
            assert question.golden_answers[0] not in output or not output.startswith(passages[1].title)
    shares = {kind: count / len(world.train) for kind, count in kinds.items()}
    assert shares == pytest.approx({"one_hop": 0.2, "two_hop": 0.2, "rumour": 0.6}, abs=0.06)


def test_world_without_rumour_questions_holds_none():
    plain = generate_world(WorldConfig(train_questions=50, eval_questions=50))
    assert not any(SAID in passage.text for passage in plain.passages)
    assert {question.data_source for question in plain.train} == {"one_hop", "two_hop", "comparison"}


def test_smallest_world_has_rumours():
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
def test_demonstrations_believe_and_misread_at_configured_rates():
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


def test_lookups_quote_rumours_only():
    drawn = list(itertools.islice(lookups(0, RUMOURS), 1000))
    kinds = {demonstration.question.data_source for demonstration in drawn}
    assert kinds == {"drill", "one_hop", "rumour"}  # no comparisons where none are asked
    rumours = [item for item in drawn if item.question.data_source == "rumour"]
    assert 0.2 < len(rumours) / len(drawn) < 0.4
    assert all(len(rumour.turns) == 2 and SAID in rumour.turns[-1].text for rumour in rumours)


def test_older_world_folder_is_accepted(tmp_path):
    config = WorldConfig(dir=str(tmp_path / "world"), people=40, train_questions=20, eval_questions=20)
    manifest = write_world(config) / "manifest.json"
    older = json.loads(manifest.read_text(encoding="utf-8"))
    del older["rumour"]
    manifest.write_text(json.dumps(older), encoding="utf-8")
    assert write_world(config) == manifest.parent
