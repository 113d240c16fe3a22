"""Demonstrate."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from calibadv_jax.commands.sft import demonstration_length
from calibadv_jax.config import Config
from calibadv_jax.config.kept import refuse_other_run
from calibadv_jax.contrib.commands.prepare_data import question_key
from calibadv_jax.contrib.lookups import look_up_each
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_jsonl
from calibadv_jax.core.tags import SEARCH_GRAMMAR, Grammar, neutralise
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn
from calibadv_jax.data.files import read_rows
from calibadv_jax.data.questions import load_questions, question_row
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rollout.actions import Search as SearchAction
from calibadv_jax.rollout.actions import grammar_of
from calibadv_jax.rollout.observation import Observations, encode, neutralise_documents
from calibadv_jax.rollout.prompts import build_prompt
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.model import build_model
from calibadv_jax.services.retriever_process import open_retriever

WRITTEN, NO_LIMIT = "written", 2**31
# Cause for which a question gives no demonstration -> what to do.
CAUSES = {
    "no supporting_ids": "name the passages that answer a question in 'supporting_ids'",
    "passage unknown": "the ids in 'supporting_ids' must be those of retriever.corpus",
    "not found": "the index does not find the passages in rollout.max_searches searches",
    "cut off": "raise rollout.max_observation_length, or lower retriever.topk",
    "answer not in the passages": "the supporting passages must hold a golden answer",
    "long prompt": "raise rollout.max_prompt_length",
    "long turn": "raise rollout.max_turn_length",
    "longer than rollout.max_length": "raise it",
    "longer than sft.row_length": "raise it, or leave it out: it follows rollout.max_length",
}
SEARCH = SearchAction.name


def run(config: Config) -> None:
    """Writes the demonstrations, and prints what became of the questions of each data source.

    Raises:
        UserError: bad input, or no question gives a demonstration.
    """
    console = Console(config.log.progress)
    output, corpus = config.sft.demonstrations, config.retriever.corpus
    if not output or output == "world":
        raise UserError(f"sft.demonstrations is {output!r}: set it to the file to write, such as demos.jsonl")
    if not corpus:
        raise UserError(
            "retriever.corpus is empty: set it to the file of the passages, which names their titles"
        )
    refuse_other_run(Path(output), "sft.demonstrations", Path(config.run.dir))
    grammar = grammar_of(make_actions(config))
    if SEARCH not in grammar.actions:
        raise UserError(f"tools has no {SEARCH}, and it is searches that are demonstrated: put it into tools")
    tokenizer = build_model(config, config.sft.init_from or config.policy.path).tokenizer
    questions = load_questions(config.data.train, config.data.columns)
    passages = read_passages(corpus, {name for one in questions for name in one.supporting_ids})
    searches = find_varied_support if config.sft.first_query == "varied" else find_support
    named = [one for one in questions if any(name in passages for name in one.supporting_ids)]

    async def find(question: Question, search: Search) -> list[Lookup]:
        return await searches(question, passages, search, config.rollout.max_searches)

    with (
        open_retriever(config.retriever, Path(config.run.dir) / "retriever.log", console.warn) as url,
        console.bar("search", len(named), "questions") as show,
    ):
        found = look_up_each(config.retriever, url, named, find, show)
    counts: Counter[tuple[str, str]] = Counter(
        (question.data_source, "passage unknown" if question.supporting_ids else "no supporting_ids")
        for question in questions
        if not any(name in passages for name in question.supporting_ids)
    )
    kept = []
    for question, lookups in zip(named, found, strict=True):
        made: Demonstration | str = "not found"
        if is_complete(question, passages, lookups):
            made = demonstrate(
                question, lookups, lambda documents: _shown(config, tokenizer, documents), grammar
            )
        if isinstance(made, Demonstration):
            made = _too_long(made, config, tokenizer) or made
        if isinstance(made, Demonstration):
            kept.append(made)
        what = f"{WRITTEN}, {len(lookups)} search" if isinstance(made, Demonstration) else made
        counts[question.data_source, what] += 1
    if not kept:
        causes = Counter(cause for _, cause in counts.elements()).most_common()
        reasons = "; ".join(f"{number} {cause} ({CAUSES[cause]})" for cause, number in causes)
        raise UserError(
            f"{config.data.train}: none of {len(questions)} questions gives a demonstration: {reasons}"
        )
    _write(Path(output), kept)
    console.say(_count_table(counts))
    console.note(f"{len(kept)} demonstrations written to {output}")


def _shown(config: Config, tokenizer: Any, documents: Sequence[Document]) -> str:
    """What the policy would see of the documents."""
    actions = make_actions(config)
    search = next((one for one in actions if one.name == SEARCH), SearchAction())
    shown = Observations(tokenizer, config.rollout.max_observation_length, config.prompt.opening).of(search)
    return shown.of_documents(neutralise_documents(documents, tokenizer, grammar_of(actions)))[1]


def _too_long(demonstration: Demonstration, config: Config, tokenizer: Any) -> str:
    """Return the limit of the config that the demonstration exceeds, as named in CAUSES, or ""."""
    rollout = config.rollout
    prompt = build_prompt(demonstration.question, tokenizer, config.prompt, NO_LIMIT, make_actions(config))
    longest_turn = max(len(encode(tokenizer, turn.text)) for turn in demonstration.turns)
    if len(prompt) > rollout.max_prompt_length:
        return "long prompt"
    if longest_turn > rollout.max_turn_length:
        return "long turn"
    length = demonstration_length(demonstration, config, tokenizer)
    if length > rollout.max_length:
        return "longer than rollout.max_length"
    return "longer than sft.row_length" if length > config.sft_row_length else ""


def _write(path: Path, demonstrations: Sequence[Demonstration]) -> None:
    """A file that `data.demonstration_files.load_demonstrations` reads; it appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, map(_row, demonstrations))


