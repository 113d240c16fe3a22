"""The arguments of the commands without a config: ``arguments.yaml``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

COMMANDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "path": Path,
    "list": lambda text: text.split(","),
}


def parser_of(command: str) -> Callable[[argparse.ArgumentParser], None]:
    """Return the function that adds the command's arguments to a parser."""
    return partial(_add_arguments, command)


def _add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    is_exclusive = any("exclusive" in fields for fields in COMMANDS[command].values())
    exclusive = parser.add_mutually_exclusive_group() if is_exclusive else parser
    for name, fields in COMMANDS[command].items():
        options = dict(fields)
        place = exclusive if options.pop("exclusive", False) else parser
        least, below = options.pop("least", None), options.pop("below", float("nan"))
        if "type" in options:
            kind = TYPES[options["type"]]
            options["type"] = kind if least is None else _limited(kind, least, below)
        place.add_argument(name, **options)


def _limited(kind: Any, least: float, below: float) -> Callable[[str], Any]:
    """Return a parser of numbers from `least` on; `below`: NaN for no limit."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not value >= least or value >= below:
            limit = f" and below {below:g}" if below == below else ""
            raise argparse.ArgumentTypeError(f"{text}: give {least:g} or more{limit}")
        return value

    parse.__name__ = kind.__name__
    return parse
