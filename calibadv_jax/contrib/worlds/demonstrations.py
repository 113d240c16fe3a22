"""Demonstrations for the cold start: deliberately imperfect ones from fresh worlds.

No generated demonstration shows a complete two-hop solution: RL has to put the halves together, and to
unlearn answering early. Rumours alone are shown whole: some are believed, and whoever looks further may
misread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds import world as worlds
from calibadv_jax.contrib.worlds.words import AGES, POOLS, YEARS
from calibadv_jax.contrib.worlds.world import ASKERS, WorldQuestion, draw_kinds
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn

NUM_DOCUMENTS = 3
PER_WORLD = 100  # demonstrations before a fresh world is drawn
# Of the look-ups, each share of those that are left by the one before.
DRILL_SHARE, COMPARISON_SHARE, RUMOUR_SHARE, AGE_SHARE = 0.1, 0.25, 0.35, 0.4
SIZES = {"person": 60, "city": 20, "company": 20, "work": 20}
Turns = tuple[DemoTurn, ...]


@dataclass(frozen=True)
class Flaws:
    """Probabilities of the flaws of a demonstration, by kind of question."""

    guess: float = 0.4  # one_hop, age: answers with any entity of the right kind, or age, without any search
    wrong_name: float = 0.1  # one_hop, age: looks up a similar name first
    unread: float = 0.5  # with pages, one_hop, age: answers so after the search, without reading
    uncalculated: float = 0.6  # age: answers with any age after reading the years
    hasty_bridge: float = 0.4  # two_hop: answers with the bridge
    second_half: float = 0.3  # two_hop: only how the last look-up is read; the rest: cut after two searches
    credulous: float = 0.5  # rumour: answers with the rumour; the rest: a whole way
    hasty_comparison: float = 0.4  # comparison: answers at random after the first search


CAREFUL = Flaws(guess=0.0, unread=0.0, uncalculated=0.0, credulous=1.0, hasty_comparison=0.0)


def imperfect(seed: int, config: WorldConfig, flaws: Flaws = Flaws()) -> Iterator[Demonstration]:
    """Yield endless demonstrations of all question types, in the shares of the config."""
    rng = np.random.default_rng(seed)
    while True:
        world = _ColdStartWorld(rng, config)
        for kind in draw_kinds(config, PER_WORLD, rng):
            yield world.demonstrate(kind, flaws)


def lookups(seed: int, config: WorldConfig) -> Iterator[Demonstration]:
    """Yield endless careful demonstrations, none of them two-hop: facts are found, quoted and compared."""
    rng = np.random.default_rng(seed)
    # A number is drawn for comparisons in every world, for the other kinds only where they are asked for.
    shares = {"comparison": COMPARISON_SHARE if config.comparison else 0.0}
    shares |= {"rumour": RUMOUR_SHARE} if config.rumour else {}
    shares |= {"age": AGE_SHARE} if config.age else {}
    while True:
        world = _ColdStartWorld(rng, config)
        for _ in range(PER_WORLD):
            if rng.random() < DRILL_SHARE:
                yield _same_or_not(rng)
            else:
                kinds = (kind for kind, share in shares.items() if rng.random() < share)
                yield world.demonstrate(next(kinds, "one_hop"), CAREFUL)


def drills(seed: int, config: WorldConfig) -> Iterator[Demonstration]:
    """Yield endless exercises without any search: words to copy, names to compare."""
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
    """Ask whether two names are equal; unequal ones may have a word in common."""
    first, second = POOLS[("city", "company")[rng.integers(2)]]
    left = [str(rng.choice(first)), str(rng.choice(second))]
    right = list(left)
    if rng.random() < 0.5:
        changed = rng.integers(3)  # first word, second word, both
        right[0] = str(rng.choice(first)) if changed != 1 else left[0]
        right[1] = str(rng.choice(second)) if changed != 0 else left[1]
    text, answer = f"{' '.join(left)} and {' '.join(right)}", "yes" if left == right else "no"
    return Demonstration(Question("demonstration", text, (answer,), "drill"), (_answer_turn(text, answer),))


Generator = Callable[[int, WorldConfig], Iterator[Demonstration]]
GENERATORS: dict[str, Generator] = {"imperfect": imperfect, "lookups": lookups, "drills": drills}


def _answer_turn(thought: str, answer: str) -> DemoTurn:
    return DemoTurn(f"<think> {thought} </think>\n<answer> {answer} </answer>")


class _ColdStartWorld:
    """A small world of cold-start entities with a simple search engine, and its demonstrations."""

    def __init__(self, rng: np.random.Generator, config: WorldConfig):
        self.misread, self.rng = config.misread, rng
        self.facts = worlds.make_facts(config, rng, SIZES, "cold_start")
        texts = worlds.write_passages(self.facts, rng)
        pages = worlds.write_pages(texts, rng) if config.pages else {}
        self.pages = {page.title: (address, page) for address, page in pages.items()}
        texts = [worlds.summarise(address, page) for address, page in pages.items()] or texts
        self.passages = [Document(str(number), *passage) for number, passage in enumerate(texts)]
        self.by_title = {passage.title: passage for passage in self.passages}
        self.by_word: dict[str, list[Document]] = {}
        for passage in self.passages:
            for word in set(f"{passage.title} {passage.text}".replace(".", "").split()):
                self.by_word.setdefault(word, []).append(passage)

    def demonstrate(self, kind: str, flaws: Flaws) -> Demonstration:
        drawn = ASKERS[kind](self.facts, self.rng)
        turns = getattr(self, f"_{kind}")(drawn, flaws)
        return Demonstration(Question("demonstration", drawn.text, (drawn.answer,), kind), turns)

    def _one_hop(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        (title,), (statement,) = drawn.searches, drawn.statements
        turns = self._turns_before_guess(title, flaws)
        if turns is None:
            return (*self._look_up_with_detour(title, flaws), _answer_turn(statement, drawn.answer))
        names = next(names for names in self.facts.entities.values() if drawn.answer in names)
        guess = str(self.rng.choice(names))
        return (*turns, _answer_turn(statement.replace(drawn.answer, guess), guess))

    def _age(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        (title,), (born, died) = drawn.searches, drawn.findings
        turns, answer = self._turns_before_guess(title, flaws), str(self.rng.choice(AGES))
        if turns is None:
            turns = self._look_up_with_detour(title, flaws)
            if self.rng.random() >= flaws.uncalculated:
                thought, answer = ". ".join(drawn.statements), drawn.answer
                text = f"<think> {thought} </think>\n<calculate> {died} - {born} </calculate>"
                turns = (*turns, DemoTurn(text, observation=answer))
        return (*turns, _answer_turn(f"{title} became {answer}", answer))

    def _two_hop(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        bridge, answer = drawn.findings
        first = self._look_up(drawn.searches[0])
        second = self._look_up(bridge, drawn.statements[0])
        draw = self.rng.random()
        if draw < flaws.hasty_bridge:
            return *first, _answer_turn(drawn.statements[0], bridge)
        if draw < flaws.hasty_bridge + flaws.second_half:
            untrained = (replace(turn, trained=False) for turn in second)
            return *untrained, _answer_turn(drawn.statements[1], answer)
        return *first, *second

    def _rumour(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        name, bridge = drawn.searches
        first = self._look_up(name)
        if self.rng.random() < flaws.credulous:
            return *first, _answer_turn(self.facts.state_rumour(name), self.facts.rumours[name].object)
        second = self._look_up(bridge, drawn.statements[0])
        if self.rng.random() >= self.misread:
            return *first, *second, _answer_turn(drawn.statements[1], drawn.answer)
        other_facts = [
            (sentence, name)
            for turn in second
            for document in turn.documents
            for label, name in self.facts.objects[document.title].items()
            if (sentence := self.facts.state(document.title, label)) != drawn.statements[1]
        ]
        return *first, *second, _answer_turn(*other_facts[self.rng.integers(len(other_facts))])

    def _comparison(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        left, right = drawn.searches
        if self.rng.random() < flaws.hasty_comparison:
            guess = str(self.rng.choice(["yes", "no"]))
            return *self._look_up(left), _answer_turn(drawn.statements[0], guess)
        turns = *self._look_up(left), *self._look_up(right, drawn.statements[0])
        return *turns, _answer_turn(" and ".join(drawn.findings), drawn.answer)

    def _turns_before_guess(self, title: str, flaws: Flaws) -> Turns | None:
        """Return no turn, or a search alone; None where the demonstration does not guess."""
        if self.rng.random() < flaws.guess:
            return ()
        if self.pages and self.rng.random() < flaws.unread:
            return (self._search_turn(title),)
        return None

    def _look_up_with_detour(self, title: str, flaws: Flaws) -> Turns:
        turns = self._look_up(title)
        if self.rng.random() >= flaws.wrong_name:
            return turns
        words = title.split()
        related = {p.title for word in words for p in self.by_word[word] if word in p.title.split()} - {title}
        similar = str(self.rng.choice(sorted(related or set(self.by_title) - {title})))
        return (self._search_turn(similar), *turns)

    def _look_up(self, title: str, thought: str = "") -> Turns:
        """Return the search for a title and, in a world with pages, the reading of its page."""
        search = self._search_turn(title, thought)
        if title not in self.pages:
            return (search,)
        address, page = self.pages[title]
        thought = worlds.summarise(address, page)[1].removesuffix(".")
        return search, DemoTurn(f"<think> {thought} </think>\n<access> {address} </access>", (page,))

    def _search_turn(self, title: str, thought: str = "") -> DemoTurn:
        """Return a search that finds the passage of that title, and others that share a word of it."""
        text = f"<think> {thought or f'find {title}'} </think>\n<search> {title} </search>"
        passage = self.by_title[title]
        related = {p.id: p for word in title.split() for p in self.by_word[word] if p is not passage}
        pool = list(related.values()) if len(related) >= NUM_DOCUMENTS - 1 else self.passages
        others = [pool[index] for index in self.rng.permutation(len(pool)) if pool[index] is not passage]
        return DemoTurn(text, (passage, *others[: NUM_DOCUMENTS - 1]))
