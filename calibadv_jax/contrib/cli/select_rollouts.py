"""The best kept rollouts as demonstrations for sft: ``calibadv select-rollouts RUN … --output FILE``."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from calibadv_jax.config import RewardConfig
from calibadv_jax.contrib.arguments import number
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_jsonl
from calibadv_jax.core.locking import locked_output
from calibadv_jax.core.tags import CLOSE_INFORMATION, FIRST_DOCUMENT, OPEN_INFORMATION, with_open_tag
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rollout_store.reader import read_columns, read_metadata
from calibadv_jax.rollout_store.schema import kept_steps

RecordRow = dict[str, Any]  # of rollouts/step_N.parquet
Candidate = tuple[tuple[float, ...], RecordRow]  # its rank, of which the smallest is the best
QUESTION = ["question", "golden_answers", "data_source", "supporting_ids"]
COLUMNS = QUESTION + ["step", "group", "index", "question_id", "error", "answer_score", "format_valid"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (run.dir)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL file to write")
    text = "lowest answer score of a demonstration (default: the largest that the run's reward gives)"
    parser.add_argument("--min-score", type=float, metavar="S", help=text)
    text = "largest number of demonstrations of a question (default: %(default)s)"
    parser.add_argument("--per-question", type=number(int, least=1), default=1, metavar="N", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Write the best by score, then fewest sampled tokens, then the earliest; print all counts."""
    counts: Counter[str] = Counter()
    chosen: dict[tuple[str, str], list[Candidate]] = {}
    for run_index, folder in enumerate(arguments.runs):
        for row in _good_rows(folder, arguments.min_score, counts):
            tokens = sum(len(turn["token_ids"]) for turn in row["turns"])
            rank = (-row["answer_score"], tokens, run_index, row["step"], row["group"], row["index"])
            question = (row["data_source"], row["question_id"])
            candidates: list[Candidate] = [*chosen.get(question, []), (rank, row)]
            chosen[question] = _best(candidates, arguments.per_question)
    if not chosen:
        least = "the largest reward" if arguments.min_score is None else f"{arguments.min_score:g} or more"
        raise UserError(f"no trajectory with a score of {least} among {counts.total()}; lower --min-score")
    best = [row for _, candidates in sorted(chosen.items()) for _, row in candidates]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with locked_output(arguments.output, "--output", Console().warn):
        write_jsonl(arguments.output, map(demonstration, best))
    rows: list[tuple[str, int]] = [("all", counts.total())]
    counts["repeated or beyond --per-question"] = counts.pop("good") - len(best)
    rows += [*counts.items(), ("written", len(best)), ("questions", len(chosen))]
    Console().say(table(rows, ["trajectories", "number"]))


def _good_rows(folder: Path, min_score: float | None, counts: Counter[str]) -> Iterator[RecordRow]:
    if not (files := kept_steps(folder)):
        raise UserError(f"{folder}: no rollouts/step_N.parquet; give a run with log.rollouts=parquet")
    for path in files.values():
        reward = RewardConfig()  # updated unchecked: older runs had other keys
        vars(reward).update(json.loads(read_metadata(path).get("config", "{}")).get("reward", {}))
        if reward.shuffle:
            raise UserError(f"{path}: its scores were permuted by reward.shuffle; give other runs")
        head = read_columns(path, COLUMNS).to_pylist()
        verdicts = [_verdict(row, reward.max_score if min_score is None else min_score) for row in head]
        good = [index for index, verdict in enumerate(verdicts) if verdict == "good"]
        turns = read_columns(path, ["turns"]).take(pa.array(good, pa.int64())).to_pylist()
        counts.update(verdicts)
        yield from (head[index] | turn for index, turn in zip(good, turns, strict=True))


def _verdict(row: RecordRow, min_score: float) -> str:
    """Return why a trajectory is left out, or "good"."""
    if row["error"] is not None:
        return "failed"
    if not row["format_valid"]:
        return "format invalid"
    return "score too low" if row["answer_score"] < min_score else "good"


def _best(candidates: list[Candidate], limit: int) -> list[Candidate]:
    """Return at most `limit` by rank; of equal texts the better one stays."""
    by_texts: dict[str, Candidate] = {}
    for rank, row in sorted(candidates, key=lambda candidate: candidate[0]):
        texts = "\n".join(" ".join(turn["text"].lower().split()) for turn in row["turns"])
        by_texts.setdefault(texts, (rank, row))
    return list(by_texts.values())[:limit]


def demonstration(row: RecordRow) -> dict[str, Any]:
    """Return a row of the file that `data.demonstrations.load_demonstrations` reads."""
    turns = [{"text": with_open_tag(turn["text"])} | _reply(turn) for turn in row["turns"]]
    return {"id": row["question_id"]} | {name: row[name] for name in QUESTION} | {"turns": turns}


def _reply(turn: RecordRow) -> dict[str, Any]:
    """Return the documents or the text of the observation, or both where an action returned both."""
    documents = [{name: document[name] for name in ("id", "title", "text")} for document in turn["documents"]]
    shown = turn["observation_text"].partition(OPEN_INFORMATION)[2].rpartition(CLOSE_INFORMATION)[0]
    words, listed, _ = shown.partition(FIRST_DOCUMENT)
    if documents and listed:
        return {"documents": documents, "observation": words.removesuffix("\n")}
    return {"documents": [], "observation": shown}  # none; or an action lists its own in another way
