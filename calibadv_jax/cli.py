"""The command line: ``calibadv COMMAND --config FILE [--config FILE …] [--dry-run] [key.path=value …]``.

``python -m calibadv_jax COMMAND`` does the same. The config is read and checked before the command's
libraries are imported, so that a mistake is reported without delay.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from calibadv_jax.config import Config, dump_config, hint_for_key, load_config
from calibadv_jax.config.trust import Trust, add_flag
from calibadv_jax.core.cpu import CPU_DEVICES, tune_for_cpu, use_large_pages
from calibadv_jax.core.errors import INPUT_STATUS, UserError, exit_status, storage_errno, storage_path
from calibadv_jax.core.modules_path import safe_path
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.signals import exit_process, exit_process_now
from calibadv_jax.core.tags import without_controls

# Largest width of a policy whose matrix products use no more than one core.
SMALL_WIDTH = 512
# Exit status after Ctrl-C: 128 + SIGINT, as shells report it.
INTERRUPTED = 130
PIPE_CLOSED = 141  # as of a program that SIGPIPE ends
# Commands in calibadv_jax.commands; the others are in calibadv_jax.contrib.cli.
CORE = ("sft", "train", "evaluate", "export")

# Commands that take a config, with their descriptions.
COMMANDS = {
    "quickstart": "From nothing to a better search agent: world, cold start, training, evaluation, export.",
    "sft": "Supervised cold start on demonstrations.",
    "train": "Reinforcement learning of a search agent.",
    "evaluate": "Scores of a policy on held-out questions.",
    "export": "A checkpoint as a HuggingFace folder.",
    "coverage": "Share of questions that the index can answer, by data source, and files of them.",
    "demonstrate": "Demonstrations for sft from questions that name their supporting passages.",
    "doctor": "Checks of a config before a run, end to end.",
    "plan": "Memory, time and device hours of a run on TPUs or GPUs that you do not have yet.",
}
# Commands that take no config, with their descriptions.
TOOLS = {
    "inspect": "Page of a run's trajectories: tokens by advantage, and the reason of each turn's advantage.",
    "ask": "Ask a policy a question, and show its searches and documents.",
    "serve": "A web page and an OpenAI-compatible API that answer questions with a policy.",
    "replay": "Reward, advantages and loss of a kept step again, or with other settings.",
    "audit": "Credit of a run against the supporting passages of its questions.",
    "report": "Curves of one or more runs, as one HTML page and as PNG files.",
    "compare": "Test the difference of two evaluations on the same questions.",
    "select-rollouts": "Demonstrations for sft from the best kept rollouts.",
    "prepare-data": "Convert and filter question files of any known layout.",
    "init-tokens": "A model whose untrained control tokens have embeddings of their own.",
    "configs": "List the shipped configs, or copy one to edit it.",
}
# Programs outside of this package, which parse their own arguments: the module to run, and the description.
PROGRAMS = {
    "retriever": ("retriever.serve", "Start the retrieval service."),
    "build-index": ("retriever.build_index", "Build an index of a corpus for the retrieval service."),
    "prepare-corpus": ("retriever.prepare_corpus", "Convert a corpus of any known layout."),
}
# Commands whose module has another name. A file inspect.py would hide Python's own module from a file beside
# it that is run by its path.
MODULES = {"inspect": "inspect_run"}
# Options of a command, as arguments of argparse. The command's run() gets their values by name.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "export": {"adapter": dict(action="store_true", help="only policy.lora's adapters, as a PEFT folder")},
    "doctor": {"offline": dict(action="store_true", help="only checks without network, services and files")},
    "plan": {
        "tpu": dict(metavar="KIND:SHAPE", default="", help="TPU slice, such as v5e:4x4 or v5e-16"),
        "gpu": dict(metavar="KIND", default="", help="such as h100, a100 or rtx4090"),
        "topology": dict(metavar="SHAPE", default="", help="slices x hosts x GPUs per host, such as 1x2x8"),
        "efficiency": dict(
            metavar="SHARE",
            type=float,
            default=0.0,
            help="of the devices' peak speed; 0: as measured near this size, else 0.4",
        ),
        "tokens": dict(metavar="NUMBER", type=int, default=0, help="mean of a trajectory; 0: the most"),
        "sampled": dict(metavar="NUMBER", type=int, default=0, help="of these, sampled tokens; 0: the most"),
        "estimate": dict(action="store_true", help="estimate memory by a formula, without a compiler"),
        "json": dict(metavar="FILE", default="", help="write the figures to this file"),
    },
}


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        configs: Config files; later files win.
        overrides: "key.path=value", in the order given; later values win.
        dry_run: Whether to print the resolved config and stop.
        trust_run: Whether the user trusts the runs whose configs are read.
        options: Values of the command's own OPTIONS, by name.
    """

    configs: list[Path]
    overrides: list[str]
    dry_run: bool
    trust_run: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and have the exit status of bad input."""

    def error(self, message: str) -> NoReturn:
        self.exit(INPUT_STATUS, f"error: {message}; try: {self.prog} --help\n")


def calibadv(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command that the first argument names, and end the process.

    Args:
        argv: Command and its arguments; None: those of the process.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        words = ["--help"]
    command, *arguments = words
    if command == "--version":
        sys.stdout.write(f"calibadv {version('calibadv-jax')}\n")
        sys.exit(0)
    if command == "help" and arguments:
        command = arguments[0]
        arguments = ["--help"]
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        sys.exit(0)
    if command in PROGRAMS:
        module, _ = PROGRAMS[command]
        # A kind of index of the user's own is found in the current folder all the same (--kind).
        os.execve(sys.executable, [sys.executable, "-m", module, *arguments], {**os.environ, **safe_path()})
    # Without PyTorch, which nothing here needs, transformers would warn that it is missing.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if command in TOOLS:
        _run_tool(command, arguments)
    if command not in COMMANDS:
        names = ", ".join([*COMMANDS, *TOOLS, *PROGRAMS])
        sys.stderr.write(f"error: unknown command {command!r}; the commands are {names}\n")
        sys.exit(INPUT_STATUS)
    if argv is None and command in (*CORE, "quickstart"):
        use_large_pages()

    def run(config: Config, **options: Any) -> None:
        importlib.import_module(module_of(command)).run(config, **options)

    main(command, run, arguments)


def _run_tool(command: str, argv: Sequence[str]) -> NoReturn:
    """Run a command that takes no config."""
    tool = importlib.import_module(module_of(command))
    parser = _Parser(f"calibadv {command}", description=TOOLS[command], allow_abbrev=False)
    tool.add_arguments(parser)
    # Options may stand between the other arguments.
    arguments = parser.parse_intermixed_args(argv)
    run_and_exit(lambda: tool.run(arguments))


def _overview() -> str:
    """Return the text of ``calibadv --help``."""
    programs = {name: description for name, (_, description) in PROGRAMS.items()}
    tools = {**TOOLS, **programs}
    width = max(len(name) for name in (*COMMANDS, *tools))
    lines = ["usage: calibadv COMMAND --config FILE [--config FILE …] [--dry-run] [key.path=value …]"]
    for title, commands in (("commands", COMMANDS), ("commands without a config", tools)):
        lines.append("")
        lines.append(f"{title}:")
        for name, description in commands.items():
            lines.append(f"  {name:{width}}  {description}")
    lines.append("")
    lines.append("calibadv help COMMAND says more; calibadv --version")
    lines.append("")
    return "\n".join(lines)


def module_of(command: str) -> str:
    """Return the dotted name of the module of a command in COMMANDS or TOOLS."""
    package = "commands" if command in CORE else "contrib.cli"
    default_name = command.replace("-", "_")
    name = MODULES.get(command, default_name)
    return f"calibadv_jax.{package}.{name}"


def main(command: str, run: Callable[..., object], argv: Sequence[str] | None = None) -> NoReturn:
    """Load the config, run a command with it, and end the process.

    Args:
        command: Name of a command in COMMANDS.
        run: Called with the config, and with the values of the command's OPTIONS by name.
        argv: The command's arguments; None: those of the process.
    """
    is_quickstart = command == "quickstart"
    default = [Path("quickstart")] if is_quickstart else None
    arguments = parse(f"calibadv {command}", COMMANDS[command], argv, OPTIONS.get(command), default)

    def run_with_config() -> None:
        # A config that is only shown does nothing.
        trust = Trust(command, is_given=arguments.trust_run or arguments.dry_run)
        config = load_config(arguments.configs, arguments.overrides, is_quickstart, trust)
        if arguments.dry_run:
            sys.stdout.write(dump_config(config))
        else:
            tune_for_cpu(_divides_by(CPU_DEVICES, config))
            run(config, **arguments.options)

    run_and_exit(run_with_config)


def parse(
    program: str,
    description: str,
    argv: Sequence[str] | None = None,
    options: Mapping[str, dict[str, Any]] | None = None,
    configs: list[Path] | None = None,
) -> Arguments:
    """Parse the arguments of a command that takes a config.

    Args:
        program: Name of the program, for messages.
        description: Description of the command, for its help.
        argv: Arguments; None: those of the process.
        options: The command's own options; see OPTIONS.
        configs: Config files to use if none is given; None: at least one must be given.
    """
    options = options or {}
    parser = _Parser(prog=program, description=description, allow_abbrev=False)
    config_help = "YAML file of the run, or a shipped config (calibadv configs); later ones win, key by key"
    if configs:
        config_help += f"; default: {', '.join(map(str, configs))}"
    parser.add_argument(
        "--config", type=Path, required=not configs, action="append", metavar="FILE", help=config_help
    )
    for name, option in options.items():
        parser.add_argument(f"--{name}", **option)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    add_flag(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.path=value",
        help="config keys and their new values; every key is described in docs/configuration.md",
    )
    parsed, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        _refuse_option(parser, unknown[0])
    chosen_options = {name: getattr(parsed, name) for name in options}
    chosen_configs = parsed.config or configs or []
    return Arguments(chosen_configs, parsed.overrides, parsed.dry_run, parsed.trust_run, chosen_options)


def _refuse_option(parser: argparse.ArgumentParser, option: str) -> NoReturn:
    message = f"unknown option {option!r}; config keys are written key.path=value, without dashes"
    key = option.partition("=")[0].strip("-").replace("-", "_")
    hint = hint_for_key(key)
    if hint:
        message += f"; {hint}"
    parser.error(message)


def _divides_by(devices: int, config: Config) -> bool:
    """Return whether a small policy can be trained on this number of devices of one process."""
    sizes = config.mesh.sizes_on(devices)
    shards = sizes["data"] * sizes["fsdp"]
    uses_all_devices = shards * sizes["tensor"] == devices
    is_one_process = not (config.distributed.coordinator_address or config.distributed.num_processes)
    has_even_shards = config.learner.microbatch_rows % shards == 0 and config.sft.rows % shards == 0
    # A width of another type is reported when the policy is made.
    width = config.policy.init.get("hidden_size")
    is_small = isinstance(width, int) and width <= SMALL_WIDTH
    return is_one_process and has_even_shards and is_small and uses_all_devices


def run_and_exit(work: Callable[[], object]) -> NoReturn:
    """Do the work and end the process; see `exit_process`.

    The exit status is 0 after success; 2 after a `UserError`, and 75 after an `EnvironmentFailure` or a full
    disk, both printed as one line ``error: …``; 130 after Ctrl-C; 141 if nobody reads the output any more.
    Another exception is a defect and shows its traceback.

    Args:
        work: Called without arguments.
    """
    try:
        work()
        sys.stdout.flush()
    except SystemExit as stopped:
        exit_process(stopped.code)
    except UserError as error:
        sys.stderr.write(f"error: {without_controls(redact(str(error)))}\n")
        exit_process(exit_status(error))
    except BrokenPipeError:
        if not _is_output_closed():
            raise
        exit_process_now(PIPE_CLOSED)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        exit_process(INTERRUPTED)
    except Exception as error:  # each library has its own error for a full disk
        number = storage_errno(error)
        if number is None:
            raise
        path = storage_path(error) or "a file"
        sys.stderr.write(
            f"error: {path}: {os.strerror(number)}; fix that, then give the same command again\n"
        )
        exit_process(exit_status(error))
    exit_process(0)


def _is_output_closed() -> bool:
    """Whether the reader of standard output has ended, as in ``calibadv configs | head``."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # errors are reported without being asked for
    except (OSError, ValueError):  # it is no file
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    calibadv()
