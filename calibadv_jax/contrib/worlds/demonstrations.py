"""Demonstrations for the cold start: deliberately imperfect ones from fresh worlds.

No generated demonstration shows a complete two-hop solution. Such a question is answered too early,
with the bridge; or the demonstration is cut after the second search; or it begins there, and only the
answer is learned. RL has to put the halves together, and to unlearn answering early. Rumours alone are
shown whole: some are believed at once, and whoever looks further may misread what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.words import AGES, POOLS, YEARS
from calibadv_jax.contrib.worlds.world import (
    Facts,
    WorldQuestion,
    ask,
    draw_kinds,
    facts_of,
    one_hop,
    summarise,
    write_pages,
    write_passages,
)
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn

NUM_DOCUMENTS = 3
PER_WORLD = 100  # demonstrations before a fresh world is drawn
DRILL_SHARE = 0.1  # of the look-ups
COMPARISON_SHARE = 0.25  # of the rest of them
RUMOUR_SHARE = 0.35  # of the rest of them, where there are rumours
AGE_SHARE = 0.4  # of the rest of them, where ages are asked for
SIZES = {"person": 60, "city": 20, "company": 20, "work": 20}


@dataclass(frozen=True)
class Flaws:
    """How imperfect the demonstrations are."""

    guess: float = 0.4  # one_hop, age: answers with any entity of the right kind, or age, without any search
    wrong_name: float = 0.1  # one_hop, age: looks up a similar name first
    unread: float = 0.5  # with pages, one_hop, age: answers so after the search, without reading
    uncalculated: float = 0.6  # age: answers with any age after reading the years
    hasty_bridge: float = 0.4  # two_hop: answers with the bridge
    second_half: float = 0.3  # two_hop: only how the last look-up is read; the rest: cut after two searches
    credulous: float = 0.5  # rumour: answers with what is rumoured; the rest: a whole way
    hasty_comparison: float = 0.4  # comparison: answers at random after the first search


def imperfect(seed: int, config: WorldConfig, flaws: Flaws = Flaws()) -> Iterator[Demonstration]:
    """Endless demonstrations of all question types, in the shares of the config."""
    rng = np.random.default_rng(seed)
    while True:
        world = _ColdStartWorld(rng, config)
        for kind in draw_kinds(config, PER_WORLD, rng):
            yield _demonstrate(world, ask(world.facts, kind, rng), flaws, rng)


def lookups(seed: int, config: WorldConfig) -> Iterator[Demonstration]:
    """Endless careful demonstrations, none of them two-hop: facts are found, quoted and compared."""
    rng = np.random.default_rng(seed)
    careful = Flaws(guess=0.0, unread=0.0, uncalculated=0.0, credulous=1.0, hasty_comparison=0.0)
    comparisons = COMPARISON_SHARE if config.comparison else 0.0
    while True:
        world = _ColdStartWorld(rng, config)
        for _ in range(PER_WORLD):
            if rng.random() < DRILL_SHARE:
                yield _same_or_not(rng)
            elif rng.random() < comparisons:
                yield _demonstrate(world, ask(world.facts, "comparison", rng), careful, rng)
            elif config.rumour and rng.random() < RUMOUR_SHARE:  # draws nothing in a world without rumours
                yield _demonstrate(world, ask(world.facts, "rumour", rng), careful, rng)
            elif config.age and rng.random() < AGE_SHARE:
                yield _demonstrate(world, ask(world.facts, "age", rng), careful, rng)
            else:
                yield _demonstrate(world, one_hop(world.facts, rng), careful, rng)


def drills(seed: int, config: WorldConfig) -> Iterator[Demonstration]:
    """Endless exercises without any search: words to copy, names to compare."""
    rng = np.random.default_rng(seed)
    words = [word for pair in POOLS.values() for pool in pair for word in pool]
    if config.age:
        words += map(str, (*AGES, *YEARS))
    while True:
        text = " ".join(rng.choice(words, rng.integers(8, 25)))
        question = Question("demonstration", text, (text,), "drill")
        yield Demonstration(question, (DemoTurn(f"<answer> {text} </answer>"),))
        yield _same_or_not(rng)


def _same_or_not(rng: np.random.Generator) -> Demonstration:
    """Two names, equal or with a word in common or without: yes or no."""
    first, second = POOLS[("city", "company")[rng.integers(2)]]
    left = [str(rng.choice(first)), str(rng.choice(second))]
    right = list(left)
    if rng.random() < 0.5:
        changed = rng.integers(3)  # first word, second word, both
        right[0] = str(rng.choice(first)) if changed != 1 else left[0]
        right[1] = str(rng.choice(second)) if changed != 0 else left[1]
    text = f"{' '.join(left)} and {' '.join(right)}"
    answer = "yes" if left == right else "no"
    question = Question("demonstration", text, (answer,), "drill")
    return Demonstration(question, (_answer_turn(text, answer),))


GENERATORS: dict[str, Callable[[int, WorldConfig], Iterator[Demonstration]]] = {
    "imperfect": imperfect,
    "lookups": lookups,
    "drills": drills,
}


class _ColdStartWorld:
    """A small world of cold-start entities with a simple replacement for its search engine."""

    def __init__(self, rng: np.random.Generator, config: WorldConfig):
        self.misread = config.misread
        self.facts: Facts = facts_of(config, rng, SIZES, "cold_start")
        self.rng = rng
        texts = write_passages(self.facts, rng)
        pages = write_pages(texts, rng) if config.pages else []
        self.pages = {page.title: page for page in pages}
        texts = [summarise(page) for page in pages] or texts
        self.passages = [Document(str(number), *passage) for number, passage in enumerate(texts)]
        self.by_title = {passage.title: passage for passage in self.passages}
        self.by_word: dict[str, list[Document]] = {}
        for passage in self.passages:
            for word in set(f"{passage.title} {passage.text}".replace(".", "").split()):
                self.by_word.setdefault(word, []).append(passage)

    def similar(self, title: str) -> str:
        """Another entity, with a word in common if there is one."""
        related = sorted(
            {p.title for word in title.split() for p in self.by_word[word] if word in p.title.split()}
            - {title}
        )
        return str(self.rng.choice(related or sorted(set(self.by_title) - {title})))

    def search(self, title: str) -> tuple[Document, ...]:
        """The passage of that title first, as in a search engine, then others that share a word of it."""
        wanted = self.by_title[title]
        related = {p.id: p for word in title.split() for p in self.by_word[word] if p is not wanted}
        pool = list(related.values()) if len(related) >= NUM_DOCUMENTS - 1 else self.passages
        order = self.rng.permutation(len(pool))
        others = [pool[index] for index in order if pool[index] is not wanted][: NUM_DOCUMENTS - 1]
        return (wanted, *others)

    def misread_from(self, documents: Sequence[Document], statement: str) -> tuple[str, str]:
        """Another fact than `statement` in the documents, and its object."""
        others = [
            (self.facts.state(document.title, label), found)
            for document in documents
            for label, found in self.facts.objects[document.title].items()
        ]
        others = [other for other in others if other[0] != statement]
        return others[self.rng.integers(len(others))]


def _search_turn(world: _ColdStartWorld, title: str, thought: str = "") -> DemoTurn:
    thought = thought or f"find {title}"
    return DemoTurn(f"<think> {thought} </think>\n<search> {title} </search>", world.search(title))


def _look_up(world: _ColdStartWorld, title: str, thought: str = "") -> tuple[DemoTurn, ...]:
    """The search for a title and, in a world with pages, the reading of its page."""
    search = _search_turn(world, title, thought)
    if title not in world.pages:
        return (search,)
    page = world.pages[title]
    thought = summarise(page)[1].removesuffix(".")
    text = f"<think> {thought} </think>\n<access> {page.address} </access>"
    return search, DemoTurn(text, (Document(page.id, page.title, page.text),))


def _answer_turn(thought: str, answer: str) -> DemoTurn:
    return DemoTurn(f"<think> {thought} </think>\n<answer> {answer} </answer>")


def _demonstrate(
    world: _ColdStartWorld, asked: WorldQuestion, flaws: Flaws, rng: np.random.Generator
) -> Demonstration:
    question = Question("demonstration", asked.text, (asked.answer,), asked.kind)
    ways = {
        "one_hop": _one_hop,
        "two_hop": _two_hop,
        "rumour": _rumour,
        "comparison": _comparison,
        "age": _age,
    }
    return Demonstration(question, ways[asked.kind](world, asked, flaws, rng))


def _one_hop(
    world: _ColdStartWorld, asked: WorldQuestion, flaws: Flaws, rng: np.random.Generator
) -> tuple[DemoTurn, ...]:
    wanted, statement = asked.searches[0], asked.statements[0]
    hasty = _before_a_guess(world, wanted, flaws, rng)
    if hasty is None:
        return (*_look_up_at_last(world, wanted, flaws, rng), _answer_turn(statement, asked.answer))
    kind = next(kind for kind, names in world.facts.entities.items() if asked.answer in names)
    guess = str(rng.choice(world.facts.entities[kind]))
    return (*hasty, _answer_turn(statement.replace(asked.answer, guess), guess))


def _age(
    world: _ColdStartWorld, asked: WorldQuestion, flaws: Flaws, rng: np.random.Generator
) -> tuple[DemoTurn, ...]:
    (wanted,), (born, died) = asked.searches, asked.findings
    way, said = _before_a_guess(world, wanted, flaws, rng), str(rng.choice(AGES))
    if way is None:
        way = _look_up_at_last(world, wanted, flaws, rng)
        if rng.random() >= flaws.uncalculated:
            thought, said = ". ".join(asked.statements), asked.answer
            text = f"<think> {thought} </think>\n<calculate> {died} - {born} </calculate>"
            way = (*way, DemoTurn(text, observation=said))
    return (*way, _answer_turn(f"{wanted} became {said}", said))


def _before_a_guess(
    world: _ColdStartWorld, wanted: str, flaws: Flaws, rng: np.random.Generator
) -> tuple[DemoTurn, ...] | None:
    """What a demonstration does that then guesses: nothing, or a search alone; None: it does not guess."""
    if rng.random() < flaws.guess:
        return ()
    if world.pages and rng.random() < flaws.unread:
        return (_search_turn(world, wanted),)
    return None


def _look_up_at_last(
    world: _ColdStartWorld, wanted: str, flaws: Flaws, rng: np.random.Generator
) -> tuple[DemoTurn, ...]:
    """The look-up of a title, now and then after a search for a similar one."""
    way = _look_up(world, wanted)
    if rng.random() < flaws.wrong_name:
        way = (_search_turn(world, world.similar(wanted)), *way)
    return way


def _two_hop(
    world: _ColdStartWorld, asked: WorldQuestion, flaws: Flaws, rng: np.random.Generator
) -> tuple[DemoTurn, ...]:
    bridge, answer = asked.findings
    first = _look_up(world, asked.searches[0])
    second = _look_up(world, bridge, asked.statements[0])
    early, last = _answer_turn(asked.statements[0], bridge), _answer_turn(asked.statements[1], answer)
    drawn = rng.random()
    if drawn < flaws.hasty_bridge:
        return *first, early
    if drawn < flaws.hasty_bridge + flaws.second_half:
        return *(replace(turn, trained=False) for turn in second), last
    return *first, *second


def _rumour(
    world: _ColdStartWorld, asked: WorldQuestion, flaws: Flaws, rng: np.random.Generator
) -> tuple[DemoTurn, ...]:
    name, bridge = asked.searches
    first = _look_up(world, name)
    if rng.random() < flaws.credulous:
        return *first, _answer_turn(world.facts.state_rumour(name), world.facts.rumours[name].said)
    second = _look_up(world, bridge, asked.statements[0])
    thought, answer = asked.statements[1], asked.answer
    if rng.random() < world.misread:
        found = [document for turn in second for document in turn.documents]
        thought, answer = world.misread_from(found, thought)
    return *first, *second, _answer_turn(thought, answer)


def _comparison(
    world: _ColdStartWorld, asked: WorldQuestion, flaws: Flaws, rng: np.random.Generator
) -> tuple[DemoTurn, ...]:
    left, right = asked.searches
    if rng.random() < flaws.hasty_comparison:
        guess = str(rng.choice(["yes", "no"]))
        return *_look_up(world, left), _answer_turn(asked.statements[0], guess)
    found = f"{asked.findings[0]} and {asked.findings[1]}"
    return (
        *_look_up(world, left),
        *_look_up(world, right, asked.statements[0]),
        _answer_turn(found, asked.answer),
    )
