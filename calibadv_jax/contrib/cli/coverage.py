"""Measures what the index returns for questions: ``calibadv coverage --config FILE [key.path=value …]``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from calibadv_jax.config import Config
from calibadv_jax.contrib.support_search import (
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
    """Print each measure's share of the questions; write the shares, and files of answerable questions.

    Raises:
        UserError: no question file is set, a file is damaged, or the retriever cannot be used.
    """
    console = Console(config.log.progress)
    folder = Path(config.run.dir) / "coverage"
    files = {}
    if config.data.train:
        files["train"] = config.data.train
    if config.data.eval:
        files["eval"] = config.data.eval
    if not files:
        raise UserError("no question file: set data.train, data.eval or both")
    report: dict[str, Shares] = {}
    with (
        locked_output(folder, "coverage of run.dir", console.warn),
        open_retriever(config.retriever, Path(config.run.dir) / "retriever.log", console.warn) as url,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for key, sources in files.items():
            questions = load_questions(sources, config.data.columns)
            with console.bar(f"data.{key}", len(questions), "questions") as show:
                coverages = measure(config, url, questions, show)
            answerable = [
                question
                for question, coverage in zip(questions, coverages, strict=True)
                if coverage["answerable"]
            ]
            write_questions(folder / f"{key}.jsonl", answerable)
            report[key] = summary(questions, coverages)
            console.say(f"data.{key}: share of questions")
            console.say(_shares_table(report[key]))
        write_json(folder / "coverage.json", report)
    console.note(f"answerable questions and figures written to {folder}")


def _shares_table(shares_by_source: Shares) -> str:
    rows = []
    for source, shares in shares_by_source.items():
        cells = ["-" if share is None else share for share in shares.values()]
        rows.append([source, *cells])
    return table(rows, ["data source", "questions", *MEASURES.values()])


def measure(
    config: Config, url: str | Sequence[str], questions: Sequence[Question], show: Callable[[int], object]
) -> list[QuestionCoverage]:
    """Measure the coverage of each question; with a corpus, the titles of its passages are queries too.

    Args:
        config: names the retriever's settings and corpus.
        url: address of the retriever, or several.
        questions: at least one.
        show: called with the number of questions done, after each.

    Returns:
        The coverage of each question, in their order.
    """
    corpus = config.retriever.corpus
    supporting_ids = {name for question in questions for name in question.supporting_ids}
    passages: dict[str, Document] = {}
    if corpus and supporting_ids:
        passages = read_passages(corpus, supporting_ids)

    async def measure_question(question: Question, search: SearchFunction) -> QuestionCoverage:
        titles = [passages[name].title for name in question.supporting_ids if name in passages]
        results = [await search(query) for query in queries_for(question, titles)]
        documents = [document for result in results for document in result]
        by_question = _judge(question, results[0])  # the question itself is the first query
        by_any = _judge(question, documents)
        answer_by_any = by_any["answer"]
        all_by_any = by_any["all_passages"]
        return {
            **by_question,
            "answer_by_any": answer_by_any,
            "all_by_any": all_by_any,
            "answerable": bool(answer_by_any or all_by_any),
        }

    return look_up_each(config.retriever, url, questions, measure_question, show)


def _judge(question: Question, documents: Sequence[Document]) -> QuestionCoverage:
    """Return which of answer, passage and all_passages the documents hold; None where one does not apply."""
    ids = {document.id for document in documents}
    has_passage = [name in ids for name in question.supporting_ids]
    coverage: QuestionCoverage = {"answer": None, "passage": None, "all_passages": None}
    is_yes_no = all(answer.lower() in YES_NO for answer in question.golden_answers)
    if not is_yes_no:
        texts = (f"{document.title}\n{document.text}" for document in documents)
        coverage["answer"] = any(answer_in(text, question) for text in texts)
    if has_passage:
        coverage["passage"] = any(has_passage)
        coverage["all_passages"] = all(has_passage)
    return coverage


def summary(questions: Sequence[Question], coverages: Sequence[QuestionCoverage]) -> Shares:
    """Return data source -> questions, and each measure's share of the questions to which it applies."""
    by_source: dict[str, list[QuestionCoverage]] = {}
    for question, coverage in zip(questions, coverages, strict=True):
        by_source.setdefault(question.data_source, []).append(coverage)
    if len(by_source) > 1:
        by_source = dict(sorted(by_source.items()))
        by_source["all"] = list(coverages)
    shares: Shares = {}
    for source, members in by_source.items():
        shares[source] = {"questions": len(members)}
        for name in MEASURES:
            values: list[bool] = []
            for coverage in members:
                value = coverage[name]
                if value is not None:
                    values.append(value)
            shares[source][name] = sum(values) / len(values) if values else None
    return shares
