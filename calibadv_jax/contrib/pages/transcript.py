"""One group for the trajectory page: the text of every token, and the advantage of every turn, explained."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from calibadv_jax.advantages.baselines import mean_and_std
from calibadv_jax.advantages.calibadv import variant_keys
from calibadv_jax.advantages.credit import last_non_empty, positive_negative_sums
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import ESTIMATORS
from calibadv_jax.core.tags import CLOSE_INFORMATION
from calibadv_jax.core.tool_calls import readable_call
from calibadv_jax.core.trajectory import NO_ACTIONS, Group, Trajectory
from calibadv_jax.rewards.score import format_flaw, turn_flaws
from calibadv_jax.rollout_store.reader import SharedFields, calls_of_turn, from_rows

RecordRow = dict[str, Any]  # a trajectory, or a turn of it, by the columns of rollout_store.schema
_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that do not make a character (yet)
_LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, each of which may be a token of its own
# Columns that the page shows without change: of the group, of a trajectory, of a turn.
_GROUP = (
    "step",
    "group",
    "question_id",
    "question",
    "data_source",
    "golden_answers",
    "supporting_ids",
)
_TRAJECTORY = (
    "index",
    "error",
    "answer",
    "answer_score",
    "format_valid",
    "policy_versions",
    "advantage_raw",
)
_TURN = (
    "kind",
    "stop_reason",
    "is_refused",
    "policy_versions",
    "advantage_raw",
    "advantage",
    "correctness",
    "softened",
    "repeated",
    "found_silver",
)


class Pieces:
    """Cuts the text of token ids into one piece a token, with the tokenizer.json in `folder`.

    Raises:
        UserError: there is no such file, or it cannot be loaded.
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
        if not ids:
            return []
        lengths = []  # letters of each token's piece
        # The tokens before `end` have their pieces. Those from `start` on are decoded together, because the
        # text of a token may depend on the one before it.
        start = 0
        end = 0
        for position in range(1, len(ids) + 1):
            before = self.text(ids[start:end])
            after = self.text(ids[start:position])
            is_incomplete = after.endswith(_REPLACEMENT) and position - end < _LONGEST_CHARACTER
            if is_incomplete:
                lengths.append(0)
            else:
                lengths.append(max(0, len(after) - len(before)))
                start = end
                end = position
        text = self.text(ids)
        bounds = [0, *accumulate(lengths[:-1]), len(text)]  # the last token has the rest of the text
        return [text[first:last] for first, last in pairwise(bounds)]


def transcript(
    rows: Sequence[RecordRow],
    pieces: Pieces,
    config: AdvantageConfig,
    shared: SharedFields,
) -> dict[str, Any]:
    """Return a group in JSON's types.

    Args:
        rows: all trajectories of the group, with all columns.
        pieces: cuts the text of the run's tokens.
        config: section `advantage` of the run's config.
        shared: what all trajectories of the run share; see `reader.shared_fields`.
    """
    first = rows[0]
    facts = _facts(rows, config)
    groups, *_ = from_rows(rows, shared)
    (group,) = groups
    explanation = WORDS.group(facts, config, first["silver"])
    trajectories = []
    for row, trajectory in zip(rows, group.attempts, strict=True):
        trajectories.append(
            {
                **{name: row[name] for name in _TRAJECTORY},
                "origin": _origin(trajectory),
                "seconds": round(row["seconds"], 3),
                "metrics": dict(row["metrics"]),
                "why": WORDS.trajectory(row, facts, format_flaw(trajectory)).strip(),
                "turns": _turns(row, pieces, config, turn_flaws(trajectory), _sharers(group, trajectory)),
            }
        )
    estimator = ESTIMATORS.get(config.name)
    estimator_judges = estimator is not None and estimator.judges_searches
    return {
        **{name: first[name] for name in _GROUP},
        "silver": dict(first["silver"]),
        "prompt": pieces.text(first["prompt_ids"]),
        "why": [line for line in explanation.splitlines() if line],
        "brief": WORDS.group_brief(facts).strip(),
        "is_judged": config.is_calibrated or estimator_judges,
        "trajectories": trajectories,
    }


def _origin(trajectory: Trajectory) -> str:
    """Return where a trajectory comes from; empty if the policy sampled it from the prompt."""
    if trajectory.is_demonstration:
        return "demonstration"
    if trajectory.continues is None:
        return ""
    num_turns = sum(turn.is_context for turn in trajectory.turns)
    turns = "turn 1" if num_turns == 1 else f"turns 1 to {num_turns}"
    return f"continues {turns} of trajectory {trajectory.continues}"


