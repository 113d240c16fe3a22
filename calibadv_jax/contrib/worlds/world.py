"""A generated encyclopedia: fictional people, cities, companies and books, and questions about them.

Every name is two words. Which split a name belongs to is decided by a hash of the whole name, so that
train, eval and cold-start entities never share a name while every single word occurs in all splits:
words can be learned, facts cannot be memorised and must be searched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.words import ADDRESSES, AGES, BIRTHS, POOLS, WORDS, build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_folder, write_jsonl
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.questions import write_questions

Split = Literal["train", "eval", "cold_start"]
SPLITS: tuple[Split, ...] = ("train", "eval", "cold_start")


@dataclass(frozen=True)
class Relation:
    """A fact type, see ``words.yaml``."""

    subject: str
    object: str
    statement: str
    question: str
    phrase: str


RELATIONS: dict[str, Relation] = {name: Relation(**entry) for name, entry in WORDS["relations"].items()}
CHAINS = [
    (first, second)
    for first, to_bridge in RELATIONS.items()
    for second, to_answer in RELATIONS.items()
    if to_bridge.object == to_answer.subject
]
COMPARISONS = {
    "home": "do {} and {} live in the same city?",
    "employer": "do {} and {} work for the same company?",
}
RUMOUR = "it was written that {}"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Rumour:
    """A statement about the object of a fact, in the same passage. It may be false."""

    first: str  # relation of the fact
    second: str  # relation that is stated of its object
    object: str  # name that is stated


@dataclass(frozen=True)
class Facts:
    """The entities of one split and their relations."""

    entities: dict[str, list[str]]  # kind -> names
    objects: dict[str, dict[str, str]]  # name -> relation -> object's name
    rumours: dict[str, Rumour] = field(default_factory=dict)  # name -> the rumour in its passage
    lives: dict[str, tuple[int, int]] = field(default_factory=dict)  # person -> years of birth, death

    def state(self, name: str, relation: str) -> str:
        return RELATIONS[relation].statement.format(name, self.objects[name][relation])

    def state_rumour(self, name: str) -> str:
        rumour = self.rumours[name]
        bridge = self.objects[name][rumour.first]
        return RUMOUR.format(RELATIONS[rumour.second].statement.format(bridge, rumour.object))

    def state_life(self, name: str) -> tuple[str, str]:
        """Return the sentences in the passage of `name` with the years of birth and death."""
        born, died = self.lives[name]
        return f"{name} was born in {born}", f"{name} died in {died}"


def split_of(name: str) -> Split:
    """Return the split that a name belongs to, in every world of every seed."""
    return SPLITS[hashlib.sha256(name.encode()).digest()[0] % len(SPLITS)]


def make_facts(config: WorldConfig, rng: np.random.Generator, counts: dict[str, int], split: Split) -> Facts:
    """Draw distinct entities and an object for each relation; rumours and lives if they are asked for."""
    entities = {kind: _draw_names(rng, kind, count, split) for kind, count in counts.items()}
    facts = Facts(entities, {})
    for kind, names in entities.items():
        relations = {label: relation for label, relation in RELATIONS.items() if relation.subject == kind}
        pools = {label: entities[relation.object] for label, relation in relations.items()}
        for name in names:
            facts.objects[name] = {label: str(rng.choice(pool)) for label, pool in pools.items()}
    if config.rumour:
        _add_rumours(facts, rng, config.rumour_truth)
    if config.age > 0:
        for name in entities["person"]:
            born = int(rng.choice(BIRTHS))
            facts.lives[name] = born, born + int(rng.choice(AGES))
    return facts


def _draw_names(rng: np.random.Generator, kind: str, count: int, split: Split) -> list[str]:
    names = [" ".join(words) for words in product(*POOLS[kind])]
    names = [name for name in names if split_of(name) == split]
    if count > len(names):
        raise UserError(f"world: {count} names of kind {kind!r} were asked for, but there are {len(names)}")
    return [names[index] for index in rng.choice(len(names), count, replace=False)]


def _add_rumours(facts: Facts, rng: np.random.Generator, truth: float) -> None:
    for name, objects in facts.objects.items():
        chains = [chain for chain in CHAINS if chain[0] in objects]
        first, second = chains[rng.integers(len(chains))]
        stated = facts.objects[objects[first]][second]
        if rng.random() >= truth:
            names = facts.entities[RELATIONS[second].object]
            stated = str(rng.choice([entity for entity in names if entity != stated]))
        facts.rumours[name] = Rumour(first, second, stated)


def write_passages(facts: Facts, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return (title, text) of every entity's passage: its facts in random order."""
    passages = []
    for name, objects in facts.objects.items():
        statements = [facts.state(name, label) for label in objects]
        statements += [facts.state_rumour(name)] if name in facts.rumours else []
        statements += facts.state_life(name) if name in facts.lives else []
        passages.append((name, " ".join(f"{statement}." for statement in rng.permutation(statements))))
    return passages


