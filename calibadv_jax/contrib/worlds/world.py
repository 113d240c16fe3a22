"""A generated encyclopedia: fictional people, cities, companies and books, and questions about them.

Every name is two words. Which split a name belongs to is decided by a hash of the whole name, so that
train, eval and cold-start entities never share a name while every single word occurs in all splits:
words can be learned, facts cannot be memorised and must be searched.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.config.sections.rollout import TAGS, TOOL_CALLS
from calibadv_jax.contrib.worlds.whole_ways import WorldQuestion, whole_ways
from calibadv_jax.contrib.worlds.words import ADDRESSES, AGES, BIRTHS, POOLS, WORDS, build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_folder, write_jsonl, write_text
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import demonstration_row
from calibadv_jax.data.questions import write_questions

Split = Literal["train", "eval", "cold_start"]
SPLITS: tuple[Split, ...] = ("train", "eval", "cold_start")
MANIFEST = "manifest.json"
RUMOUR = "it was written that {}"
COMPARISONS = {
    "home": "do {} and {} live in the same city?",
    "employer": "do {} and {} work for the same company?",
}


@dataclass(frozen=True)
class Relation:
    """A fact type, see ``words.yaml``."""

    subject: str
    object: str
    statement: str
    question: str
    phrase: str


RELATIONS: dict[str, Relation] = {name: Relation(**entry) for name, entry in WORDS["relations"].items()}
# Pairs of relations of which the second asks for a fact of the first one's object.
CHAINS = [
    (first, second)
    for first, to_bridge in RELATIONS.items()
    for second, to_answer in RELATIONS.items()
    if to_bridge.object == to_answer.subject
]


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
        """Return the sentence that states a fact, without a full stop."""
        return RELATIONS[relation].statement.format(name, self.objects[name][relation])

    def state_rumour(self, name: str) -> str:
        """Return the sentence in the passage of `name` that states its rumour."""
        rumour = self.rumours[name]
        bridge = self.objects[name][rumour.first]
        statement = RELATIONS[rumour.second].statement.format(bridge, rumour.object)
        return RUMOUR.format(statement)

    def state_life(self, name: str) -> tuple[str, str]:
        """Return the sentences in the passage of `name` with the years of birth and death."""
        born, died = self.lives[name]
        return f"{name} was born in {born}", f"{name} died in {died}"


def split_of(name: str) -> Split:
    """Return the split that a name belongs to, in every world of every seed."""
    digest = hashlib.sha256(name.encode()).digest()
    return SPLITS[digest[0] % len(SPLITS)]


def make_facts(config: WorldConfig, rng: np.random.Generator, counts: dict[str, int], split: Split) -> Facts:
    """Draw distinct entities and an object for each of their relations.

    Args:
        config: Says whether rumours and years of birth and death are drawn, too.
        rng: Source of the draws.
        counts: Number of entities by kind.
        split: The split of all names.

    Raises:
        UserError: The split has fewer names of a kind.
    """
    entities = {kind: _draw_names(rng, kind, count, split) for kind, count in counts.items()}
    facts = Facts(entities, {})
    for kind, names in entities.items():
        # Relation -> names of its possible objects.
        pools = {
            label: entities[relation.object]
            for label, relation in RELATIONS.items()
            if relation.subject == kind
        }
        for name in names:
            facts.objects[name] = {label: str(rng.choice(pool)) for label, pool in pools.items()}
    if config.rumour:
        _add_rumours(facts, rng, config.rumour_truth)
    if config.age > 0:
        for name in entities["person"]:
            born = int(rng.choice(BIRTHS))
            died = born + int(rng.choice(AGES))
            facts.lives[name] = (born, died)
    return facts


def _all_names(pools: Sequence[Sequence[str]]) -> list[str]:
    """Return every pair of a first and a second word."""
    return [" ".join(words) for words in product(*pools)]


@functools.cache
def _names_of(kind: str, split: Split) -> tuple[str, ...]:
    """Return all names of a kind that belong to a split."""
    return tuple(name for name in _all_names(POOLS[kind]) if split_of(name) == split)


def _draw_names(rng: np.random.Generator, kind: str, count: int, split: Split) -> list[str]:
    names = _names_of(kind, split)
    if count > len(names):
        raise UserError(f"world: {count} names of kind {kind!r} were asked for, but there are {len(names)}")
    indices = rng.choice(len(names), count, replace=False)
    return [names[index] for index in indices]


def _add_rumours(facts: Facts, rng: np.random.Generator, truth: float) -> None:
    """Draw a rumour for every entity, which is true with the probability `truth`."""
    for name, objects in facts.objects.items():
        chains = [chain for chain in CHAINS if chain[0] in objects]
        first, second = chains[rng.integers(len(chains))]
        bridge = objects[first]
        stated = facts.objects[bridge][second]
        if rng.random() >= truth:
            names = facts.entities[RELATIONS[second].object]
            others = [entity for entity in names if entity != stated]
            stated = str(rng.choice(others))
        facts.rumours[name] = Rumour(first, second, stated)


def make_passages(facts: Facts, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return the title and the text of every entity's passage: its facts in random order."""
    passages = []
    for name, objects in facts.objects.items():
        statements = [facts.state(name, label) for label in objects]
        if name in facts.rumours:
            statements.append(facts.state_rumour(name))
        if name in facts.lives:
            statements.extend(facts.state_life(name))
        text = " ".join(f"{statement}." for statement in rng.permutation(statements))
        passages.append((name, text))
    return passages


