"""Asks a policy: ``calibadv ask --policy D [--config FILE] [key.path=value …] ["question"]``.

Shows each turn as soon as it is sampled: thoughts and searches of the policy, the documents, and at the end
the answer. Without a question it asks for them, one after the other.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from calibadv_jax.config import Config, RewardConfig, RolloutConfig, load_config
from calibadv_jax.config.kept import newest_start
from calibadv_jax.contrib.arguments import number
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import CLOSE_INFORMATION, FIRST_DOCUMENT, OPEN_INFORMATION, printable, well_formed
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.shown_steps import LONGEST, cut, ending, folded, turn_lines
from calibadv_jax.rollout.agent import run_trajectory
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.model import PolicySource, build_model, find_policy, has_tokenizer
from calibadv_jax.run.wiring import open_rollouts

OVERRIDE = re.compile(r"(tools|[a-z_]+(\.[a-z_0-9]+)+)=.*", re.DOTALL)
_PATIENCE = 10.0  # seconds without an answer of the retriever

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_policy_arguments(parser)
    text = "values that replace those of the config, and the question"
    parser.add_argument("words", nargs="*", metavar="key.path=value | question", help=text)


def run(arguments: argparse.Namespace) -> None:
    overrides = [word for word in arguments.words if OVERRIDE.fullmatch(word)]
    questions = [word for word in arguments.words if word not in overrides]
    if len(questions) > 1:
        raise UserError(f"{len(questions)} questions were given; put quotes around one of several words")
    config, source = read_policy(arguments, overrides)
    console = Console()
    console.note(f"opening {source}, the sampler and the retriever")
    ask(config, source, questions or typed_questions(), console.say)


def ask(config: Config, source: PolicySource, questions: Iterable[str], say: Say) -> None:
    """Answer a list of questions, or those of an iterator that waits for somebody to type.

    Raises UserError if policy, sampler or retriever cannot be used, or a question of a list failed.
    """
    with open_policy(config, source) as rollouts:
        for place, text in enumerate(questions):
            trajectory = answer(rollouts, f"ask{place}", text, say)
            if trajectory.error is None:
                say(ending(trajectory))
            elif isinstance(questions, list):
                raise UserError(trajectory.error)
            else:
                say(f"failed: {printable(trajectory.error)}")


def answer(rollouts: Rollouts, name: str, text: str, say: Say) -> Trajectory:
    """Return the trajectory of a question; print each turn and each observation meanwhile."""

    def show(turn: Turn, is_observed: bool) -> None:
        if not is_observed:
            for line in turn_lines(turn.kind, turn.think, turn.query, turn.text):
                say(line)
            return
        if words := printable(observed_words(turn)):
            say(cut(f"        {words}", LONGEST))
        for place, document in enumerate(turn.documents, 1):
            say(folded(place, document))

    return rollouts.run(run_question(rollouts, name, text, show, rollouts.context.rollout))


def typed_questions() -> Iterator[str]:
    """Yield lines of standard input that are not blank, until it ends."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("question (Ctrl-D ends): ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `read_policy` reads, but not the overrides."""
    text = "policy to ask: a run, its checkpoints folder, a checkpoint, a snapshot, a HuggingFace folder"
    parser.add_argument("--policy", type=Path, required=True, metavar="FOLDER", help=text)
    text = "config with prompt, rollout, sampler and retriever; default: the config of the run"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)
    text = "start the MCP servers that the run's own config names as commands; without it they are refused"
    parser.add_argument("--start-programs", action="store_true", help=text)
    text = "sampling temperature (default: 0, always the most likely token)"
    parser.add_argument("--temperature", type=number(float, least=0, below=math.inf), default=0.0, help=text)


def read_policy(arguments: argparse.Namespace, overrides: Sequence[str]) -> tuple[Config, PolicySource]:
    """Return the config of the arguments, and the policy that they name, with the tokenizer beside it.

    Raises UserError if there is no such policy or config, or the run's own config starts programs.
    """
    if not arguments.policy.exists():
        raise UserError(f"{arguments.policy}: no such folder; give that of a run or of a HuggingFace model")
    source = find_policy(arguments.policy)
    own = ["policy.tokenizer="] if has_tokenizer(source.model_folder) else []
    own.append(f"rollout.temperature={arguments.temperature}")
    config = load_config(arguments.config or run_config(source), [*own, *overrides])
    programs = [tool.mcp.command for tool in config.tools if tool.mcp and tool.mcp.command]
    if programs and not (arguments.config or arguments.start_programs):  # the run may be somebody else's
        advice = "--start-programs allows it, and --config FILE takes a config of your own"
        raise UserError(f"{source}: the run's config starts a program, {programs[0]!r}; {advice}")
    return config, source


def run_config(source: PolicySource) -> Path:
    """Return the config of the newest start of the policy's run; UserError if it belongs to no run."""
    start = newest_start(source.model_folder.parent)
    if start is None:
        raise UserError(f"{source}: no config of a run beside it; name one with --config")
    return start.path


def for_people(config: Config, folder: str, slots: int) -> Config:
    """Write logs into `folder`, use few slots, wait briefly, and ask no judge: there is no golden answer."""
    run, sampler = replace(config.run, dir=folder), replace(config.sampler, slots=slots)
    retriever = replace(config.retriever, patience=min(config.retriever.patience, _PATIENCE))
    return replace(config, run=run, sampler=sampler, retriever=retriever, reward=RewardConfig())


@contextmanager
def open_policy(config: Config, source: PolicySource, slots: int = 1) -> Iterator[Rollouts]:
    """Yield rollouts of the policy for `slots` questions at a time; UserError if a part cannot be used."""
    with tempfile.TemporaryDirectory() as folder:
        config = for_people(config, folder, slots)
        model = build_model(config, str(source.model_folder), source.adapters)
        with open_rollouts(config, model, source.model_folder, Path(folder) / "snapshots") as rollouts:
            rollouts.load(0, rollouts.publish(0, source.params(model.policy, model.mesh)))
            yield rollouts


async def run_question(
    rollouts: Rollouts,
    name: str,
    text: str,
    watch: Callable[[Turn, bool], object],
    rollout: RolloutConfig,
    seed: int | None = None,
    session: str = "",
) -> Trajectory:
    """Write a trajectory with the limits of `rollout` on the loop of `rollouts`.

    `name` and `seed` (None: the run's) determine every sampled token. `watch`: see `RolloutContext`.
    `session` (default: `name`) is unique among questions under way.
    """
    question = Question(name, well_formed(text), (), "ask")
    context = replace(rollouts.context, watch=watch, rollout=rollout)
    seed = rollouts.seed if seed is None else seed
    return await run_trajectory(context, question, 0, seed, session or name)


def observed_words(turn: Turn) -> str:
    """Return the text that a turn's observation shows, without its documents."""
    shown = turn.observation_text.partition(OPEN_INFORMATION)[2].rpartition(CLOSE_INFORMATION)[0]
    return shown.partition(FIRST_DOCUMENT)[0] if turn.documents else shown
