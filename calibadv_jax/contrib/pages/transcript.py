"""One group for the trajectory page: the text of every token, and the advantage of every turn, explained."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from calibadv_jax.advantages.calibadv import variant_keys
from calibadv_jax.advantages.credit import last_filled, two_sides
from calibadv_jax.advantages.estimators import ESTIMATORS, mean_and_std
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import NO_ACTIONS, SEARCH_ALONE, Trajectory
from calibadv_jax.record.reader import from_rows
from calibadv_jax.rewards.score import format_flaw, turn_flaws

RecordRow = dict[str, Any]  # a trajectory, or a turn of it, by the columns of record.schema
AdvantageSettings = Mapping[str, Any]  # the section `advantage` of the run's config
_REPLACEMENT = "\ufffd"  # written by a decoder for bytes that are no character (yet)
_LONGEST_CHARACTER = 4  # bytes of UTF-8, each of which may be a token of its own
_TRAJECTORY_COLUMNS = (
    *("index", "error", "answer", "answer_score", "format_valid", "policy_versions", "advantage_raw"),
)
_TURN_COLUMNS = (
    *("kind", "stop_reason", "is_refused", "policy_versions", "advantage_raw", "advantage"),
    *("correctness", "softened", "repeated", "found_silver"),
)
_GROUP_COLUMNS = (
    *("step", "group", "question_id", "question", "data_source", "golden_answers", "supporting_ids"),
)


class Pieces:
    """Cuts the text of token ids into one piece a token.

    Args:
        folder: with the tokenizer.json of the policy.

    Raises:
        UserError: no such file, or it cannot be loaded.
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
        whole = self.text(ids)
        alone = self._tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        return alone if "".join(alone) == whole else self._in_context(list(ids), whole)

    def _in_context(self, ids: list[int], whole: str) -> list[str]:
        """Return as a token's piece its addition to the text of the few before it, as TGI and vLLM stream."""
        pieces: list[str] = []
        start, end = 0, 0  # ids[start:end] has been shown, and ids[start:] is decoded together
        for place in range(len(ids)):
            before, after = self.text(ids[start:end]), self.text(ids[start : place + 1])
            is_open = after.endswith(_REPLACEMENT) and place + 1 - end < _LONGEST_CHARACTER
            if is_open or len(after) <= len(before):
                pieces.append("")
                continue
            pieces.append(after[len(before) :])
            start, end = end, place + 1
        if "".join(pieces) == whole:
            return pieces
        # The decoder looks further back: pieces of `whole` with the same lengths, the rest in the last one.
        ends = np.cumsum([0, *map(len, pieces)]).tolist()
        cut = [whole[start:end] for start, end in zip(ends, ends[1:], strict=False)]
        return [*cut[:-1], cut[-1] + whole[ends[-1] :]]


def transcript(
    rows: Sequence[RecordRow],
    pieces: Pieces,
    settings: AdvantageSettings,
    opening: str = "",
    actions: tuple[str, ...] = SEARCH_ALONE,
) -> dict[str, Any]:
    """Return a group in JSON's types.

    Args:
        rows: all trajectories of the group, with all columns.
        opening, actions: of every trajectory, see `Trajectory`.
    """
    first = rows[0]
    (group,), *_ = from_rows(rows, opening, actions)
    return {
        **{name: first[name] for name in _GROUP_COLUMNS},
        "silver": dict(first["silver"]),
        "prompt": pieces.text(first["prompt_ids"]),
        "why": group_words(rows, settings),
        "is_judged": is_judged(settings),
        "trajectories": [
            _trajectory(row, trajectory, rows, pieces, settings)
            for row, trajectory in zip(rows, group.attempts, strict=True)
        ],
    }


def _trajectory(
    row: RecordRow,
    trajectory: Trajectory,
    group: Sequence[RecordRow],
    pieces: Pieces,
    settings: AdvantageSettings,
) -> dict[str, Any]:
    explained = zip(turn_words(row, settings), turn_flaws(trajectory), strict=True)
    return {
        **{name: row[name] for name in _TRAJECTORY_COLUMNS},
        "seconds": round(row["seconds"], 3),
        "metrics": dict(row["metrics"]),
        "why": trajectory_words(row, group, settings, format_flaw(trajectory)),
        "turns": [
            _turn(place, row, pieces) | {"why": reason, "flaw": flaw}
            for place, (reason, flaw) in enumerate(explained)
        ],
    }


