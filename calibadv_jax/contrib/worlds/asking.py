"""Questions about the generated encyclopedia, each with the way to its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.facts import CHAINS, COMPARISONS, RELATIONS, Facts

AGE = "how old did {} become?"


@dataclass(frozen=True)
class WorldQuestion:
    """A question with the way to its answer."""

    kind: Literal["one_hop", "two_hop", "comparison", "rumour", "age"]
    text: str
    answer: str
    searches: tuple[str, ...]  # titles to look up, in order
    findings: tuple[str, ...]  # what the look-ups yield: the bridge, the compared values, years, the answer
    statements: tuple[str, ...]  # the sentences that say so


def draw_kinds(config: WorldConfig, count: int, rng: np.random.Generator) -> list[str]:
    """Kinds of `count` questions, in the shares of the config."""
    kinds = ["one_hop", "two_hop", "comparison", "rumour", "age"]
    shares = np.array([getattr(config, kind) for kind in kinds])
    return [str(kind) for kind in rng.choice(kinds, count, p=shares / shares.sum())]


def ask(facts: Facts, kind: str, rng: np.random.Generator) -> WorldQuestion:
    """Draws a question of a kind: one_hop, two_hop, comparison, rumour or age.

    A rumour is a two-hop question whose first passage already says an answer, which may be false. An age is
    the difference of two years in one passage.
    """
    draw = {
        "one_hop": one_hop,
        "two_hop": _two_hop,
        "comparison": _comparison,
        "rumour": _rumour,
        "age": _age,
    }[kind]
    return draw(facts, rng)


def one_hop(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    """Draws a question that one passage answers."""
    label = str(rng.choice(list(RELATIONS)))
    relation = RELATIONS[label]
    name = str(rng.choice(facts.entities[relation.subject]))
    answer = facts.look_up(name, label)
    return WorldQuestion(
        "one_hop", relation.question.format(name), answer, (name,), (answer,), (facts.state(name, label),)
    )


def _two_hop(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    while True:
        labels = CHAINS[rng.integers(len(CHAINS))]
        name = str(rng.choice(facts.entities[RELATIONS[labels[0]].subject]))
        rumour = facts.rumours.get(name)
        asked = _chain(facts, "two_hop", name, labels)
        # "who founded the company that X works for": X would be its own answer
        if asked.answer != name and (rumour is None or (rumour.first, rumour.second) != labels):
            return asked


def _rumour(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    names = list(facts.rumours)
    while True:
        name = names[rng.integers(len(names))]
        rumour = facts.rumours[name]
        asked = _chain(facts, "rumour", name, (rumour.first, rumour.second))
        if name not in (asked.answer, rumour.said):
            return asked


def _chain(
    facts: Facts, kind: Literal["two_hop", "rumour"], name: str, labels: tuple[str, str]
) -> WorldQuestion:
    first, second = labels
    bridge = facts.look_up(name, first)
    answer = facts.look_up(bridge, second)
    text = RELATIONS[second].question.format(RELATIONS[first].phrase.format(name))
    statements = facts.state(name, first), facts.state(bridge, second)
    return WorldQuestion(kind, text, answer, (name, bridge), (bridge, answer), statements)


def _comparison(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    label = str(rng.choice(list(COMPARISONS)))
    people = facts.entities["person"]
    wanted = bool(rng.integers(2))
    while True:
        left, right = (str(name) for name in rng.choice(people, 2, replace=False))
        if wanted:
            peers = [name for name in people if facts.look_up(name, label) == facts.look_up(left, label)]
            right = str(rng.choice(peers))
        values = facts.look_up(left, label), facts.look_up(right, label)
        if left != right and (values[0] == values[1]) == wanted:
            answer = "yes" if wanted else "no"
            text = COMPARISONS[label].format(left, right)
            statements = facts.state(left, label), facts.state(right, label)
            return WorldQuestion("comparison", text, answer, (left, right), values, statements)


def _age(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    name = str(rng.choice(list(facts.lives)))
    born, died = facts.lives[name]
    text, years = AGE.format(name), (str(born), str(died))
    return WorldQuestion("age", text, str(died - born), (name,), years, facts.state_life(name))
