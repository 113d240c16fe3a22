"""The best kept rollouts as demonstrations for sft: ``calibadv select-rollouts RUN … --output FILE``."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from calibadv_jax.config import RewardConfig
from calibadv_jax.config.sections.rollout import RETRIEVER_ACTIONS, TOOL_CALLS
from calibadv_jax.contrib.arguments import number
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_jsonl
from calibadv_jax.core.locking import locked_output
from calibadv_jax.core.tags import (
    CLOSE_INFORMATION,
    FIRST_DOCUMENT,
    NOTHING_FOUND,
    OPEN_INFORMATION,
    with_opening_tag,
)
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.rewards.evidence import max_score
from calibadv_jax.rollout_store.reader import calls_of_turn, read_columns, read_metadata
from calibadv_jax.rollout_store.schema import kept_steps

UNWRITABLE = "calls that turns in tags cannot say"
RecordRow = dict[str, Any]  # a row of rollouts/step_N.parquet, or a turn of it
# Columns that are copied into the demonstration.
QUESTION = ["question", "golden_answers", "data_source", "supporting_ids"]
# Columns that are read of every trajectory; the turns are read of the good ones only.
COLUMNS = [
    *QUESTION,
    "step",
    "group",
    "index",
    "question_id",
    "error",
    "answer_score",
    "format_valid",
]


class Candidate(NamedTuple):
    """A good trajectory and its rank."""

    rank: tuple[float, ...]  # the smallest is the best
    row: RecordRow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (run.dir)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL file to write")
    parser.add_argument(
        "--min-score",
        type=float,
        metavar="S",
        help="lowest answer score of a demonstration (default: the largest that the run's reward gives)",
    )
    parser.add_argument(
        "--per-question",
        type=number(int, least=1),
        default=1,
        metavar="N",
        help="largest number of demonstrations of a question (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the best by score, then fewest sampled tokens, then the earliest; print all counts.

    Raises:
        UserError: a folder keeps no trajectories, its scores were permuted, or no trajectory is good.
    """
    counts: Counter[str] = Counter()  # trajectories by verdict
    chosen: dict[tuple[str, str], list[Candidate]] = {}  # by data source and id of the question
    for run_index, folder in enumerate(arguments.runs):
        for row in _good_rows(folder, arguments.min_score, counts):
            num_tokens = sum(len(turn["token_ids"]) for turn in row["turns"])
            rank = (-row["answer_score"], num_tokens, run_index, row["step"], row["group"], row["index"])
            question = (row["data_source"], row["question_id"])
            candidates = [*chosen.get(question, []), Candidate(rank, row)]
            chosen[question] = _best(candidates, arguments.per_question)
    if not chosen:
        least = "the largest reward" if arguments.min_score is None else f"{arguments.min_score:g} or more"
        raise UserError(f"no trajectory with a score of {least} among {counts.total()}; lower --min-score")
    best = [candidate.row for question in sorted(chosen) for candidate in chosen[question]]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with locked_output(arguments.output, "--output", Console().warn):
        write_jsonl(arguments.output, (demonstration(row) for row in best))
    rows = [("all", counts.total())]
    num_good = counts.pop("good")
    rows += counts.items()
    rows.append(("repeated or beyond --per-question", num_good - len(best)))
    rows.append(("written", len(best)))
    rows.append(("questions", len(chosen)))
    Console().say(table(rows, ["trajectories", "number"]))


def _good_rows(folder: Path, min_score: float | None, counts: Counter[str]) -> Iterator[RecordRow]:
    """Yield the good trajectories of a run, with their turns; count the verdicts on all of them."""
    files = kept_steps(folder)
    if not files:
        raise UserError(f"{folder}: no rollouts/step_N.parquet; give a run with log.rollouts=parquet")
    for path in files.values():
        metadata = read_metadata(path)
        reward = _reward_config(metadata)
        if reward.shuffle:
            raise UserError(f"{path}: its scores were permuted by reward.shuffle; give other runs")
        has_calls = metadata.get("protocol") == TOOL_CALLS
        rows = read_columns(path, COLUMNS).to_pylist()
        verdicts = [_verdict(row, reward, min_score) for row in rows]
        good = [index for index, verdict in enumerate(verdicts) if verdict == "good"]
        turns = read_columns(path, ["turns"]).take(pa.array(good, pa.int64())).to_pylist()
        for index, turns_of_row in zip(good, turns, strict=True):
            row = rows[index] | turns_of_row
            if has_calls and not all(map(_is_in_tags, row["turns"])):
                verdicts[index] = UNWRITABLE
                continue
            yield row | {"has_calls": has_calls}
        counts.update(verdicts)


