"""The command line: ``calibadv COMMAND --config FILE [--config FILE …] [--dry-run] [key.path=value …]``.

``python -m calibadv_jax COMMAND`` does the same. The config is read and checked before the command's
libraries are imported, so that a mistake is reported at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from calibadv_jax.config import Config, counterpart, dump_config, load_config
from calibadv_jax.core.cpu import CPU_DEVICES, tune_for_cpu, use_large_pages
from calibadv_jax.core.errors import INPUT_STATUS, UserError, exit_status, storage_errno, storage_path
from calibadv_jax.core.secrets import redact
from calibadv_jax.core.stopping import exit_process

SMALL = 512  # width of a policy whose products fill no more than one core
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
CORE = ("sft", "train", "evaluate", "export")  # in calibadv_jax.commands; others in contrib.cli

COMMANDS = {  # with a config
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
TOOLS = {  # without a config
    "inspect": "Page of a run's trajectories: tokens by advantage, and the reason of each turn's advantage.",
    "ask": "Ask a policy a question, and show its searches and documents.",
    "serve": "A web page and an OpenAI-compatible API that answer questions with a policy.",
    "replay": "Reward, advantages and loss of a kept step again, or with other settings.",
    "audit": "Credit of a run against the supporting passages of its questions.",
    "report": "Curves of one or more runs, as one HTML page and as PNG files.",
    "compare": "Test the difference of two evaluations on the same questions.",
    "select-rollouts": "Demonstrations for sft from the best kept rollouts.",
    "prepare-data": "Convert and filter question files of any known layout.",
    "configs": "List the shipped configs, or copy one to edit it.",
}
PROGRAMS = {  # other programs, by the module that runs them: they parse their own arguments
    "retriever": ("retriever.serve", "Start the retrieval service."),
    "build-index": ("retriever.build_index", "Build an index of a corpus for the retrieval service."),
    "prepare-corpus": ("retriever.prepare_corpus", "Convert a corpus of any known layout."),
}
# A file inspect.py would hide Python's own from a file beside it that is run by its path.
MODULES = {"inspect": "inspect_run"}
# Options of a command, as arguments of argparse; run() gets their values by name.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "export": {"adapter": dict(action="store_true", help="only policy.lora's adapters, as a PEFT folder")},
    "doctor": {"offline": dict(action="store_true", help="only checks without network, services and files")},
    "plan": {
        "tpu": dict(metavar="KIND:SHAPE", default="", help="TPU slice, such as v5e:4x4 or v5e-16"),
        "gpu": dict(metavar="KIND", default="", help="h100, h200 or h20"),
        "topology": dict(metavar="SHAPE", default="", help="slices x hosts x GPUs per host, such as 1x2x8"),
        "efficiency": dict(metavar="SHARE", type=float, default=0.4, help="of the devices' peak speed"),
        "tokens": dict(metavar="NUMBER", type=int, default=0, help="mean of a trajectory; 0: the most"),
        "sampled": dict(metavar="NUMBER", type=int, default=0, help="of these, sampled tokens; 0: the most"),
        "estimate": dict(action="store_true", help="estimate memory by a formula, without a compiler"),
        "json": dict(metavar="FILE", default="", help="write the figures to this file"),
    },
}


@dataclass(frozen=True)
class Arguments:
    """Parsed command line."""

    configs: list[Path]  # later files win
    overrides: list[str]  # "key.path=value", in the order given; later values win
    dry_run: bool
    options: dict[str, Any] = field(default_factory=dict)  # of the command, see OPTIONS


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(INPUT_STATUS, f"error: {message}; try: {self.prog} --help\n")


def calibadv(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command that the first argument names; ``help`` and ``--version`` are answered here."""
    command, *words = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command == "--version":
        sys.stdout.write(f"calibadv {version('calibadv-jax')}\n")
        sys.exit(0)
    if command == "help" and words:
        command, *words = words[0], "--help"
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_overview())
        sys.exit(0)
    if command in PROGRAMS:
        os.execv(sys.executable, [sys.executable, "-m", PROGRAMS[command][0], *words])
    if command in TOOLS:
        tool = importlib.import_module(module_of(command))
        parser = _Parser(f"calibadv {command}", description=TOOLS[command], allow_abbrev=False)
        tool.add_arguments(parser)
        arguments = parser.parse_intermixed_args(words)  # options may stand between the other arguments
        end(lambda: tool.run(arguments))
    if command not in COMMANDS:
        names = ", ".join([*COMMANDS, *TOOLS, *PROGRAMS])
        sys.stderr.write(f"error: unknown command {command!r}; the commands are {names}\n")
        sys.exit(INPUT_STATUS)
    if argv is None and command in (*CORE, "quickstart"):
        use_large_pages()

    def run(config: Config, **options: Any) -> None:
        importlib.import_module(module_of(command)).run(config, **options)

    main(command, run, words)


