"""Questions that need two passages: the files and the measures of experiments/second_search_real.md.

    python -m experiments.two_passages select DEMONSTRATIONS TEST --output FOLDER
        [--most-searches 2] [--one-search 200]
    python -m experiments.two_passages measure EVALUATION.jsonl …

`select` takes what `calibadv demonstrate` wrote and the test questions, and writes those of hotpotqa,
2wikimultihopqa and musique that name two passages or more: `demonstrations.jsonl` (all that search again, up
to --most-searches times, and --one-search that do not), `questions.jsonl` (of all up to that number, to train
on) and `test.jsonl`.

`measure` prints a line for each evaluation: its scores, the share of the questions whose answer stands in
what the searches returned (yes and no never count), and what the first query is.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calibadv_jax.contrib.support_search import YES_NO, holds
from calibadv_jax.core.files import write_jsonl
from calibadv_jax.data import row_files
from calibadv_jax.evaluation.records import read_rows
from calibadv_jax.metrics.console import table

SOURCES = ("hotpotqa", "2wikimultihopqa", "musique")
MOST_SEARCHES = 2  # of a demonstration
ONE_SEARCH = 200  # demonstrations in which one search finds both passages
SCORES = ("f1", "em", "format", "searches", "evidence", "tokens")
SEED = 0

Row = Mapping[str, Any]


def needs_two(row: Row) -> bool:
    """Return whether a question is of the kind that is studied: two supporting passages or more."""
    return row["data_source"] in SOURCES and len(row["supporting_ids"]) >= 2


def select(
    demonstrations: Iterable[Row],
    test: Iterable[Row],
    most_searches: int = MOST_SEARCHES,
    one_search: int = ONE_SEARCH,
) -> dict[str, list[Row]]:
    """Return the rows of each file that `select` writes.

    Args:
        demonstrations: rows of the file of `calibadv demonstrate`.
        test: rows of the test questions.
        most_searches: demonstrations with more searches are left out.
        one_search: number of demonstrations with one search, drawn among them; fewer where there are fewer.

    Returns:
        Name of a file -> its rows; the order of the demonstrations is drawn.
    """
    once: list[Row] = []
    again: list[Row] = []
    for row in demonstrations:
        num_searches = len(row["turns"]) - 1  # the last turn answers
        if needs_two(row) and 1 <= num_searches <= most_searches:
            (once if num_searches == 1 else again).append(row)
    rng = random.Random(SEED)
    chosen = again + rng.sample(once, min(one_search, len(once)))
    rng.shuffle(chosen)
    questions: list[Row] = [
        {name: value for name, value in row.items() if name != "turns"} for row in (*once, *again)
    ]
    return {
        "demonstrations.jsonl": chosen,
        "questions.jsonl": questions,
        "test.jsonl": [row for row in test if needs_two(row)],
    }


def answer_is_returned(row: Row, trajectory: Row) -> bool | None:
    """Return whether an accepted answer stands in what the searches returned; None for yes and no."""
    answers = [answer for answer in row["golden_answers"] if answer.lower() not in YES_NO]
    if not answers:
        return None
    read = "\n".join(turn["observation"] for turn in trajectory["turns"])
    return any(holds(read, answer) for answer in answers)


def first_query_is_question(row: Row, trajectory: Row) -> bool | None:
    """Return whether the question's text stands in the turn of the first search; None without a search."""
    searches = [turn["text"] for turn in trajectory["turns"] if turn["kind"] == "search"]
    return holds(searches[0], row["question"]) if searches else None


def measure(rows: Sequence[Row]) -> dict[str, str]:
    """Return the measures of an evaluation's rows with evidence, each trajectory counted once, as texts."""
    pairs = [
        (row, trajectory)
        for row in rows
        for trajectory in row["trajectories"]
        if "evidence" in trajectory["scores"]
    ]
    columns = {"questions": str(len({row["id"] for row, _ in pairs}))}
    for name in SCORES:
        columns[name] = _mean([trajectory["scores"][name] for _, trajectory in pairs])
    columns["searched again"] = _mean([trajectory["scores"]["searches"] > 1 for _, trajectory in pairs])
    columns["answer returned"] = _mean([answer_is_returned(*pair) for pair in pairs])
    columns["first query is the question"] = _mean([first_query_is_question(*pair) for pair in pairs])
    return columns


def _mean(values: Iterable[float | None]) -> str:
    """Return the mean of the values that are known, as text; "-" where none is."""
    numbers = [value for value in values if value is not None]
    return f"{statistics.fmean(numbers):.3f}" if numbers else "-"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    selecting = commands.add_parser("select", help="write the files of the study")
    selecting.add_argument("demonstrations", type=Path, help="of calibadv demonstrate")
    selecting.add_argument("test", type=Path, help="the test questions")
    selecting.add_argument("--output", type=Path, required=True, help="folder of the files")
    selecting.add_argument("--most-searches", type=int, default=MOST_SEARCHES, help="of a demonstration")
    selecting.add_argument(
        "--one-search", type=int, default=ONE_SEARCH, help="demonstrations with one search (at most)"
    )
    measuring = commands.add_parser("measure", help="print the measures of evaluations")
    measuring.add_argument("evaluations", type=Path, nargs="+", help=".jsonl files of calibadv evaluate")
    arguments = parser.parse_args(argv)
    if arguments.command == "select":
        demonstrations, test = (
            [row for _, row in row_files.read_rows(path)]
            for path in (arguments.demonstrations, arguments.test)
        )
        files = select(demonstrations, test, arguments.most_searches, arguments.one_search)
        for name, rows in files.items():
            write_jsonl(arguments.output / name, rows)
            sys.stdout.write(f"{arguments.output / name}: {len(rows)} rows\n")
        return 0
    measured = {path.stem: measure([row for _, row in read_rows(path)]) for path in arguments.evaluations}
    names = list(next(iter(measured.values())))
    lines = [[title, *columns.values()] for title, columns in measured.items()]
    sys.stdout.write(table(lines, ["evaluation", *names]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
