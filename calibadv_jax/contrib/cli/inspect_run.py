"""The trajectory page: ``calibadv inspect RUN [--port N]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from calibadv_jax.contrib.arguments import number
from calibadv_jax.contrib.pages.site import Site, make_server
from calibadv_jax.metrics.console import Console

PORT = 8420


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run (its run.dir)")
    text = "port of the server, which only this machine reaches (default: %(default)s; 0: any free port)"
    parser.add_argument("--port", type=number(int, least=0, below=65536), default=PORT, help=text)


def run(arguments: argparse.Namespace) -> None:
    """Serve the page until it is interrupted."""
    console = Console()
    site = Site(arguments.run)
    steps = site.steps()  # read before a browser waits for it
    console.note(f"{len(steps)} steps, {sum(len(step['rows']['index']) for step in steps)} trajectories")
    with make_server(site, arguments.port) as server:
        console.say(f"http://localhost:{server.server_port}/")
        console.note("new steps appear by themselves; Ctrl-C ends")
        server.serve_forever()