def _overview() -> str:
    usage = "usage: calibadv COMMAND --config FILE [--config FILE …] [--dry-run] [key.path=value …]"
    tools = TOOLS | {name: text for name, (_, text) in PROGRAMS.items()}
    width = max(map(len, COMMANDS | tools))
    lines = [usage]
    for title, commands in (("commands", COMMANDS), ("commands without a config", tools)):
        lines += ["", f"{title}:", *(f"  {name:{width}}  {text}" for name, text in commands.items())]
    return "\n".join([*lines, "", "calibadv help COMMAND says more; calibadv --version", ""])


def module_of(command: str) -> str:
    """Return the dotted name of a command's module."""
    package = "commands" if command in CORE else "contrib.cli"
    return f"calibadv_jax.{package}.{MODULES.get(command, command.replace('-', '_'))}"


def main(command: str, run: Callable[..., object], argv: Sequence[str] | None = None) -> NoReturn:
    """Load the config, call `run` with it and the command's OPTIONS by name, and `end` the process."""
    is_quickstart = command == "quickstart"
    default = [Path("quickstart")] if is_quickstart else None
    arguments = parse(f"calibadv {command}", COMMANDS[command], argv, OPTIONS.get(command), default)

    def run_with_config() -> None:
        config = load_config(arguments.configs, arguments.overrides, with_inputs=is_quickstart)
        if arguments.dry_run:
            sys.stdout.write(dump_config(config))
        else:
            tune_for_cpu(_divides_by(CPU_DEVICES, config))
            run(config, **arguments.options)

    end(run_with_config)


def parse(
    program: str,
    description: str,
    argv: Sequence[str] | None = None,
    options: Mapping[str, dict[str, Any]] | None = None,
    configs: list[Path] | None = None,
) -> Arguments:
    """Parse `argv` (default: the process's arguments), with the `options` of the command `program`.

    `configs` are used if none is given; None: at least one must be given.
    """
    parser = _Parser(prog=program, description=description, allow_abbrev=False)
    text = "YAML file of the run, or a shipped config (calibadv configs); later ones win, key by key"
    text += f"; default: {', '.join(map(str, configs))}" if configs else ""
    is_needed = not configs
    parser.add_argument("--config", type=Path, required=is_needed, action="append", metavar="FILE", help=text)
    for name, option in (options or {}).items():
        parser.add_argument(f"--{name}", **option)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    text = "config keys and their new values; every key is described in docs/configuration.md"
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=text)
    parsed, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        hint = counterpart(unknown[0].partition("=")[0].strip("-").replace("-", "_"))
        fault = f"unknown option {unknown[0]!r}; config keys are written key.path=value, without dashes"
        parser.error("; ".join(filter(None, (fault, hint))))
    chosen = {name: getattr(parsed, name) for name in options or {}}
    return Arguments(parsed.config or configs or [], parsed.overrides, parsed.dry_run, chosen)


def _divides_by(devices: int, config: Config) -> bool:
    """Return whether a small policy can be trained on this number of devices of one process."""
    sizes = config.mesh.sizes_on(devices)
    shards = sizes["data"] * sizes["fsdp"]
    is_alone = not (config.distributed.coordinator_address or config.distributed.num_processes)
    divides = not (config.learner.microbatch_rows % shards or config.sft.rows % shards)
    width = config.policy.init.get("hidden_size")  # a wrong type is reported later
    is_small = isinstance(width, int) and width <= SMALL
    return is_alone and divides and is_small and shards * sizes["tensor"] == devices


def end(work: Callable[[], object]) -> NoReturn:
    """Do the work and end the process; see `exit_process`.

    Status: 0; 2 after a `UserError` and 75 after an `EnvironmentFailure` or a full disk, which are printed as
    one line ``error: …``; 130 after Ctrl-C. Other exceptions are defects and show their traceback.
    """
    try:
        work()
    except SystemExit as stopped:
        exit_process(stopped.code)
    except UserError as error:
        sys.stderr.write(f"error: {redact(str(error))}\n")
        exit_process(exit_status(error))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        exit_process(INTERRUPTED)
    except Exception as error:  # each library has its own error for a full disk
        number = storage_errno(error)
        if number is None:
            raise
        place = f"{storage_path(error) or 'a file'}: {os.strerror(number)}"
        sys.stderr.write(f"error: {place}; fix that, then give the same command again\n")
        exit_process(exit_status(error))
    exit_process(0)


if __name__ == "__main__":
    calibadv()