def make_pages(passages: Sequence[tuple[str, str]], rng: np.random.Generator) -> dict[str, Document]:
    """Give every passage a page with its text, at a random address that no other text mentions.

    Args:
        passages: Titles and texts.
        rng: Source of the addresses.

    Returns:
        The pages by address.

    Raises:
        UserError: There are more passages than addresses.
    """
    addresses = _all_names(ADDRESSES)
    if len(passages) > len(addresses):
        raise UserError(
            f"world: {len(passages)} passages, but there are {len(addresses)} addresses of pages; lower"
            " world.people, cities, companies or works, or unset world.pages"
        )
    pages = {}
    order = rng.permutation(len(addresses))[: len(passages)]
    for (title, text), index in zip(passages, order, strict=True):
        address = addresses[index]
        pages[address] = Document(f"page {address}", title, text)  # the id that the retriever's client gives
    return pages


def summarise(address: str, page: Document) -> tuple[str, str]:
    """Return the title and the text of the passage by which a search finds a page."""
    return page.title, f"the page of {page.title} is {address}."


def draw_kinds(config: WorldConfig, count: int, rng: np.random.Generator) -> list[str]:
    """Draw the kinds of `count` questions, keys of `ASKERS`, in the shares of the config."""
    kinds = list(ASKERS)
    shares = np.array([getattr(config, kind) for kind in kinds])
    probabilities = shares / shares.sum()
    return [str(kind) for kind in rng.choice(kinds, count, p=probabilities)]


