"""The command line: ``calibadv COMMAND --config FILE [--config FILE …] [--dry-run] [key.path=value …]``.

Some commands work on files instead of a config and take arguments of their own: see TOOLS.
``python -m calibadv_jax COMMAND`` does the same, and ``python -m calibadv_jax.train`` trains. `calibadv`
reads and checks the config before it imports what the command needs, so that a mistake is found at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from calibadv_jax.config import counterpart, dump_config, load_config
from calibadv_jax.core.errors import INPUT_STATUS, UserError, exit_status, storage_errno, storage_path
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.stopping import leave

SILENCE = 2.0  # seconds of loading after which a command says what it does
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

# Modules of `calibadv_jax.commands`; the other commands are modules of `calibadv_jax.contrib.commands`.
CORE = ("sft", "train", "evaluate", "export")

# Commands with a config.
COMMANDS = {
    "quickstart": "From nothing to a better search agent: world, cold start, training, evaluation, export.",
    "sft": "Supervised cold start on demonstrations.",
    "train": "Reinforcement learning of a search agent.",
    "evaluate": "Scores a policy on held-out questions.",
    "export": "Writes a checkpoint as a HuggingFace folder.",
    "coverage": "Which questions the index can answer: shares by data source, and files of those questions.",
    "demonstrate": "Demonstrations for sft from questions that name their supporting passages.",
    "doctor": "Checks a config end to end before a run.",
    "plan": "Memory, time and device hours of a run on TPUs or GPUs that are not here.",
}


@dataclass(frozen=True)
class Value:
    """An option with a value; its type is that of the default."""

    metavar: str
    what: str
    default: str | int | float


# Options of a command, handed to its run() by name: a text describes a flag.
OPTIONS: dict[str, dict[str, str | Value]] = {
    "export": {
        "adapter": "write the adapters of policy.lora alone, as a PEFT folder (export.adapter_output)"
    },
    "doctor": {"offline": "check what needs no network, no services and no model or data files"},
    "plan": {
        "tpu": Value("KIND:SHAPE", "a TPU slice, such as v5e:4x4 or v5e-16", ""),
        "gpu": Value("KIND", "h100, h200 or h20", ""),
        "topology": Value("SHAPE", "of the GPUs: slices x hosts x GPUs of a host, such as 1x2x8", ""),
        "efficiency": Value("SHARE", "of the devices' highest speed that a step reaches", 0.4),
        "tokens": Value(
            "NUMBER", "tokens of a trajectory on average; 0: the longest that the config allows", 0
        ),
        "sampled": Value("NUMBER", "of these, those that the policy writes; 0: the most", 0),
        "estimate": "count memory by the doctor's formula, without a compiler",
        "json": Value("FILE", "write the figures to this file", ""),
    },
}

# Commands without a config.
TOOLS: dict[str, str] = {
    "inspect": "A page of a run's trajectories: tokens by advantage, and why each turn got its own.",
    "ask": "Asks a policy a question, and shows what it searches and reads.",
    "replay": "Reward, advantages and loss of a kept step once more, or with other settings.",
    "audit": "Measures the credit of a run against the truth, if its questions name their passages.",
    "report": "Draws the curves of one or more runs, as one HTML page and as PNG files.",
    "compare": "Tests the difference of two evaluations on the same questions.",
    "select-rollouts": "Makes demonstrations for sft of the best kept rollouts.",
    "prepare-data": "Converts and filters question files of any layout that is known here.",
}
# A file inspect.py would hide Python's own from a file beside it that is run by its path.
MODULES = {"inspect": "inspect_run"}


@dataclass(frozen=True)
class Arguments:
    """What was asked for on the command line."""

    configs: list[Path]  # later files win
    overrides: list[str]  # "key.path=value", in the order given; later values win
    dry_run: bool
    options: dict[str, Any] = field(default_factory=dict)  # of the command, see OPTIONS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(INPUT_STATUS, f"error: {message}; try: {self.prog} --help\n")


def calibadv(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script: as `main` for the command that the first argument names.

    ``help``, ``help COMMAND`` and ``--version`` are answered here.
    """
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command == "--version":
        sys.stdout.write(f"calibadv {version('calibadv-jax')}\n")
        sys.exit(0)
    if command == "help" and rest:
        command, *rest = rest[0], "--help"
    if command in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS | TOOLS))
        usage = "usage: calibadv COMMAND --config FILE [--config FILE …] [--dry-run] [key.path=value …]"
        lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
        lines += ["", "commands without a config:"]
        lines += [f"  {name:{width}}  {what}" for name, what in TOOLS.items()]
        lines += ["", "calibadv help COMMAND says more; calibadv --version"]
        sys.stdout.write("\n".join([usage, "", "commands:", *lines, ""]))
        sys.exit(0)
    if command in TOOLS:
        _run_tool(command, rest)
    if command not in COMMANDS:
        names = [*COMMANDS, *TOOLS]
        near = difflib.get_close_matches(command, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(names)}"
        sys.stderr.write(f"error: unknown command {command!r}; {hint}\n")
        sys.exit(INPUT_STATUS)
    main(command, lambda config, **options: _load(command).run(config, **options), rest)


