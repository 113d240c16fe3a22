"""Demonstrations from annotated questions: ``calibadv demonstrate --config FILE [key.path=value …]``.

For each question of data.train that names its supporting passages: searches of the configured retriever that
find them, thoughts that quote them, the answer. A title is tried as a query only where the question or a
passage shown before mentions it, so that no demonstration uses knowledge that the policy could not have.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from calibadv_jax.commands.demonstration_encoder import make_encoder
from calibadv_jax.commands.demonstration_tokens import DemonstrationEncoder
from calibadv_jax.config import Config
from calibadv_jax.config.kept import refuse_other_run
from calibadv_jax.contrib.cli.prepare_data import count_rows, question_key
from calibadv_jax.contrib.support_search import (
    YES_NO,
    Lookup,
    SearchFunction,
    answer_in,
    find_support,
    find_varied_support,
    holds,
    look_up_each,
    read_passages,
)
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_jsonl
from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import SEARCH_GRAMMAR
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn, demonstration_row
from calibadv_jax.data.questions import load_questions
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rollout.actions import SearchAction
from calibadv_jax.run.configured_actions import make_actions
from calibadv_jax.run.model import build_model
from calibadv_jax.services.retriever_process import open_retriever

# Why a question gives no demonstration -> what to do. "longer than KEY" is not listed: raise that key.
CAUSES = {
    "no supporting_ids": "name the passages that answer a question in 'supporting_ids'",
    "passage unknown": "the ids in 'supporting_ids' must be those of retriever.corpus",
    "not found": "the index does not find the passages in rollout.max_searches searches",
    "cut off": "raise rollout.max_observation_length, or lower retriever.topk",
    "answer not in the passages": "the supporting passages must hold a golden answer",
}
MAX_QUOTE = 40  # largest number of words of a passage that a thought quotes
STRIDE = 10  # words between the beginnings of two quotes from a sentence longer than MAX_QUOTE
_TAGS = Neutraliser(SEARCH_GRAMMAR)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def run(config: Config) -> None:
    """Write the demonstrations, and print the outcomes of the questions of each data source.

    Raises:
        UserError: a key is missing, no question gives a demonstration, or a file or service cannot be used.
    """
    console = Console(config.log.progress)
    output = config.sft.demonstrations
    corpus = config.retriever.corpus
    if not output or output == "world":
        raise UserError(f"sft.demonstrations is {output!r}: set it to the file to write, such as demos.jsonl")
    if not corpus:
        raise UserError("retriever.corpus is empty: set it to the file of the passages with their titles")
    refuse_other_run(Path(output), "sft.demonstrations", Path(config.run.dir))
    actions = make_actions(config) or (SearchAction(),)
    if SearchAction.name not in [action.name for action in actions]:
        raise UserError("tools has no search, and it is searches that are demonstrated: put it into tools")
    tokenizer = build_model(config, config.sft.init_from or config.policy.path).tokenizer
    encoder = make_encoder(config, tokenizer)
    questions = load_questions(config.data.train, config.data.columns)
    supporting_ids = {name for question in questions for name in question.supporting_ids}
    passages = read_passages(corpus, supporting_ids)
    find = find_varied_support if config.sft.first_query == "varied" else find_support

    async def attempt(question: Question, search: SearchFunction) -> Demonstration | str:
        """Return the demonstration of a question, or the cause why there is none."""
        if not question.supporting_ids:
            return "no supporting_ids"
        if passages.keys().isdisjoint(question.supporting_ids):
            return "passage unknown"
        lookups = await find(question, passages, search, config.rollout.max_searches)
        if not lookups:
            return "not found"
        result = demonstrate(question, lookups, encoder.shown_documents, encoder.turn_neutraliser)
        if isinstance(result, str):
            return result
        key = _exceeded_limit(result, config, encoder)
        return f"longer than {key}" if key else result

    with (
        open_retriever(config.retriever, Path(config.run.dir) / "retriever.log", console.warn) as url,
        console.bar("search", len(questions), "questions") as show,
    ):
        results = look_up_each(config.retriever, url, questions, attempt, show)
    demonstrations = [result for result in results if not isinstance(result, str)]
    outcomes = [_outcome(result) for result in results]
    if not demonstrations:
        _refuse_no_demonstration(config, outcomes)
    write_jsonl(Path(output), map(demonstration_row, demonstrations))
    console.say(_outcomes_table(questions, outcomes))
    console.note(f"{len(demonstrations)} demonstrations written to {output}")


def _outcome(result: Demonstration | str) -> str:
    """Return the cause why there is no demonstration, or the number of its searches."""
    if isinstance(result, str):
        return result
    num_searches = len(result.turns) - 1  # the last turn answers
    return f"written, {num_searches} search"


def _refuse_no_demonstration(config: Config, outcomes: Sequence[str]) -> NoReturn:
    """Raise UserError with the number of questions and the advice of each cause."""
    reasons = []
    for cause, count in Counter(outcomes).most_common():
        reasons.append(f"{count} {cause} ({CAUSES.get(cause, 'raise it')})")
    raise UserError(
        f"{config.data.train}: none of {len(outcomes)} questions gives a demonstration: {'; '.join(reasons)}"
    )


def _outcomes_table(questions: Sequence[Question], outcomes: Sequence[str]) -> str:
    sources = [question.data_source for question in questions]
    counts = Counter(zip(sources, outcomes, strict=True))
    columns = sorted(set(outcomes))
    return table(count_rows(counts, columns), ["data source", *columns])


def _exceeded_limit(demonstration: Demonstration, config: Config, encoder: DemonstrationEncoder) -> str:
    """Return the key of the first limit that the demonstration exceeds; "" if it exceeds none."""
    rollout = config.rollout
    prompt, _ = encoder.protocol.open_prompt(demonstration.question, sys.maxsize)
    if len(prompt) > rollout.max_prompt_length:  # checked first: the encoder refuses such prompts
        return "rollout.max_prompt_length"
    if max(encoder.turn_lengths(demonstration)) > rollout.max_turn_length:
        return "rollout.max_turn_length"
    length = encoder.length(demonstration)
    if length > rollout.max_length:
        return "rollout.max_length"
    if length > config.sft_row_length:
        return "sft.pack_length"
    return ""


def demonstrate(
    question: Question,
    lookups: Sequence[Lookup],
    shown: Callable[[Sequence[Document]], str],
    neutraliser: Neutraliser = _TAGS,
) -> Demonstration | str:
    """Write the demonstration of a question: searches, thoughts that quote documents, and the answer.

    Args:
        question: the question, with its golden answers.
        lookups: the searches, in order.
        shown: returns documents as the policy is shown them, perhaps cut off.
        neutraliser: removes markup of the protocol from queries, quotes and answer.

    Returns:
        The demonstration, or a key of CAUSES where there is none.
    """

    clean = neutraliser.neutralise
    first_query = lookups[0].query if lookups else question.text
    if question.text in first_query:
        thought = "I have to look this up."
    else:
        thought = f"I have to look up {clean(first_query)}."
    turns = []
    quotes: list[str] = []
    for index, lookup in enumerate(lookups):
        search = f"<think> {thought} </think>\n<search> {clean(lookup.query)} </search>"
        turns.append(DemoTurn(search, lookup.documents))
        seen = shown(lookup.documents)
        supporting = [document for document in lookup.documents if document.id in lookup.new_ids]
        new_quotes = [clean(_quote(document, question)) for document in supporting]
        new_quotes = [quote for quote in new_quotes if quote in seen]
        if not new_quotes:
            return "cut off"
        quotes += new_quotes
        is_last = index == len(lookups) - 1
        if not is_last:
            next_query = clean(lookups[index + 1].query)
            reason = _sentence_naming(next_query, lookup.documents, seen, clean) or new_quotes[0]
            thought = f"{reason} Now I look up {next_query}."
    quote, answer = _quoted_answer(quotes, question)
    if answer is None:
        return "answer not in the passages"
    turns.append(DemoTurn(f"<think> {quote} </think>\n<answer> {clean(answer)} </answer>"))
    return Demonstration(replace(question, prompt=()), tuple(turns))


def _quoted_answer(quotes: Sequence[str], question: Question) -> tuple[str, str | None]:
    """Return the first quote that holds an answer, and the answer; None where no quote holds one.

    A yes or no is in no quote: it follows from all of them.
    """
    for quote in quotes:
        answer = answer_in(quote, question)
        if answer is not None:
            return quote, answer
    golden_answer = question.golden_answers[0]
    if golden_answer.lower() in YES_NO:
        return " ".join(quotes), golden_answer
    return "", None


def _quote(document: Document, question: Question) -> str:
    """Return the first piece of the text with an answer, or else the one with most words of the question."""
    pieces = list(_pieces(document.text))
    for piece in pieces:
        if answer_in(piece, question):
            return piece
    question_words = set(question_key(question.text).split())

    def shared_words(piece: str) -> int:
        return len(question_words & set(question_key(piece).split()))

    return max(pieces, key=shared_words, default="")


def _sentence_naming(
    query: str, documents: Sequence[Document], seen: str, clean: Callable[[str], str]
) -> str:
    """Return the first piece of the documents that names the query and that the policy saw; "" if none."""
    for document in documents:
        for piece in _pieces(document.text):
            if holds(piece, query):
                sentence = clean(piece)
                if sentence in seen:
                    return sentence
    return ""


def _pieces(text: str) -> Iterator[str]:
    """Yield sentences of at most MAX_QUOTE words, then windows of the text of that length."""
    for sentence in _SENTENCE_END.split(text.strip()):
        if 0 < len(sentence.split()) <= MAX_QUOTE:
            yield sentence
    word_spans = [match.span() for match in re.finditer(r"\S+", text)]
    for first in range(0, len(word_spans), STRIDE):
        last = min(first + MAX_QUOTE, len(word_spans)) - 1
        start, _ = word_spans[first]
        _, end = word_spans[last]
        yield text[start:end]
