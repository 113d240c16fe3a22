"""The trajectory page: ``calibadv inspect RUN [--port N] [--print] [--page FILE] [--group STEP/GROUP …]``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NamedTuple

from calibadv_jax.contrib.arguments import number
from calibadv_jax.contrib.pages.page_server import make_server
from calibadv_jax.contrib.pages.site import Site
from calibadv_jax.contrib.pages.static_page import render_groups
from calibadv_jax.contrib.pages.terminal import group_lines
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_text
from calibadv_jax.core.locking import locked_output
from calibadv_jax.metrics.console import Console

PORT = 8420  # default port of the page


class Choice(NamedTuple):
    """What ``--group`` names."""

    step: int
    group: int
    trajectory: int | None  # None: all of the group


def choice(text: str) -> Choice:
    """Parse STEP/GROUP or STEP/GROUP/TRAJECTORY."""
    if not re.fullmatch(r"\d{1,9}/\d{1,9}(/\d{1,9})?", text):
        raise argparse.ArgumentTypeError(f"{text}: give STEP/GROUP or STEP/GROUP/TRAJECTORY, such as 30/2")
    step, group, *trajectory = map(int, text.split("/"))
    return Choice(step, group, trajectory[0] if trajectory else None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run (its run.dir)")
    parser.add_argument(
        "--port",
        type=number(int, least=0, below=65536),
        default=PORT,
        help="port of the server, which only this machine reaches (default: %(default)s; 0: any free port)",
    )
    parser.add_argument(
        "--print", action="store_true", dest="prints", help="print groups in the terminal instead"
    )
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write groups as one HTML file to send, instead"
    )
    parser.add_argument(
        "--group",
        type=choice,
        action="append",
        default=[],
        metavar="STEP/GROUP",
        help="group for --print and --page, or STEP/GROUP/TRAJECTORY; may be repeated (default: the newest"
        " step's group that shows most of the credit)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Serve the page until it is interrupted, or print or write chosen groups.

    Raises:
        UserError: the run keeps no trajectories, a group is not kept, a file is damaged, or the port is in
            use.
    """
    console = Console()
    site = Site(arguments.run)
    if arguments.prints or arguments.page:
        _write_groups(site, arguments, console)
        return
    if arguments.group:
        raise UserError("--group chooses what --print and --page show; add one of them")
    steps = site.steps()  # reads all steps now, so that the first browser does not wait
    num_trajectories = sum(len(step["rows"]["index"]) for step in steps)
    console.note(f"{len(steps)} steps, {num_trajectories} trajectories")
    with make_server(site, arguments.port) as server:
        console.say(f"http://localhost:{server.server_port}/")
        console.note("new steps appear by themselves; Ctrl-C ends")
        server.serve_forever()


def _write_groups(site: Site, arguments: argparse.Namespace, console: Console) -> None:
    """Print the chosen groups, and write them to the file of ``--page``."""
    choices = arguments.group or [_newest_choice(site)]
    groups = [_group(site, chosen) for chosen in choices]
    if arguments.prints:
        for place, (chosen, group) in enumerate(zip(choices, groups, strict=True)):
            if place:
                console.say("")
            for line in group_lines(site.rows(chosen.step, chosen.group), group, chosen.trajectory):
                console.say(line)
    if arguments.page:
        only = {
            place: chosen.trajectory for place, chosen in enumerate(choices) if chosen.trajectory is not None
        }
        arguments.page.parent.mkdir(parents=True, exist_ok=True)
        with locked_output(arguments.page, "--page", console.warn):
            write_text(arguments.page, render_groups(site.name, groups, only))
        console.say(str(arguments.page))


def _newest_choice(site: Site) -> Choice:
    """Return the group of the newest step that shows most of the credit."""
    steps = site.steps()
    if not steps or not steps[-1]["instructive"]:
        raise UserError(
            f"{site.folder}: the run has kept no step yet; try again when the first step has ended"
        )
    return Choice(steps[-1]["step"], steps[-1]["instructive"]["group"], None)


def _group(site: Site, chosen: Choice) -> dict[str, Any]:
    """Return the transcript of a group; UserError where it is not kept."""
    group = site.group(chosen.step, chosen.group)
    name = f"--group {chosen.step}/{chosen.group}"
    if group is None:
        kept = [step["step"] for step in site.steps()]
        if chosen.step in kept:
            raise UserError(
                f"{name}: step {chosen.step} has no group {chosen.group}; choose one of the page's list"
            )
        shown = f"the steps that are kept go from {kept[0]} to {kept[-1]}" if kept else "no step is kept"
        raise UserError(f"{name}: step {chosen.step} is not kept; {shown}")
    indices = [trajectory["index"] for trajectory in group["trajectories"]]
    if chosen.trajectory is not None and chosen.trajectory not in indices:
        numbers = ", ".join(map(str, indices))
        raise UserError(f"{name}/{chosen.trajectory}: the group has no such trajectory; it has {numbers}")
    return group
