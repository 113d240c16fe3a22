"""Ways to the answers of a generated encyclopedia's questions, and demonstrations of them.

The cold start never shows such a way (`world_demonstrations`). These are for the groups of the training
(demonstrations.file): what a policy cannot find by itself is put beside what it samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn

NUM_DOCUMENTS = 3  # Documents that a search returns.


@dataclass(frozen=True)
class WorldQuestion:
    """A question with the way to its answer."""

    text: str
    answer: str
    searches: tuple[str, ...]  # titles to look up, in order
    findings: tuple[str, ...]  # results of the look-ups: the bridge, the compared values, years, the answer
    statements: tuple[str, ...]  # sentences that state them


def whole_ways(
    questions: Sequence[Question],
    ways: Mapping[str, WorldQuestion],
    passages: Sequence[Document],
    seed: int,
) -> Iterator[Demonstration]:
    """Yield a demonstration for each question: all look-ups in order, then the right answer.

    Args:
        questions: Questions of a world without pages, none of them for an age.
        ways: The way to the answer of each question, by its id.
        passages: The corpus. A search shows the passage that it asks for, and others that share a word.
        seed: Decides which others.
    """
    rng = np.random.default_rng(seed)
    by_title = {passage.title: passage for passage in passages}
    by_word: dict[str, list[Document]] = {}
    for passage in passages:
        for word in passage.title.split():
            by_word.setdefault(word, []).append(passage)
    for question in questions:
        way = ways[question.id]
        turns = []
        thought = f"find {way.searches[0]}"
        for title, statement in zip(way.searches, way.statements, strict=True):
            text = f"<think> {thought} </think>\n<search> {title} </search>"
            turns.append(DemoTurn(text, _shown(by_title[title], by_word, rng)))
            thought = statement
        if question.data_source == "comparison":
            thought = " and ".join(way.findings)
        turns.append(DemoTurn(f"<think> {thought} </think>\n<answer> {way.answer} </answer>"))
        yield Demonstration(question, tuple(turns))


def _shown(
    passage: Document, by_word: Mapping[str, Sequence[Document]], rng: np.random.Generator
) -> tuple[Document, ...]:
    """Return a passage, and others whose titles share a word with its title."""
    related = {}
    for word in passage.title.split():
        for other in by_word[word]:
            if other is not passage:
                related[other.id] = other
    pool = list(related.values())
    chosen = rng.permutation(len(pool))[: NUM_DOCUMENTS - 1]
    return (passage, *(pool[index] for index in chosen))