def _turn(place: int, row: RecordRow, pieces: Pieces) -> dict[str, Any]:
    turn = row["turns"][place]
    seen = {document["id"] for earlier in row["turns"][:place] for document in earlier["documents"]}
    return {
        **{name: turn[name] for name in _TURN_COLUMNS},
        "ids": turn["token_ids"],
        "pieces": pieces.pieces(turn["token_ids"]),
        "logprobs": _rounded(turn["logprobs"]),
        "learner_logprobs": _rounded(turn["learner_logprobs"]),
        "observation": observation_parts(turn["observation_text"], turn["documents"]),
        "num_observation_tokens": len(turn["observation_ids"]),
        "documents": [_document(document, turn, row, seen) for document in turn["documents"]],
    }


def _document(document: RecordRow, turn: RecordRow, row: RecordRow, seen: Collection[str]) -> dict[str, Any]:
    identity = document["id"]
    return {
        **document,
        "weight": dict(row["silver"]).get(identity),
        "is_new": identity in turn["found_silver"],
        "is_seen": identity in seen,
        "is_supporting": identity in row["supporting_ids"],
    }


def _rounded(values: Sequence[float] | None) -> list[float | None] | None:
    """Round to four places; None for values that JSON lacks."""
    if values is None:
        return None
    return [round(value, 4) if math.isfinite(value) else None for value in values]


def observation_parts(text: str, documents: Sequence[RecordRow]) -> list[dict[str, Any]]:
    """Return the observation in order, `{"text", "document"}`: a part shows a document (its place) or none.

    Documents are located by the headers that the agent loop writes; no document can forge one
    (`tags.neutralise`). An observation that was cut may lack the last documents.
    """
    starts, position = [], 0
    for place, document in enumerate(documents):
        position = text.find(f'Doc {place + 1}(Title: "{document["title"]}', position)
        if position < 0:
            break
        starts.append(position)
        position += 1
    if not starts:
        return [{"text": text, "document": None}] if text else []
    end = text.rfind("</information>")
    bounds = [0, *starts, end if end >= starts[-1] else len(text), len(text)]
    places = [None, *range(len(starts)), None]
    return [
        {"text": text[start:stop], "document": place}
        for place, start, stop in zip(places, bounds, bounds[1:], strict=False)
        if start < stop
    ]


def signed(value: float) -> str:
    """Format with three places, always with a sign, and a real minus: +0.500, −1.155, 0.000."""
    rounded = f"{value:+.3f}".replace("-", "−")
    return "0.000" if rounded.strip("+−") == "0.000" else rounded


def plain(value: float) -> str:
    """Format with up to three places, a real minus."""
    return f"{round(value, 3):g}".replace("-", "−")


def group_words(group: Sequence[RecordRow], settings: AdvantageSettings) -> list[str]:
    """Describe for all trajectories of a question in a step how scores become advantages."""
    scores = _scores(group)
    if not scores:
        return ["No trajectory of this group was finished: nothing is trained."]
    name, is_calibrated = _estimator(settings), settings.get("name") == "calibadv"
    entry = ESTIMATORS.get(name)
    words = [f"Scores of the finished trajectories: {', '.join(map(plain, scores))}."]
    if not _is_of_group(settings):
        keys = [key for key in ("normalize_std", "std_over", "score_threshold") if key in settings]
        config = AdvantageConfig(name=name, **{key: settings[key] for key in keys}) if entry else None
        formula = entry.formula(config) if entry and config else "a function of the run's own"
        words.append(f"Advantage by {name}: {formula}.")
    elif min(scores) == max(scores):
        words.append("They do not differ, so every advantage is 0.000: nothing is learned from this group.")
    else:
        mean, std = mean_and_std(np.array(scores, np.float64))
        centred = f"score − mean {plain(mean)}"
        scaled = f"({centred}) / standard deviation {plain(std)}"
        words.append(f"Advantage by {name}: {scaled if _is_scaled(settings) else centred}.")
    differ = any(turn["advantage_raw"] != row["advantage_raw"] for row in group for turn in row["turns"])
    if differ or (entry and entry.by_turn):
        carried = entry.carried if entry else "turns have advantages of their own"
        words.append(f"{name}: {carried}. The number of a trajectory is that of its last sampled turn.")
    elif not is_calibrated:
        words.append(f"{name} calibrates no turn: every turn carries its trajectory's advantage.")
    return words + (_calibration_words(group, settings) if is_calibrated else [])


