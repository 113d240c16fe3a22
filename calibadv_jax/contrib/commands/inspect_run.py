"""The trajectory page: ``calibadv inspect RUN [--steps FIRST-LAST] [--port N | --output FOLDER]``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from calibadv_jax.contrib.pages.site import RunFiles, Site, make_server, write_site
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.console import Console

PORT = 8420


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run (its run.dir)")
    steps = "show only these steps, such as 10-20"
    parser.add_argument("--steps", default="", metavar="FIRST-LAST", help=steps)
    add = parser.add_mutually_exclusive_group().add_argument
    port = f"port of the server, which only this machine reaches (default: {PORT}; 0: any free port)"
    add("--port", type=int, default=PORT, help=port)
    output = "write the page as files for a web server into this folder, and end"
    add("--output", type=Path, metavar="FOLDER", help=output)


def run(arguments: argparse.Namespace) -> None:
    """Serve the page until it is interrupted, or write it."""
    console = Console()
    if not 0 <= arguments.port < 2**16:
        raise UserError(f"--port {arguments.port}: a port is a number from 0 to 65535")
    site = Site(RunFiles(arguments.run, *_parse_steps(arguments.steps)))
    steps = site.steps()  # read before a browser waits for it
    console.note(f"{len(steps)} steps, {sum(len(step['rows']['index']) for step in steps)} trajectories")
    if arguments.output and not steps:
        raise UserError(f"{arguments.run}: keeps no step yet; --output writes those that are there")
    if arguments.output:
        number = write_site(site, arguments.output)
        console.say(f"{number} files in {arguments.output}; look at them with")
        console.say(f"python -m http.server --bind 127.0.0.1 --directory {arguments.output}")
        return
    with make_server(site, arguments.port) as server:
        console.say(f"http://localhost:{server.server_port}/")
        console.note("new steps appear by themselves; Ctrl-C ends")
        server.serve_forever()


def _parse_steps(text: str) -> tuple[int, int | None]:
    """Return the first and last step of "10-20", "10-", "-20", "7"."""
    match = re.fullmatch(r"(\d+)|(\d*)-(\d*)", text)
    if not text:
        return 0, None
    if not match:
        raise UserError(f"--steps {text}: give FIRST-LAST, such as 10-20, 10- or 7")
    if match[1]:
        return int(match[1]), int(match[1])
    return int(match[2] or 0), int(match[3]) if match[3] else None
