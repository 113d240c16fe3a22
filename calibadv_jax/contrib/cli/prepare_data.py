"""Converts and filters question files of any layout: ``calibadv prepare-data INPUT … --output FILE``."""

from __future__ import annotations

import argparse
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.contrib.arguments import number
from calibadv_jax.core.answers import normalise_answer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_write, write_text
from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.golden_answers import NoAnswer
from calibadv_jax.data.layouts import NO_COLUMNS
from calibadv_jax.data.questions import question_row, read_questions, write_questions
from calibadv_jax.data.row_files import Sources, find_files
from calibadv_jax.metrics.console import Console, table

# Outcomes of rows. A dropped row is counted under the reason to drop it.
READ = "read"
WRITTEN = "written"
EXAMPLES = 5  # dropped rows that the report shows for each reason
# Columns of a .parquet file of questions.
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "question": pa.string(),
        "golden_answers": pa.list_(pa.string()),
        "data_source": pa.string(),
        "supporting_ids": pa.list_(pa.string()),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    }
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="question files: a path, a pattern, hf://datasets/OWNER/NAME/FILE, OWNER/NAME",
    )
    parser.add_argument("--output", type=Path, required=True, help=".jsonl or .parquet file to write")
    parser.add_argument("--question", default="", metavar="KEY", help="key of the question in other layouts")
    parser.add_argument("--answer", default="", metavar="KEY", help="key of the golden answers in such files")
    parser.add_argument("--separator", default="", help="text between answers in one text, such as '|'")
    parser.add_argument("--only", nargs="+", default=[], metavar="DATA_SOURCE", help="keep only these")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="INPUT", help="drop their questions")
    parser.add_argument(
        "--max_characters", type=number(int, least=0), default=0, help="of a question; 0: no limit"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the questions, and print the outcomes of the rows of each data source."""
    filters = Filters(
        columns=ColumnsConfig(arguments.question, arguments.answer, arguments.separator),
        data_sources=arguments.only,
        excluded=arguments.exclude,
        max_characters=arguments.max_characters,
    )
    report = prepare(arguments.inputs, arguments.output, filters)
    console = Console()
    console.say(table(report.rows(), ["data source", *report.outcomes]))
    console.say(f"written to {arguments.output}; dropped rows in {arguments.output}.report.json")


@dataclass(frozen=True)
class Filters:
    """Reasons to drop rows, besides missing answers and repeated questions."""

    columns: ColumnsConfig = NO_COLUMNS  # keys of the input rows; the files of `excluded` have a known layout
    data_sources: Collection[str] = ()  # data sources to keep; empty: all
    excluded: Sources = ()  # files of questions that must not occur
    max_characters: int = 0  # largest length of a question's text; 0: no limit


@dataclass
class PreparationReport:
    """Rows read, written and dropped, by data source, and examples of each reason."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # rows by data source and outcome
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)  # dropped rows by reason

    def drop(self, source: str, reason: str, where: str, text: str) -> None:
        """Count a dropped row, and keep the first few of its reason as examples."""
        self.counts.update([(source, READ), (source, reason)])
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append({"row": where, "question": text})

    @property
    def outcomes(self) -> list[str]:
        """Every outcome: read, written, and the reasons to drop rows."""
        return [READ, WRITTEN, *sorted(self.examples)]

    def rows(self) -> list[list[Any]]:
        """Return the rows of a table with a column for each outcome; see `count_rows`."""
        return count_rows(self.counts, self.outcomes)


def count_rows(counts: Counter[tuple[str, str]], outcomes: Sequence[str]) -> list[list[Any]]:
    """Return one row a data source, and one of all: its name and its number of each outcome."""
    sources = sorted({source for source, _ in counts})
    rows: list[list[Any]] = []
    for source in sources:
        rows.append([source, *(counts[source, outcome] for outcome in outcomes)])
    totals = [sum(counts[source, outcome] for source in sources) for outcome in outcomes]
    rows.append(["all", *totals])
    return rows


def question_key(text: str) -> str:
    """Return a key by letters and digits; case, marks and spaces do not count."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(words) or text.strip()


def prepare(sources: Sources, output: Path, filters: Filters = Filters()) -> PreparationReport:
    """Write the questions that are kept, and ``OUTPUT.report.json``; both appear when they are complete.

    Args:
        sources: the question files.
        output: .jsonl or .parquet file to write.
        filters: which rows to drop.

    Returns:
        The numbers of rows by data source and outcome, with examples.

    Raises:
        UserError: no question is left, a file cannot be read or written, or `output` has another ending.
    """
    if output.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{output}: the output must end in .jsonl or .parquet")
    report = PreparationReport()
    questions = _select(sources, filters, report)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); choose another --output") from error
    with atomic_write(output) as partial:
        if output.suffix == ".parquet":
            rows = [question_row(question) for question in questions]
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), partial)
        else:
            write_questions(partial, questions)
        _, num_read, num_written, *_ = report.rows()[-1]
        if not num_written:
            reasons = ", ".join(sorted(report.examples)) or "the files are empty"
            raise UserError(
                f"{output}: no question is left, {num_read} were dropped ({reasons}); relax the filters"
            )
        header = ["data_source", *report.outcomes]
        counts = [dict(zip(header, row, strict=True)) for row in report.rows()]
        text = json.dumps({"counts": counts, "examples": report.examples}, indent=2, ensure_ascii=False)
        write_text(output.with_name(output.name + ".report.json"), text + "\n")
    return report


def _select(sources: Sources, filters: Filters, report: PreparationReport) -> Iterator[Question]:
    """Yield the questions that are kept, each with an id of its own; count every row in the report."""
    excluded = _excluded_keys(filters)
    seen: set[str] = set()  # keys of the questions kept so far
    ids: set[str] = set()  # ids of the questions kept so far
    for path, source in find_files(sources):
        for where, question in read_questions(path, source, filters.columns):
            if isinstance(question, NoAnswer):
                report.drop(question.source, "no answer", where, str(question))
                continue
            reason = _why_dropped(question, filters, excluded, seen)
            if reason:
                report.drop(question.data_source, reason, where, question.text)
                continue
            seen.add(question_key(question.text))
            report.counts.update([(question.data_source, READ), (question.data_source, WRITTEN)])
            name = _unused_id(question.id, ids)
            ids.add(name)
            answers = tuple(answer for answer in question.golden_answers if normalise_answer(answer))
            yield replace(question, id=name, golden_answers=answers)


def _excluded_keys(filters: Filters) -> set[str]:
    """Return the keys of the questions that must not occur."""
    keys: set[str] = set()
    if not filters.excluded:
        return keys
    for path, source in find_files(filters.excluded):
        for _, question in read_questions(path, source):
            if isinstance(question, Question):
                keys.add(question_key(question.text))
    return keys


def _unused_id(name: str, ids: Collection[str]) -> str:
    """Return the name, or the first of NAME_2, NAME_3, … that is not among the ids."""
    if name not in ids:
        return name
    number = 2
    while f"{name}_{number}" in ids:
        number += 1
    return f"{name}_{number}"


def _why_dropped(
    question: Question, filters: Filters, excluded: Collection[str], seen: Collection[str]
) -> str:
    """Return the reason to drop a question; "" to keep it."""
    if filters.data_sources and question.data_source not in filters.data_sources:
        return "other data source"
    if not any(normalise_answer(answer) for answer in question.golden_answers):
        return "empty answer"
    if filters.max_characters and len(question.text) > filters.max_characters:
        return "too long"
    key = question_key(question.text)
    if key in excluded:
        return "overlap"
    if key in seen:
        return "duplicate"
    return ""
