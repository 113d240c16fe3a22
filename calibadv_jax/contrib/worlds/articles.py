"""The texts of the generated encyclopedia: passages, and the pages that some worlds have behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calibadv_jax.contrib.worlds.facts import Facts
from calibadv_jax.contrib.worlds.words import ADDRESSES
from calibadv_jax.core.errors import UserError

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
