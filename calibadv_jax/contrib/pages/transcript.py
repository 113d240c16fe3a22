"""One group for the trajectory page: the text of every token, and the advantage of every turn, explained."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from calibadv_jax.advantages.baselines import mean_and_std
from calibadv_jax.advantages.calibadv import variant_keys
from calibadv_jax.advantages.credit import last_filled, positive_negative_sums
from calibadv_jax.advantages.estimators import ESTIMATORS
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import CLOSE_INFORMATION
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.rewards.score import format_flaw, turn_flaws
from calibadv_jax.rollout_store.reader import from_rows

RecordRow = dict[str, Any]  # a trajectory, or a turn of it, by the columns of rollout_store.schema
_REPLACEMENT = "\ufffd"  # written by a decoder for bytes that are no character (yet)
_LONGEST_CHARACTER = 4  # bytes of UTF-8, each of which may be a token of its own
# Columns that are shown as they are.
_GROUP = ("step", "group", "question_id", "question", "data_source", "golden_answers", "supporting_ids")
_TRAJECTORY = ("index", "error", "answer", "answer_score", "format_valid", "policy_versions", "advantage_raw")
_TURN = (
    *("kind", "stop_reason", "is_refused", "policy_versions", "advantage_raw", "advantage"),
    *("correctness", "softened", "repeated", "found_silver"),
)


class Pieces:
    """Cuts the text of token ids into one piece a token, with the tokenizer.json in `folder`.

    Raises UserError if there is no such file, or it cannot be loaded.
    """

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path}: no such file; the page needs the run's tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path}: no tokenizer can be loaded ({' '.join(str(error).split())})") from error

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with special tokens shown."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return one piece a token; together they are `text(ids)`.

        A character that several tokens make belongs to the last of them; the others are empty.
        """
        whole, lengths = self.text(ids), []
        start = end = 0  # ids[start:end] have their pieces, and ids[start:] are decoded together
        for place in range(1, len(ids) + 1):
            before, after = self.text(ids[start:end]), self.text(ids[start:place])
            is_open = after.endswith(_REPLACEMENT) and place - end < _LONGEST_CHARACTER
            lengths.append(0 if is_open else max(0, len(after) - len(before)))
            if not is_open:
                start, end = end, place
        # The last token has the rest: bytes that make no character.
        bounds = [0, *accumulate(lengths[:-1]), len(whole)]
        return [whole[start:end] for start, end in pairwise(bounds)] if ids else []


def transcript(
    rows: Sequence[RecordRow],
    pieces: Pieces,
    config: AdvantageConfig,
    opening: str,
    actions: tuple[str, ...],
) -> dict[str, Any]:
    """Return a group in JSON's types: `rows` are all its trajectories, with all columns."""
    first, facts, estimator = rows[0], _facts(rows, config), ESTIMATORS.get(config.name)
    (group,), *_ = from_rows(rows, opening, actions)
    words = WORDS.group(facts, config, first["silver"])
    return {
        **{name: first[name] for name in _GROUP},
        "silver": dict(first["silver"]),
        "prompt": pieces.text(first["prompt_ids"]),
        "why": [line for line in words.splitlines() if line],
        "is_judged": config.is_calibrated or (estimator is not None and estimator.judges),
        "trajectories": [
            {
                **{name: row[name] for name in _TRAJECTORY},
                "seconds": round(row["seconds"], 3),
                "metrics": dict(row["metrics"]),
                "why": WORDS.trajectory(row, facts, format_flaw(trajectory)).strip(),
                "turns": _turns(row, pieces, config, turn_flaws(trajectory)),
            }
            for row, trajectory in zip(rows, group.attempts, strict=True)
        ],
    }