def is_judged(settings: AdvantageSettings) -> bool:
    """Return whether searches have a correctness, see `advantages.estimators.judges`."""
    name = settings.get("name")
    return name == "calibadv" or (name in ESTIMATORS and ESTIMATORS[name].judges)


def _scores(group: Sequence[RecordRow]) -> list[float]:
    return [row["answer_score"] for row in group if row["error"] is None]


def _estimator(settings: AdvantageSettings) -> str:
    """Return the estimator of the advantages before any calibration."""
    name = str(settings.get("name", "grpo"))
    return str(settings.get("base", "grpo")) if name == "calibadv" else name


def _is_of_group(settings: AdvantageSettings) -> bool:
    """Return whether advantages follow from the mean, and the deviation, of the group's scores alone."""
    return _estimator(settings) in ("grpo", "dr_grpo") and settings.get("std_over", "group") == "group"


def _is_scaled(settings: AdvantageSettings) -> bool:
    return _estimator(settings) != "dr_grpo" and bool(settings.get("normalize_std", True))


def trajectory_words(
    row: RecordRow, group: Sequence[RecordRow], settings: AdvantageSettings, flaw: str
) -> str:
    """Derive the trajectory's own advantage; empty if the group's words cover it.

    Args:
        group: all trajectories of its question in its step, itself among them.
        flaw: why its format is not valid, see `rewards.score.format_flaw`.
    """
    if row["error"] is not None or row["advantage_raw"] is None:
        return "This trajectory could not be finished: it is left out of its group and never trained."
    invalid = ""
    if not row["format_valid"]:
        judged = " None of its turns is judged." if row["silver"] else ""
        invalid = f"Invalid format: {flaw or 'rewards are shuffled (reward.shuffle)'}.{judged} "
    scores, score = _scores(group), row["answer_score"]
    if not _is_of_group(settings) or min(scores) == max(scores):
        return invalid.strip()
    mean, std = mean_and_std(np.array(scores, np.float64))
    centred = f"{plain(score)} − {plain(mean)}"
    formula = f"({centred}) / {plain(std)}" if _is_scaled(settings) else centred
    return f"{invalid}{formula} = {signed(row['advantage_raw'])}."


def turn_words(row: RecordRow, settings: AdvantageSettings) -> list[str]:
    """Explain the change of each turn's advantage; empty where the group's words cover it."""
    last = last_sampled(row)
    words = []
    for place, turn in enumerate(row["turns"]):
        if row["error"] is not None or turn["advantage"] is None:
            words.append("")
        elif not turn["token_ids"]:
            words.append("No token was sampled: nothing is trained.")
        elif settings.get("name") != "calibadv" or variant_keys(settings):
            words.append(_judgement(row, turn, settings) if turn["kind"] not in NO_ACTIONS else "")
        elif place == last:
            words.append(_answer_words(turn))
        else:
            words.append(_search_words(row, turn, settings))
    return words


def last_sampled(row: RecordRow) -> int | None:
    """Return the index of the last turn with a sampled token, CalibAdv's answer turn."""
    return last_filled([turn["token_ids"] for turn in row["turns"]])


