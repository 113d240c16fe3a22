"""World."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.words import ADDRESSES, AGES, BIRTHS, POOLS, build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import replacing_folder, write_jsonl
from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.questions import write_questions

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


SUMMARY = "the page of {} is {}"  # its title and its address


@dataclass(frozen=True)
class Passage:
    """One article of the encyclopedia."""

    id: str
    title: str
    text: str


@dataclass(frozen=True)
class Page:
    """What a passage only has the address of."""

    address: str
    title: str
    text: str

    @property
    def id(self) -> str:
        """As the retriever's client calls the document."""
        return f"page {self.address}"


def write_passages(facts: Facts, rng: np.random.Generator) -> list[tuple[str, str]]:
    """(title, text) of every entity's passage: its facts in random order."""
    passages = []
    for name, objects in facts.objects.items():
        statements = [facts.state(name, label) for label in objects]
        if name in facts.rumours:
            statements.append(facts.state_rumour(name))
        if name in facts.lives:
            statements += facts.state_life(name)
        passages.append((name, " ".join(f"{statement}." for statement in rng.permutation(statements))))
    return passages


def write_pages(passages: Sequence[tuple[str, str]], rng: np.random.Generator) -> list[Page]:
    """A page of each passage, with its text, at an address that nothing else tells.

    Raises:
        UserError: there are more passages than addresses.
    """
    addresses = [f"{a} {b}" for a in ADDRESSES[0] for b in ADDRESSES[1]]
    if len(passages) > len(addresses):
        raise UserError(
            f"world: {len(passages)} passages, but there are {len(addresses)} addresses of pages; lower"
            " world.people, cities, companies or works, or set world.pages=false"
        )
    order = rng.permutation(len(addresses))
    return [Page(addresses[at], *passage) for at, passage in zip(order, passages, strict=False)]


def summarise(page: Page) -> tuple[str, str]:
    """(title, text) of the passage that leads to a page."""
    return page.title, f"{SUMMARY.format(page.title, page.address)}."


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


@dataclass(frozen=True)
class World:
    """One corpus for both splits, and the questions of each."""

    passages: list[Passage]
    train: list[Question]
    eval: list[Question]
    pages: list[Page] = field(default_factory=list)


def generate_world(config: WorldConfig) -> World:
    """Both splits' facts in one shuffled corpus, and their questions. A function of the config alone."""
    rng = np.random.default_rng(config.seed)
    counts = {
        "person": config.people,
        "city": config.cities,
        "company": config.companies,
        "work": config.works,
    }
    splits = {split: facts_of(config, rng, counts, split) for split in ("train", "eval")}
    texts = [text for facts in splits.values() for text in write_passages(facts, rng)]
    pages = write_pages(texts, rng) if config.pages else []
    texts = [summarise(page) for page in pages] or texts
    order = rng.permutation(len(texts))
    passages = [Passage(str(number), *texts[index]) for number, index in enumerate(order)]
    ids = {passage.title: [passage.id] for passage in passages}
    for page in pages:
        ids[page.title].append(page.id)
    return World(
        passages,
        _questions(splits["train"], config, config.train_questions, "train", ids, rng),
        _questions(splits["eval"], config, config.eval_questions, "eval", ids, rng),
        pages,
    )


def _questions(
    facts: Facts,
    config: WorldConfig,
    count: int,
    split: str,
    ids: dict[str, list[str]],
    rng: np.random.Generator,
) -> list[Question]:
    kinds = draw_kinds(config, count, rng)
    questions = []
    for number, kind in enumerate(kinds):
        asked = ask(facts, kind, rng)
        supporting = tuple(one for title in asked.searches for one in ids[title])
        questions.append(Question(f"{split}_{number}", asked.text, (asked.answer,), asked.kind, supporting))
    return questions


def write_world(config: WorldConfig) -> Path:
    """Writes corpus.jsonl (wiki-18 format), train.jsonl, eval.jsonl, tokenizer/ and manifest.json.

    A world with pages has pages.jsonl too.

    A folder that already holds exactly this world is left unchanged.

    Raises:
        UserError: the folder holds something else.
    """
    folder = Path(config.dir)
    manifest = dataclasses.asdict(config) | {"dir": ""}
    if _manifest(folder) == manifest:
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds something other than this world; remove it or change world.dir")
    world = generate_world(config)
    with replacing_folder(folder) as partial:
        write_corpus(partial / "corpus.jsonl", world.passages)
        write_questions(partial / "train.jsonl", world.train)
        write_questions(partial / "eval.jsonl", world.eval)
        if config.pages:
            rows = ({"url": page.address, "contents": _contents(page)} for page in world.pages)
            write_jsonl(partial / "pages.jsonl", rows)
        build_word_tokenizer(config.pages, config.age > 0).save_pretrained(partial / "tokenizer")
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    return folder


def _manifest(folder: Path) -> dict[str, Any] | None:
    """What the folder says that it holds; a key that is newer than the folder has its default there."""
    try:
        known = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return dataclasses.asdict(WorldConfig()) | known if isinstance(known, dict) else None


def write_corpus(path: Path, passages: Sequence[Passage]) -> None:
    """One ``{"id", "contents"}`` row a passage; contents is the quoted title, a newline, the text."""
    write_jsonl(path, ({"id": one.id, "contents": _contents(one)} for one in passages))


def _contents(one: Passage | Page) -> str:
    return f'"{one.title}"\n{one.text}'