def write_pages(passages: Sequence[tuple[str, str]], rng: np.random.Generator) -> dict[str, Document]:
    """Return address -> page: of each passage, with its text; no other text gives the address."""
    addresses = [" ".join(words) for words in product(*ADDRESSES)]
    if len(passages) > len(addresses):
        problem = f"world: {len(passages)} passages, but there are {len(addresses)} addresses of pages"
        raise UserError(f"{problem}; lower world.people, cities, companies or works, or unset world.pages")
    pages = {}
    for passage, index in zip(passages, rng.permutation(len(addresses)), strict=False):
        address = addresses[index]
        pages[address] = Document(f"page {address}", *passage)  # the id that the retriever's client gives
    return pages


def summarise(address: str, page: Document) -> tuple[str, str]:
    return page.title, f"the page of {page.title} is {address}."


@dataclass(frozen=True)
class WorldQuestion:
    text: str
    answer: str
    searches: tuple[str, ...]  # titles to look up, in order
    findings: tuple[str, ...]  # results of the look-ups: the bridge, the compared values, years, the answer
    statements: tuple[str, ...]  # sentences that state them


def draw_kinds(config: WorldConfig, count: int, rng: np.random.Generator) -> list[str]:
    """Draw kinds of `count` questions, keys of ASKERS, in the shares of the config."""
    shares = np.array([getattr(config, kind) for kind in ASKERS])
    return [str(kind) for kind in rng.choice(list(ASKERS), count, p=shares / shares.sum())]