def _row(demonstration: Demonstration) -> dict[str, Any]:
    turns = [
        {
            "text": turn.text,
            "documents": [{"id": d.id, "title": d.title, "text": d.text} for d in turn.documents],
        }
        for turn in demonstration.turns
    ]
    return question_row(demonstration.question) | {"turns": turns}


def _count_table(counts: Counter[tuple[str, str]]) -> str:
    """What became of the questions of each data source, and of all."""
    sources = sorted({source for source, _ in counts})
    what = sorted({name for (_, name), number in counts.items() if number})
    rows = [[source, *(counts[source, name] for name in what)] for source in sources]
    rows.append(["all", *(sum(counts[source, name] for source in sources) for name in what)])
    return table(rows, ["data source", *what])


Search = Callable[[str], Awaitable[list[Document]]]  # documents of a query, best first
MAX_QUOTE = 40  # words of a passage that a thought quotes
STRIDE = 10  # words between two places where a quote may begin in a sentence that is longer
FIRST_THOUGHT = "I have to look this up."
YES_NO = ("yes", "no")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_BRACKETS = re.compile(r"\s*\([^()]*\)\s*$")  # Silent Garden (novel)


@dataclass(frozen=True)
class Lookup:
    """One search and what it found."""

    query: str
    documents: tuple[Document, ...]
    found: tuple[str, ...]  # ids of the supporting passages that no search before it found


_IDS = ("id", "_id", "docid", "doc_id", "pid", "passage_id")  # those that the retriever knows


def read_passages(corpus: str | Path, ids: Collection[str]) -> dict[str, Document]:
    """The passages of these ids, from a corpus of rows with an id and contents, or with title and text.

    Raises:
        UserError: no such file, or a malformed row.
    """
    found: dict[str, Document] = {}
    for where, row in read_rows(corpus, "passages"):
        name = next((str(row[key]) for key in _IDS if row.get(key) not in (None, "")), "")
        if name not in ids:
            continue
        title, text = row.get("title"), row.get("text")
        if isinstance(row.get("contents"), str):
            title, _, text = row["contents"].partition("\n")
        if not isinstance(title, str) or not isinstance(text, str):
            raise UserError(f"{where}: expected 'contents', or 'title' and 'text'; correct the row")
        found[name] = Document(name, title.strip().strip('"'), text)
    return found


