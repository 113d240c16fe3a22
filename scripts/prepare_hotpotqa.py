"""Write HotpotQA of the hub as questions and their passages, for scripts/real_policy.sh.

    python scripts/prepare_hotpotqa.py --output runs/hotpotqa

Writes corpus.jsonl, train.jsonl and test.jsonl. The passages are the paragraphs that HotpotQA gives with the
questions that are taken, ten for each: a small corpus, in which search is easier than in all of Wikipedia.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_write

FOLDER = f"{hub.DATASETS}hotpotqa/hotpot_qa/distractor"
COLUMNS = ["id", "question", "answer", "supporting_facts", "context"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--train", type=int, default=10_000, help="number of training questions (default: %(default)s)"
    )
    parser.add_argument(
        "--test",
        type=int,
        default=500,
        help="number of test questions, from the dev set (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    try:
        if min(arguments.train, arguments.test) < 1:
            raise UserError("--train and --test must be at least 1")
        passages: dict[tuple[str, str], str] = {}  # (title, text) -> id
        arguments.output.mkdir(parents=True, exist_ok=True)
        sizes = {
            name: write(
                arguments.output / f"{name}.jsonl",
                (question(row, passages) for row in rows(pattern, getattr(arguments, name))),
            )
            for name, pattern in (("test", "validation-*.parquet"), ("train", "train-00000-*.parquet"))
        }
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    contents = ((name, f'"{title}"\n{text}') for (title, text), name in passages.items())
    write(arguments.output / "corpus.jsonl", ({"id": name, "contents": text} for name, text in contents))
    counts = ", ".join(f"{number} {name} questions" for name, number in sizes.items())
    sys.stdout.write(f"{arguments.output}: {counts}, {len(passages)} passages\n")
    return 0


def rows(pattern: str, limit: int) -> Iterator[dict[str, Any]]:
    """Return the first rows of the files of the hub.

    Raises:
        UserError: the hub cannot be reached, or a file is not what it was.
    """
    missing = limit
    for path in hub.fetch_data(f"{FOLDER}/{pattern}"):
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(256, columns=COLUMNS):
                    batch_rows = batch.to_pylist()[:missing]
                    missing -= len(batch_rows)
                    yield from batch_rows
                    if not missing:
                        return
        except (pa.ArrowException, KeyError) as error:
            raise UserError(f"{path}: not HotpotQA's file ({error}); give --data FOLDER instead") from error


def question(row: dict[str, Any], passages: dict[tuple[str, str], str]) -> dict[str, Any]:
    """Return a row of our layout, and add its paragraphs to the passages."""
    ids: dict[str, str] = {}
    for title, sentences in zip(row["context"]["title"], row["context"]["sentences"], strict=True):
        text = " ".join("".join(sentences).split())
        ids[title] = passages.setdefault((title, text), str(len(passages)))
    supporting = dict.fromkeys(ids[title] for title in row["supporting_facts"]["title"] if title in ids)
    return {
        "id": f"hotpotqa_{row['id']}",
        "question": row["question"],
        "golden_answers": [row["answer"]],
        "data_source": "hotpotqa",
        "supporting_ids": list(supporting),
    }


def write(path: Path, values: Iterator[dict[str, Any]]) -> int:
    """Write JSON lines in one replacement, and return their number."""
    count = 0
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        for value in values:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(main())
