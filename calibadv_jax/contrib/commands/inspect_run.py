"""The trajectory page: ``calibadv inspect RUN [--steps FIRST-LAST] [--port N]``."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from calibadv_jax.contrib.arguments import number
from calibadv_jax.contrib.pages.site import Site, make_server
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.console import Console

PORT = 8420


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run (its run.dir)")
    text = "show only these steps, such as 10-20"
    parser.add_argument("--steps", default="", metavar="FIRST-LAST", help=text)
    text = "port of the server, which only this machine reaches (default: %(default)s; 0: any free port)"
    parser.add_argument("--port", type=number(int, least=0, below=65536), default=PORT, help=text)


def run(arguments: argparse.Namespace) -> None:
    """Serve the page until it is interrupted."""
    console = Console()
    site = Site(arguments.run, *_parse_steps(arguments.steps))
    steps = site.steps()  # read before a browser waits for it
    console.note(f"{len(steps)} steps, {sum(len(step['rows']['index']) for step in steps)} trajectories")
    with make_server(site, arguments.port) as server:
        console.say(f"http://localhost:{server.server_port}/")
        console.note("new steps appear by themselves; Ctrl-C ends")
        server.serve_forever()


def _parse_steps(text: str) -> tuple[int, float]:
    """Return the first and last step of "10-20", "10-", "-20", "7"; all steps for ""."""
    match = re.fullmatch(r"(\d*)(-?)(\d*)", text)
    if not match or text == "-":
        raise UserError(f"--steps {text}: give FIRST-LAST, such as 10-20, 10- or 7")
    first, dash, last = match.groups()
    last = last if dash else first
    return int(first or 0), int(last) if last else math.inf
