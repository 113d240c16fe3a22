"""Why a turn got its advantage, in words and numbers, from what the record kept of its group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibadv_jax.advantages.credit import last_filled, two_sides
from calibadv_jax.advantages.named import ESTIMATORS
from calibadv_jax.advantages.steps import mean_and_std
from calibadv_jax.config import AdvantageConfig
from calibadv_jax.core.trajectory import NO_ACTIONS
from calibadv_jax.pages.run_files import Row

Settings = Mapping[str, Any]  # the section `advantage` of the run's config


def signed(value: float) -> str:
    """Three places, always with a sign, and a real minus: +0.500, −1.155, 0.000."""
    rounded = f"{value:+.3f}".replace("-", "−")
    return "0.000" if rounded.strip("+−") == "0.000" else rounded


def plain(value: float) -> str:
    """Up to three places, a real minus."""
    return f"{round(value, 3):g}".replace("-", "−")


def trajectory_words(row: Row, group: Sequence[Row], settings: Settings) -> str:
    """Where the trajectory's own advantage comes from.

    Args:
        group: all trajectories of its question in its step, itself among them.
    """
    if row["error"] is not None or row["advantage_raw"] is None:
        return "This trajectory could not be finished: it is left out of its group and never trained."
    scores = [one["answer_score"] for one in group if one["error"] is None]
    shown = ", ".join(plain(score) for score in scores)
    score, raw = row["answer_score"], signed(row["advantage_raw"])
    said = f"Scores of the finished trajectories of the group: {shown}."
    name = _estimator(settings)
    if name not in ("grpo", "dr_grpo") or settings.get("std_over", "group") != "group":
        of = "its answer turn" if _differ(row) else "it"
        return f"{said} {name} ({_formula(name, settings)}) gives {of} the advantage {raw}."
    if min(scores) == max(scores):
        return f"{said} They do not differ, so the advantage is {raw}: nobody is praised or blamed."
    mean, std = mean_and_std(np.array(scores, np.float64))
    if name == "dr_grpo" or not settings.get("normalize_std", True):
        return f"{said} Score {plain(score)} − mean {plain(mean)} = {raw}."
    return f"{said} (Score {plain(score)} − mean {plain(mean)}) / standard deviation {plain(std)} = {raw}."


def _estimator(settings: Settings) -> str:
    """Who made the advantages, before any calibration."""
    name = str(settings.get("name", "grpo"))
    return str(settings.get("base", "grpo")) if name == "calibadv" else name


def _formula(name: str, settings: Settings) -> str:
    if name not in ESTIMATORS:
        return "a function of the run's own"
    known = ("normalize_std", "std_over", "score_threshold")
    return ESTIMATORS[name].formula(
        AdvantageConfig(name=name, **{key: settings[key] for key in known if key in settings})
    )


def _differ(row: Row) -> bool:
    """Whether turns had advantages of their own before any calibration."""
    return any(turn["advantage_raw"] != row["advantage_raw"] for turn in row["turns"])


def turn_words(row: Row, group: Sequence[Row], settings: Settings) -> list[str]:
    """One text a turn: what was done to its advantage, and why."""
    last = last_sampled(row)
    words = []
    for place, turn in enumerate(row["turns"]):
        if row["error"] is not None or turn["advantage"] is None:
            words.append("The trajectory failed: no turn of it is trained.")
        elif not turn["token_ids"]:
            words.append("No token was sampled: nothing is trained.")
        elif settings.get("name") != "calibadv":
            words.append(_unchanged(row, turn, settings))
        elif _is_variant(settings):
            words.append(_variant_words(row, turn, settings))
        elif place == last:
            words.append(_answer_words(row, group, settings))
        else:
            words.append(_search_words(row, turn, settings))
    return words


def last_sampled(row: Row) -> int | None:
    """Index of the last turn with a sampled token, CalibAdv's answer turn."""
    return last_filled([turn["token_ids"] for turn in row["turns"]])


def _unchanged(row: Row, turn: Row, settings: Settings) -> str:
    name = settings.get("name") or "The algorithm"
    if turn["advantage_raw"] != row["advantage_raw"]:
        return f"{name} gives this turn an advantage of its own, {signed(turn['advantage'])}."
    if turn["advantage"] == turn["advantage_raw"]:
        return (
            f"{name} calibrates no turn: it carries the trajectory's advantage, {signed(turn['advantage'])}."
        )
    return f"{name} made {signed(turn['advantage'])} of {signed(turn['advantage_raw'])}."


_OF_THE_PAPER = {
    "softening": "plain",
    "rebalance_over": "answer",
    "rebalance_within": "group",
    "rebalance_by": "advantage",
    "rebalance_excess": False,
}


def _is_variant(settings: Settings) -> bool:
    """Whether CalibAdv was calibrated otherwise than in the paper."""
    return bool(_changes(settings))


def _changes(settings: Settings) -> list[str]:
    pairs = [*_OF_THE_PAPER.items(), *([("adjust", "")] if settings.get("adjust") == "clip" else [])]
    return [f"{key}={settings[key]}" for key, value in pairs if settings.get(key, value) != value]


