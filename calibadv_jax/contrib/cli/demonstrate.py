"""Demonstrations from annotated questions: ``calibadv demonstrate --config FILE [key.path=value …]``.

For each question of data.train that names its supporting passages: searches of the configured retriever that
find them, thoughts that quote them, the answer. A title is tried as a query only where the question or a
passage shown before mentions it, so that no demonstration knows what it could not know.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from calibadv_jax.commands.sft import demonstration_length
from calibadv_jax.config import Config, RetrieverConfig
from calibadv_jax.config.kept import refuse_other_run
from calibadv_jax.contrib.cli.prepare_data import count_rows, question_key
from calibadv_jax.core.errors import QueryRefused, UserError
from calibadv_jax.core.files import write_jsonl
from calibadv_jax.core.tags import SEARCH_GRAMMAR, Grammar, neutralise, numbered
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn
from calibadv_jax.data.files import read_rows
from calibadv_jax.data.questions import load_questions, question_row
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rollout.actions import SearchAction, grammar_of
from calibadv_jax.rollout.observation import Observations, encode, neutralise_documents
from calibadv_jax.rollout.prompts import open_prompt
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.model import build_model
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_process import open_retriever

# Cause for which a question gives no demonstration -> what to do. For "longer than KEY": raise it.
CAUSES = {
    "no supporting_ids": "name the passages that answer a question in 'supporting_ids'",
    "passage unknown": "the ids in 'supporting_ids' must be those of retriever.corpus",
    "not found": "the index does not find the passages in rollout.max_searches searches",
    "cut off": "raise rollout.max_observation_length, or lower retriever.topk",
    "answer not in the passages": "the supporting passages must hold a golden answer",
}
AT_ONCE = 128  # questions; the client puts their queries into common requests
MAX_QUOTE = 40  # words of a passage that a thought quotes
STRIDE = 10  # words between two places where a quote may begin in a sentence that is longer
YES_NO = ("yes", "no")
ID_KEYS = ("id", "_id", "docid", "doc_id", "pid", "passage_id")  # the retriever reads them too
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_BRACKETS = re.compile(r"\s*\([^()]*\)\s*$")  # Silent Garden (novel)
Result = TypeVar("Result")
SearchFunction = Callable[[str], Awaitable[list[Document]]]


@dataclass(frozen=True)
class Lookup:
    query: str
    documents: tuple[Document, ...]
    new_ids: tuple[str, ...]  # ids of the supporting passages that no search before it found


def run(config: Config) -> None:
    """Write the demonstrations, and print the outcomes of the questions of each data source."""
    console = Console(config.log.progress)
    output, corpus = config.sft.demonstrations, config.retriever.corpus
    if not output or output == "world":
        raise UserError(f"sft.demonstrations is {output!r}: set it to the file to write, such as demos.jsonl")
    if not corpus:
        raise UserError("retriever.corpus is empty: set it to the file of the passages with their titles")
    refuse_other_run(Path(output), "sft.demonstrations", Path(config.run.dir))
    actions = make_actions(config) or (SearchAction(),)
    grammar = grammar_of(actions)
    search_action = next((action for action in actions if action.name == SearchAction.name), None)
    if search_action is None:
        raise UserError("tools has no search, and it is searches that are demonstrated: put it into tools")
    tokenizer = build_model(config, config.sft.init_from or config.policy.path).tokenizer
    questions = load_questions(config.data.train, config.data.columns)
    passages = read_passages(corpus, {name for question in questions for name in question.supporting_ids})
    find = find_varied_support if config.sft.first_query == "varied" else find_support
    observations = Observations(tokenizer, config.rollout.max_observation_length, config.prompt.opening)
    observations = observations.of(search_action)

    def shown(documents: Sequence[Document]) -> str:  # to the policy
        return observations.information(numbered(neutralise_documents(documents, tokenizer, grammar)))[1]

    async def attempt(question: Question, search: SearchFunction) -> Demonstration | str:
        if passages.keys().isdisjoint(question.supporting_ids):
            return "passage unknown" if question.supporting_ids else "no supporting_ids"
        lookups = await find(question, passages, search, config.rollout.max_searches)
        result = demonstrate(question, lookups, shown, grammar) if lookups else "not found"
        if isinstance(result, str):
            return result
        lengths = _lengths(result, config, tokenizer)
        return next((f"longer than {key}" for key, length, limit in lengths if length > limit), result)

    with (
        open_retriever(config.retriever, Path(config.run.dir) / "retriever.log", console.warn) as url,
        console.bar("search", len(questions), "questions") as show,
    ):
        results = look_up_each(config.retriever, url, questions, attempt, show)
    demonstrations = [result for result in results if not isinstance(result, str)]
    outcomes = [
        result if isinstance(result, str) else f"written, {len(result.turns) - 1} search"
        for result in results
    ]
    if not demonstrations:
        causes = Counter(outcomes).most_common()
        reasons = "; ".join(f"{number} {cause} ({CAUSES.get(cause, 'raise it')})" for cause, number in causes)
        none = f"none of {len(questions)} questions gives a demonstration"
        raise UserError(f"{config.data.train}: {none}: {reasons}")
    write_jsonl(Path(output), map(_row, demonstrations))
    counts = Counter(zip((question.data_source for question in questions), outcomes, strict=True))
    columns = sorted(set(outcomes))
    console.say(table(count_rows(counts, columns), ["data source", *columns]))
    console.note(f"{len(demonstrations)} demonstrations written to {output}")


def _lengths(demonstration: Demonstration, config: Config, tokenizer: Any) -> Iterator[tuple[str, int, int]]:
    """Yield keys of the config, each with a length of the demonstration and its limit."""
    rollout, actions = config.rollout, make_actions(config)
    prompt, _ = open_prompt(demonstration.question, tokenizer, config.prompt, sys.maxsize, actions)
    yield "rollout.max_prompt_length", len(prompt), rollout.max_prompt_length
    longest_turn = max(len(encode(tokenizer, turn.text)) for turn in demonstration.turns)
    yield "rollout.max_turn_length", longest_turn, rollout.max_turn_length
    length = demonstration_length(demonstration, config, tokenizer)  # refuses longer prompts
    yield "rollout.max_length", length, rollout.max_length
    yield "sft.pack_length", length, config.sft_row_length


def _row(demonstration: Demonstration) -> dict[str, Any]:
    turns = []
    for turn in demonstration.turns:
        documents = [{"id": d.id, "title": d.title, "text": d.text} for d in turn.documents]
        turns.append({"text": turn.text, "documents": documents})
    return question_row(demonstration.question) | {"turns": turns}


def look_up_each(
    config: RetrieverConfig,
    url: str | Sequence[str],
    questions: Sequence[Question],
    work: Callable[[Question, SearchFunction], Awaitable[Result]],
    show: Callable[[int], object],
) -> list[Result]:
    """Return the result of `work` on each question; its search finds nothing for a refused query."""
    client, slots, numbers = RetrieverClient(config, url), asyncio.Semaphore(AT_ONCE), count(1)

    async def search(query: str) -> list[Document]:
        with suppress(QueryRefused):
            return (await client.search([query]))[0]
        return []

    async def finish(question: Question) -> Result:
        async with slots:
            result = await work(question, search)
        show(next(numbers))
        return result

    async def finish_all() -> list[Result]:
        try:
            return list(await asyncio.gather(*map(finish, questions)))
        finally:
            await client.close()

    return asyncio.run(finish_all())


def read_passages(corpus: str | Path, ids: Collection[str]) -> dict[str, Document]:
    """Return the passages of these ids, from a corpus of rows with an id and contents, or title and text."""
    passages: dict[str, Document] = {}
    for where, row in read_rows(corpus, "passages"):
        name = next((str(row[key]) for key in ID_KEYS if row.get(key) not in (None, "")), "")
        if name in ids:
            title, text = row.get("title"), row.get("text")
            if isinstance(row.get("contents"), str):
                title, _, text = row["contents"].partition("\n")
            if not isinstance(title, str) or not isinstance(text, str):
                raise UserError(f"{where}: expected 'contents', or 'title' and 'text'; correct the row")
            passages[name] = Document(name, title.strip().strip('"'), text)
    return passages


def holds(text: str, phrase: str) -> bool:
    """Return whether the phrase occurs in the text as whole words, whatever case and punctuation."""
    return f" {question_key(phrase)} " in f" {question_key(text)} "


def answer_in(text: str, question: Question) -> str | None:
    """Return the first accepted answer in the text; None for yes and no, which occur by chance."""
    answers = (answer for answer in question.golden_answers if answer.lower() not in YES_NO)
    return next((answer for answer in answers if holds(text, answer)), None)


def queries_for(question: Question, titles: Sequence[str], titles_first: bool = False) -> list[str]:
    """Return the queries to try: the question, the titles (or these before it), both together."""
    plain, text = [_plain(title) for title in titles], question.text
    alone = [*plain, text] if titles_first else [text, *plain]
    return list(dict.fromkeys([*alone, *(f"{text} {title}" for title in plain)]))


def _plain(title: str) -> str:
    return _BRACKETS.sub("", title) or title


async def find_support(
    question: Question,
    passages: Mapping[str, Document],
    search: SearchFunction,
    max_searches: int,
    first_query: str | None = None,
) -> list[Lookup]:
    """Return searches that find the supporting passages of a question; none where not all can be found.

    Each is the query that finds most of the missing passages, the one that ranks them best if several do.
    Of equal ones the first search is the question, and a later one a title. Where each of several
    supporting passages holds an answer one of them is enough. `first_query`: without it the best one.
    """
    missing, read = list(question.supporting_ids), question.text
    lookups: list[Lookup] = []
    while missing and len(lookups) < max_searches:
        queries = queries_for(question, _mentioned(passages, missing, read), bool(lookups))
        queries = queries if first_query is None or lookups else [first_query]
        results = {query: await search(query) for query in queries}
        query = max(results, key=lambda query: _worth(results[query], missing))
        new_ids = tuple(document.id for document in results[query] if document.id in missing)
        if not new_ids:
            return []
        lookups.append(Lookup(query, tuple(results[query]), new_ids))
        if _are_alternatives(question, passages):
            return lookups
        missing = [name for name in missing if name not in new_ids]
        read += "".join(f"\n{document.title}\n{document.text}" for document in results[query])
    return [] if missing else lookups


async def find_varied_support(
    question: Question, passages: Mapping[str, Document], search: SearchFunction, max_searches: int
) -> list[Lookup]:
    """Do as `find_support`, with a first query drawn among those that lead to all supporting passages.

    These are the question and each title that it mentions. The draw depends on the question's id alone.
    """
    titles = map(_plain, _mentioned(passages, question.supporting_ids, question.text))
    queries = dict.fromkeys([question.text, *titles])
    ways = [await find_support(question, passages, search, max_searches, query) for query in queries]
    complete = [way for way in ways if way]
    if complete:
        return complete[crc32(question.id.encode()) % len(complete)]
    return await find_support(question, passages, search, max_searches)


def _mentioned(passages: Mapping[str, Document], names: Collection[str], read: str) -> list[str]:
    titles = [passages[name].title for name in names if name in passages]
    return [title for title in titles if holds(read, _plain(title))]


def _worth(documents: Sequence[Document], missing: Collection[str]) -> tuple[int, int]:
    """Return the number of missing passages among the documents, and their ranks; larger is better."""
    ranks = [rank for rank, document in enumerate(documents) if document.id in missing]
    return len(ranks), -sum(ranks)


def _are_alternatives(question: Question, passages: Mapping[str, Document]) -> bool:
    """Return whether each of several supporting passages holds an answer, so that one is enough."""
    supporting = [passages[name] for name in question.supporting_ids if name in passages]
    texts = [f"{passage.title}\n{passage.text}" for passage in supporting]
    return len(texts) > 1 and all(answer_in(text, question) for text in texts)


def demonstrate(
    question: Question,
    lookups: Sequence[Lookup],
    shown: Callable[[Sequence[Document]], str],
    grammar: Grammar = SEARCH_GRAMMAR,
) -> Demonstration | str:
    """Return searches, thoughts that quote the documents as `shown`, and the answer; or a key of CAUSES."""
    clean = partial(neutralise, grammar=grammar)
    turns = []
    first = lookups[0].query if lookups else question.text
    thought = f"I have to look {'this up' if question.text in first else f'up {clean(first)}'}."
    quotes: list[str] = []
    for number, lookup in enumerate(lookups, 1):
        text = f"<think> {thought} </think>\n<search> {clean(lookup.query)} </search>"
        turns.append(DemoTurn(text, lookup.documents))
        seen = shown(lookup.documents)
        support = [document for document in lookup.documents if document.id in lookup.new_ids]
        new = [clean(_quote(document, question)) for document in support]
        new = [quote for quote in new if quote in seen]
        if not new:
            return "cut off"
        quotes += new
        if number < len(lookups):
            query = clean(lookups[number].query)
            thought = f"{_naming(query, lookup.documents, seen, clean) or new[0]} Now I look up {query}."
    quote = next((quote for quote in quotes if answer_in(quote, question)), "")
    answer = answer_in(quote, question)
    if answer is None and question.golden_answers[0].lower() in YES_NO:
        quote, answer = " ".join(quotes), question.golden_answers[0]
    if answer is None:
        return "answer not in the passages"
    turns.append(DemoTurn(f"<think> {quote} </think>\n<answer> {clean(answer)} </answer>"))
    return Demonstration(replace(question, prompt=()), tuple(turns))


def _quote(document: Document, question: Question) -> str:
    """Return the sentence with an answer, or with most words of the question; of a long one a part."""
    pieces, words = list(_pieces(document.text)), set(question_key(question.text).split())
    best = max(pieces, key=lambda piece: len(words & set(question_key(piece).split())), default="")
    return next((piece for piece in pieces if answer_in(piece, question)), best)


def _naming(query: str, documents: Sequence[Document], seen: str, clean: Callable[[str], str]) -> str:
    """Return the first sentence seen of the documents that names the next query, or nothing."""
    pieces = (clean(piece) for d in documents for piece in _pieces(d.text) if holds(piece, query))
    return next((piece for piece in pieces if piece in seen), "")


def _pieces(text: str) -> Iterator[str]:
    """Yield sentences of at most MAX_QUOTE words, then windows of the text of that length."""
    for sentence in _SENTENCE_END.split(text.strip()):
        if 0 < len(sentence.split()) <= MAX_QUOTE:
            yield sentence
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    for first in range(0, len(spans), STRIDE):
        yield text[spans[first][0] : spans[min(first + MAX_QUOTE, len(spans)) - 1][1]]
