"""Tables and curves of experiments/quickstart.md from the folders that quickstart_results.sh wrote.

python -m benchmarks.report_quickstart RESULTS_FOLDER --svg experiments/quickstart_curves.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOURCES = ("all", "one_hop", "two_hop", "comparison")
COLOURS = {"calibadv": "#1f6fb2", "grpo": "#c4622d", "shuffled": "#888888"}
WIDTH, HEIGHT, MARGIN = 640, 320, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--svg", type=Path)
    arguments = parser.parse_args()
    runs = {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(arguments.folder.glob("*/quickstart.json"))
    }
    curves = {name: rewards(arguments.folder / name) for name in runs}
    out = sys.stdout.write
    for temperature in ("1", "0"):
        out(f"\nF1 before -> after at temperature {temperature}\n\n")
        sources = sources_of(runs, temperature)
        out("| run | " + " | ".join(sources) + " | format after | searches after | seconds |\n")
        out("|---" * (len(sources) + 4) + "|\n")
        for name, run in runs.items():
            out(row(name, run, temperature, sources))
    out("\nMean training reward by steps\n\n")
    out(curve_table(curves))
    if arguments.svg:
        arguments.svg.write_text(svg(curves), encoding="utf-8")


def sources_of(runs: dict[str, dict[str, Any]], temperature: str) -> list[str]:
    """Return the kinds of questions that any run has, in the order of `SOURCES`."""
    return [source for source in SOURCES if any(source in run["after"][temperature] for run in runs.values())]


def row(name: str, run: dict[str, Any], temperature: str, sources: Sequence[str]) -> str:
    """Return a run's line of the table; a kind of question that its world does not have is left empty."""
    before, after = run["before"][temperature], run["after"][temperature]
    cells = []
    for source in sources:
        if source in after:
            cells.append(f"{before[source]['f1']:.2f} -> {after[source]['f1']:.2f}")
        else:
            cells.append("")
    cells += [f"{after['all']['format']:.3f}", f"{after['all']['searches']:.2f}"]
    cells.append(f"{run['seconds']['total']:.0f}")
    return f"| {name} | " + " | ".join(cells) + " |\n"


def rewards(folder: Path) -> list[float]:
    """Return the training reward of every step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward/f1"] for line in lines]


def smoothed(values: list[float], window: int = 10) -> list[float]:
    return [statistics.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def curve_table(curves: dict[str, list[float]]) -> str:
    names = [name for name in curves if len(curves[name]) > 1]
    text = "| steps | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|\n"
    for start in range(0, max(len(curves[name]) for name in names), 10):
        means = [curves[name][start : start + 10] for name in names]
        cells = [f"{statistics.mean(part):.2f}" if part else "" for part in means]
        text += f"| {start + 1}-{start + 10} | " + " | ".join(cells) + " |\n"
    return text


def svg(curves: dict[str, list[float]]) -> str:
    """Draw running means over ten steps, one line a run, coloured by arm."""
    lines = {name: smoothed(values) for name, values in curves.items() if name.split("-")[0] in COLOURS}
    longest = max(len(values) for values in lines.values())

    def x(step: int) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * step / max(1, longest - 1)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(tick)}" y2="{y(tick)}" stroke="#ddd"/>'
            f'<text x="8" y="{y(tick) + 4}">{tick:.2f}</text>'
        )
    for name, values in lines.items():
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(values))
        colour = COLOURS[name.split("-")[0]]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
    for place, (arm, colour) in enumerate(COLOURS.items()):
        if any(name.startswith(arm) for name in lines):
            parts.append(f'<text x="{MARGIN + 10 + 90 * place}" y="24" fill="{colour}">{arm}</text>')
    parts.append(f'<text x="{WIDTH / 2 - 40}" y="{HEIGHT - 10}">training step</text></svg>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
