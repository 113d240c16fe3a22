"""Methods of answering: the agent as trained, baselines without its searches, and controls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from calibadv_jax.config import Config
from calibadv_jax.config.sections.retriever import NO_RETRIEVER
from calibadv_jax.core.errors import QueryRefused
from calibadv_jax.core.interfaces import Retriever
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Document, Question

_ANSWER = (
    "the answer, short and without explanation, between <answer> and </answer>, for example"
    " <answer> Beijing </answer>."
)
FIRST_TRY = 16384  # letters of passages whose tokens are counted first; a page may be a million
MAX_DRAWS = 8  # other questions whose documents are tried, before a search shows fewer than it found


@dataclass(frozen=True)
class Method:
    template: str | None  # prompt of a method with a single turn; None: the agent's own prompt and turns
    asks_retriever: bool


METHODS = {
    "agent": Method(None, True),
    "direct": Method(f"Answer the question. Write only {_ANSWER} Question: {{question}}\n", False),
    "chain_of_thought": Method(
        "Answer the question. First reason about it step by step, between <think> and </think>. Then write"
        f" {_ANSWER} Question: {{question}}\n",
        False,
    ),
    "rag": Method(
        "Answer the question. A search engine found these passages for it; they may lack what is needed."
        f" Write only {_ANSWER}\n{{question}}\n",
        True,
    ),
    "empty_retriever": Method(None, False),
    "random_documents": Method(None, True),
}


def method_config(config: Config) -> Config:
    """Return the config with which the trajectories of `evaluate.method` are written."""
    method, rollout = METHODS[config.evaluate.method], config.rollout
    if not method.asks_retriever:
        config = replace(config, retriever=config.retriever.at(NO_RETRIEVER))
    if method.template is None:
        return config
    longest = rollout.max_prompt_length
    if method.asks_retriever:  # the passages stand in the prompt
        longest = min(longest + rollout.max_observation_length, rollout.max_length - 1)
    template = config.evaluate.template or method.template
    prompt = replace(config.prompt, template=template, prepend_think=False)
    return replace(config, prompt=prompt, rollout=replace(rollout, max_searches=0, max_prompt_length=longest))


def method_retriever(name: str, retriever: Retriever, questions: Sequence[Question], seed: int) -> Retriever:
    """Return the retriever of the agent's searches; "random_documents" draws from all `questions`."""
    if name == "empty_retriever":
        return EmptyRetriever(retriever)
    if name == "random_documents":
        return RandomDocuments(retriever, questions, seed)
    return retriever


class EmptyRetriever:
    """Implements `interfaces.Retriever` without any document."""

    def __init__(self, inner: Retriever):
        self.inner = inner

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        return [[] for _ in queries]

    async def access(self, addresses: Sequence[str]) -> list[Document | None]:
        return [None for _ in addresses]

    async def close(self) -> None:
        await self.inner.close()


class RandomDocuments(EmptyRetriever):
    """Implements `interfaces.Retriever` with documents of other questions, none of the query's own.

    The same query gets the same documents. There are no pages: addresses of unrelated ones are unknown.
    """

    def __init__(self, inner: Retriever, questions: Sequence[Question], seed: int):
        super().__init__(inner)
        self.seed = seed
        self.texts = sorted({question.text for question in questions})

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        return [await self._unrelated(query) for query in queries]

    async def _unrelated(self, query: str) -> list[Document]:
        (related,) = await self.inner.search([query])
        excluded = {document.id for document in related}
        drawn: dict[str, Document] = {}
        order = random_state(self.seed, 0, f"random documents of {query}").permutation(len(self.texts))
        for index in order[:MAX_DRAWS].tolist():
            try:
                (documents,) = await self.inner.search([self.texts[index]])
            except QueryRefused:  # the other question's text, not the policy's query
                continue
            drawn |= {document.id: document for document in documents if document.id not in excluded}
            if len(drawn) >= len(related):
                break
        return list(drawn.values())[: len(related)]


def with_passages(
    question: Question, documents: Sequence[Document], fits: Callable[[Question], bool] = lambda _: True
) -> Question:
    """Put passages before the question's text, for one-shot RAG; cut their end where they do not fit."""
    passages = "\n".join(
        f'Passage {number}: "{document.title}" {" ".join(document.text.split())}'
        for number, document in enumerate(documents, 1)
    )

    def shown(length: int) -> Question:
        beginning = f"{passages[:length]}\n" if length else ""
        return replace(question, text=f"{beginning}Question: {question.text}")

    most = FIRST_TRY
    while most < len(passages) and fits(shown(most)):
        most *= 2
    if most >= len(passages) and fits(shown(len(passages))):
        return shown(len(passages))
    lengths = range(1, min(most, len(passages)) + 1)
    return shown(bisect_left(lengths, True, key=lambda length: not fits(shown(length))))