def module_of(command: str) -> str:
    """The dotted name of a command's module."""
    package = "commands" if command in CORE else "contrib.commands"
    return f"calibadv_jax.{package}.{MODULES.get(command, command.replace('-', '_'))}"


def _load(name: str) -> ModuleType:
    """The module of a command, which loads JAX and more; says so if that takes long."""

    def say() -> None:
        sys.stderr.write(f"calibadv {name}: loading its libraries (JAX and others)\n")
        sys.stderr.flush()

    timer = threading.Timer(SILENCE, say)
    timer.daemon = True
    timer.start()
    try:
        return importlib.import_module(module_of(name))
    finally:
        timer.cancel()


def _run_tool(name: str, argv: Sequence[str]) -> NoReturn:
    tool = _load(name)
    parser = _Parser(prog=f"calibadv {name}", description=TOOLS[name], allow_abbrev=False)
    tool.add_arguments(parser)
    arguments = parser.parse_intermixed_args(argv)  # options may stand between the other arguments
    end(lambda: tool.run(arguments))


def main(command: str, run: Callable[..., object], argv: Sequence[str] | None = None) -> NoReturn:
    """Loads the config, calls `run` and ends the process.

    `run` gets the config, and the options of OPTIONS by name.
    Exit status: 0 when `run` returns, whatever it returns (it raises SystemExit for another one); 2 after
    a `UserError` and 75 after an `EnvironmentFailure`, which are printed as one line ``error: …``; 130 after
    an interruption from the keyboard.
    Any other exception is a defect of this program and shows its traceback.
    """
    arguments = parse(f"calibadv {command}", COMMANDS[command], argv, OPTIONS.get(command, {}))
    end(lambda: _with_config(run, arguments, makes_inputs=command == "quickstart"))


def parse(
    program: str,
    description: str,
    argv: Sequence[str] | None = None,
    options: Mapping[str, str | Value] = MappingProxyType({}),
) -> Arguments:
    """Parses `argv` (default: the process's arguments).

    Args:
        program: how the command was called, for messages.
        options: flags and options of this command, with what they do.

    Raises:
        SystemExit: status 0 after ``--help``, 2 after a mistake that was reported in one line.
    """
    parser = _Parser(prog=program, description=description, allow_abbrev=False)
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        action="append",
        metavar="FILE",
        help="YAML file of the run; if it is given several times, later files win, key by key",
    )
    for name, option in options.items():
        if isinstance(option, Value):
            kind, default = type(option.default), option.default
            parser.add_argument(
                f"--{name}", metavar=option.metavar, type=kind, default=default, help=option.what
            )
        else:
            parser.add_argument(f"--{name}", action="store_true", help=option)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="config keys and their new values; every key is described in docs/configuration.md",
    )
    known, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        hint = counterpart(unknown[0].partition("=")[0].strip("-").replace("-", "_"))
        parser.error(
            f"unknown option {unknown[0]!r}; config keys are written key.path=value, without dashes"
            + (f"; {hint}" if hint else "")
        )
    chosen = {name: getattr(known, name) for name in options}
    return Arguments(known.config, known.overrides, known.dry_run, chosen)


def _with_config(run: Callable[..., object], arguments: Arguments, makes_inputs: bool) -> None:
    config = load_config(arguments.configs, arguments.overrides, with_inputs=makes_inputs)
    if arguments.dry_run:
        sys.stdout.write(dump_config(config))
    else:
        run(config, **arguments.options)


def end(work: Callable[[], object]) -> NoReturn:
    """Does the work and ends the process with the status of how it went; see `leave`."""
    try:
        work()
    except SystemExit as stopped:
        leave(stopped.code)
    except UserError as error:
        sys.stderr.write(f"error: {redact(str(error))}\n")
        leave(exit_status(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        leave(INTERRUPTED)
    except Exception as error:  # a full disk is an error of each library's own
        number = storage_errno(error)
        if number is None:
            raise
        place = storage_path(error) or "a file"
        sys.stderr.write(
            f"error: {place}: {os.strerror(number)}; fix that, then give the same command again\n"
        )
        leave(exit_status(error))
    leave(0)


if __name__ == "__main__":
    calibadv()
