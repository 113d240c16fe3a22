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
from calibadv_jax.config.trust import Trust, add_flag
from calibadv_jax.contrib.arguments import number
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import FIRST_DOCUMENT, to_printable_line, well_formed
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.shown_steps import LONGEST_LINE, answer_line, document_line, truncate, turn_lines
from calibadv_jax.rollout.agent import run_trajectory
from calibadv_jax.rollout.protocol import TurnProtocol
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.model import PolicySource, build_model, find_policy, has_tokenizer
from calibadv_jax.run.wiring import open_rollouts

# A word of the command line that changes a key of the config; any other word is the question.
OVERRIDE = re.compile(r"(tools|[a-z_]+(\.[a-z_0-9]+)+)=.*", re.DOTALL)
_PATIENCE = 10.0  # seconds to wait for a retriever that does not answer

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    add_policy_arguments(parser)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key.path=value | question",
        help="values that replace those of the config, and the question",
    )


def run(arguments: argparse.Namespace) -> None:
    """Answer the question of the command line, or those that are typed.

    Raises:
        UserError: several questions are given, or as `read_policy` and `ask`.
    """
    overrides = [word for word in arguments.words if OVERRIDE.fullmatch(word)]
    questions = [word for word in arguments.words if word not in overrides]
    if len(questions) > 1:
        raise UserError(f"{len(questions)} questions were given; put quotes around one of several words")
    config, source = read_policy(arguments, overrides, "ask")
    console = Console()
    console.note(f"opening {source}, the sampler and the retriever")
    ask(config, source, questions or typed_questions(), console.say)


def ask(config: Config, source: PolicySource, questions: Iterable[str], say: Say) -> None:
    """Answer a list of questions, or those of an iterator that waits for somebody to type.

    Args:
        config: prompt, rollout, sampler and retriever.
        source: the policy.
        questions: a list, or an iterator: a question of a list that fails is an error, a question of an
            iterator that fails is reported and the next one is asked.
        say: prints a line.

    Raises:
        UserError: policy, sampler or retriever cannot be used, or a question of a list failed.
    """
    with open_policy(config, source) as rollouts:
        for index, text in enumerate(questions):
            trajectory = answer(rollouts, f"ask{index}", text, say)
            if trajectory.error is None:
                say(answer_line(trajectory))
            elif isinstance(questions, list):
                raise UserError(trajectory.error)
            else:
                say(f"failed: {to_printable_line(trajectory.error)}")


def answer(rollouts: Rollouts, name: str, text: str, say: Say) -> Trajectory:
    """Return the trajectory of a question; print each turn and each observation meanwhile."""

    def show(turn: Turn, is_observed: bool) -> None:
        if not is_observed:
            for line in turn_lines(turn.kind, turn.think, turn.query, turn.text):
                say(line)
            return
        words = to_printable_line(observed_words(turn, rollouts.context.protocol))
        if words:
            say(truncate(f"        {words}", LONGEST_LINE))
        for position, document in enumerate(turn.documents, 1):
            say(document_line(position, document))

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
    parser.add_argument(
        "--policy",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="policy to ask: a run, its checkpoints folder, a checkpoint, a snapshot, a HuggingFace folder",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config with prompt, rollout, sampler and retriever; default: the config of the run",
    )
    add_flag(parser)
    parser.add_argument(
        "--temperature",
        type=number(float, least=0, below=math.inf),
        default=0.0,
        help="sampling temperature (default: 0, always the most likely token)",
    )


def read_policy(
    arguments: argparse.Namespace, overrides: Sequence[str], command: str
) -> tuple[Config, PolicySource]:
    """Return the config of the arguments, and the policy that they name, with the tokenizer beside it.

    Args:
        arguments: those of `add_policy_arguments`.
        overrides: "key.path=value" each; they win over the config.
        command: name of the command, ask or serve.

    Raises:
        UserError: there is no such policy or config, or the run's own config would do more than ask.
    """
    if not arguments.policy.exists():
        raise UserError(f"{arguments.policy}: no such folder; give that of a run or of a HuggingFace model")
    source = find_policy(arguments.policy)
    settings = []
    if has_tokenizer(source.model_folder):
        settings.append("policy.tokenizer=")  # the tokenizer in the policy's own folder
    settings.append(f"rollout.temperature={arguments.temperature}")
    folders = {}
    path = arguments.config
    if path is None:
        path = run_config(source)
        folders[str(path)] = source.model_folder.parent
    trust = Trust(command, arguments.trust_run, folders)
    return load_config(path, [*settings, *overrides], trust=trust), source


def run_config(source: PolicySource) -> Path:
    """Return the config of the newest start of the policy's run; UserError if it belongs to no run."""
    start = newest_start(source.model_folder.parent)
    if start is None:
        raise UserError(f"{source}: no config of a run beside it; name one with --config")
    return start.path


def for_people(config: Config, folder: str, slots: int) -> Config:
    """Return the config for questions of people.

    Logs go into `folder`, `slots` questions are sampled together, a retriever that does not answer is
    waited for briefly, and no judge is asked, because there is no golden answer. Answers stand where the
    policy has learned to write them.
    """
    patience = min(config.retriever.patience, _PATIENCE)
    return replace(
        config,
        run=replace(config.run, dir=folder),
        sampler=replace(config.sampler, slots=slots),
        retriever=replace(config.retriever, patience=patience),
        reward=RewardConfig(answer_from=config.reward.answer_from),
    )


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
    """Write a trajectory on the event loop of `rollouts`.

    Args:
        rollouts: holds the policy, the sampler and the retriever.
        name: id of the question; `name` and `seed` determine every sampled token.
        text: the question.
        watch: called with each turn; see `RolloutContext`.
        rollout: limits of the trajectory.
        seed: None: the run's seed.
        session: unique among questions under way; empty: `name`.
    """
    question = Question(name, well_formed(text), (), "ask")
    context = replace(rollouts.context, watch=watch, rollout=rollout)
    if seed is None:
        seed = rollouts.seed
    return await run_trajectory(context, question, 0, seed, session or name)


def observed_words(turn: Turn, protocol: TurnProtocol) -> str:
    """Return the text that a turn's observation shows, without its documents.

    Args:
        turn: The turn with its observation.
        protocol: The protocol of the turn.
    """
    replies = protocol.reply_texts(turn)
    if turn.documents:
        replies = [reply.partition(FIRST_DOCUMENT)[0] for reply in replies]
    return "\n".join(reply for reply in replies if reply.strip())
