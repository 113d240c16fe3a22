"""Converts and filters question files of any layout: ``calibadv prepare-data INPUT … --output FILE``."""

from __future__ import annotations

import argparse
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
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
from calibadv_jax.data.files import Sources, find_files
from calibadv_jax.data.layouts import NO_COLUMNS, NoAnswer
from calibadv_jax.data.questions import question_row, read_questions, write_questions
from calibadv_jax.metrics.console import Console, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "question files: a path, a pattern, hf://datasets/OWNER/NAME/FILE, OWNER/NAME"
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=text)
    parser.add_argument("--output", type=Path, required=True, help=".jsonl or .parquet file to write")
    parser.add_argument("--question", default="", metavar="KEY", help="key of the question in other layouts")
    parser.add_argument("--answer", default="", metavar="KEY", help="key of the golden answers in such files")
    parser.add_argument("--separator", default="", help="text between answers in one text, such as '|'")
    parser.add_argument("--only", nargs="+", default=[], metavar="DATA_SOURCE", help="keep only these")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="INPUT", help="drop their questions")
    characters = number(int, least=0)
    parser.add_argument("--max_characters", type=characters, default=0, help="of a question; 0: no limit")


def run(arguments: argparse.Namespace) -> None:
    filters = Filters(
        columns=ColumnsConfig(arguments.question, arguments.answer, arguments.separator),
        data_sources=arguments.only,
        excluded=arguments.exclude,
        max_characters=arguments.max_characters,
    )
    report, console = prepare(arguments.inputs, arguments.output, filters), Console()
    console.say(table(report.rows(), ["data source", *report.outcomes]))
    console.say(f"written to {arguments.output}; dropped rows in {arguments.output}.report.json")


READ, WRITTEN = "read", "written"  # outcomes of rows beside the reasons to drop them
EXAMPLES = 5  # dropped rows that the report shows for each reason
_TEXT, _TEXTS = pa.string(), pa.list_(pa.string())
_MESSAGES = pa.list_(pa.struct({"role": _TEXT, "content": _TEXT}))
SCHEMA = pa.schema(
    {"id": _TEXT, "question": _TEXT, "golden_answers": _TEXTS, "data_source": _TEXT}
    | {"supporting_ids": _TEXTS, "prompt": _MESSAGES}
)


@dataclass(frozen=True)
class Filters:
    """Reasons to drop rows, besides missing answers and repeated questions."""

    columns: ColumnsConfig = NO_COLUMNS  # of the inputs, not of the files of excluded questions
    data_sources: Collection[str] = ()  # kept; empty: all
    excluded: Sources = ()  # files of questions that must not occur
    max_characters: int = 0  # of the question; 0: no limit


@dataclass
class PreparationReport:
    """Rows read, written and dropped, by data source, and examples of each reason."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # of data source and outcome
    examples: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def drop(self, source: str, reason: str, where: str, text: str) -> None:
        self.counts.update([(source, READ), (source, reason)])
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append({"row": where, "question": text})

    @property
    def outcomes(self) -> list[str]:
        return [READ, WRITTEN, *sorted(self.examples)]

    def rows(self) -> list[list[Any]]:
        return count_rows(self.counts, self.outcomes)


def count_rows(counts: Counter[tuple[str, str]], outcomes: Sequence[str]) -> list[list[Any]]:
    """Return one row a data source, and one of all: its name and its number of each outcome."""
    sources = sorted({source for source, _ in counts})
    rows = [[source, *(counts[source, outcome] for outcome in outcomes)] for source in sources]
    sums = (sum(counts[source, outcome] for source in sources) for outcome in outcomes)
    return [*rows, ["all", *sums]]


def question_key(text: str) -> str:
    """Return a key by letters and digits; case, marks and spaces do not count."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(words) or text.strip()


def prepare(sources: Sources, output: Path, filters: Filters = Filters()) -> PreparationReport:
    """Write the questions that are kept, and ``OUTPUT.report.json``; both appear when they are complete."""
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
            pq.write_table(pa.Table.from_pylist(list(map(question_row, questions)), SCHEMA), partial)
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
    excluded = {
        question_key(question.text)
        for path, source in (find_files(filters.excluded) if filters.excluded else ())
        for _, question in read_questions(path, source)
        if isinstance(question, Question)
    }
    seen, ids = set[str](), set[str]()
    for path, source in find_files(sources):
        for where, question in read_questions(path, source, filters.columns):
            if isinstance(question, NoAnswer):
                report.drop(question.source, "no answer", where, str(question))
                continue
            if reason := _why_dropped(question, filters, excluded, seen):
                report.drop(question.data_source, reason, where, question.text)
                continue
            seen.add(question_key(question.text))
            report.counts.update([(question.data_source, READ), (question.data_source, WRITTEN)])
            names = chain([question.id], (f"{question.id}_{number}" for number in count(2)))
            name = next(name for name in names if name not in ids)
            ids.add(name)
            answers = tuple(filter(normalise_answer, question.golden_answers))
            yield replace(question, id=name, golden_answers=answers)


def _why_dropped(
    question: Question, filters: Filters, excluded: Collection[str], seen: Collection[str]
) -> str:
    if filters.data_sources and question.data_source not in filters.data_sources:
        return "other data source"
    if not any(map(normalise_answer, question.golden_answers)):
        return "empty answer"
    if filters.max_characters and len(question.text) > filters.max_characters:
        return "too long"
    if (key := question_key(question.text)) in excluded:
        return "overlap"
    return "duplicate" if key in seen else ""
