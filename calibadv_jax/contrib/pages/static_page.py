"""Chosen groups as one HTML file to send to somebody: no script, and nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from calibadv_jax.contrib.pages.transcript import plain, signed
from calibadv_jax.core.trajectory import NO_ACTIONS

# Bounds of the five shades of |advantage|, as in static/detail.js.
_SHADES = (0.25, 0.5, 1.0, 1.5)
# A mark and a word for how a trajectory ended, as in static/records.js.
_OUTCOMES = {
    "failed": ("–", "failed"),
    "invalid": ("!", "invalid format"),
    "right": ("✓", "right"),
    "partly": ("~", "partly right"),
    "wrong": ("✗", "wrong"),
}


def render_groups(
    run: str, groups: Sequence[Mapping[str, Any]], only: Mapping[int, int] | None = None
) -> str:
    """Return the page of some groups.

    Text of questions, documents and the policy is untrusted. It is escaped, and the page forbids scripts.

    Args:
        run: name of the run.
        groups: each as `transcript` returns it.
        only: place of a group -> the trajectory to show of it; of other groups all are shown.
    """
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["plain"] = plain
    environment.filters["signed"] = _signed
    environment.globals["outcome"] = outcome
    environment.globals["shade"] = shade
    environment.globals["silver_titles"] = silver_titles
    shown = []
    for place, group in enumerate(groups):
        index = (only or {}).get(place)
        trajectories = group["trajectories"]
        if index is not None:
            trajectories = [trajectory for trajectory in trajectories if trajectory["index"] == index]
        shown.append({**group, "trajectories": trajectories})
    return environment.get_template("static_page.html").render(
        run=run,
        groups=shown,
        no_actions=NO_ACTIONS,
        # The project's own files, not text of a run.
        style=Markup((folder / "static" / "style.css").read_text(encoding="utf-8")),
    )


def outcome(trajectory: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return name, mark and word for how a trajectory ended."""
    if trajectory["error"] is not None:
        name = "failed"
    elif not trajectory["format_valid"]:
        name = "invalid"
    elif trajectory["metrics"].get("em", 0.0) >= 1:
        name = "right"
    else:
        name = "partly" if trajectory["answer_score"] > 0 else "wrong"
    return name, *_OUTCOMES[name]


def shade(turn: Mapping[str, Any]) -> str:
    """Return the style classes of a turn's tokens."""
    advantage = turn["advantage"]
    if not advantage:
        is_spared = advantage == 0 and turn["advantage_raw"]
        return "zero spared" if is_spared else "zero"
    level = 1 + sum(abs(advantage) > bound for bound in _SHADES)
    return f"{'plus' if advantage > 0 else 'minus'} shade{level}"


def silver_titles(group: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return title and weight of the group's silver documents; the id where no turn shows one."""
    titles = {}
    for trajectory in group["trajectories"]:
        for turn in trajectory["turns"]:
            for document in turn["documents"]:
                titles[document["id"]] = document["title"]
    return [(titles.get(name) or name, weight) for name, weight in group["silver"].items()]


def _signed(value: float | None) -> str:
    """Format as `signed`; a dash for a value that was not computed."""
    return "–" if value is None else signed(value)