def _reward_config(metadata: Mapping[str, str]) -> RewardConfig:
    """Return the reward section of a kept step's config; unchecked, because older runs had other keys."""
    config = json.loads(metadata.get("config", "{}"))
    reward = RewardConfig()
    vars(reward).update(config.get("reward", {}))
    return reward


def _verdict(row: RecordRow, reward: RewardConfig, min_score: float | None) -> str:
    """Return why a trajectory is left out, or "good"; without `min_score` only the largest score is good."""
    if min_score is None:
        min_score = max_score(row["supporting_ids"], reward)
    if row["error"] is not None:
        return "failed"
    if not row["format_valid"]:
        return "format invalid"
    if row["answer_score"] < min_score:
        return "score too low"
    return "good"


def _best(candidates: list[Candidate], limit: int) -> list[Candidate]:
    """Return at most `limit` candidates by rank; of equal texts only the better one."""
    by_text: dict[str, Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.rank):
        turns = [" ".join(turn["text"].lower().split()) for turn in candidate.row["turns"]]
        by_text.setdefault("\n".join(turns), candidate)
    return list(by_text.values())[:limit]


def demonstration(row: RecordRow) -> dict[str, Any]:
    """Return a row of the file that `data.demonstrations.load_demonstrations` reads."""
    if row.get("has_calls"):
        turns = [_turn_in_tags(turn) for turn in row["turns"]]
    else:
        turns = [{"text": with_opening_tag(turn["text"]), **_observation(turn)} for turn in row["turns"]]
    question = {name: row[name] for name in QUESTION}
    return {"id": row["question_id"], **question, "turns": turns}


def _is_in_tags(turn: RecordRow) -> bool:
    """Return whether tags can say a turn: an answer, or one call and what it brought."""
    if turn["kind"] == "answer":
        return True
    calls = calls_of_turn(turn)
    if len(calls) != 1 or len(calls[0].arguments) != 1 or turn["is_refused"]:
        return False
    if turn["documents"]:
        # Text before the documents, as of a tool that returns both, would be lost.
        return turn["kind"] in RETRIEVER_ACTIONS
    return turn["kind"] == "search" and NOTHING_FOUND in turn["observation_text"]


def _turn_in_tags(turn: RecordRow) -> dict[str, Any]:
    """Return a turn with tool calls as a turn in tags, which serves both protocols."""
    thought = f"<think> {turn['think'].strip()} </think>\n" if turn["think"].strip() else ""
    if turn["kind"] == "answer":
        return {"text": f"{thought}<answer> {turn['answer']} </answer>"}
    (call,) = calls_of_turn(turn)
    (argument,) = call.arguments.values()
    observation = "" if turn["documents"] else NOTHING_FOUND
    return {
        "text": f"{thought}<{call.name}> {argument} </{call.name}>",
        "documents": _documents(turn),
        "observation": observation,
    }


def _documents(turn: RecordRow) -> list[dict[str, str]]:
    documents = []
    for document in turn["documents"]:
        documents.append({"id": document["id"], "title": document["title"], "text": document["text"]})
    return documents


def _observation(turn: RecordRow) -> dict[str, Any]:
    """Return the documents or the text of the observation, or both where an action returned both."""
    documents = _documents(turn)
    _, _, after_opening = turn["observation_text"].partition(OPEN_INFORMATION)
    shown, _, _ = after_opening.rpartition(CLOSE_INFORMATION)
    words, header, _ = shown.partition(FIRST_DOCUMENT)
    if documents and header:
        return {"documents": documents, "observation": words.removesuffix("\n")}
    # There are no documents, or an action lists its documents in a way of its own: keep the text as shown.
    return {"documents": [], "observation": shown}
