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
    parser.add_argument(
        "--steps", default="", metavar="FIRST-LAST", help="show only these steps, such as 10-20"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--port",
        type=int,
        default=PORT,
        help=f"port of the server, which only this machine reaches (default: {PORT}; 0: any free port)",
    )
    where.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write the page as files for a web server into this folder, and end",
    )


def run(arguments: argparse.Namespace) -> None:
    """Serves the page until it is interrupted, or writes it."""
    console = Console()
    if not 0 <= arguments.port < 2**16:
        raise UserError(f"--port {arguments.port}: a port is a number from 0 to 65535")
    site = Site(RunFiles(arguments.run, *_steps(arguments.steps)))
    steps = site.index.steps()  # read before a browser waits for it
    console.note(f"{len(steps)} steps, {sum(len(one['rows']['index']) for one in steps)} trajectories")
    if arguments.output:
        number = write_site(site, arguments.output)
        console.say(f"{number} files in {arguments.output}; look at them with")
        console.say(f"python -m http.server --bind 127.0.0.1 --directory {arguments.output}")
        return
    with make_server(site, arguments.port) as server:
        console.say(f"http://localhost:{server.server_port}/")
        console.note("new steps appear when the page is loaded again; Ctrl-C ends")
        server.serve_forever()


def _steps(text: str) -> tuple[int, int | None]:
    """First and last step of "10-20", "10-", "-20", "7"."""
    found = re.fullmatch(r"(\d+)|(\d*)-(\d*)", text)
    if not text:
        return 0, None
    if not found:
        raise UserError(f"--steps {text}: give FIRST-LAST, such as 10-20, 10- or 7")
    if found[1]:
        return int(found[1]), int(found[1])
    return int(found[2] or 0), int(found[3]) if found[3] else None
