"""The shipped configs: ``calibadv configs [copy NAME [FILE]]``."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from calibadv_jax.config.shipped import SUFFIX, headline, shipped_folder, shipped_names
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_text
from calibadv_jax.metrics.console import Console

HEADLINE_WIDTH = 90  # letters of a config's headline in the list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="copy NAME [FILE]",
        help="nothing: list the shipped configs; copy NAME [FILE]: write one to FILE"
        " (default: NAME.yaml here)",
    )


def run(arguments: argparse.Namespace) -> None:
    """List the shipped configs, or copy one; its `base` becomes the name of a shipped config.

    Raises:
        UserError: the arguments are not ``copy NAME [FILE]``, or the file exists.
    """
    words: list[str] = arguments.words
    if words:
        _copy(words)
    else:
        _list()


def _list() -> None:
    console = Console()
    names = shipped_names()
    width = max(len(name) for name in names)
    for name in names:
        text = textwrap.shorten(headline(name), HEADLINE_WIDTH, placeholder=" …")
        console.say(f"{name:{width}}  {text}")


def _copy(words: list[str]) -> None:
    """Write the config that the words ``copy NAME [FILE]`` name; an empty FILE counts as none."""
    action, name, file, *more = [*words, "", ""]
    if action != "copy" or name not in shipped_names() or any(more):
        raise UserError(f"configs {' '.join(words)}: give copy NAME [FILE]; calibadv configs lists the names")
    target = Path(file or f"{Path(name).name}{SUFFIX}")
    if target.exists():
        raise UserError(f"{target}: exists; name another file: calibadv configs copy {name} FILE")
    source = shipped_folder() / f"{name}{SUFFIX}"
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    for index, line in enumerate(lines):
        if line.startswith("base:"):
            base = Path(name).parent / line.partition(":")[2].strip()
            lines[index] = f"base: {base.with_suffix('').as_posix()}\n"
    write_text(target, "".join(lines))
    console = Console()
    console.say(f"{target} is {name}; edit it, then give it with --config {target}")
