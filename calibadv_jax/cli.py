"""The command line that all entry points share: ``--config FILE [--dry-run] [key.path=value …]``.

Imports nothing heavy, so that ``--help`` answers at once: an entry point imports its stages inside the
function it hands to `main`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from calibadv_jax.config import Config, dump_config, load_config
from calibadv_jax.errors import UserError

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclass(frozen=True)
class Arguments:
    """What was asked for on the command line."""

    config: Path
    overrides: list[str]  # "key.path=value", in the order given; later ones win
    dry_run: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"error: {message}; try: {self.prog} --help\n")


def parse(module: str, description: str, argv: Sequence[str] | None = None) -> Arguments:
    """Parses `argv` (default: the process's arguments) for ``python -m <module>``.

    Raises:
        SystemExit: status 0 after ``--help``, 2 after a mistake that was reported in one line.
    """
    parser = _Parser(prog=f"python -m {module}", description=description, allow_abbrev=False)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML file of the run")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="values that replace the file's; every key is described in docs/configuration.md",
    )
    known, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(f"unknown option {unknown[0]!r}; config keys are written key.path=value, without dashes")
    return Arguments(known.config, known.overrides, known.dry_run)


def main(
    run: Callable[[Config], object],
    module: str,
    description: str,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Loads the config, calls `run` with it and ends the process.

    Exit status: 0 when `run` returns, whatever it returns (it raises SystemExit for another one); 2 after
    a `UserError`, which is printed as one line ``error: …``; 130 after an interruption from the keyboard.
    Any other exception is a defect of this program and keeps its traceback.
    """
    arguments = parse(module, description, argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            sys.stdout.write(dump_config(config))
        else:
            run(config)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    sys.exit(0)
