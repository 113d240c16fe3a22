"""Demonstrations from annotated questions: ``calibadv demonstrate --config FILE [key.path=value …]``.

For each question of data.train that names its supporting passages: searches of the configured retriever that
find them, thoughts that quote them, the answer. Written to sft.demonstrations, which `calibadv sft` reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibadv_jax.commands.sft import demonstration_length
from calibadv_jax.config import Config
from calibadv_jax.config.kept import refuse_other_run
from calibadv_jax.contrib.annotated import (
    Lookup,
    Search,
    demonstrate,
    find_support,
    find_varied_support,
    is_complete,
    read_passages,
)
from calibadv_jax.contrib.lookups import look_up_each
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_jsonl
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration
from calibadv_jax.data.questions import load_questions, question_row
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rollout.actions import SearchAction, grammar_of
from calibadv_jax.rollout.observation import Observations, encode, neutralise_documents
from calibadv_jax.rollout.prompts import build_prompt
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.model import build_model
from calibadv_jax.services.retriever_client import open_retriever

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
    """A file that `data.demonstrations.load_demonstrations` reads; it appears when it is complete."""
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
