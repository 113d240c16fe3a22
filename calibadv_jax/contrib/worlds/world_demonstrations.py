"""Demonstrations for the cold start: deliberately imperfect ones from fresh worlds.

No generated demonstration shows a complete two-hop solution: RL has to put the halves together, and to
unlearn answering early. Only rumours are shown to the end: some are believed, and a demonstration that looks
further may misread what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds import world as worlds
from calibadv_jax.contrib.worlds.whole_ways import WorldQuestion
from calibadv_jax.contrib.worlds.words import AGES, NAMEWORDS, POOLS, YEARS
from calibadv_jax.contrib.worlds.world import ASKERS, draw_kinds
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn

PER_WORLD = 100  # Demonstrations before a fresh world is drawn.
DRILL_SHARE = 0.1  # Share of drills among the demonstrations of `lookups`.
# Each kind's share of the look-ups that no kind before it has taken; the rest is one-hop.
COMPARISON_SHARE = 0.25
RUMOUR_SHARE = 0.35
AGE_SHARE = 0.4
# Share of the two-hop demonstrations without haste that show only how the last look-up is read. The rest is
# cut after two searches.
SECOND_HALF_SHARE = 0.5
CHANGED_SHARE = 0.5  # Share of comparison drills that draw one word of the second name again, or both.
SIZES = {"person": 60, "city": 20, "company": 20, "work": 20}
Turns = tuple[DemoTurn, ...]


@dataclass(frozen=True)
class Flaws:
    """Probabilities of the flaws of a demonstration, by kind of question."""

    guess: float = 0.4  # one_hop, age: answers with any entity of the right kind, or age, without any search
    unread: float = 0.5  # with pages, one_hop, age: answers so after the search, without reading
    uncalculated: float = 0.6  # age: answers with any age after reading the years
    credulous: float = 0.5  # rumour: answers with the rumour; the rest: a whole way
    hasty_comparison: float = 0.4  # comparison: answers at random after the first search


CAREFUL = Flaws(guess=0.0, unread=0.0, uncalculated=0.0, credulous=1.0, hasty_comparison=0.0)


def imperfect(seed: int, config: WorldConfig, flaws: Flaws = Flaws()) -> Iterator[Demonstration]:
    """Generate demonstrations of all kinds of questions, in the shares of the config.

    Args:
        seed: Decides all draws.
        config: The section `world`.
        flaws: Probabilities of the flaws.

    Yields:
        Demonstrations, without end.
    """
    rng = np.random.default_rng(seed)
    while True:
        world = _ColdStartWorld(rng, config)
        for kind in draw_kinds(config, PER_WORLD, rng):
            yield world.demonstrate(kind, flaws)


def lookups(seed: int, config: WorldConfig) -> Iterator[Demonstration]:
    """Generate careful demonstrations, none of them two-hop: facts are found, quoted and compared.

    Args:
        seed: Decides all draws.
        config: The section `world`.

    Yields:
        Demonstrations, without end.
    """
    rng = np.random.default_rng(seed)
    while True:
        world = _ColdStartWorld(rng, config)
        for _ in range(PER_WORLD):
            if rng.random() < DRILL_SHARE:
                yield _same_or_not(rng)
            else:
                yield world.demonstrate(_lookup_kind(config, rng), CAREFUL)


def _lookup_kind(config: WorldConfig, rng: np.random.Generator) -> str:
    """Draw the kind of a look-up."""
    # A number is drawn for comparisons in every world, for the other kinds only if the config asks for them.
    shares = {"comparison": COMPARISON_SHARE if config.comparison else 0.0}
    if config.rumour:
        shares["rumour"] = RUMOUR_SHARE
    if config.age:
        shares["age"] = AGE_SHARE
    for kind, share in shares.items():
        if rng.random() < share:
            return kind
    return "one_hop"


def drills(seed: int, config: WorldConfig) -> Iterator[Demonstration]:
    """Generate exercises without any search: words to copy, and names to compare, in turn.

    Args:
        seed: Decides all draws.
        config: The section `world`.

    Yields:
        Demonstrations, without end.
    """
    rng = np.random.default_rng(seed)
    words = list(NAMEWORDS)
    if config.age:
        words.extend(str(number) for number in (*AGES, *YEARS))
    while True:
        num_words = rng.integers(8, 25)
        text = " ".join(rng.choice(words, num_words))
        question = Question("demonstration", text, (text,), "drill")
        yield Demonstration(question, (DemoTurn(f"<answer> {text} </answer>"),))
        yield _same_or_not(rng)


def _same_or_not(rng: np.random.Generator) -> Demonstration:
    """Ask whether two names are equal; unequal ones may have a word in common."""
    kind = ("city", "company")[rng.integers(2)]
    first_words, second_words = POOLS[kind]
    left = [str(rng.choice(first_words)), str(rng.choice(second_words))]
    right = list(left)
    if rng.random() >= CHANGED_SHARE:
        return _comparison_drill(left, right)
    changed = ("first", "second", "both")[rng.integers(3)]
    if changed != "second":
        right[0] = str(rng.choice(first_words))
    if changed != "first":
        right[1] = str(rng.choice(second_words))
    return _comparison_drill(left, right)


def _comparison_drill(left: list[str], right: list[str]) -> Demonstration:
    text = f"{' '.join(left)} and {' '.join(right)}"
    answer = "yes" if left == right else "no"
    question = Question("demonstration", text, (answer,), "drill")
    return Demonstration(question, (_answer_turn(text, answer),))


Generator = Callable[[int, WorldConfig], Iterator[Demonstration]]
GENERATORS: dict[str, Generator] = {"imperfect": imperfect, "lookups": lookups, "drills": drills}


def _answer_turn(thought: str, answer: str) -> DemoTurn:
    return DemoTurn(f"<think> {thought} </think>\n<answer> {answer} </answer>")


class _ColdStartWorld:
    """A small world of cold-start entities with a simple search engine, and its demonstrations."""

    def __init__(self, rng: np.random.Generator, config: WorldConfig):
        self.rng = rng
        self.misread = config.misread
        self.num_documents = config.documents
        self.detour = config.detour
        self.hasty = config.hasty
        self.facts = worlds.make_facts(config, rng, SIZES, "cold_start")
        texts = worlds.make_passages(self.facts, rng)
        self.pages: dict[str, tuple[str, Document]] = {}  # title -> address and page
        if config.pages:
            pages = worlds.make_pages(texts, rng)
            self.pages = {page.title: (address, page) for address, page in pages.items()}
            texts = [worlds.summarise(address, page) for address, page in pages.items()]
        self.passages = []
        for number, (title, text) in enumerate(texts):
            self.passages.append(Document(str(number), title, text))
        # The search engine finds passages by their titles and by their words.
        self.by_title = {passage.title: passage for passage in self.passages}
        self.by_word: dict[str, list[Document]] = {}
        for passage in self.passages:
            words = f"{passage.title} {passage.text}".replace(".", "").split()
            for word in set(words):
                self.by_word.setdefault(word, []).append(passage)
        self._demonstrators: dict[str, Callable[[WorldQuestion, Flaws], Turns]] = {
            "one_hop": self._one_hop,
            "two_hop": self._two_hop,
            "comparison": self._comparison,
            "rumour": self._rumour,
            "age": self._age,
        }

    def demonstrate(self, kind: str, flaws: Flaws) -> Demonstration:
        """Draw a question of a kind, and answer it with these flaws."""
        drawn = ASKERS[kind](self.facts, self.rng)
        turns = self._demonstrators[kind](drawn, flaws)
        question = Question("demonstration", drawn.text, (drawn.answer,), kind)
        return Demonstration(question, turns)

    def _one_hop(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        (title,) = drawn.searches
        (statement,) = drawn.statements
        turns = self._turns_before_guess(title, flaws)
        if turns is None:
            return (*self._look_up_with_detour(title), _answer_turn(statement, drawn.answer))
        guess = str(self.rng.choice(self._names_like(drawn.answer)))
        return (*turns, _answer_turn(statement.replace(drawn.answer, guess), guess))

    def _names_like(self, answer: str) -> list[str]:
        """Return the names of the answer's kind."""
        for names in self.facts.entities.values():
            if answer in names:
                return names
        raise ValueError(f"{answer} is no entity")

    def _age(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        (title,) = drawn.searches
        born, died = drawn.findings
        turns = self._turns_before_guess(title, flaws)
        answer = str(self.rng.choice(AGES))
        if turns is None:
            turns = self._look_up_with_detour(title)
            if self.rng.random() >= flaws.uncalculated:
                answer = drawn.answer
                thought = ". ".join(drawn.statements)
                text = f"<think> {thought} </think>\n<calculate> {died} - {born} </calculate>"
                turns = (*turns, DemoTurn(text, observation=answer))
        return (*turns, _answer_turn(f"{title} became {answer}", answer))

    def _two_hop(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        name, _ = drawn.searches
        bridge, answer = drawn.findings
        to_bridge, to_answer = drawn.statements
        first = self._look_up(name)
        second = self._look_up(bridge, to_bridge)
        draw = self.rng.random()
        if draw < self.hasty:
            return (*first, _answer_turn(to_bridge, bridge))
        if draw < self.hasty + SECOND_HALF_SHARE * (1 - self.hasty):
            untrained = [replace(turn, trained=False) for turn in second]
            return (*untrained, _answer_turn(to_answer, answer))
        return (*first, *second)

    def _rumour(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        name, bridge = drawn.searches
        to_bridge, to_answer = drawn.statements
        first = self._look_up(name)
        if self.rng.random() < flaws.credulous:
            believed = _answer_turn(self.facts.state_rumour(name), self.facts.rumours[name].object)
            return (*first, believed)
        second = self._look_up(bridge, to_bridge)
        if self.rng.random() >= self.misread:
            return (*first, *second, _answer_turn(to_answer, drawn.answer))
        misread = self._facts_shown(second, without=to_answer)
        thought, answer = misread[self.rng.integers(len(misread))]
        return (*first, *second, _answer_turn(thought, answer))

    def _facts_shown(self, turns: Sequence[DemoTurn], without: str) -> list[tuple[str, str]]:
        """Return the facts in the turns' documents, except one, as sentences with their objects' names."""
        facts = []
        for turn in turns:
            for document in turn.documents:
                for label, name in self.facts.objects[document.title].items():
                    sentence = self.facts.state(document.title, label)
                    if sentence != without:
                        facts.append((sentence, name))
        return facts

    def _comparison(self, drawn: WorldQuestion, flaws: Flaws) -> Turns:
        left, right = drawn.searches
        left_statement, _ = drawn.statements
        if self.rng.random() < flaws.hasty_comparison:
            guess = str(self.rng.choice(["yes", "no"]))
            return (*self._look_up(left), _answer_turn(left_statement, guess))
        first = self._look_up(left)
        second = self._look_up(right, left_statement)
        return (*first, *second, _answer_turn(" and ".join(drawn.findings), drawn.answer))

    def _turns_before_guess(self, title: str, flaws: Flaws) -> Turns | None:
        """Return no turn, or a search alone; None if the demonstration does not guess."""
        if self.rng.random() < flaws.guess:
            return ()
        if self.pages and self.rng.random() < flaws.unread:
            return (self._search_turn(title),)
        return None

    def _look_up_with_detour(self, title: str) -> Turns:
        """Look up a title, with the probability `world.detour` after a search for a similar one."""
        turns = self._look_up(title)
        if self.rng.random() >= self.detour:
            return turns
        similar = self._similar_titles(title) or set(self.by_title) - {title}
        wrong_title = str(self.rng.choice(sorted(similar)))
        return (self._search_turn(wrong_title), *turns)

    def _similar_titles(self, title: str) -> set[str]:
        """Return the other titles that share a word with this one."""
        titles = set()
        for word in title.split():
            for passage in self.by_word[word]:
                if word in passage.title.split():
                    titles.add(passage.title)
        return titles - {title}

    def _look_up(self, title: str, thought: str = "") -> Turns:
        """Return the search for a title and, in a world with pages, the reading of its page."""
        search = self._search_turn(title, thought)
        if title not in self.pages:
            return (search,)
        address, page = self.pages[title]
        _, summary = worlds.summarise(address, page)
        text = f"<think> {summary.removesuffix('.')} </think>\n<access> {address} </access>"
        return search, DemoTurn(text, (page,))

    def _search_turn(self, title: str, thought: str = "") -> DemoTurn:
        """Return a search that finds the passage of that title, and others that share a word of it."""
        if not thought:
            thought = f"find {title}"
        text = f"<think> {thought} </think>\n<search> {title} </search>"
        passage = self.by_title[title]
        related = {}
        for word in title.split():
            for other in self.by_word[word]:
                if other is not passage:
                    related[other.id] = other
        pool = list(related.values())
        num_others = self.num_documents - 1
        if len(pool) < num_others:
            pool = self.passages
        shuffled = [pool[index] for index in self.rng.permutation(len(pool))]
        others = [other for other in shuffled if other is not passage]
        return DemoTurn(text, (passage, *others[:num_others]))
