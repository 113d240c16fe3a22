"""Rows of an evaluation: a question with transcripts and scores, a line of a JSON Lines file.

A row carries the identity of its evaluation, so that only an interrupted run of the same one continues.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from calibadv_jax.config import Config, RewardConfig
from calibadv_jax.config.keys import keys_with_mark
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_write, content_hash, wrap_disk_errors
from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.evaluation.methods import METHODS

ScoredRow = dict[str, Any]  # one line of the file
RowKey = tuple[str, str, str]  # values of KEY_FIELDS

KEY_FIELDS = ("temperature", "data_source", "id")
FIELDS = (*KEY_FIELDS, "evaluation", "content", "question", "golden_answers", "scores", "trajectories")


def evaluation_identity(
    config: Config,
    policy: dict[str, Any],
    service: dict[str, Any],
    questions: Sequence[Question],
    prompt_hashes: Mapping[str, str],
) -> str:
    """Return a hash of all that decides an answer or its scores.

    Args:
        config: Config as given, before `method_config`.
        policy: What identifies the policy.
        service: What identifies the retriever.
        questions: All questions, which "random_documents" draws from.
        prompt_hashes: May hold "tools" (descriptions of the actions, unless search is the only one) and
            "judge" (file of its prompt).
    """
    evaluate = config.evaluate
    prompt = {}
    for name, value in dataclasses.asdict(config.prompt).items():
        # Evaluations from before chat_template_kwargs have no such key, and must keep their hash.
        if value != {}:
            prompt[name] = value
    pool = [question.text for question in questions] if evaluate.method == "random_documents" else []
    decisive: dict[str, Any] = {
        "policy": policy,
        "evaluate": [evaluate.method, evaluate.template, evaluate.samples],
        "seed": config.run.seed,
        "sampler": [config.sampler.name, config.sampler_dtype],
        "prompt": prompt,
        "rollout": _decisive_keys("rollout", dataclasses.asdict(config.rollout)),
        "retriever": _decisive_keys("retriever", dataclasses.asdict(config.retriever)),
        "service": service,
        "pool": pool,
    }
    judge = prompt_hashes.get("judge", "")
    if config.reward != RewardConfig() or judge:
        decisive["reward"] = [_decisive_keys("reward", dataclasses.asdict(config.reward)), judge]
    tools = prompt_hashes.get("tools")
    if tools:
        decisive["tools"] = [tools, [[tool.name, tool.max_length] for tool in config.tools]]
    return content_hash(decisive)[:16]


def _decisive_keys(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a section, and of its subsections, that decide an answer or its scores."""
    indifferent_keys = keys_with_mark(Mark.NO_ANSWER)
    decisive = {}
    for name, value in values.items():
        key = f"{section}.{name}"
        if key not in indifferent_keys:
            decisive[name] = _decisive_keys(key, value) if isinstance(value, dict) else value
    return decisive


def make_row(evaluation: str, temperature: float, question: Question, group: Group, method: str) -> ScoredRow:
    """Return the row of a scored group.

    Args:
        evaluation: Result of `evaluation_identity`.
        temperature: Temperature of sampling.
        question: The question of the data; that of the group may carry passages.
        group: Scored trajectories.
        method: Name of the method.
    """
    is_agent = METHODS[method].template is None
    attempts = [_attempt_row(trajectory, is_agent) for trajectory in group.attempts]
    finished_scores = [attempt["scores"] for attempt in attempts if attempt["error"] is None]
    return {
        "evaluation": evaluation,
        "content": _content(question),
        "temperature": f"{temperature:g}",
        "data_source": question.data_source,
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "scores": question_scores(finished_scores),
        "trajectories": attempts,
    }


