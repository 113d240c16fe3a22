"""The questions of an evaluation with their transcripts and scores: JSON Lines, one question a line.

Each line carries the identity of its evaluation, so that an interrupted one continues and no other one does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from calibadv_jax.config import Config, RewardConfig
from calibadv_jax.config.keys import marked
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import replacing, written
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.evaluation.intervals import pass_at_k
from calibadv_jax.evaluation.methods import METHODS

Row = dict[str, Any]  # one line of the file
Key = tuple[str, str, str]  # temperature, data source, question id

FIELDS = (
    "evaluation", "content", "temperature", "data_source", "id", "question", "golden_answers", "scores",
    "trajectories",
)  # fmt: skip


def identity(
    config: Config,
    policy: dict[str, Any],
    service: dict[str, Any],
    questions: Sequence[Question],
    told: Mapping[str, str],
) -> str:
    """Hash of what decides an answer or its scores: policy, method, prompt, sampling, retrieval, reward.

    Args:
        config: as given, before `method_config`.
        service: which retriever answers.
        questions: all of the evaluation; "random_documents" draws from them.
        told: hashes of what the policy is told of its actions ("tools", where search is not the only one)
            and of what the judge is told ("judge", where it has a file).
    """
    evaluate, sampler = config.evaluate, config.sampler
    dtype = config.sampler_dtype
    value = {
        "policy": policy,
        "evaluate": [evaluate.method, evaluate.template, evaluate.samples],
        "seed": config.run.seed,
        "sampler": [sampler.name, dtype],
        "prompt": {  # evaluations that are older than chat_template_kwargs go on
            name: value for name, value in dataclasses.asdict(config.prompt).items() if value != {}
        },
        "rollout": _deciding("rollout", dataclasses.asdict(config.rollout)),
        "retriever": _deciding("retriever", dataclasses.asdict(config.retriever)),
        "service": service,
        "pool": [q.text for q in questions] if evaluate.method == "random_documents" else [],
    }
    if config.reward != RewardConfig() or told.get("judge"):
        value["reward"] = [_deciding("reward", dataclasses.asdict(config.reward)), told.get("judge", "")]
    if told.get("tools"):
        value["tools"] = [told["tools"], [[tool.name, tool.max_length] for tool in config.tools]]
    return _hash(value)


def _deciding(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a section, and of those in it, that decide an answer or its scores."""
    free = marked(Mark.NO_ANSWER)
    kept = {name: one for name, one in values.items() if f"{section}.{name}" not in free}
    return {
        name: _deciding(f"{section}.{name}", one) if isinstance(one, dict) else one
        for name, one in kept.items()
    }


def make_row(evaluation: str, temperature: float, question: Question, group: Group, method: str) -> Row:
    """A scored group as a line of the file.

    Args:
        question: as it stands in the data; the group's own may carry passages.
    """
    attempts = [_attempt(one, METHODS[method].template is None) for one in group.attempts]
    return {
        "evaluation": evaluation,
        "content": _content(question),
        "temperature": f"{temperature:g}",
        "data_source": question.data_source,
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "scores": question_scores([one["scores"] for one in attempts if one["error"] is None]),
        "trajectories": attempts,
    }