def _one_hop(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    label = str(rng.choice(list(RELATIONS)))
    relation = RELATIONS[label]
    name = str(rng.choice(facts.entities[relation.subject]))
    answer = facts.objects[name][label]
    return WorldQuestion(
        relation.question.format(name),
        answer,
        searches=(name,),
        findings=(answer,),
        statements=(facts.state(name, label),),
    )


def _two_hop(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    while True:
        labels = CHAINS[rng.integers(len(CHAINS))]
        first, _ = labels
        name = str(rng.choice(facts.entities[RELATIONS[first].subject]))
        question = _chain(facts, name, labels)
        # "who founded the company that X works for": X would be its own answer.
        answers_itself = question.answer == name
        rumour = facts.rumours.get(name)
        answers_rumour = rumour is not None and (rumour.first, rumour.second) == labels
        if not answers_itself and not answers_rumour:
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
    phrase = RELATIONS[first].phrase.format(name)
    return WorldQuestion(
        RELATIONS[second].question.format(phrase),
        answer,
        searches=(name, bridge),
        findings=(bridge, answer),
        statements=(facts.state(name, first), facts.state(bridge, second)),
    )


def _comparison(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    label = str(rng.choice(list(COMPARISONS)))
    people = facts.entities["person"]
    is_equal = bool(rng.integers(2))
    while True:
        left, right = (str(name) for name in rng.choice(people, 2, replace=False))
        left_value = facts.objects[left][label]
        if is_equal:
            same_value = [name for name in people if facts.objects[name][label] == left_value]
            right = str(rng.choice(same_value))
        right_value = facts.objects[right][label]
        if left == right or (left_value == right_value) != is_equal:
            continue
        return WorldQuestion(
            COMPARISONS[label].format(left, right),
            "yes" if is_equal else "no",
            searches=(left, right),
            findings=(left_value, right_value),
            statements=(facts.state(left, label), facts.state(right, label)),
        )


def _age(facts: Facts, rng: np.random.Generator) -> WorldQuestion:
    name = str(rng.choice(list(facts.lives)))
    born, died = facts.lives[name]
    return WorldQuestion(
        f"how old did {name} become?",
        str(died - born),
        searches=(name,),
        findings=(str(born), str(died)),
        statements=facts.state_life(name),
    )


ASKERS: dict[str, Callable[[Facts, np.random.Generator], WorldQuestion]] = {
    "one_hop": _one_hop,
    "two_hop": _two_hop,
    "comparison": _comparison,
    "rumour": _rumour,
    "age": _age,
}


@dataclass(frozen=True)
class World:
    """A generated corpus and its questions."""

    passages: list[Document]
    train: list[Question]
    eval: list[Question]
    pages: dict[str, Document]  # by address
    # Id of a training question -> the way to its answer.
    ways: dict[str, WorldQuestion] = field(default_factory=dict, repr=False)


def generate_world(config: WorldConfig) -> World:
    """Return the facts of both splits in one shuffled corpus, and their questions.

    Args:
        config: Decides the world completely: equal configs give equal worlds.

    Raises:
        UserError: More names or pages are asked for than there are.
    """
    rng = np.random.default_rng(config.seed)
    counts = {
        "person": config.people,
        "city": config.cities,
        "company": config.companies,
        "work": config.works,
    }
    train = make_facts(config, rng, counts, "train")
    held_out = make_facts(config, rng, counts, "eval")
    texts = [*make_passages(train, rng), *make_passages(held_out, rng)]
    pages: dict[str, Document] = {}
    if config.pages:
        pages = make_pages(texts, rng)
    if pages:
        texts = [summarise(address, page) for address, page in pages.items()]
    passages = []
    for number, index in enumerate(rng.permutation(len(texts))):
        title, text = texts[index]
        passages.append(Document(str(number), title, text))
    # Title -> ids of its passage and its page.
    ids = {passage.title: [passage.id] for passage in passages}
    for page in pages.values():
        ids[page.title].append(page.id)
    ways: dict[str, WorldQuestion] = {}
    train_questions = _draw_questions(config, train, config.train_questions, "train", ids, rng, ways)
    eval_questions = _draw_questions(config, held_out, config.eval_questions, "eval", ids, rng)
    return World(passages, train_questions, eval_questions, pages, ways)


def _draw_questions(
    config: WorldConfig,
    facts: Facts,
    count: int,
    split: str,
    ids: Mapping[str, Sequence[str]],
    rng: np.random.Generator,
    ways: dict[str, WorldQuestion] | None = None,
) -> list[Question]:
    """Draw the questions of a split.

    `ids` has the supporting documents by title; `ways` gets the way to each answer by the question's id.
    """
    questions = []
    for number, kind in enumerate(draw_kinds(config, count, rng)):
        drawn = ASKERS[kind](facts, rng)
        supporting = tuple(document_id for title in drawn.searches for document_id in ids[title])
        if ways is not None:
            ways[f"{split}_{number}"] = drawn
        questions.append(Question(f"{split}_{number}", drawn.text, (drawn.answer,), kind, supporting))
    return questions


def write_world(config: WorldConfig, protocol: str = TAGS) -> Path:
    """Write corpus (wiki-18 format), pages, questions, demonstrations, tokenizer, manifest to `world.dir`.

    A folder that already holds exactly this world is left unchanged.

    Args:
        config: The section `world`.
        protocol: `rollout.protocol`: with "tool_calls" the tokenizer has a chat template.

    Returns:
        The folder.

    Raises:
        UserError: The folder holds something else, or as `generate_world`.
    """
    folder = Path(config.dir)
    manifest = dataclasses.asdict(config) | {"dir": "", "protocol": protocol}
    if _read_manifest(folder) == manifest:
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds something other than this world; remove it or change world.dir")
    world = generate_world(config)
    with atomic_folder(folder) as partial:
        corpus = ({"id": passage.id, "contents": _contents(passage)} for passage in world.passages)
        write_jsonl(partial / "corpus.jsonl", corpus)
        write_questions(partial / "train.jsonl", world.train)
        write_questions(partial / "eval.jsonl", world.eval)
        if config.demonstrations:
            shown = world.train[: config.demonstrations]
            demonstrations = whole_ways(shown, world.ways, world.passages, config.seed)
            write_jsonl(partial / "demonstrations.jsonl", map(demonstration_row, demonstrations))
        if config.pages:
            pages = ({"url": address, "contents": _contents(page)} for address, page in world.pages.items())
            write_jsonl(partial / "pages.jsonl", pages)
        tokenizer = build_word_tokenizer(config.pages, config.age > 0, protocol == TOOL_CALLS)
        tokenizer.save_pretrained(partial / "tokenizer")
        write_text(partial / MANIFEST, json.dumps(manifest, indent=2))
    return folder


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the config of the world in a folder; a key that is newer than the folder has its default.

    Returns:
        The config, or None if the folder has no manifest of a world.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not isinstance(manifest, dict):
        return None
    return dataclasses.asdict(WorldConfig()) | {"protocol": TAGS} | manifest


def _contents(document: Document) -> str:
    """Return title and text in the format of the wiki-18 corpus."""
    return f'"{document.title}"\n{document.text}'