def question_scores(attempts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the scores of a question, given those of its finished trajectories.

    Each score is a mean over the trajectories. Where there are several, n, the result also has mean@n and
    pass@k with k = 2, 4, 8, … and n.
    """
    if not attempts:
        return {}
    count = len(attempts)
    scores = {}
    for name in attempts[0]:
        scores[name] = sum(attempt[name] for attempt in attempts) / count
    if count > 1:
        num_correct = sum(attempt["em"] == 1 for attempt in attempts)
        scores[f"mean@{count}"] = num_correct / count
        powers_of_two = {2**exponent for exponent in range(1, count.bit_length())}
        for k in sorted(powers_of_two | {count}):
            scores[f"pass@{k}"] = pass_at_k(count, num_correct, k)
    return scores


def _attempt_row(trajectory: Trajectory, is_agent: bool) -> ScoredRow:
    """Return the part of a row about one trajectory, with its transcript."""
    scores = dict(trajectory.metrics)
    scores["answered"] = float(trajectory.answer is not None)
    scores["searches"] = float(trajectory.num_searches)
    scores["tokens"] = float(trajectory.mask.sum())
    if not is_agent:
        # A single turn without a search cannot follow the agent's format.
        scores.pop("format", None)
    if trajectory.error is not None:
        scores = {}
    return {
        "error": trajectory.error,
        "answer": trajectory.answer,
        "scores": scores,
        "prompt_tokens": len(trajectory.prompt_ids),
        "turns": [_turn_row(turn) for turn in trajectory.turns],
    }


def _turn_row(turn: Turn) -> ScoredRow:
    return {
        "kind": turn.kind,
        "text": turn.text,
        "stop_reason": turn.stop_reason,
        "tokens": len(turn.token_ids),
        "observation": turn.observation_text,
        "observation_tokens": len(turn.observation_ids),
        "document_ids": [document.id for document in turn.documents],
    }


def row_key(row: ScoredRow) -> RowKey:
    """Return the values of KEY_FIELDS, which identify a row within its evaluation."""
    return row["temperature"], row["data_source"], row["id"]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k samples is correct.

    1 - C(samples - correct, k) / C(samples, k), from Chen et al., arXiv 2107.03374.

    Args:
        samples: Number of samples.
        correct: Number of correct ones.
        k: At most `samples`.
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def read_scores(path: Path) -> Iterator[ScoredRow]:
    """Yield every row of a file without its transcripts.

    Raises:
        UserError: The file is missing, or no evaluation wrote it.
    """
    for _, row in read_rows(path):
        yield _without_transcripts(row)


def read_row_at(path: Path, offset: int) -> ScoredRow:
    """Return the row of the line that begins at a position, with its transcripts.

    Args:
        path: The file.
        offset: Position in bytes, as `read_rows` yields it.

    Raises:
        UserError: No row begins there.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(offset)
        return _parse_row(file.readline(), f"{path}, byte {offset}")


class RowFile:
    """The file of an evaluation that is under way: its rows so far, and new ones. Transcripts stay on disk.

    Dropped are rows of another evaluation, rows with a failed trajectory and a line that an interruption cut:
    their questions are asked again.

    Args:
        path: The file; it may be missing.
        evaluation: Result of `evaluation_identity`.
        questions: Questions of the evaluation.

    Attributes:
        rows: Rows so far, without transcripts.
        num_foreign_rows: Number of rows of another evaluation in the file, which are dropped.
    """

    def __init__(self, path: Path, evaluation: str, questions: Sequence[Question]):
        self.path = path
        self.evaluation = evaluation
        self.rows: dict[RowKey, ScoredRow] = {}
        self.num_foreign_rows = 0
        self._offsets: dict[RowKey, int] = {}  # position of each row's line in the file, in bytes
        self._read_earlier_rows(questions)

    def _read_earlier_rows(self, questions: Sequence[Question]) -> None:
        if not self.path.is_file():
            return
        known_questions = {(question.data_source, question.id, _content(question)) for question in questions}
        for offset, row in read_rows(self.path, may_be_cut=True):
            if row["evaluation"] != self.evaluation:
                self.num_foreign_rows += 1
                continue
            is_known = (row["data_source"], row["id"], row["content"]) in known_questions
            has_failed = any(attempt["error"] is not None for attempt in row["trajectories"])
            if is_known and not has_failed:
                self._register(row, offset)

    def start(self) -> None:
        """Remove the dropped rows from the file; `add` appends to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self._rewrite(list(self.rows))

    def add(self, row: ScoredRow) -> None:
        """Append a row; it survives the end of this process."""
        with wrap_disk_errors(self.path), self.path.open("ab") as file:
            self._register(row, file.tell())
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def finish(self, order: Sequence[RowKey]) -> list[ScoredRow]:
        """Put the file in this order; return its rows without transcripts."""
        self._rewrite(order)
        return [self.rows[key] for key in order]

    def _register(self, row: ScoredRow, offset: int) -> None:
        key = row_key(row)
        self.rows[key] = _without_transcripts(row)
        self._offsets[key] = offset

    def _rewrite(self, order: Sequence[RowKey]) -> None:
        """Write the lines of these rows in this order, and no others."""
        offsets: dict[RowKey, int] = {}
        with self.path.open("rb") as old, atomic_write(self.path) as partial, partial.open("wb") as new:
            for key in order:
                old.seek(self._offsets[key])
                offsets[key] = new.tell()
                new.write(old.readline())
        self._offsets = offsets


def _without_transcripts(row: ScoredRow) -> ScoredRow:
    attempts = [{"error": attempt["error"]} for attempt in row["trajectories"]]
    return {**row, "trajectories": attempts}


def _content(question: Question) -> str:
    """Return a hash of all fields of a question."""
    return content_hash(dataclasses.asdict(question))[:16]


def read_rows(path: Path, may_be_cut: bool = False) -> Iterator[tuple[int, ScoredRow]]:
    """Yield the position in bytes and the row of every line, with its transcripts.

    Args:
        path: The file.
        may_be_cut: Leave out a last line without newline, which an evaluation is writing.

    Raises:
        UserError: As `read_scores`.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the .jsonl (or the .json beside it) of an evaluation")
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if may_be_cut and not line.endswith(b"\n"):
                return
            yield offset, _parse_row(line, f"{path}:{number}")
            offset += len(line)


def _parse_row(line: bytes, place: str) -> ScoredRow:
    """Return the row of a line; raise UserError, which names the `place`, if it is none."""
    try:
        row: ScoredRow = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: not valid JSON ({error}); remove the file, or the line") from error
    missing = [name for name in FIELDS if not isinstance(row, dict) or name not in row]
    if missing:
        raise UserError(
            f"{place}: no {', '.join(missing)}: not a line of calibadv evaluate; give another file"
        )
    return row
