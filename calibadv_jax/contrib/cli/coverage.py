"""Measures what the index returns for questions: ``calibadv coverage --config FILE [key.path=value …]``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, compress
from pathlib import Path

from calibadv_jax.config import Config
from calibadv_jax.contrib.cli.demonstrate import (
    YES_NO,
    SearchFunction,
    answer_in,
    look_up_each,
    queries_for,
    read_passages,
)
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.locking import locked_output
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.questions import load_questions, write_questions
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.services.retriever_process import open_retriever

# Measure -> its header. The query is the question; any query: it, a title of a supporting passage, or both.
MEASURES = {
    "answer": "answer",
    "passage": "a passage",
    "all_passages": "all passages",
    "answer_by_any": "answer, any query",
    "all_by_any": "all passages, any query",
    "answerable": "answerable",
}
QuestionCoverage = dict[str, bool | None]  # measure -> whether it holds; None: it does not apply
Shares = dict[str, dict[str, float | int | None]]  # data source -> "questions" and MEASURES


def run(config: Config) -> None:
    console = Console(config.log.progress)
    folder = Path(config.run.dir) / "coverage"
    files = {"train": config.data.train, "eval": config.data.eval}
    files = {key: sources for key, sources in files.items() if sources}
    if not files:
        raise UserError("no question file: set data.train, data.eval or both")
    report = {}
    with (
        locked_output(folder, "coverage of run.dir", console.warn),
        open_retriever(config.retriever, Path(config.run.dir) / "retriever.log", console.warn) as url,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for key, sources in files.items():
            questions = load_questions(sources, config.data.columns)
            with console.bar(f"data.{key}", len(questions), "questions") as show:
                coverages = measure(config, url, questions, show)
            answerable = (coverage["answerable"] for coverage in coverages)
            write_questions(folder / f"{key}.jsonl", compress(questions, answerable))
            report[key] = summary(questions, coverages)
            console.say(f"data.{key}: share of questions")
            rows = [
                [source, *("-" if share is None else share for share in shares.values())]
                for source, shares in report[key].items()
            ]
            console.say(table(rows, ["data source", "questions", *MEASURES.values()]))
        write_json(folder / "coverage.json", report)
    console.note(f"answerable questions and figures written to {folder}")


def measure(
    config: Config, url: str | Sequence[str], questions: Sequence[Question], show: Callable[[int], object]
) -> list[QuestionCoverage]:
    """Measure the coverage of each question; with a corpus, the titles of its passages are queries too."""
    corpus = config.retriever.corpus
    named = {name for question in questions for name in question.supporting_ids}
    passages = read_passages(corpus, named) if corpus and named else {}

    async def look(question: Question, search: SearchFunction) -> QuestionCoverage:
        titles = [passages[name].title for name in question.supporting_ids if name in passages]
        results = [await search(query) for query in queries_for(question, titles)]
        first, every = _judge(question, results[0]), _judge(question, list(chain(*results)))
        by_any = {"answer_by_any": every["answer"], "all_by_any": every["all_passages"]}
        return first | by_any | {"answerable": any(by_any.values())}

    return look_up_each(config.retriever, url, questions, look, show)


def _judge(question: Question, documents: Sequence[Document]) -> QuestionCoverage:
    is_yes_no = all(answer.lower() in YES_NO for answer in question.golden_answers)
    texts = (f"{document.title}\n{document.text}" for document in documents)
    ids = {document.id for document in documents}
    supporting = [name in ids for name in question.supporting_ids]
    return {
        "answer": None if is_yes_no else any(answer_in(text, question) for text in texts),
        "passage": any(supporting) if supporting else None,
        "all_passages": all(supporting) if supporting else None,
    }


def summary(questions: Sequence[Question], coverages: Sequence[QuestionCoverage]) -> Shares:
    """Return data source -> questions, and each measure's share of the questions to which it applies."""
    by_source: dict[str, list[QuestionCoverage]] = {}
    for question, coverage in zip(questions, coverages, strict=True):
        by_source.setdefault(question.data_source, []).append(coverage)
    if len(by_source) > 1:
        by_source = dict(sorted(by_source.items())) | {"all": list(coverages)}
    shares: Shares = {}
    for source, members in by_source.items():
        shares[source] = {"questions": len(members)}
        for name in MEASURES:
            values = [value for value in (coverage[name] for coverage in members) if value is not None]
            shares[source][name] = sum(values) / len(values) if values else None
    return shares