def _variant_words(row: Row, turn: Row, settings: Settings) -> str:
    """What happened, without the numbers that the record does not hold for this variant."""
    judged = f"{_judgement(row, turn, settings)} " if turn["kind"] not in NO_ACTIONS else ""
    before, after = signed(turn["advantage_raw"]), signed(turn["advantage"])
    return f"{judged}CalibAdv with {', '.join(_changes(settings))} made {after} of {before}."


def _search_words(row: Row, turn: Row, settings: Settings) -> str:
    """Of a turn before the answer turn: soft penalty."""
    raw, after, correctness = turn["advantage_raw"], turn["advantage"], turn["correctness"]
    whose = "the trajectory's" if raw == row["advantage_raw"] else "its own"
    kept = f"It keeps {whose} advantage, {signed(after)}."
    if turn["kind"] in NO_ACTIONS:
        return f"Only actions can be softened; this turn is {turn['kind']}. {kept}"
    judged = _judgement(row, turn, settings)
    if not settings.get("soft_penalty", True):
        return f"The soft penalty is off (advantage.soft_penalty). {judged} {kept}"
    if raw >= 0:
        return f"{judged} Only a negative advantage is softened. {kept}"
    if not turn["softened"]:
        return f"Not softened. {judged} {kept}"
    factor = plain(1 - correctness)
    return (
        f"Softened. {judged} The soft penalty leaves 1 − {plain(correctness)} = {factor} of the penalty:"
        f" {signed(raw)} × {factor} = {signed(after)}."
    )


def _judgement(row: Row, turn: Row, settings: Settings) -> str:
    """The correctness of a search, and what made it."""
    silver = dict(row["silver"])
    number = len(turn["documents"])
    if not silver:
        threshold = plain(settings.get("silver_threshold", 0.7))
        return (
            "Correctness 0: the group has no silver documents (no trajectory in the right format that saw"
            f" documents scored {threshold} of the largest reward or more)."
        )
    if not row["format_valid"]:
        return "Correctness 0: the trajectory's format is invalid, so none of its turns is judged."
    found = [one for one in dict.fromkeys(turn["found_silver"])]
    titles = {document["id"]: document["title"] for document in turn["documents"]}
    named = ", ".join(f"“{titles.get(one, one)}” (weight {plain(silver.get(one, 0.0))})" for one in found)
    has_found = f"it found {_count(len(found), 'new silver document')} among its {number}: {named}"
    if turn["repeated"]:
        also = f", although {has_found}" if found else ""
        return f"Correctness 0: the search repeats the {turn['repeated']}{also}."
    if not found:
        seen = any(one["id"] in silver for one in turn["documents"])
        why = "its silver documents had been seen before" if seen else "it found no silver document"
        return f"Correctness 0: {why}."
    correctness = plain(turn["correctness"])
    how = settings.get("correctness", "fraction")
    weights = [silver.get(one, 0.0) for one in found]
    formula = {
        "fraction": f"{len(found)} / {number}",
        "max": "the largest of these weights",
        "mean": f"{plain(math.fsum(weights))} (sum of these weights) / {number}",
    }.get(how, how)
    return f"Correctness {correctness}: {has_found} ({how}: {formula} = {correctness})."


def _answer_words(row: Row, group: Sequence[Row], settings: Settings) -> str:
    """Of the last sampled turn: rebalance."""
    turn = row["turns"][last_sampled(row) or 0]
    raw, after = turn["advantage_raw"], turn["advantage"]
    name = "The last sampled turn (“answer turn”)"
    if not settings.get("rebalance", True):
        return (
            f"{name} is not softened, and rebalancing is off (advantage.rebalance): it keeps {signed(after)}."
        )
    if raw == 0:
        return f"{name} has advantage 0: nothing to rebalance."
    positive, negative = _answer_mass(group)
    sums = (
        f"Over the tokens of the group's answer turns the positive advantages sum up to {plain(positive)},"
        f" the negative ones to −{plain(negative)}."
    )
    if positive == 0 or negative == 0:
        return f"{name}. {sums} One side is empty and nothing can balance the other: they become 0."
    side = settings.get("adjust", "positive")
    target = plain(settings.get("target_ratio", 1.0))
    if (side == "positive") != (raw > 0):
        return f"{name}. {sums} Only the {side} side is rescaled: this turn keeps {signed(after)}."
    return (
        f"{name}. {sums} The {side} side is rescaled until negative / positive = λ = {target}:"
        f" {signed(raw)} × {plain(after / raw)} = {signed(after)}."
    )


def _answer_mass(group: Sequence[Row]) -> tuple[float, float]:
    """Positive sum and magnitude of the negative sum, before calibration, over the tokens of answer turns."""
    masses = []
    for row in group:
        last = last_sampled(row)
        if last is not None and row["error"] is None:
            turn = row["turns"][last]
            masses.append(turn["advantage_raw"] * len(turn["token_ids"]))
    return two_sides(masses)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