def holds(text: str, phrase: str) -> bool:
    """Whether the phrase occurs in the text as whole words; case and punctuation do not matter."""
    return f" {question_key(phrase)} " in f" {question_key(text)} "


def answer_in(text: str, question: Question) -> str | None:
    """The first accepted answer that occurs in the text; None for yes and no, which occur by chance."""
    said = (one for one in question.golden_answers if one.lower() not in YES_NO)
    return next((one for one in said if holds(text, one)), None)


def queries_for(question: Question, titles: Sequence[str], titles_first: bool = False) -> list[str]:
    """What is tried, each once: the question, the titles (or these before it), both together."""
    plain = [_plain(title) for title in titles]
    alone = [*plain, question.text] if titles_first else [question.text, *plain]
    return list(dict.fromkeys([*alone, *(f"{question.text} {title}" for title in plain)]))


def _plain(title: str) -> str:
    return _BRACKETS.sub("", title) or title


async def find_support(
    question: Question,
    passages: Mapping[str, Document],
    search: Search,
    max_searches: int,
    first_query: str | None = None,
) -> list[Lookup]:
    """Searches that find the supporting passages of a question; fewer where not all can be found.

    Each is the query that finds most of those that are missing, the one that ranks them best if several do.
    Of equal ones the first search is the question, and a later one a title. Where each of several
    supporting passages holds an answer one of them is enough.

    Args:
        passages: the supporting ones of the corpus, by id.
        first_query: what is searched first; None: the best query.
    """
    missing = list(question.supporting_ids)
    read = question.text
    lookups: list[Lookup] = []
    while missing and len(lookups) < max_searches:
        known = _mentioned(passages, missing, read)
        used = {one.query for one in lookups}
        tried = [query for query in queries_for(question, known, bool(lookups)) if query not in used]
        if first_query is not None and not lookups:
            tried = [first_query]
        results = [await search(query) for query in tried]
        best = max(range(len(tried)), key=lambda index: _worth(results[index], missing), default=None)
        found = [] if best is None else [one.id for one in results[best] if one.id in missing]
        if best is None or not found:
            break
        lookups.append(Lookup(tried[best], tuple(results[best]), tuple(found)))
        missing = [name for name in missing if name not in found]
        read += "".join(f"\n{one.title}\n{one.text}" for one in results[best])
        if _are_alternatives(question, passages):
            break
    return lookups


async def find_varied_support(
    question: Question, passages: Mapping[str, Document], search: Search, max_searches: int
) -> list[Lookup]:
    """As `find_support`, with a first query drawn among those that lead to all that the question needs.

    These are the question and each title that it mentions. The draw depends on the question's id alone. If
    none of them leads to all, the searches are those of `find_support`.
    """
    titles = _mentioned(passages, question.supporting_ids, question.text)
    ways = []
    for query in dict.fromkeys([question.text, *map(_plain, titles)]):
        way = await find_support(question, passages, search, max_searches, query)
        if is_complete(question, passages, way):
            ways.append(way)
    if not ways:
        return await find_support(question, passages, search, max_searches)
    return ways[crc32(question.id.encode()) % len(ways)]


def _mentioned(passages: Mapping[str, Document], names: Collection[str], read: str) -> list[str]:
    """Titles of these passages that the text read so far mentions."""
    titles = [passages[name].title for name in names if name in passages]
    return [title for title in titles if holds(read, _plain(title))]


def _worth(documents: Sequence[Document], missing: Collection[str]) -> tuple[int, int]:
    """How many of the missing passages there are, and how far in front; the larger the better."""
    ranks = [rank for rank, one in enumerate(documents) if one.id in missing]
    return len(ranks), -sum(ranks)


