"""The trajectory page: ``calibadv inspect RUN [--port N]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from calibadv_jax.contrib.arguments import number
from calibadv_jax.contrib.pages.page_server import make_server
from calibadv_jax.contrib.pages.site import Site
from calibadv_jax.metrics.console import Console

PORT = 8420  # default port of the page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run (its run.dir)")
    parser.add_argument(
        "--port",
        type=number(int, least=0, below=65536),
        default=PORT,
        help="port of the server, which only this machine reaches (default: %(default)s; 0: any free port)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Serve the page until it is interrupted.

    Raises:
        UserError: the run keeps no trajectories, a file is damaged, or the port is in use.
    """
    console = Console()
    site = Site(arguments.run)
    steps = site.steps()  # reads all steps now, so that the first browser does not wait
    num_trajectories = sum(len(step["rows"]["index"]) for step in steps)
    console.note(f"{len(steps)} steps, {num_trajectories} trajectories")
    with make_server(site, arguments.port) as server:
        console.say(f"http://localhost:{server.server_port}/")
        console.note("new steps appear by themselves; Ctrl-C ends")
        server.serve_forever()
