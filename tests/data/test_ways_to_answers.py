"""The way to a question's answer: what is looked up, what is found there, and the sentences that say so."""

import itertools

import numpy as np
import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.demonstrations import imperfect, lookups
from calibadv_jax.contrib.worlds.world import ask, make_facts, write_passages

SIZES = {"person": 40, "city": 12, "company": 12, "work": 12}


@pytest.fixture(scope="module")
def facts():
    return make_facts(WorldConfig(), np.random.default_rng(0), SIZES, "train")


@pytest.mark.parametrize(("kind", "hops"), [("one_hop", 1), ("two_hop", 2), ("comparison", 2)])
def test_every_step_of_the_way_is_a_sentence_of_its_passage(facts, kind, hops):
    rng = np.random.default_rng(1)
    passages = dict(write_passages(facts, rng))
    for _ in range(300):
        asked = ask(facts, kind, rng)
        assert len(asked.searches) == len(asked.findings) == len(asked.statements) == hops
        for title, finding, statement in zip(asked.searches, asked.findings, asked.statements, strict=True):
            assert f"{statement}." in passages[title]
            assert statement.startswith(title) and statement.endswith(finding)
        if kind == "comparison":
            assert asked.answer == ("yes" if asked.findings[0] == asked.findings[1] else "no")
            assert asked.searches[0] != asked.searches[1]
            assert all(name in asked.text for name in asked.searches)
        else:
            assert asked.answer == asked.findings[-1]
            assert asked.searches[0] in asked.text
            assert asked.answer not in asked.text  # nobody is the answer to a question about himself
        if kind == "two_hop":
            assert asked.searches[1] == asked.findings[0]


def test_no_entity_occurs_twice(facts):
    for kind, names in facts.entities.items():
        assert len(names) == len(set(names)) == SIZES[kind]


@pytest.mark.parametrize("generator", [imperfect, lookups])
def test_what_a_careful_demonstration_quotes_stands_in_what_it_was_shown(generator):
    """Quoted is the sentence that was looked for: of the passage with the title of the last search."""
    quotes = 0
    for demonstration in itertools.islice(generator(3, WorldConfig()), 1000):
        shown = None
        for turn in demonstration.turns:
            thought = turn.text.partition("<think> ")[2].partition(" </think>")[0]
            if shown is not None and " and " not in thought and not thought.startswith("find "):
                quotes += 1
                assert f"{thought}." in shown
            shown = turn.documents[0].text if turn.documents else None
            if turn.documents:
                title = turn.text.partition("<search> ")[2].partition(" </search>")[0]
                assert turn.documents[0].title == title
                assert len({document.title for document in turn.documents}) == len(turn.documents) == 3
        assert shown is None or generator is imperfect  # it ends with an answer, or was cut after a search
    assert quotes > 300


@pytest.mark.medium
def test_a_wrong_name_is_looked_up_before_the_right_one():
    """Never after it: the answer follows from the last search."""
    detours = 0
    for demonstration in itertools.islice(imperfect(4, WorldConfig()), 2000):
        searches = [turn.documents[0] for turn in demonstration.turns if turn.documents]
        if demonstration.question.data_source == "one_hop" and len(searches) == 2:
            detours += 1
            assert (
                demonstration.turns[-1].text.startswith("<think> ") and not demonstration.turns[-1].documents
            )
            assert demonstration.question.golden_answers[0] in searches[1].text
            assert searches[1].title in demonstration.question.text
    assert detours > 10
