"""Print what scripts/real_policy.sh measured as one table: ``python scripts/real_table.py OUTPUT_FOLDER``.

A row for each evaluation, with 95 % intervals; for the trained agents also the difference to the cold start
on the same questions. Below it the differences of the arms, each averaged over its seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BASELINES = ("direct", "chain_of_thought", "rag", "cold_start")
METRICS = ("f1", "em", "text_f1", "text_cover_em", "format", "searches", "tokens")


def main(argv: list[str]) -> int:
    evaluations = Path(argv[0]) / "evaluations" if len(argv) == 1 else Path()
    files = {path.stem: path for path in sorted(evaluations.glob("*.json"))}
    if len(argv) != 1 or not files:
        sys.stderr.write("error: give the output folder of scripts/real_policy.sh, with its evaluations\n")
        return 2
    names = [name for name in BASELINES if name in files] + [name for name in files if name not in BASELINES]
    lines = [["", *METRICS, "F1 beside the cold start"], ["---"] * (len(METRICS) + 2)]
    for name in names:
        report = json.loads(files[name].read_text(encoding="utf-8"))
        comparison = evaluations.parent / "comparisons" / f"{name}.json"
        difference = _difference(json.loads(comparison.read_text())) if comparison.is_file() else ""
        lines.append([_label(name, report), *(_score(report, metric) for metric in METRICS), difference])
    sys.stdout.write("".join(f"| {' | '.join(line)} |\n" for line in lines))
    differences = sorted((evaluations.parent / "comparisons").glob("*-less-*.json"))
    if differences:
        sys.stdout.write("\n| F1, all seeds | difference |\n| --- | --- |\n")
    for path in differences:
        names = path.stem.replace("-less-", " less ")
        sys.stdout.write(f"| {names} | {_difference(json.loads(path.read_text(encoding='utf-8')))} |\n")
    return 0


def _label(name: str, report: dict[str, Any]) -> str:
    """Return the evaluation's name, with the step of the policy that it measured."""
    arm, has_step, _ = name.partition("-steps-")
    return f"{arm}-steps-{report['policy']['step']}" if has_step else name


def _score(report: dict[str, Any], metric: str) -> str:
    """Return mean and interval over all questions, at the first temperature."""
    temperature = next(iter(report["scores"]))
    mean = report["scores"][temperature]["all"].get(metric)
    if mean is None:
        return "-"
    interval = report["intervals"].get(temperature, {}).get("all", {}).get(metric)
    digits = 0 if metric == "tokens" else 3
    return f"{mean:.{digits}f}" + (
        f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})" if interval else ""
    )


def _difference(report: dict[str, Any]) -> str:
    f1 = next(iter(report["differences"].values()))["f1"]["all"]
    between = f" ({f1['interval'][0]:+.3f} to {f1['interval'][1]:+.3f})" if f1["interval"] else ""
    return f"{f1['difference']:+.3f}{between}, p {f1['p_value']:.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