def _turns(
    row: RecordRow, pieces: Pieces, config: AdvantageConfig, flaws: Sequence[str]
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    seen: set[str] = set()  # documents of earlier turns
    silver, facts = dict(row["silver"]), {"variants": variant_keys(asdict(config))}
    last = last_filled([turn["token_ids"] for turn in row["turns"]])
    for place, (turn, flaw) in enumerate(zip(row["turns"], flaws, strict=True)):
        documents = [
            {
                **document,
                "weight": silver.get(document["id"]),
                "is_new": document["id"] in turn["found_silver"],
                "is_seen": document["id"] in seen,
                "is_supporting": document["id"] in row["supporting_ids"],
            }
            for document in turn["documents"]
        ]
        seen |= {document["id"] for document in documents}
        turns.append(
            {
                **{name: turn[name] for name in _TURN},
                "ids": turn["token_ids"],
                "pieces": pieces.pieces(turn["token_ids"]),
                **{name: _rounded(turn[name]) for name in ("logprobs", "learner_logprobs")},
                "observation": observation_parts(turn["observation_text"]),
                "num_observation_tokens": len(turn["observation_ids"]),
                "documents": documents,
                # Empty where the group's words cover it.
                "why": WORDS.turn(row, turn, place == last, facts, config).strip(),
                "flaw": flaw,
            }
        )
    return turns


def _rounded(values: Sequence[float] | None) -> list[float | None] | None:
    """Round to four places; None for values that JSON lacks."""
    if values is None:
        return None
    return [round(value, 4) if math.isfinite(value) else None for value in values]


def observation_parts(text: str) -> list[dict[str, Any]]:
    """Return the observation in order, `{"text", "document"}`: a part shows a document (its place) or none.

    Documents are located by the headers that the agent loop writes; no document can forge one
    (`tags.neutralise`). An observation that was cut may lack the last documents.
    """
    before, *shown = re.split(r'(?=Doc \d+\(Title: ")', text)
    parts: list[tuple[str, int | None]] = [(before, None)]
    parts += [(document, place) for place, document in enumerate(shown)]
    last, closing, after = parts[-1][0].rpartition(CLOSE_INFORMATION.strip())
    if shown and closing:
        parts[-1:] = [(last, len(shown) - 1), (closing + after, None)]
    return [{"text": part, "document": place} for part, place in parts if part]


def signed(value: float) -> str:
    """Format with three places, always with a sign, and a real minus: +0.500, −1.155, 0.000."""
    rounded = f"{value:+.3f}".replace("-", "−")
    return "0.000" if rounded.strip("+−") == "0.000" else rounded


def plain(value: float) -> str:
    """Format with up to three places, a real minus."""
    return f"{round(value, 3):g}".replace("-", "−")


_environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
_environment.globals["no_actions"] = NO_ACTIONS
_environment.filters |= {"plain": plain, "signed": signed}
_environment.filters["weight"] = lambda name, silver: silver.get(name, 0.0)
_source = Path(__file__).with_name("words.jinja").read_text(encoding="utf-8")
WORDS: Any = _environment.from_string(_source).module


def _facts(group: Sequence[RecordRow], config: AdvantageConfig) -> dict[str, Any]:
    """Return the numbers of a group that words.jinja tells."""
    finished = [row for row in group if row["error"] is None]
    scores = np.array([row["answer_score"] for row in finished], np.float64)
    mean, std = mean_and_std(scores) if finished else (0.0, 0.0)
    estimator = ESTIMATORS.get(config.estimator)  # before any calibration; None: a function of the run's own
    differ = any(turn["advantage_raw"] != row["advantage_raw"] for row in group for turn in row["turns"])
    sampled = [[turn for turn in row["turns"] if turn["token_ids"]] for row in finished]
    answers = [turns[-1] for turns in sampled if turns]
    positive, negative = positive_negative_sums(
        [turn["advantage_raw"] * len(turn["token_ids"]) for turn in answers]
    )
    settings = asdict(config)
    return {
        "name": config.estimator,
        "scores": scores.tolist(),
        "tied": len(set(scores)) < 2,
        "mean": mean,
        "std": std,
        "formula": estimator.formula(config) if estimator else "a function of the run's own",
        # Whether advantages follow from mean and deviation of the group's scores alone.
        "of_group": config.estimator in ("grpo", "dr_grpo") and config.std_over == "group",
        "scaled": config.estimator != "dr_grpo" and config.normalize_std,
        "differ": differ or bool(estimator and estimator.by_turn),
        "carried": estimator.carried if estimator else "turns have advantages of their own",
        "variants": [f"{key}={settings[key]}" for key in variant_keys(settings)],
        "positive": positive,
        "negative": negative,
    }
