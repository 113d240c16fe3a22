"""Asks a policy: ``calibadv ask --policy D [--config FILE] [key.path=value …] ["question"]``.

Shows each turn as soon as it is sampled: thoughts and searches of the policy, the documents, and at the end
the answer. Without a question it asks for them, one after the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from calibadv_jax.config import Config
from calibadv_jax.contrib import asking
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import printable
from calibadv_jax.core.trajectory import Trajectory, Turn
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.shown_steps import LONGEST, cut, ending, folded, turn_lines
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.model import PolicySource

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asking.add_arguments(parser)
    text = "values that replace those of the config, and the question"
    parser.add_argument("words", nargs="*", metavar="key.path=value | question", help=text)


def run(arguments: argparse.Namespace) -> None:
    overrides = [word for word in arguments.words if asking.OVERRIDE.fullmatch(word)]
    questions = [word for word in arguments.words if word not in overrides]
    if len(questions) > 1:
        raise UserError(f"{len(questions)} questions were given; put quotes around one of several words")
    config, source = asking.read_policy(arguments, overrides)
    console = Console()
    console.note(f"opening {source}, the sampler and the retriever")
    ask(config, source, questions or typed_questions(), arguments.temperature, console.say)


def ask(config: Config, source: PolicySource, questions: Iterable[str], temperature: float, say: Say) -> None:
    """Answer a list of questions, or those of an iterator that waits for somebody to type.

    Raises UserError if policy, sampler or retriever cannot be used, or a question of a list failed.
    """
    with asking.open_policy(config, source) as rollouts:
        for number, text in enumerate(questions):
            trajectory = answer(rollouts, f"ask{number}", text, temperature, say)
            if trajectory.error is None:
                say(ending(trajectory))
            elif isinstance(questions, list):
                raise UserError(trajectory.error)
            else:
                say(f"failed: {printable(trajectory.error)}")


def answer(rollouts: Rollouts, name: str, text: str, temperature: float, say: Say) -> Trajectory:
    """Return the trajectory of a question; print each turn and each observation meanwhile."""

    def show(turn: Turn, is_observed: bool) -> None:
        if not is_observed:
            for line in turn_lines(turn.kind, turn.think, turn.query, turn.text):
                say(line)
            return
        if words := printable(asking.observed_words(turn)):
            say(cut(f"        {words}", LONGEST))
        for number, document in enumerate(turn.documents, 1):
            say(folded(number, document))

    rollout = replace(rollouts.context.rollout, temperature=temperature)
    return rollouts.run(asking.answer(rollouts, name, text, show, rollout))


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
