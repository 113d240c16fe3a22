"""Demonstrations of generated worlds: what they look up, quote and answer, and how often they are flawed."""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.world import RUMOUR
from calibadv_jax.contrib.worlds.world_demonstrations import Flaws, drills, imperfect, lookups
from examples.own_tool import Calculator

PLAIN = WorldConfig()
SHARES = {"one_hop": 0.2, "two_hop": 0.2, "comparison": 0, "rumour": 0.6}
RUMOURS = WorldConfig(rumour_truth=0.4, misread=0.7, **SHARES)
PAGES = WorldConfig(people=20, cities=8, companies=8, works=8, one_hop=1, two_hop=0, comparison=0, pages=True)
AGES = replace(PAGES, age=1)
STATED = RUMOUR.removesuffix("{}")


def body_of(turn, name):
    return turn.text.partition(f"<{name}> ")[2].partition(f" </{name}>")[0]


def thought_of(turn):
    return body_of(turn, "think")


def actions_of(demonstration):
    """The name of each turn's action."""
    return tuple(turn.text.rpartition("</")[2].rstrip(">") for turn in demonstration.turns)


def drawn_of(kind, generator, seed, config, count):
    """The demonstrations of a kind among the first `count`."""
    drawn = islice(generator(seed, config), count)
    return [demonstration for demonstration in drawn if demonstration.question.data_source == kind]


def stated_rumour(passage):
    """The one sentence of a passage that may be false."""
    sentences = passage.removesuffix(".").split(". ")
    (rumour,) = [sentence for sentence in sentences if sentence.startswith(STATED)]
    return rumour


def calculated(body):
    action = Calculator()
    return asyncio.run(action.call(action.parse(body))).text


def test_look_ups_end_with_the_right_answer():
    for demonstration in islice(lookups(0, PLAIN), 200):
        (answer,) = demonstration.question.golden_answers
        assert f"<answer> {answer} </answer>" in demonstration.turns[-1].text


def test_searches_return_as_many_documents_as_configured():
    for documents in (1, 2, 5):
        for demonstration in islice(imperfect(0, replace(PLAIN, documents=documents)), 50):
            for turn in demonstration.turns:
                if turn.documents:
                    assert len({document.title for document in turn.documents}) == documents


@pytest.mark.medium
def test_one_hop_guesses_are_as_frequent_as_configured():
    drawn = drawn_of("one_hop", imperfect, 2, PLAIN, 3000)
    share = sum(len(demonstration.turns) == 1 for demonstration in drawn) / len(drawn)
    assert share == pytest.approx(Flaws().guess, abs=0.06)


@pytest.mark.parametrize("generator", [imperfect, lookups])
def test_quoted_sentence_stands_in_the_passage_that_was_searched(generator):
    quotes = 0
    for demonstration in islice(generator(3, PLAIN), 1000):
        shown = None
        for turn in demonstration.turns:
            thought = thought_of(turn)
            if shown is not None and " and " not in thought and not thought.startswith("find "):
                quotes += 1
                assert f"{thought}." in shown
            shown = None
            if turn.documents:
                titles = [document.title for document in turn.documents]
                assert titles[0] == body_of(turn, "search")
                assert len(set(titles)) == len(titles) == 3
                shown = turn.documents[0].text
        # It ends with an answer; only an imperfect one may be cut after a search.
        assert shown is None or generator is imperfect
    assert quotes > 300


@pytest.mark.medium
def test_wrong_name_is_looked_up_before_the_right_one():
    """Never after it: the answer follows from the last search."""
    detours = 0
    for demonstration in drawn_of("one_hop", imperfect, 4, PLAIN, 2000):
        found = [turn.documents[0] for turn in demonstration.turns if turn.documents]
        if len(found) == 2:
            detours += 1
            last = demonstration.turns[-1]
            assert last.text.startswith("<think> ") and not last.documents
            assert demonstration.question.golden_answers[0] in found[1].text
            assert found[1].title in demonstration.question.text
    assert detours > 10


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_two_hop_demonstrations_are_as_hasty_as_configured(share):
    drawn = drawn_of("two_hop", imperfect, 0, replace(PLAIN, hasty=share), 1000)
    num_hasty = num_cut = num_second_half = 0
    for demonstration in drawn:
        actions = actions_of(demonstration)
        if not all(turn.trained for turn in demonstration.turns):
            num_second_half += 1
        elif actions == ("search", "search"):
            num_cut += 1
        else:
            assert actions == ("search", "answer")
            num_hasty += 1
    assert num_hasty / len(drawn) == pytest.approx(share, abs=0.06)
    assert num_cut / len(drawn) == pytest.approx((1 - share) / 2, abs=0.06)
    assert num_second_half / len(drawn) == pytest.approx((1 - share) / 2, abs=0.06)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_look_ups_make_detours_as_often_as_configured(share):
    drawn = drawn_of("one_hop", lookups, 0, replace(PLAIN, comparison=0, detour=share), 1000)
    num_detours = sum(len(demonstration.turns) == 3 for demonstration in drawn)
    assert num_detours / len(drawn) == pytest.approx(share, abs=0.05)


