"""What is true in the generated encyclopedia: entities, their relations, and what is only said of them."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.words import AGES, BIRTHS, POOLS
from calibadv_jax.core.errors import UserError

Split = Literal["train", "eval", "cold_start"]
SPLITS: tuple[Split, ...] = ("train", "eval", "cold_start")


@dataclass(frozen=True)
class Relation:
    """A fact type: how it is stated, asked for, and used to name its object within another question."""

    subject: str
    object: str
    statement: str
    question: str
    phrase: str


RELATIONS: dict[str, Relation] = {
    "home": Relation("person", "city", "{} lives in {}", "where does {} live?", "the city where {} lives"),
    "employer": Relation(
        "person", "company", "{} works for {}", "who does {} work for?", "the company that {} works for"
    ),
    "base": Relation(
        "company", "city", "{} is based in {}", "where is {} based?", "the city where {} is based"
    ),
    "founder": Relation("company", "person", "{} was founded by {}", "who founded {}?", "the founder of {}"),
    "author": Relation("work", "person", "{} was written by {}", "who wrote {}?", "the author of {}"),
    "mayor": Relation("city", "person", "{} has the mayor {}", "who is the mayor of {}?", "the mayor of {}"),
}

CHAINS = [
    (first, second)
    for first, one in RELATIONS.items()
    for second, two in RELATIONS.items()
    if one.object == two.subject
]

COMPARISONS = {
    "home": "do {} and {} live in the same city?",
    "employer": "do {} and {} work for the same company?",
}

RUMOUR = "it was written that {}"
BORN, DIED = "{} was born in {}", "{} died in {}"


@dataclass(frozen=True)
class Rumour:
    """What a passage says of the object of one of its own facts. It may be false."""

    first: str  # the relation that leads to that object
    second: str  # what is said of it
    said: str  # name of the object that it is said to have


@dataclass(frozen=True)
class Facts:
    """The entities of one split and what is true of them."""

    entities: dict[str, list[str]]  # kind -> names
    objects: dict[str, dict[str, str]]  # name -> relation -> object's name
    rumours: dict[str, Rumour] = field(default_factory=dict)  # name -> the rumour in its passage
    lives: dict[str, tuple[int, int]] = field(default_factory=dict)  # person -> years of birth, death

    def look_up(self, name: str, relation: str) -> str:
        return self.objects[name][relation]

    def state(self, name: str, relation: str) -> str:
        """The sentence in the passage of `name`."""
        return RELATIONS[relation].statement.format(name, self.look_up(name, relation))

    def state_rumour(self, name: str) -> str:
        """The sentence in the passage of `name` that may be false."""
        rumour = self.rumours[name]
        bridge = self.look_up(name, rumour.first)
        return RUMOUR.format(RELATIONS[rumour.second].statement.format(bridge, rumour.said))

    def state_life(self, name: str) -> tuple[str, str]:
        """The sentences in the passage of `name` that say the years of birth and death."""
        born, died = self.lives[name]
        return BORN.format(name, born), DIED.format(name, died)


def split_of(name: str) -> Split:
    """The split an entity's name belongs to, in every world of every seed."""
    return SPLITS[hashlib.sha256(name.encode()).digest()[0] % len(SPLITS)]


def make_facts(
    rng: np.random.Generator,
    counts: dict[str, int],
    split: Split,
    rumour_truth: float | None = None,
    with_lives: bool = False,
) -> Facts:
    """Draws distinct entities of a split, and one object for every relation of each.

    Args:
        rumour_truth: share of the rumours that are true; None: passages hold no rumours.
        with_lives: whether passages say when a person was born and died.

    Raises:
        UserError: more entities of a kind are asked for than there are names in the split.
    """
    entities = {kind: _names(rng, kind, count, split) for kind, count in counts.items()}
    objects: dict[str, dict[str, str]] = {}
    for kind, names in entities.items():
        for name in names:
            objects[name] = {
                label: str(rng.choice(entities[relation.object]))
                for label, relation in RELATIONS.items()
                if relation.subject == kind
            }
    facts = Facts(entities, objects)
    if rumour_truth is not None:
        facts = _with_rumours(facts, rng, rumour_truth)
    return _with_lives(facts, rng) if with_lives else facts


def facts_of(config: WorldConfig, rng: np.random.Generator, counts: dict[str, int], split: Split) -> Facts:
    """Of `make_facts`: only a world that asks about rumours, or ages, tells of them."""
    truth = config.rumour_truth if config.rumour else None
    return make_facts(rng, counts, split, truth, with_lives=config.age > 0)


def _with_rumours(facts: Facts, rng: np.random.Generator, truth: float) -> Facts:
    rumours = {}
    for name, objects in facts.objects.items():
        chains = [chain for chain in CHAINS if chain[0] in objects]
        first, second = chains[rng.integers(len(chains))]
        said = facts.look_up(objects[first], second)
        if rng.random() >= truth:
            others = [other for other in facts.entities[RELATIONS[second].object] if other != said]
            said = str(rng.choice(others))
        rumours[name] = Rumour(first, second, said)
    return dataclasses.replace(facts, rumours=rumours)


def _with_lives(facts: Facts, rng: np.random.Generator) -> Facts:
    lives = {}
    for name in facts.entities["person"]:
        born = int(rng.choice(BIRTHS))
        lives[name] = born, born + int(rng.choice(AGES))
    return dataclasses.replace(facts, lives=lives)


def _names(rng: np.random.Generator, kind: str, count: int, split: Split) -> list[str]:
    first, second = POOLS[kind]
    names = [f"{a} {b}" for a in first for b in second]
    names = [name for name in names if split_of(name) == split]
    if count > len(names):
        raise UserError(f"world: {count} names of kind {kind!r} were asked for, but there are {len(names)}")
    return [names[index] for index in rng.choice(len(names), count, replace=False)]
