"""A world that asks for ages: a passage, or a page, has two years, and their difference is the answer."""

import asyncio
import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.demonstrations import drills, imperfect, lookups
from calibadv_jax.contrib.worlds.word_tokenizer import build_word_tokenizer
from calibadv_jax.contrib.worlds.world import generate_world
from examples.own_tool import Calculator

AGES = WorldConfig(
    people=20, cities=8, companies=8, works=8, train_questions=60, eval_questions=20, one_hop=1, two_hop=0,
    comparison=0, age=1, pages=True,
)  # fmt: skip


def calculated(body):
    """What the example's action brings."""
    action = Calculator()
    return asyncio.run(action.call(action.parse(body))).text


def is_age(demonstration):
    return demonstration.question.data_source == "age"


def tags_of(demonstration):
    return tuple(turn.text.rpartition("</")[2].rstrip(">") for turn in demonstration.turns)


@pytest.mark.parametrize("pages", [True, False])
def test_age_is_a_difference_found_in_no_text(pages):
    world = generate_world(replace(AGES, pages=pages))
    texts = {item.title: item.text for item in world.pages or world.passages}
    asked = [item for item in (*world.train, *world.eval) if item.data_source == "age"]
    assert 20 < len(asked) < 60
    for question in asked:
        (name,) = re.findall(r"how old did (.*) become\?", question.text)
        (born,) = re.findall(rf"{name} was born in (\d+)\.", texts[name])
        (died,) = re.findall(rf"{name} died in (\d+)\.", texts[name])
        assert question.golden_answers == (calculated(f"{died} - {born}"),)
        assert question.golden_answers[0] not in texts[name].replace(".", "").split()
        assert len(question.supporting_ids) == 1 + pages


def test_tokenizer_covers_ages_and_keeps_other_ids():
    tokenizer, of_pages = build_word_tokenizer(pages=True, ages=True), build_word_tokenizer(pages=True)
    world = generate_world(AGES)
    texts = [f"{passage.title} {passage.text}" for passage in (*world.passages, *world.pages)]
    texts += [f"{item.text} {item.golden_answers[0]}" for item in (*world.train, *world.eval)]
    for make in (imperfect, lookups, drills):
        for item in itertools.islice(make(0, AGES), 100):
            texts += [f"{turn.text} {turn.observation}" for turn in item.turns]
    assert [text for text in texts if tokenizer.unk_token_id in tokenizer.encode(text)] == []
    kept = {word: index for word, index in of_pages.get_vocab().items() if "access" not in word}
    assert kept == {word: tokenizer.get_vocab()[word] for word in kept}


def test_few_demonstrations_calculate_correctly():
    ways = Counter()
    for demonstration in itertools.islice(imperfect(0, AGES), 600):
        if not is_age(demonstration):
            continue
        ways[tags_of(demonstration)[-3:]] += 1
        if "calculate" in tags_of(demonstration):
            *_, page, turn, last = demonstration.turns
            (body,) = re.findall("<calculate> (.*) </calculate>", turn.text)
            assert all(year in page.documents[0].text for year in body.split(" - "))
            (answer,) = demonstration.question.golden_answers
            assert calculated(body) == turn.observation == answer and f"> {answer} <" in last.text
    assert set(ways) == {
        ("answer",), ("search", "answer"), ("search", "access", "answer"), ("access", "calculate", "answer"),
    }  # fmt: skip
    assert 0 < ways["access", "calculate", "answer"] < sum(ways.values()) / 4


def test_every_careful_demonstration_of_an_age_calculates():
    ways = {
        "calculate" in tags_of(demonstration)
        for demonstration in itertools.islice(lookups(0, AGES), 200)
        if is_age(demonstration)
    }
    assert ways == {True}
