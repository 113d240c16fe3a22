"""Methods of answering: the agent as trained, baselines without its searches, and controls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from calibadv_jax.config import Config
from calibadv_jax.config.sections.retriever import NO_RETRIEVER_URL
from calibadv_jax.config.sections.rollout import TAGS
from calibadv_jax.core.errors import QueryRefused
from calibadv_jax.core.interfaces import Retriever
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Document, Question

_ANSWER = (
    "the answer, short and without explanation, between <answer> and </answer>, for example"
    " <answer> Beijing </answer>."
)
# Characters of the passages that `with_passages` tries first: a page may have a million, and counting their
# tokens takes long.
FIRST_TRY = 16384
# Number of other questions whose documents `RandomDocuments` tries before a search shows fewer documents than
# the real search found.
MAX_DRAWS = 8


@dataclass(frozen=True)
class Method:
    """How an evaluation answers questions.

    Attributes:
        template: Prompt of a method with a single turn; None: the agent's own prompt and turns.
        asks_retriever: Whether the method needs the retriever.
    """

    template: str | None
    asks_retriever: bool


METHODS = {
    "agent": Method(template=None, asks_retriever=True),
    "direct": Method(
        template=f"Answer the question. Write only {_ANSWER} Question: {{question}}\n",
        asks_retriever=False,
    ),
    "chain_of_thought": Method(
        template=(
            "Answer the question. First reason about it step by step, between <think> and </think>. Then"
            f" write {_ANSWER} Question: {{question}}\n"
        ),
        asks_retriever=False,
    ),
    "rag": Method(
        template=(
            "Answer the question. A search engine found these passages for it; they may lack what is needed."
            f" Write only {_ANSWER}\n{{question}}\n"
        ),
        asks_retriever=True,
    ),
    "empty_retriever": Method(template=None, asks_retriever=False),
    "random_documents": Method(template=None, asks_retriever=True),
}


def method_config(config: Config) -> Config:
    """Return the config with which the trajectories of `evaluate.method` are written."""
    method = METHODS[config.evaluate.method]
    if not method.asks_retriever:
        config = replace(config, retriever=config.retriever.at(NO_RETRIEVER_URL))
    if method.template is None:
        return config
    max_prompt_length = config.rollout.max_prompt_length
    if method.asks_retriever:
        # The passages are in the prompt, so it may be longer by the length of an observation.
        max_prompt_length += config.rollout.max_observation_length
        max_prompt_length = min(max_prompt_length, config.rollout.max_length - 1)
    template = config.evaluate.template or method.template
    # The only turn of these methods answers inside <answer>, whatever the agent's protocol is.
    rollout = replace(config.rollout, protocol=TAGS, max_searches=0, max_prompt_length=max_prompt_length)
    return replace(
        config,
        prompt=replace(config.prompt, template=template, prepend_think=False),
        rollout=rollout,
        reward=replace(config.reward, answer_from="auto"),
    )


def method_retriever(name: str, retriever: Retriever, questions: Sequence[Question], seed: int) -> Retriever:
    """Return the retriever of the agent's searches.

    Args:
        name: Name of the method.
        retriever: The real retriever.
        questions: All questions of the evaluation; "random_documents" shows documents of other ones.
        seed: Seed of these draws.
    """
    if name == "empty_retriever":
        return EmptyRetriever(retriever)
    if name == "random_documents":
        return RandomDocuments(retriever, questions, seed)
    return retriever


class EmptyRetriever:
    """Implements `interfaces.Retriever` without any document.

    Args:
        inner: The real retriever, which is closed with this one.
    """

    def __init__(self, inner: Retriever):
        self.inner = inner

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Return no documents for each query."""
        return [[] for _ in queries]

    async def access(self, addresses: Sequence[str]) -> list[Document | None]:
        """Return no page for each address."""
        return [None for _ in addresses]

    async def close(self) -> None:
        """Close the real retriever."""
        await self.inner.close()


class RandomDocuments(EmptyRetriever):
    """Implements `interfaces.Retriever` with documents of other questions, none of the query's own.

    The same query gets the same documents. There are no pages: no address of an unrelated page is known.

    Args:
        inner: The real retriever.
        questions: Questions whose documents are shown.
        seed: Seed of the draws.
    """

    def __init__(self, inner: Retriever, questions: Sequence[Question], seed: int):
        super().__init__(inner)
        self.seed = seed
        self.texts = sorted({question.text for question in questions})

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        """Return unrelated documents for each query, at most as many as the real search finds."""
        return [await self._unrelated(query) for query in queries]

    async def _unrelated(self, query: str) -> list[Document]:
        (related,) = await self.inner.search([query])
        related_ids = {document.id for document in related}
        unrelated: dict[str, Document] = {}  # by id
        order = random_state(self.seed, 0, f"random documents of {query}").permutation(len(self.texts))
        for index in order[:MAX_DRAWS].tolist():
            try:
                (documents,) = await self.inner.search([self.texts[index]])
            except QueryRefused:  # the service refuses the other question's text, not the policy's query
                continue
            for document in documents:
                if document.id not in related_ids:
                    unrelated[document.id] = document
            if len(unrelated) >= len(related):
                break
        return list(unrelated.values())[: len(related)]


def with_passages(
    question: Question, documents: Sequence[Document], fits: Callable[[Question], bool] = lambda _: True
) -> Question:
    """Put passages before a question's text, for one-shot RAG; cut off their end where they do not fit.

    Args:
        question: The question.
        documents: Documents that a search with the question's text found, best first.
        fits: Returns whether the prompt of a question with passages is short enough. If it is for some
            length of the passages, it must be for every shorter length.
    """
    lines = []
    for number, document in enumerate(documents, 1):
        text = " ".join(document.text.split())
        lines.append(f'Passage {number}: "{document.title}" {text}')
    passages = "\n".join(lines)

    def with_beginning(length: int) -> Question:
        """Return the question with so many characters of the passages."""
        beginning = f"{passages[:length]}\n" if length else ""
        return replace(question, text=f"{beginning}Question: {question.text}")

    limit = FIRST_TRY
    while limit < len(passages) and fits(with_beginning(limit)):
        limit *= 2
    if limit >= len(passages) and fits(with_beginning(len(passages))):
        return with_beginning(len(passages))
    # The longest beginning that fits is one shorter than the shortest that does not.
    lengths = range(1, min(limit, len(passages)) + 1)
    longest = bisect_left(lengths, True, key=lambda length: not fits(with_beginning(length)))
    return with_beginning(longest)