def question_scores(attempts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over a question's finished trajectories; with several also mean@n and pass@k of exact match.

    pass@k for k = 2, 4, 8, … and n. Empty where none has finished.
    """
    if not attempts:
        return {}
    count = len(attempts)
    scores = {name: sum(one[name] for one in attempts) / count for name in attempts[0]}
    if count > 1:
        correct = sum(one["em"] == 1 for one in attempts)
        scores[f"mean@{count}"] = correct / count
        powers = {2**exponent for exponent in range(1, count.bit_length())}
        scores |= {f"pass@{k}": pass_at_k(count, correct, k) for k in sorted(powers | {count})}
    return scores


def _attempt(trajectory: Trajectory, is_agent: bool) -> Row:
    scores = trajectory.metrics | {
        "answered": float(trajectory.answer is not None),
        "searches": float(trajectory.num_searches),
        "tokens": float(trajectory.mask.sum()),
    }
    if not is_agent:  # a single turn without search cannot keep to the agent's format
        scores.pop("format", None)
    return {
        "error": trajectory.error,
        "answer": trajectory.answer,
        "scores": {} if trajectory.error is not None else scores,
        "prompt_tokens": len(trajectory.prompt_ids),
        "turns": [
            {
                "kind": turn.kind,
                "text": turn.text,
                "stop_reason": turn.stop_reason,
                "tokens": len(turn.token_ids),
                "observation": turn.observation_text,
                "observation_tokens": len(turn.observation_ids),
                "document_ids": [document.id for document in turn.documents],
            }
            for turn in trajectory.turns
        ],
    }


def key_of(row: Row) -> Key:
    return row["temperature"], row["data_source"], row["id"]


def read_scores(path: Path) -> Iterator[Row]:
    """Every row of a file without its transcripts.

    Raises:
        UserError: no such file, or a line that no evaluation wrote.
    """
    return (_without_transcripts(row) for _, row in _read(path))


class RowFile:
    """The file of an evaluation that is under way: what it already holds, and new rows as they come.

    Rows of another evaluation and rows with a trajectory that failed are dropped: those questions are asked
    again. So is a line that was cut by the interruption. Transcripts stay on disk.

    Args:
        evaluation: see `identity`.
        questions: of this evaluation.
    """

    def __init__(self, path: Path, evaluation: str, questions: Sequence[Question]):
        self.path, self.evaluation = path, evaluation
        self.rows: dict[Key, Row] = {}  # without transcripts
        self.others = 0  # lines of another evaluation
        self._offsets: dict[Key, int] = {}  # bytes before a row's line
        known = {(question.data_source, question.id): question for question in questions}
        for offset, row in _read(path, may_be_cut=True) if path.is_file() else ():
            question = known.get((row["data_source"], row["id"]))
            is_ours = row["evaluation"] == evaluation
            self.others += not is_ours
            is_same = question is not None and row["content"] == _content(question)
            if is_ours and is_same and not _has_failed(row):
                self._note(row, offset)

    def start(self) -> None:
        """Drops what is not kept from the file; `add` appends to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self._rewrite(list(self.rows))

    def add(self, row: Row) -> None:
        """Appends a row; it survives the end of this process."""
        with written(self.path), self.path.open("ab") as file:
            self._note(row, file.tell())
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def finish(self, order: Sequence[Key]) -> list[Row]:
        """Puts the file in this order; returns its rows without transcripts."""
        self._rewrite(order)
        return [self.rows[key] for key in order]

    def _note(self, row: Row, offset: int) -> None:
        self.rows[key_of(row)], self._offsets[key_of(row)] = _without_transcripts(row), offset

    def _rewrite(self, order: Sequence[Key]) -> None:
        offsets: dict[Key, int] = {}
        with self.path.open("rb") as old, replacing(self.path) as partial, partial.open("wb") as new:
            for key in order:
                old.seek(self._offsets[key])
                offsets[key] = new.tell()
                new.write(old.readline())
        self._offsets = offsets


def _without_transcripts(row: Row) -> Row:
    errors = [{"error": one["error"]} for one in row["trajectories"]]
    return row | {"trajectories": errors}


def _content(question: Question) -> str:
    """Hash of all that the data say of a question."""
    return _hash(dataclasses.asdict(question))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _has_failed(row: Row) -> bool:
    return any(one["error"] is not None for one in row["trajectories"])


def _read(path: Path, may_be_cut: bool = False) -> Iterator[tuple[int, Row]]:
    """(bytes before the line, row) of every line.

    Args:
        may_be_cut: a last line without its end is left out.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the .jsonl (or the .json beside it) of an evaluation")
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if may_be_cut and not line.endswith(b"\n"):
                return
            yield offset, _parse(line, f"{path}:{number}")
            offset += len(line)


def _parse(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error}); remove the file, or the line") from error
    missing = [name for name in FIELDS if not isinstance(row, dict) or name not in row]
    if missing:
        raise UserError(
            f"{where}: no {', '.join(missing)}: not a line of calibadv evaluate; give another file"
        )
    return row
