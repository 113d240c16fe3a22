"""A generated encyclopedia: fictional people, cities, companies and books, and questions about them.

Every name is two words. Which split a name belongs to is decided by a hash of the whole name, so that
train, eval and cold-start entities never share a name while every single word occurs in all splits:
words can be learned, facts cannot be memorised and must be searched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.data.questions import write_questions
from calibadv_jax.data.word_tokenizer import build_word_tokenizer
from calibadv_jax.data.words import POOLS
from calibadv_jax.errors import UserError
from calibadv_jax.trajectory import Question

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


@dataclass(frozen=True)
class Passage:
    """One article of the encyclopedia."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class WorldQuestion:
    """A question with the way to its answer."""

    kind: Literal["one_hop", "two_hop", "comparison"]
    text: str
    answer: str
    searches: tuple[str, ...]  # titles to look up, in order
    findings: tuple[str, ...]  # what each look-up yields: the bridge, the compared values, the answer
    statements: tuple[str, ...]  # the sentences that say so


@dataclass(frozen=True)
class Facts:
    """The entities of one split and what is true of them."""

    entities: dict[str, list[str]]  # kind -> names
    objects: dict[str, dict[str, str]]  # name -> relation -> object's name

    def look_up(self, name: str, relation: str) -> str:
        return self.objects[name][relation]

    def state(self, name: str, relation: str) -> str:
        return RELATIONS[relation].statement.format(name, self.look_up(name, relation))


@dataclass(frozen=True)
class World:
    """One corpus for both splits, and the questions of each."""

    passages: list[Passage]
    train: list[Question]
    eval: list[Question]


def split_of(name: str) -> Split:
    """The split an entity's name belongs to, in every world of every seed."""
    return SPLITS[hashlib.sha256(name.encode()).digest()[0] % len(SPLITS)]


def make_facts(rng: np.random.Generator, counts: dict[str, int], split: Split) -> Facts:
    """Draws distinct entities of a split, and one object for every relation of each.

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
    return Facts(entities, objects)


def _names(rng: np.random.Generator, kind: str, count: int, split: Split) -> list[str]:
    first, second = POOLS[kind]
    names = [f"{a} {b}" for a in first for b in second]
    names = [name for name in names if split_of(name) == split]
    if count > len(names):
        raise UserError(f"world: {count} names of kind {kind!r} were asked for, but there are {len(names)}")
    return [names[index] for index in rng.choice(len(names), count, replace=False)]


def write_passages(facts: Facts, rng: np.random.Generator) -> list[tuple[str, str]]:
    """(title, text) of every entity's passage: its facts in random order."""
    return [
        (name, " ".join(f"{facts.state(name, label)}." for label in rng.permutation(list(objects))))
        for name, objects in facts.objects.items()
    ]


def ask(facts: Facts, kind: str, rng: np.random.Generator) -> WorldQuestion:
    """Draws a question of a kind: one_hop, two_hop or comparison."""
    return {"one_hop": _one_hop, "two_hop": _two_hop, "comparison": _comparison}[kind](facts, rng)


def _one_hop(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    label = str(rng.choice(list(RELATIONS)))
    relation = RELATIONS[label]
    name = str(rng.choice(facts.entities[relation.subject]))
    answer = facts.look_up(name, label)
    return WorldQuestion(
        "one_hop", relation.question.format(name), answer, (name,), (answer,), (facts.state(name, label),)
    )


def _two_hop(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    while True:
        first, second = CHAINS[rng.integers(len(CHAINS))]
        name = str(rng.choice(facts.entities[RELATIONS[first].subject]))
        bridge = facts.look_up(name, first)
        answer = facts.look_up(bridge, second)
        if answer != name:  # "who founded the company that X works for": X would be its own answer
            text = RELATIONS[second].question.format(RELATIONS[first].phrase.format(name))
            statements = facts.state(name, first), facts.state(bridge, second)
            return WorldQuestion("two_hop", text, answer, (name, bridge), (bridge, answer), statements)


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


def generate_world(config: WorldConfig) -> World:
    """Both splits' facts in one shuffled corpus, and their questions. A function of the config alone."""
    rng = np.random.default_rng(config.seed)
    counts = {
        "person": config.people,
        "city": config.cities,
        "company": config.companies,
        "work": config.works,
    }
    splits = {split: make_facts(rng, counts, split) for split in ("train", "eval")}
    texts = [text for facts in splits.values() for text in write_passages(facts, rng)]
    order = rng.permutation(len(texts))
    passages = [Passage(str(number), *texts[index]) for number, index in enumerate(order)]
    ids = {passage.title: passage.id for passage in passages}
    return World(
        passages,
        _questions(splits["train"], config, config.train_questions, "train", ids, rng),
        _questions(splits["eval"], config, config.eval_questions, "eval", ids, rng),
    )


def _questions(
    facts: Facts,
    config: WorldConfig,
    count: int,
    split: str,
    ids: dict[str, str],
    rng: np.random.Generator,
) -> list[Question]:
    shares = np.array([config.one_hop, config.two_hop, config.comparison])
    kinds = rng.choice(["one_hop", "two_hop", "comparison"], count, p=shares / shares.sum())
    questions = []
    for number, kind in enumerate(kinds):
        asked = ask(facts, str(kind), rng)
        supporting = tuple(ids[title] for title in asked.searches)
        questions.append(Question(f"{split}_{number}", asked.text, (asked.answer,), asked.kind, supporting))
    return questions


def write_world(config: WorldConfig) -> Path:
    """Writes corpus.jsonl (wiki-18 format), train.jsonl, eval.jsonl, tokenizer/ and manifest.json.

    A folder that already holds exactly this world is left unchanged.

    Raises:
        UserError: the folder holds something else.
    """
    folder = Path(config.dir)
    manifest = json.dumps(dataclasses.asdict(config) | {"dir": ""}, indent=2)
    known = folder / "manifest.json"
    if known.is_file() and known.read_text(encoding="utf-8") == manifest:
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds something other than this world; remove it or change world.dir")
    world = generate_world(config)
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_corpus(unfinished / "corpus.jsonl", world.passages)
    write_questions(unfinished / "train.jsonl", world.train)
    write_questions(unfinished / "eval.jsonl", world.eval)
    build_word_tokenizer().save_pretrained(unfinished / "tokenizer")
    (unfinished / "manifest.json").write_text(manifest, encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    unfinished.rename(folder)
    return folder


def write_corpus(path: Path, passages: Sequence[Passage]) -> None:
    """One ``{"id", "contents"}`` row a passage; contents is the quoted title, a newline, the text."""
    with path.open("w", encoding="utf-8") as file:
        for passage in passages:
            row = {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