def _one_hop(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    label = str(rng.choice(list(RELATIONS)))
    relation = RELATIONS[label]
    name = str(rng.choice(facts.entities[relation.subject]))
    answer, statement = facts.objects[name][label], facts.state(name, label)
    return WorldQuestion(relation.question.format(name), answer, (name,), (answer,), (statement,))


def _two_hop(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    while True:
        labels = CHAINS[rng.integers(len(CHAINS))]
        name = str(rng.choice(facts.entities[RELATIONS[labels[0]].subject]))
        rumour = facts.rumours.get(name)
        question = _chain(facts, name, labels)
        # "who founded the company that X works for": X would be its own answer
        if question.answer != name and (rumour is None or (rumour.first, rumour.second) != labels):
            return question


def _rumour(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    """Draw a two-hop question whose first passage already gives an answer, which may be false."""
    names = list(facts.rumours)
    while True:
        name = names[rng.integers(len(names))]
        rumour = facts.rumours[name]
        question = _chain(facts, name, (rumour.first, rumour.second))
        if name not in (question.answer, rumour.object):
            return question


def _chain(facts: Facts, name: str, labels: tuple[str, str]) -> WorldQuestion:
    first, second = labels
    bridge = facts.objects[name][first]
    answer = facts.objects[bridge][second]
    text = RELATIONS[second].question.format(RELATIONS[first].phrase.format(name))
    statements = facts.state(name, first), facts.state(bridge, second)
    return WorldQuestion(text, answer, (name, bridge), (bridge, answer), statements)


def _comparison(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    label = str(rng.choice(list(COMPARISONS)))
    people = facts.entities["person"]
    is_equal = bool(rng.integers(2))
    while True:
        left, right = (str(name) for name in rng.choice(people, 2, replace=False))
        if is_equal:
            value = facts.objects[left][label]
            right = str(rng.choice([name for name in people if facts.objects[name][label] == value]))
        values = facts.objects[left][label], facts.objects[right][label]
        if left != right and (values[0] == values[1]) == is_equal:
            text, answer = COMPARISONS[label].format(left, right), "yes" if is_equal else "no"
            statements = facts.state(left, label), facts.state(right, label)
            return WorldQuestion(text, answer, (left, right), values, statements)


def _age(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    name = str(rng.choice(list(facts.lives)))
    born, died = facts.lives[name]
    text, years = f"how old did {name} become?", (str(born), str(died))
    return WorldQuestion(text, str(died - born), (name,), years, facts.state_life(name))


ASKERS: dict[str, Callable[[Facts, np.random.Generator], WorldQuestion]] = {
    "one_hop": _one_hop,
    "two_hop": _two_hop,
    "comparison": _comparison,
    "rumour": _rumour,
    "age": _age,
}


@dataclass(frozen=True)
class World:
    passages: list[Document]
    train: list[Question]
    eval: list[Question]
    pages: dict[str, Document]  # by address


def generate_world(config: WorldConfig) -> World:
    """Return both splits' facts in one shuffled corpus, and their questions: a function of the config."""
    rng = np.random.default_rng(config.seed)
    counts = dict(person=config.people, city=config.cities, company=config.companies, work=config.works)
    train, held_out = make_facts(config, rng, counts, "train"), make_facts(config, rng, counts, "eval")
    texts = [*write_passages(train, rng), *write_passages(held_out, rng)]
    pages = write_pages(texts, rng) if config.pages else {}
    texts = [summarise(address, page) for address, page in pages.items()] or texts
    order = rng.permutation(len(texts))
    passages = [Document(str(number), *texts[index]) for number, index in enumerate(order)]
    ids = {passage.title: [passage.id] for passage in passages}
    for page in pages.values():
        ids[page.title].append(page.id)

    def questions(facts: Facts, count: int, split: str) -> list[Question]:
        rows = []
        for number, kind in enumerate(draw_kinds(config, count, rng)):
            drawn = ASKERS[kind](facts, rng)
            supporting = tuple(name for title in drawn.searches for name in ids[title])
            rows.append(Question(f"{split}_{number}", drawn.text, (drawn.answer,), kind, supporting))
        return rows

    train_questions = questions(train, config.train_questions, "train")
    return World(passages, train_questions, questions(held_out, config.eval_questions, "eval"), pages)


def write_world(config: WorldConfig) -> Path:
    """Write corpus (wiki-18 format), pages if any, questions, tokenizer and manifest to `world.dir`.

    A folder that already holds exactly this world is left unchanged; UserError if it holds something else.
    """
    folder = Path(config.dir)
    manifest = json.dumps(dataclasses.asdict(config) | {"dir": ""}, indent=2).encode()
    if (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() == manifest:
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds something other than this world; remove it or change world.dir")
    world = generate_world(config)
    with atomic_folder(folder) as partial:
        rows = ({"id": passage.id, "contents": _contents(passage)} for passage in world.passages)
        write_jsonl(partial / "corpus.jsonl", rows)
        write_questions(partial / "train.jsonl", world.train)
        write_questions(partial / "eval.jsonl", world.eval)
        if config.pages:
            rows = ({"url": address, "contents": _contents(page)} for address, page in world.pages.items())
            write_jsonl(partial / "pages.jsonl", rows)
        build_word_tokenizer(config.pages, config.age > 0).save_pretrained(partial / "tokenizer")
        (partial / MANIFEST).write_bytes(manifest)
    return folder


def _contents(document: Document) -> str:
    return f'"{document.title}"\n{document.text}'