def _sharers(group: Group, trajectory: Trajectory) -> list[list[int]]:
    """Return for each turn of a trajectory the indices of those that continue it."""
    sharers: list[list[int]] = [[] for _ in trajectory.turns]
    for other in group.trajectories:
        if other.continues != trajectory.index:
            continue
        for place, turn in enumerate(other.turns):
            if turn.is_context:
                sharers[place].append(other.index)
    return sharers


def _turns(
    row: RecordRow,
    pieces: Pieces,
    config: AdvantageConfig,
    flaws: Sequence[str],
    sharers: Sequence[Sequence[int]],
) -> list[dict[str, Any]]:
    """Return the turns of a trajectory; `flaws` and `sharers` have an entry for each."""
    turns: list[dict[str, Any]] = []
    seen_ids: set[str] = set()  # documents of earlier turns
    facts = {"variants": variant_keys(asdict(config))}
    last = last_non_empty([turn["token_ids"] for turn in row["turns"]])
    for index, (turn, flaw) in enumerate(zip(row["turns"], flaws, strict=True)):
        calls = calls_of_turn(turn)
        documents = [_document(document, row, turn, seen_ids) for document in turn["documents"]]
        seen_ids |= {document["id"] for document in documents}
        # No sampler wrote the tokens of a demonstration: the policy's own probabilities are shown.
        is_demonstration = bool(row.get("is_demonstration"))
        logprobs = turn["learner_logprobs"] if is_demonstration else turn["logprobs"]
        learner_logprobs = None if is_demonstration else turn["learner_logprobs"]
        shared = _shared(row, turn, sharers[index])
        turns.append(
            {
                **{name: turn[name] for name in _TURN},
                "calls": [readable_call(call) for call in calls],
                "ids": turn["token_ids"],
                "pieces": pieces.pieces(turn["token_ids"]),
                "logprobs": _rounded(logprobs),
                "learner_logprobs": _rounded(learner_logprobs),
                "observation": _observation(turn, len(calls), documents),
                "num_observation_tokens": len(turn["observation_ids"]),
                "documents": documents,
                # Empty where the explanation of the group covers the turn.
                "why": shared or _explanation(row, turn, index == last, facts, config),
                # The same in a few words; empty where `why` has no shorter form.
                "brief": "" if shared else WORDS.turn_brief(row, turn, index == last, facts, config).strip(),
                "flaw": flaw,
            }
        )
    return turns


def _shared(row: RecordRow, turn: RecordRow, sharers: Sequence[int]) -> str:
    """Return where the tokens of a turn are trained that several trajectories go through; else ""."""
    if turn.get("is_context"):  # older files lack the column
        source = row.get("continues")
        where = "a demonstration's context" if source is None else f"trained in trajectory {source}"
        return f"Not trained here: {where}."
    if sharers:
        indices = ", ".join(str(index) for index in (row["index"], *sharers))
        return f"Advantage: the mean over the trajectories {indices}, which go through this turn."
    return ""


def _explanation(
    row: RecordRow, turn: RecordRow, is_last: bool, facts: Mapping[str, Any], config: AdvantageConfig
) -> str:
    """Return why a turn has its advantage, and how far it is from the teacher's policy."""
    sentences = [WORDS.turn(row, turn, is_last, facts, config).strip()]
    teacher = turn.get("teacher_logprobs")  # older files lack the column
    if teacher:
        sentences.append(WORDS.teaching(float(np.mean(np.subtract(turn["logprobs"], teacher)))).strip())
    return " ".join(sentence for sentence in sentences if sentence)


def _document(
    document: RecordRow, row: RecordRow, turn: RecordRow, seen_ids: Collection[str]
) -> dict[str, Any]:
    """Return a document of a turn with its part in the credit; `seen_ids`: documents of earlier turns."""
    name = document["id"]
    silver = dict(row["silver"])
    return {
        **document,
        "weight": silver.get(name),
        "is_new": name in turn["found_silver"],
        "is_seen": name in seen_ids,
        "is_supporting": name in row["supporting_ids"],
    }


def _rounded(values: Sequence[float] | None) -> list[float | None] | None:
    """Round to four places; None for a value that is not finite, which JSON cannot express."""
    if values is None:
        return None
    return [round(value, 4) if math.isfinite(value) else None for value in values]


