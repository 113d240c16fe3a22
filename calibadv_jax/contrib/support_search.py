"""Searches that find the supporting passages of annotated questions, for `demonstrate` and `coverage`.

A title is tried as a query only where the question or a passage shown before mentions it, so that no
sequence of searches uses knowledge that the searcher could not have.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.contrib.cli.prepare_data import question_key
from calibadv_jax.core.errors import QueryRefused, UserError
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.row_files import read_rows
from calibadv_jax.services.retriever_client import RetrieverClient

MAX_CONCURRENT_QUESTIONS = 128  # the client puts the queries of several questions into one request
YES_NO = ("yes", "no")
# Keys of a corpus's rows that may hold the id of the passage. The retriever reads the same keys.
ID_KEYS = ("id", "_id", "docid", "doc_id", "pid", "passage_id")
_BRACKETS = re.compile(r"\s*\([^()]*\)\s*$")  # as at the end of "Silent Garden (novel)"

Result = TypeVar("Result")
SearchFunction = Callable[[str], Awaitable[list[Document]]]


@dataclass(frozen=True)
class Lookup:
    """A search and the documents that it returned."""

    query: str
    documents: tuple[Document, ...]
    new_ids: tuple[str, ...]  # ids of the supporting passages that no earlier search returned


def look_up_each(
    config: RetrieverConfig,
    url: str | Sequence[str],
    questions: Sequence[Question],
    work: Callable[[Question, SearchFunction], Awaitable[Result]],
    show: Callable[[int], object],
) -> list[Result]:
    """Run `work` on each question, several at a time.

    Args:
        config: settings of the retriever's client.
        url: address of the retriever, or several.
        questions: what to work on.
        work: gets a question and a search function, which returns no documents for a refused query.
        show: called with the number of questions done, after each.

    Returns:
        The result of each question, in their order.
    """
    client = RetrieverClient(config, url)
    slots = asyncio.Semaphore(MAX_CONCURRENT_QUESTIONS)
    num_done = 0

    async def search(query: str) -> list[Document]:
        with suppress(QueryRefused):
            results = await client.search([query])
            return results[0]
        return []

    async def finish(question: Question) -> Result:
        nonlocal num_done
        async with slots:
            result = await work(question, search)
        num_done += 1
        show(num_done)
        return result

    async def finish_all() -> list[Result]:
        try:
            return list(await asyncio.gather(*(finish(question) for question in questions)))
        finally:
            await client.close()

    return asyncio.run(finish_all())


def read_passages(corpus: str | Path, ids: Collection[str]) -> dict[str, Document]:
    """Read the passages of these ids from a corpus.

    Args:
        corpus: file of rows with an id (ID_KEYS) and ``contents``, whose first line is the title, or else
            ``title`` and ``text``.
        ids: ids of the passages to read.

    Returns:
        Id -> passage, without the ids that the corpus lacks.

    Raises:
        UserError: a row of one of the ids has no text.
    """
    passages: dict[str, Document] = {}
    for where, row in read_rows(corpus, "passages"):
        name = _passage_id(row)
        if name not in ids:
            continue
        title = row.get("title")
        text = row.get("text")
        if isinstance(row.get("contents"), str):
            title, _, text = row["contents"].partition("\n")
        if not isinstance(title, str) or not isinstance(text, str):
            raise UserError(f"{where}: expected 'contents', or 'title' and 'text'; correct the row")
        passages[name] = Document(name, title.strip().strip('"'), text)
    return passages


def _passage_id(row: Mapping[str, Any]) -> str:
    """Return the first id of a row that is not empty; "" where there is none."""
    for key in ID_KEYS:
        if row.get(key) not in (None, ""):
            return str(row[key])
    return ""


def holds(text: str, phrase: str) -> bool:
    """Return whether the phrase occurs in the text as whole words, whatever case and punctuation."""
    return f" {question_key(phrase)} " in f" {question_key(text)} "


def answer_in(text: str, question: Question) -> str | None:
    """Return the first accepted answer in the text; yes and no never count, because they occur by chance."""
    for answer in question.golden_answers:
        if answer.lower() not in YES_NO and holds(text, answer):
            return answer
    return None


def queries_for(question: Question, titles: Sequence[str], titles_first: bool = False) -> list[str]:
    """Return the queries to try, each once.

    Args:
        question: its text is a query.
        titles: each is a query, alone and behind the question's text.
        titles_first: whether the titles come before the question.
    """
    plain_titles = [_without_brackets(title) for title in titles]
    queries = [*plain_titles, question.text] if titles_first else [question.text, *plain_titles]
    queries += [f"{question.text} {title}" for title in plain_titles]
    return list(dict.fromkeys(queries))


def _without_brackets(title: str) -> str:
    """Return a title without the explanation in brackets at its end."""
    return _BRACKETS.sub("", title) or title


async def find_support(
    question: Question,
    passages: Mapping[str, Document],
    search: SearchFunction,
    max_searches: int,
    first_query: str | None = None,
) -> list[Lookup]:
    """Find searches that return the supporting passages of a question.

    Each is the query that returns most of the missing passages, the one that ranks them best if several do.
    Of equal ones the first search is the question, and a later one a title. Where each of several supporting
    passages holds an answer, one of them is enough.

    Args:
        question: names its supporting passages.
        passages: the supporting passages, by id.
        search: returns the documents of a query.
        max_searches: number of searches that may be used.
        first_query: query of the first search; None: the best one.

    Returns:
        The searches in order; empty where not all supporting passages can be found.
    """
    missing = list(question.supporting_ids)
    read = question.text  # what the searcher has read so far
    lookups: list[Lookup] = []
    while missing and len(lookups) < max_searches:
        if first_query is not None and not lookups:
            queries = [first_query]
        else:
            titles = _mentioned_titles(passages, missing, read)
            queries = queries_for(question, titles, titles_first=bool(lookups))
        results = {query: await search(query) for query in queries}
        best = _best_query(results, missing)
        documents = results[best]
        new_ids = tuple(document.id for document in documents if document.id in missing)
        if not new_ids:
            return []
        lookups.append(Lookup(best, tuple(documents), new_ids))
        if _are_alternatives(question, passages):
            return lookups
        missing = [name for name in missing if name not in new_ids]
        read += "".join(f"\n{document.title}\n{document.text}" for document in documents)
    return [] if missing else lookups


async def find_varied_support(
    question: Question, passages: Mapping[str, Document], search: SearchFunction, max_searches: int
) -> list[Lookup]:
    """Do as `find_support`, with a first query drawn among those that lead to all supporting passages.

    These are the question and each title that it mentions. The draw depends on the question's id alone.
    """
    titles = _mentioned_titles(passages, question.supporting_ids, question.text)
    first_queries = dict.fromkeys([question.text, *(_without_brackets(title) for title in titles)])
    complete = []
    for first_query in first_queries:
        lookups = await find_support(question, passages, search, max_searches, first_query)
        if lookups:
            complete.append(lookups)
    if complete:
        return complete[crc32(question.id.encode()) % len(complete)]
    return await find_support(question, passages, search, max_searches)


def _mentioned_titles(passages: Mapping[str, Document], ids: Collection[str], read: str) -> list[str]:
    """Return the titles of these passages that the text mentions."""
    titles = [passages[name].title for name in ids if name in passages]
    return [title for title in titles if holds(read, _without_brackets(title))]


def _best_query(results: Mapping[str, Sequence[Document]], missing: Collection[str]) -> str:
    """Return the query with most of the missing passages; of several the first with the best ranks."""

    def worth(query: str) -> tuple[int, int]:
        ranks = [rank for rank, document in enumerate(results[query]) if document.id in missing]
        return len(ranks), -sum(ranks)

    return max(results, key=worth)


def _are_alternatives(question: Question, passages: Mapping[str, Document]) -> bool:
    """Return whether each of several supporting passages holds an answer, so that one is enough."""
    supporting = [passages[name] for name in question.supporting_ids if name in passages]
    texts = [f"{passage.title}\n{passage.text}" for passage in supporting]
    return len(texts) > 1 and all(answer_in(text, question) for text in texts)
