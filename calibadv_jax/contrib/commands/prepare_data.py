"""Question files of any known layout to one of ours: ``calibadv prepare-data INPUT … --output FILE``.

Drops rows without an answer, repeated questions and, if asked, long questions and questions of a test set;
shows what was dropped and why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from calibadv_jax.config import ColumnsConfig
from calibadv_jax.contrib.prepare import Filters, prepare
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rollout.observation import encode
from calibadv_jax.run.model import load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="question files: a path, a pattern, hf://datasets/OWNER/NAME/FILE, OWNER/NAME",
    )
    add(
        "--output",
        type=Path,
        required=True,
        help=".jsonl or .parquet file to write; a report comes beside it",
    )
    add(
        "--data_source",
        default="",
        help="data source of rows without one (default: name of the file or folder)",
    )
    add("--question", default="", metavar="KEY", help="key of the question in files of an unknown layout")
    add("--answer", default="", metavar="KEY", help="key of the golden answer or answers in such files")
    add("--separator", default="", help="text between several answers that are written as one, such as '|'")
    add("--only", nargs="+", default=[], metavar="DATA_SOURCE", help="keep only these data sources")
    add("--exclude", nargs="+", default=[], metavar="INPUT", help="drop questions that occur in these files")
    add("--max_characters", type=int, default=0, help="drop questions with more characters; 0: no limit")
    add(
        "--max_tokens",
        type=int,
        default=0,
        help="drop questions (or prompts of rows) with more tokens; 0: no limit",
    )
    add("--tokenizer", default="", help="tokenizer for --max_tokens: a folder or OWNER/NAME[@REVISION]")
    add("--drop_prompt", action="store_true", help="leave out the prompts that rows carry")


def run(arguments: argparse.Namespace) -> None:
    """Converts, filters, and prints the counts."""
    if bool(arguments.max_tokens) != bool(arguments.tokenizer):
        raise UserError("--max_tokens needs --tokenizer, and the other way round: give both or neither")
    if arguments.max_tokens < 0 or arguments.max_characters < 0:
        raise UserError("--max_tokens and --max_characters must be at least 0")
    filters = Filters(
        default_source=arguments.data_source,
        columns=ColumnsConfig(arguments.question, arguments.answer, arguments.separator),
        data_sources=frozenset(arguments.only),
        excluded=arguments.exclude,
        max_characters=arguments.max_characters,
        max_tokens=arguments.max_tokens,
        count_tokens=_token_counter(arguments.tokenizer) if arguments.tokenizer else len,
        keeps_prompt=not arguments.drop_prompt,
    )
    report = prepare(arguments.inputs, arguments.output, filters)
    console = Console()
    console.say(table(report.rows(), ["data source", "read", "written", *report.reasons]))
    if report.renamed:
        console.say(f"{report.renamed} ids were taken: a number was added to the ids of those rows")
    if report.empty_answers:
        console.say(f"{report.empty_answers} golden answers that normalise to nothing were left out")
    if report.joined_answers:
        console.warn(
            f"{report.joined_answers} rows have one golden answer with a separator in it (|, ; or a line"
            " break): if these are several answers, give --separator"
        )
    console.say(f"written to {arguments.output}; dropped rows in {arguments.output}.report.json")


def _token_counter(name: str) -> Callable[[str], int]:
    folder = Path(name)
    if hub.is_repository(name):
        repository, _, revision = name.partition("@")
        folder = hub.fetch_model(hub.resolve(repository, revision), with_weights=False)
    tokenizer = load_tokenizer(folder)
    return lambda text: len(encode(tokenizer, text))
