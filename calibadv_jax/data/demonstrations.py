"""A demonstration for the cold start: what the policy should write in each turn."""

from __future__ import annotations

from dataclasses import dataclass

from calibadv_jax.core.trajectory import Document, Question


@dataclass(frozen=True)
class DemoTurn:
    """What the policy should write, and what the retriever would have answered."""

    text: str
    documents: tuple[Document, ...] = ()
    trained: bool = True  # False: context only, not trained on
    observation: str = ""  # shown before the documents: what a tool said, or why it refused


@dataclass(frozen=True)
class Demonstration:
    question: Question
    turns: tuple[DemoTurn, ...]