def _observation(
    turn: RecordRow, num_calls: int, documents: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parts of a turn's observation, see `observation_parts` and `reply_parts`."""
    text = turn["observation_text"]
    if num_calls:
        return reply_parts(text, documents)
    return observation_parts(text, len(documents))


def reply_parts(text: str, documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Split the environment's reply to tool calls into its documents and the text around them.

    The documents of each call are numbered from 1, and the chat template writes around each reply.

    Args:
        text: the reply.
        documents: the documents of all calls, in order, with "title" and "text".

    Returns:
        The parts as `observation_parts` returns them. A document that was cut has its beginning; one that is
        not shown at all has no part.
    """
    parts: list[dict[str, Any]] = []
    position = 0
    for index, document in enumerate(documents):
        header = re.compile(rf'Doc \d+\(Title: "{re.escape(document["title"])}"\) ?')
        match = header.search(text, position)
        if match is None:
            continue
        shown = os.path.commonprefix([text[match.end() :], document["text"]])
        parts.append({"text": text[position : match.start()], "document": None})
        position = match.end() + len(shown)
        parts.append({"text": text[match.start() : position], "document": index})
    parts.append({"text": text[position:], "document": None})
    return [part for part in parts if part["text"]]


def observation_parts(text: str, num_documents: int | None = None) -> list[dict[str, Any]]:
    """Split an observation into its documents and the text around them.

    Args:
        text: the observation.
        num_documents: documents that the turn has; None: as many as the text has headers. Further headers,
            as in a record that somebody changed, are part of the text around them.

    Returns:
        The parts in order, each ``{"text", "document"}``: the index of the document that it shows, or None.

    Documents are located by the headers that the agent loop writes; no document can forge one
    (`neutraliser.Neutraliser`). An observation that was cut may lack the last documents.
    """
    before, *documents = re.split(r'(?=Doc \d+\(Title: ")', text)
    if num_documents is not None and len(documents) > num_documents:
        # The first part has no document, so that the rest joins the part before it.
        shown = [before, *documents]
        before, *documents = [*shown[:num_documents], "".join(shown[num_documents:])]
    parts: list[dict[str, Any]] = [{"text": before, "document": None}]
    for index, document in enumerate(documents):
        parts.append({"text": document, "document": index})
    if documents:
        last_document, closing, after = documents[-1].rpartition(CLOSE_INFORMATION.strip())
        if closing:
            parts[-1]["text"] = last_document
            parts.append({"text": closing + after, "document": None})
    return [part for part in parts if part["text"]]


def signed(value: float) -> str:
    """Format with three places, always with a sign, and a real minus: +0.500, −1.155, 0.000."""
    rounded = f"{value:+.3f}".replace("-", "−")
    if rounded.strip("+−") == "0.000":
        return "0.000"
    return rounded


def plain(value: float) -> str:
    """Format with up to three places, a real minus."""
    return f"{round(value, 3):g}".replace("-", "−")


def _silver_weight(name: str, silver: Mapping[str, float]) -> float:
    """Return the weight of a document in the silver set; 0 outside it."""
    return silver.get(name, 0.0)


def _load_words() -> Any:
    """Return words.jinja as a module: its macros, as functions that write an explanation."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.globals["no_actions"] = NO_ACTIONS
    environment.filters["plain"] = plain
    environment.filters["signed"] = signed
    environment.filters["weight"] = _silver_weight
    source = Path(__file__).with_name("words.jinja").read_text(encoding="utf-8")
    return environment.from_string(source).module


WORDS = _load_words()


def _facts(group: Sequence[RecordRow], config: AdvantageConfig) -> dict[str, Any]:
    """Return the numbers of a group that words.jinja puts into sentences."""
    finished = [row for row in group if row["error"] is None]
    scores = np.array([row["answer_score"] for row in finished], np.float64)
    mean, std = mean_and_std(scores) if finished else (0.0, 0.0)
    # The estimator before any calibration; None: a function of the run's own.
    estimator = ESTIMATORS.get(config.estimator)
    differ = False  # whether a turn's advantage is not that of its trajectory
    for row in group:
        if any(turn["advantage_raw"] != row["advantage_raw"] for turn in row["turns"]):
            differ = True
    answer_masses = []  # advantage × tokens of each answer turn: the last turn with sampled tokens
    for row in finished:
        sampled_turns = [turn for turn in row["turns"] if turn["token_ids"]]
        if sampled_turns:
            answer_turn = sampled_turns[-1]
            answer_masses.append(answer_turn["advantage_raw"] * len(answer_turn["token_ids"]))
    positive, negative = positive_negative_sums(answer_masses)
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
        "differ": differ or bool(estimator and estimator.turn_description),
        "carried": estimator.token_description if estimator else "turns have advantages of their own",
        "variants": [f"{key}={settings[key]}" for key in variant_keys(settings)],
        "positive": positive,
        "negative": negative,
    }
