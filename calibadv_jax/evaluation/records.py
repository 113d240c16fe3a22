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
from calibadv_jax.config.keys import marked
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_write, content_hash, wrap_disk_errors
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.evaluation.methods import METHODS

ScoredRow = dict[str, Any]  # one line of the file
RowKey = tuple[str, str, str]  # values of KEY_FIELDS

KEY_FIELDS = ("temperature", "data_source", "id")
FIELDS = (*KEY_FIELDS, "evaluation", "content", "question", "golden_answers", "scores", "trajectories")


def identity(
    config: Config,
    policy: dict[str, Any],
    service: dict[str, Any],
    questions: Sequence[Question],
    prompt_hashes: Mapping[str, str],
) -> str:
    """Hash all that decides an answer or its scores: policy, method, prompt, sampling, retrieval, reward.

    The `config` is as given, before `method_config`; `service` describes the retriever. `prompt_hashes` may
    hold "tools" (descriptions, unless search is the only action) and "judge" (the file of its prompt).
    """
    evaluate = config.evaluate
    value = {
        "policy": policy,
        "evaluate": [evaluate.method, evaluate.template, evaluate.samples],
        "seed": config.run.seed,
        "sampler": [config.sampler.name, config.sampler_dtype],
        "prompt": {  # evaluations that are older than chat_template_kwargs go on
            name: value for name, value in dataclasses.asdict(config.prompt).items() if value != {}
        },
        "rollout": _deciding("rollout", dataclasses.asdict(config.rollout)),
        "retriever": _deciding("retriever", dataclasses.asdict(config.retriever)),
        "service": service,
        "pool": [q.text for q in questions] if evaluate.method == "random_documents" else [],
    }
    judge, tools = prompt_hashes.get("judge", ""), prompt_hashes.get("tools")
    if config.reward != RewardConfig() or judge:
        value["reward"] = [_deciding("reward", dataclasses.asdict(config.reward)), judge]
    if tools:
        value["tools"] = [tools, [[tool.name, tool.max_length] for tool in config.tools]]
    return content_hash(value)[:16]


def _deciding(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the keys of a section, and of its sections, that decide an answer or its scores."""
    free = marked(Mark.NO_ANSWER)
    return {
        name: _deciding(f"{section}.{name}", value) if isinstance(value, dict) else value
        for name, value in values.items()
        if f"{section}.{name}" not in free
    }


def make_row(evaluation: str, temperature: float, question: Question, group: Group, method: str) -> ScoredRow:
    """Return the row of a scored group; `question` is the data's: the group's own may carry passages."""
    is_agent = METHODS[method].template is None
    attempts = [_attempt(trajectory, is_agent) for trajectory in group.attempts]
    return {
        "evaluation": evaluation,
        "content": _content(question),
        "temperature": f"{temperature:g}",
        "data_source": question.data_source,
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "scores": question_scores([attempt["scores"] for attempt in attempts if attempt["error"] is None]),
        "trajectories": attempts,
    }


def question_scores(attempts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return means over finished trajectories; of several also mean@n and pass@k, k = 2, 4, 8, … and n."""
    if not attempts:
        return {}
    count = len(attempts)
    scores = {name: sum(attempt[name] for attempt in attempts) / count for name in attempts[0]}
    if count > 1:
        correct = sum(attempt["em"] == 1 for attempt in attempts)
        scores[f"mean@{count}"] = correct / count
        powers = {2**exponent for exponent in range(1, count.bit_length())}
        scores |= {f"pass@{k}": pass_at_k(count, correct, k) for k in sorted(powers | {count})}
    return scores


def _attempt(trajectory: Trajectory, is_agent: bool) -> ScoredRow:
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


def key_of(row: ScoredRow) -> RowKey:
    return row["temperature"], row["data_source"], row["id"]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the chance that one of k samples is correct (Chen et al., arXiv 2107.03374)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def read_scores(path: Path) -> Iterator[ScoredRow]:
    """Read every row of a file without its transcripts; raise UserError if no evaluation wrote it."""
    return (_without_transcripts(row) for _, row in _read(path))


class RowFile:
    """The file of an evaluation that is under way: its rows so far, and new ones. Transcripts stay on disk.

    Rows of another evaluation, rows with a failed trajectory and a line that an interruption cut are dropped:
    their questions are asked again.
    """

    def __init__(self, path: Path, evaluation: str, questions: Sequence[Question]):
        self.path, self.evaluation = path, evaluation
        self.rows: dict[RowKey, ScoredRow] = {}  # without transcripts
        self._offsets: dict[RowKey, int] = {}  # bytes before a row's line
        contents = {(question.data_source, question.id, _content(question)) for question in questions}
        rows = _read(path, may_be_cut=True) if path.is_file() else ()
        for offset, row in rows:
            is_same = (row["data_source"], row["id"], row["content"]) in contents
            is_whole = all(attempt["error"] is None for attempt in row["trajectories"])
            if row["evaluation"] == evaluation and is_same and is_whole:
                self._note(row, offset)

    def start(self) -> None:
        """Remove the dropped rows from the file; `add` appends to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self._rewrite(list(self.rows))

    def add(self, row: ScoredRow) -> None:
        """Append a row; it survives the end of this process."""
        with wrap_disk_errors(self.path), self.path.open("ab") as file:
            self._note(row, file.tell())
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    def finish(self, order: Sequence[RowKey]) -> list[ScoredRow]:
        """Put the file in this order; return its rows without transcripts."""
        self._rewrite(order)
        return [self.rows[key] for key in order]

    def _note(self, row: ScoredRow, offset: int) -> None:
        self.rows[key_of(row)], self._offsets[key_of(row)] = _without_transcripts(row), offset

    def _rewrite(self, order: Sequence[RowKey]) -> None:
        offsets: dict[RowKey, int] = {}
        with self.path.open("rb") as old, atomic_write(self.path) as partial, partial.open("wb") as new:
            for key in order:
                old.seek(self._offsets[key])
                offsets[key] = new.tell()
                new.write(old.readline())
        self._offsets = offsets


def _without_transcripts(row: ScoredRow) -> ScoredRow:
    return row | {"trajectories": [{"error": attempt["error"]} for attempt in row["trajectories"]]}


def _content(question: Question) -> str:
    return content_hash(dataclasses.asdict(question))[:16]


def _read(path: Path, may_be_cut: bool = False) -> Iterator[tuple[int, ScoredRow]]:
    """Yield (bytes before the line, row) of every line; `may_be_cut` omits a last line without newline."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the .jsonl (or the .json beside it) of an evaluation")
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if may_be_cut and not line.endswith(b"\n"):
                return
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where}: not valid JSON ({error}); remove the file, or the line") from error
            missing = [name for name in FIELDS if not isinstance(row, dict) or name not in row]
            if missing:
                fault = f"no {', '.join(missing)}: not a line of calibadv evaluate"
                raise UserError(f"{where}: {fault}; give another file")
            yield offset, row
            offset += len(line)
