"""The shipped configs: ``calibadv configs [copy NAME [FILE]]``."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from calibadv_jax.config.shipped import SUFFIX, headline, shipped_folder, shipped_names
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_text
from calibadv_jax.metrics.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "nothing: list the shipped configs; copy NAME [FILE]: write one to FILE (default: NAME.yaml here)"
    parser.add_argument("words", nargs="*", metavar="copy NAME [FILE]", help=text)


def run(arguments: argparse.Namespace) -> None:
    """List the shipped configs, or copy one; its `base` becomes the name of a shipped config."""
    console, names = Console(), shipped_names()
    if not arguments.words:
        width = max(map(len, names))
        for name in names:
            console.say(f"{name:{width}}  {textwrap.shorten(headline(name), 90, placeholder=' …')}")
        return
    words: list[str] = arguments.words
    action, name, file, *more = [*words, "", ""]
    if action != "copy" or name not in names or any(more):
        raise UserError(f"configs {' '.join(words)}: give copy NAME [FILE]; calibadv configs lists the names")
    target = Path(file or f"{Path(name).name}{SUFFIX}")
    if target.exists():
        raise UserError(f"{target}: exists; name another file: calibadv configs copy {name} FILE")
    lines = (shipped_folder() / f"{name}{SUFFIX}").read_text(encoding="utf-8").splitlines(keepends=True)
    for index, line in enumerate(lines):
        if line.startswith("base:"):
            base = Path(name).parent / line.partition(":")[2].strip()
            lines[index] = f"base: {base.with_suffix('').as_posix()}\n"
    write_text(target, "".join(lines))
    console.say(f"{target} is {name}; edit it, then give it with --config {target}")