def _calibration_words(group: Sequence[RecordRow], settings: AdvantageSettings) -> list[str]:
    soft, rebalance = settings.get("soft_penalty", True), settings.get("rebalance", True)
    words = []
    if soft:
        words.append("Soft penalty: a negative advantage of an action is multiplied by 1 − its correctness.")
    if not group[0]["silver"]:
        threshold = plain(settings.get("silver_threshold", 0.7))
        words.append(
            "Every correctness is 0: the group has no silver documents (no trajectory in the right format"
            f" that saw documents scored {threshold} of the largest reward or more)."
        )
    if variants := [f"{key}={settings[key]}" for key in variant_keys(settings)]:
        return [*words, f"CalibAdv with {', '.join(variants)}: each turn shows what that made of it."]
    for key, is_on in (("soft_penalty", soft), ("rebalance", rebalance)):
        words += [] if is_on else [f"Switched off: advantage.{key}."]
    return words + (_rebalance_words(group, settings) if rebalance else [])


def _rebalance_words(group: Sequence[RecordRow], settings: AdvantageSettings) -> list[str]:
    masses = []  # uncalibrated, over the tokens of answer turns
    for row in group:
        last = last_sampled(row)
        if last is not None and row["error"] is None:
            turn = row["turns"][last]
            masses.append(turn["advantage_raw"] * len(turn["token_ids"]))
    positive, negative = two_sides(masses)
    if positive == negative == 0:
        return []
    sums = (
        "Rebalancing: over the tokens of the answer turns (the last sampled ones) the positive advantages sum"
        f" up to {plain(positive)}, the negative ones to −{plain(negative)}."
    )
    if positive == 0 or negative == 0:
        return [f"{sums} One side is empty and nothing can balance the other: they become 0."]
    side, target = settings.get("adjust", "positive"), plain(settings.get("target_ratio", 1.0))
    return [f"{sums} The {side} side is rescaled until negative / positive = λ = {target}."]


def _search_words(row: RecordRow, turn: RecordRow, settings: AdvantageSettings) -> str:
    if turn["kind"] in NO_ACTIONS:
        return f"Only actions can be softened; this turn is {turn['kind']}."
    judged = _judgement(row, turn, settings)
    raw, after = turn["advantage_raw"], turn["advantage"]
    if turn["softened"]:
        return f"Softened. {judged} {signed(raw)} × (1 − {plain(turn['correctness'])}) = {signed(after)}."
    is_kept = judged and raw < 0 and settings.get("soft_penalty", True)
    return f"Not softened. {judged}" if is_kept else judged


def _judgement(row: RecordRow, turn: RecordRow, settings: AdvantageSettings) -> str:
    """Explain the correctness of a search; empty where it could have none."""
    silver = dict(row["silver"])
    number = len(turn["documents"])
    if not silver or not row["format_valid"]:
        return ""
    ids = list(dict.fromkeys(turn["found_silver"]))
    titles = {document["id"]: document["title"] for document in turn["documents"]}
    weighted = ", ".join(f"“{titles.get(key, key)}” (weight {plain(silver.get(key, 0.0))})" for key in ids)
    count = f"{len(ids)} new silver document{'' if len(ids) == 1 else 's'}"
    finding = f"it found {count} among its {number}: {weighted}"
    if turn["repeated"]:
        also = f", although {finding}" if ids else ""
        return f"Correctness 0: the search repeats the {turn['repeated']}{also}."
    if not ids:
        seen = any(document["id"] in silver for document in turn["documents"])
        why = "its silver documents had been seen before" if seen else "it found no silver document"
        return f"Correctness 0: {why}."
    correctness = plain(turn["correctness"])
    how = settings.get("correctness", "fraction")
    total = plain(math.fsum(silver.get(key, 0.0) for key in ids))
    formula = {
        "fraction": f"{len(ids)} / {number}",
        "max": "the largest of these weights",
        "mean": f"{total} (sum of these weights) / {number}",
    }.get(how, how)
    return f"Correctness {correctness}: {finding} ({how}: {formula} = {correctness})."


def _answer_words(turn: RecordRow) -> str:
    raw, after = turn["advantage_raw"], turn["advantage"]
    if raw == after or not after:
        return ""
    return f"Answer turn, rescaled: {signed(raw)} × {plain(after / raw)} = {signed(after)}."
