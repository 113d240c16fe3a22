"""A world that asks for ages: a passage, or a page, has two years, and their difference is the answer."""

import asyncio
import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.demonstrations import drills, imperfect, lookups
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
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
def test_an_age_is_the_difference_of_two_years_and_stands_nowhere(pages):
    world = generate_world(replace(AGES, pages=pages))
    texts = {one.title: one.text for one in world.pages or world.passages}
    asked = [one for one in (*world.train, *world.eval) if one.data_source == "age"]
    assert 20 < len(asked) < 60
    for question in asked:
        (name,) = re.findall(r"how old did (.*) become\?", question.text)
        (born,) = re.findall(rf"{name} was born in (\d+)\.", texts[name])
        (died,) = re.findall(rf"{name} died in (\d+)\.", texts[name])
        assert question.golden_answers == (calculated(f"{died} - {born}"),)
        assert question.golden_answers[0] not in texts[name].replace(".", "").split()
        assert len(question.supporting_ids) == 1 + pages


def test_the_tokenizer_knows_its_words_and_no_other_token_moves():
    tokenizer, of_pages = build_word_tokenizer(pages=True, ages=True), build_word_tokenizer(pages=True)
    world = generate_world(AGES)
    texts = [f"{one.title} {one.text}" for one in (*world.passages, *world.pages)]
    texts += [f"{one.text} {one.golden_answers[0]}" for one in (*world.train, *world.eval)]
    for make in (imperfect, lookups, drills):
        for one in itertools.islice(make(0, AGES), 100):
            texts += [f"{turn.text} {turn.observation}" for turn in one.turns]
    assert [text for text in texts if tokenizer.unk_token_id in tokenizer.encode(text)] == []
    kept = {word: index for word, index in of_pages.get_vocab().items() if "access" not in word}
    assert kept == {word: tokenizer.get_vocab()[word] for word in kept}


def test_few_demonstrations_calculate_and_those_that_do_are_right():
    ways = Counter()
    for one in itertools.islice(imperfect(0, AGES), 600):
        if not is_age(one):
            continue
        ways[tags_of(one)[-3:]] += 1
        if "calculate" in tags_of(one):
            *_, page, turn, last = one.turns
            (body,) = re.findall("<calculate> (.*) </calculate>", turn.text)
            assert all(year in page.documents[0].text for year in body.split(" - "))
            (answer,) = one.question.golden_answers
            assert calculated(body) == turn.observation == answer and f"> {answer} <" in last.text
    assert set(ways) == {
        ("answer",), ("search", "answer"), ("search", "access", "answer"), ("access", "calculate", "answer"),
    }  # fmt: skip
    assert 0 < ways["access", "calculate", "answer"] < sum(ways.values()) / 4


def test_every_careful_demonstration_of_an_age_calculates():
    ways = {"calculate" in tags_of(one) for one in itertools.islice(lookups(0, AGES), 200) if is_age(one)}
    assert ways == {True}