def is_complete(question: Question, passages: Mapping[str, Document], lookups: Sequence[Lookup]) -> bool:
    """Whether the searches found what the question needs."""
    found = {name for one in lookups for name in one.found}
    return bool(found) and (_are_alternatives(question, passages) or found >= set(question.supporting_ids))


def _are_alternatives(question: Question, passages: Mapping[str, Document]) -> bool:
    """Whether each of several supporting passages holds an answer: then they are no steps of one way."""
    known = [passages[name] for name in question.supporting_ids if name in passages]
    return len(known) > 1 and all(answer_in(f"{one.title}\n{one.text}", question) for one in known)


def demonstrate(
    question: Question,
    lookups: Sequence[Lookup],
    shown: Callable[[Sequence[Document]], str],
    grammar: Grammar = SEARCH_GRAMMAR,
) -> Demonstration | str:
    """Searches with their documents, thoughts that quote them, and the answer; or why there is none.

    Args:
        lookups: that found what the question needs.
        shown: documents as the policy sees them, which may cut off the end.
        grammar: of the actions that are on.
    """
    clean = partial(neutralise, grammar=grammar)
    turns = []
    first = lookups[0].query if lookups else question.text
    thought = FIRST_THOUGHT if question.text in first else f"I have to look up {clean(first)}."
    quotes: list[str] = []
    for number, lookup in enumerate(lookups, 1):
        text = f"<think> {thought} </think>\n<search> {clean(lookup.query)} </search>"
        turns.append(DemoTurn(text, lookup.documents))
        seen = shown(lookup.documents)
        support = [one for one in lookup.documents if one.id in lookup.found]
        new = [quote for one in support if (quote := clean(_quote(one, question))) in seen]
        if not new:
            return "cut off"
        quotes += new
        if number < len(lookups):
            query = clean(lookups[number].query)
            thought = f"{_naming(query, lookup.documents, seen, clean) or new[0]} Now I look up {query}."
    held = next((pair for quote in quotes if (pair := (quote, answer_in(quote, question)))[1]), None)
    if held is not None:
        quote, answer = held
    elif question.golden_answers[0].lower() in YES_NO:
        quote, answer = " ".join(quotes), question.golden_answers[0]
    else:
        return "answer not in the passages"
    turns.append(DemoTurn(f"<think> {quote} </think>\n<answer> {clean(str(answer))} </answer>"))
    return Demonstration(replace(question, prompt=()), tuple(turns))


def _quote(document: Document, question: Question) -> str:
    """The sentence with an answer, or the one that has most words of the question; of a long one a part."""
    pieces = list(_pieces(document.text))
    whole = next((piece for piece in pieces if answer_in(piece, question)), None)
    if whole is not None:
        return whole
    asked = set(question_key(question.text).split())
    return max(pieces, key=lambda piece: len(asked & set(question_key(piece).split())), default="")


def _naming(query: str, documents: Sequence[Document], seen: str, clean: Callable[[str], str]) -> str:
    """The first sentence that is seen of the documents and names what is looked up next, or nothing."""
    pieces = (clean(piece) for one in documents for piece in _pieces(one.text) if holds(piece, query))
    return next((piece for piece in pieces if piece in seen), "")


def _pieces(text: str) -> Iterator[str]:
    """Sentences of at most MAX_QUOTE words, then parts of the text that no end of a sentence divides."""
    for sentence in _SENTENCE_END.split(text.strip()):
        if 0 < len(sentence.split()) <= MAX_QUOTE:
            yield sentence
    starts = [found.start() for found in re.finditer(r"\S+", text)]
    ends = [found.end() for found in re.finditer(r"\S+", text)]
    for first in range(0, len(starts), STRIDE):
        yield text[starts[first] : ends[min(first + MAX_QUOTE, len(ends)) - 1]]