@pytest.mark.medium
def test_rumours_are_believed_and_facts_misread_as_often_as_configured():
    are_credulous, are_misread = [], []
    for demonstration in drawn_of("rumour", imperfect, 0, RUMOURS, 3000):
        assert all(turn.trained for turn in demonstration.turns)
        *searches, last = demonstration.turns
        shown = searches[-1].documents
        thought, answer = thought_of(last), body_of(last, "answer")
        assert thought.endswith(answer)
        assert any(f"{thought}." in document.text for document in shown)
        are_credulous.append(len(searches) == 1)
        if len(searches) == 1:
            assert thought == stated_rumour(shown[0].text)
        else:
            are_misread.append(demonstration.question.golden_answers[0] != answer)
    assert np.mean(are_credulous) == pytest.approx(Flaws().credulous, abs=0.05)
    assert np.mean(are_misread) == pytest.approx(RUMOURS.misread, abs=0.05)


def test_look_ups_quote_rumours_and_never_look_further():
    drawn = list(islice(lookups(0, RUMOURS), 1000))
    kinds = {demonstration.question.data_source for demonstration in drawn}
    assert kinds == {"drill", "one_hop", "rumour"}, "no comparisons where none are asked"
    rumours = [each for each in drawn if each.question.data_source == "rumour"]
    assert 0.2 < len(rumours) / len(drawn) < 0.4
    for demonstration in rumours:
        assert len(demonstration.turns) == 2
        assert STATED in demonstration.turns[-1].text


def test_demonstrations_read_the_page_or_guess():
    ways = Counter()
    for demonstration in islice(imperfect(0, PAGES), 300):
        actions = actions_of(demonstration)
        ways[actions] += 1
        if actions[-2:] == ("access", "answer"):
            read = demonstration.turns[-2]
            (page,) = read.documents
            assert demonstration.question.golden_answers[0] in page.text
            assert page.id == f"page {body_of(read, 'access')}"
    assert set(ways) >= {("answer",), ("search", "answer"), ("search", "access", "answer")}
    assert ways["search", "access", "answer"] < 150, "most do not read"


def test_few_demonstrations_of_an_age_calculate_and_are_right():
    ways = Counter()
    for demonstration in drawn_of("age", imperfect, 0, AGES, 600):
        actions = actions_of(demonstration)
        ways[actions[-3:]] += 1
        if "calculate" in actions:
            *_, read, calculation, last = demonstration.turns
            (body,) = re.findall("<calculate> (.*) </calculate>", calculation.text)
            assert all(year in read.documents[0].text for year in body.split(" - "))
            (answer,) = demonstration.question.golden_answers
            assert calculated(body) == calculation.observation == answer
            assert f"> {answer} <" in last.text
    calculating = ("access", "calculate", "answer")
    assert set(ways) == {("answer",), ("search", "answer"), ("search", "access", "answer"), calculating}
    assert 0 < ways[calculating] < ways.total() / 4


def test_every_careful_demonstration_of_an_age_calculates():
    drawn = drawn_of("age", lookups, 0, AGES, 200)
    assert drawn and all("calculate" in actions_of(demonstration) for demonstration in drawn)


def test_drills_copy_words_and_compare_names_in_turn():
    drawn = list(islice(drills(0, PLAIN), 2000))
    for demonstration in drawn[::2]:
        (turn,) = demonstration.turns
        assert turn.text == f"<answer> {demonstration.question.text} </answer>"
        assert 8 <= len(demonstration.question.text.split()) < 25
    changes = Counter()
    for demonstration in drawn[1::2]:
        (turn,) = demonstration.turns
        assert thought_of(turn) == demonstration.question.text
        left, _, right = demonstration.question.text.partition(" and ")
        is_changed = tuple(a != b for a, b in zip(left.split(), right.split(), strict=True))
        answer = "no" if any(is_changed) else "yes"
        assert body_of(turn, "answer") == answer
        assert demonstration.question.golden_answers == (answer,)
        changes[is_changed] += 1
    # Some words that are drawn anew are the same again.
    num_equal = changes.pop((False, False))
    assert num_equal / 1000 == pytest.approx(1 / 2, abs=0.06)
    assert set(changes) == {(True, False), (False, True), (True, True)}
    for count in changes.values():
        assert count / 1000 == pytest.approx(1 / 6, abs=0.05)


def test_a_tenth_of_the_look_ups_are_drills():
    drawn = drawn_of("drill", lookups, 0, PLAIN, 2000)
    assert len(drawn) / 2000 == pytest.approx(0.1, abs=0.02)


def test_words_of_drills_include_numbers_only_in_a_world_with_ages():
    for config, has_numbers in ((PLAIN, False), (AGES, True)):
        copied = islice(drills(0, config), 0, 400, 2)
        words = [word for demonstration in copied for word in demonstration.question.text.split()]
        assert any(word.isdigit() for word in words) == has_numbers
