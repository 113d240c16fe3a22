"""Tables and figures of experiments/evidence.md from the folder that evidence.sh filled.

    python -m experiments.report OUTPUT [--docs experiments/] [--name evidence_rumours]

Writes NAME_tables.md and NAME_*.svg into OUTPUT/report, or into the folder given by --docs. A run counts when
the policy of its last step has been evaluated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from calibadv_jax import cli
from experiments import figures as evidence_figures
from experiments import tables as evidence_tables
from experiments.results import cold_starts, read_results


def write_report(output: Path, folder: Path, name: str = "evidence") -> list[Path]:
    """Write the tables and those figures that there are results for; return their paths."""
    results = read_results(output)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{name}_tables.md"]
    written[0].write_text(evidence_tables.page(results, cold_starts(output)), encoding="utf-8")
    for kind, figure in evidence_figures.figures(results).items():
        written.append(folder / f"{name}_{kind}.svg")
        evidence_figures.save(figure, written[-1])
    return written


def write_short(output: Path, names: Sequence[str]) -> tuple[str, Path]:
    """Return the table of some arms, and draw the figure of the short version: searches by step."""
    results = read_results(output, names)
    path = output / "short.svg"
    evidence_figures.save(evidence_figures.curves({"": results}, "searches"), path)
    return evidence_tables.arms_table(results), path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, metavar="OUTPUT")
    parser.add_argument(
        "--docs", type=Path, metavar="FOLDER", help="folder to write to (default: OUTPUT/report)"
    )
    parser.add_argument("--name", default="evidence", help="start of the files' names (default: %(default)s)")
    arguments = parser.parse_args(argv)
    folder = arguments.docs or arguments.output / "report"
    for path in write_report(arguments.output, folder, arguments.name):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    cli.run_and_exit(main)
