"""The report of one or more runs: ``calibadv report RUN [RUN …] [--output FILE] [--png FOLDER]``."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from calibadv_jax.contrib.arguments import number
from calibadv_jax.contrib.cli.inspect_run import PORT
from calibadv_jax.contrib.report.draw import draw
from calibadv_jax.contrib.report.gather import SMOOTH, Gathered
from calibadv_jax.contrib.report.page import render
from calibadv_jax.contrib.report.runs import group_runs, read_runs
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import atomic_write, write_text
from calibadv_jax.core.locking import locked_output
from calibadv_jax.metrics.console import Console

PNG_DPI = 200  # dots per inch of the PNG files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run (its run.dir)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="page to write; default: report.html, in the run's folder if there is only one run",
    )
    parser.add_argument(
        "--smooth",
        type=number(int, least=1),
        default=SMOOTH,
        metavar="STEPS",
        help="steps that the strong lines average (default: %(default)s; 1: no mean)",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="also write every figure as FOLDER/NAME.png"
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the page, and the figures as PNG files if a folder for them is given.

    Raises:
        UserError: matplotlib is not installed, a folder is no run with metrics, or a file is damaged.
    """
    if not is_installed():
        raise UserError("matplotlib is not installed; pip install 'calibadv-jax[report]'")
    console = Console()
    output = arguments.output
    if output is None:
        folder = arguments.runs[0] if len(arguments.runs) == 1 else Path()
        output = folder / "report.html"
    gathered = write_report(arguments.runs, output, console, arguments.smooth)
    console.say(str(output))
    if arguments.png is not None:
        _write_png_files(gathered, arguments.png)
        console.say(f"{arguments.png}: {len(gathered.charts)} figures")


def is_installed() -> bool:
    """Return whether matplotlib, which draws the figures, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_report(folders: Sequence[Path], output: Path, console: Console, smooth: int = SMOOTH) -> Gathered:
    """Write the page of some runs.

    Args:
        folders: folders of the runs.
        output: the page to write.
        console: shows the progress.
        smooth: steps that the trends are means of.

    Returns:
        The charts of the page.

    Raises:
        UserError: a folder is no run with metrics, or a file is damaged.
    """
    runs = read_runs(folders)
    with console.phase("reading the kept trajectories", announce=True):
        gathered = Gathered(group_runs(runs), smooth)
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        locked_output(output, "--output", console.warn),
        console.phase("drawing the figures", announce=True),
    ):
        write_text(output, render(gathered, PORT))  # atomic: a browser never loads half a page
    return gathered


def _write_png_files(gathered: Gathered, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    order = [series.name for series in gathered.series]
    for chart in gathered.charts:
        figure = draw(chart, order)
        with atomic_write(folder / f"{chart.figure.key}.png") as partial:
            figure.savefig(partial, dpi=PNG_DPI, format="png")
