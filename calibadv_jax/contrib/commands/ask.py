"""Asks a policy: ``calibadv ask --policy D [--config FILE] [key.path=value …] ["question"]``.

Shows each turn as soon as it is sampled: thoughts and searches of the policy, the documents, and at the end
the answer. Without a question it asks for them, one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from calibadv_jax.config import Config, RewardConfig, load_config
from calibadv_jax.config.kept import newest_start
from calibadv_jax.core.errors import ActionRefused, QueryRefused, UserError
from calibadv_jax.core.interfaces import Action, Completion, Reply, Sampler, SamplingParams
from calibadv_jax.core.tags import NOTHING_FOUND, parse_turn, printable, well_formed, with_open_tag
from calibadv_jax.core.trajectory import Question, Trajectory
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.shown_steps import LONGEST, cut, ending, folded, turn_lines
from calibadv_jax.rollout.actions import SearchAction
from calibadv_jax.rollout.agent import RolloutContext
from calibadv_jax.rollout.observation import decode
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.model import PolicySource, build_model, find_policy, has_tokenizer
from calibadv_jax.run.wiring import open_rollouts

_OVERRIDE = re.compile(r"(tools|[a-z_]+(\.[a-z_0-9]+)+)=.*", re.DOTALL)
_PATIENCE = 10.0  # seconds without an answer of the retriever

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    policy = "policy to ask: a run, its checkpoints folder, a checkpoint, a snapshot, a HuggingFace folder"
    add("--policy", type=Path, required=True, metavar="FOLDER", help=policy)
    config = "config with prompt, rollout, sampler and retriever; default: the config of the run"
    add("--config", type=Path, metavar="FILE", help=config)
    programs = (
        "start the MCP servers that the run's own config names as commands; without it they are refused"
    )
    add("--start-programs", action="store_true", help=programs)
    temperature = "sampling temperature (default: 0, always the most likely token)"
    add("--temperature", type=float, default=0.0, help=temperature)
    words = "values that replace those of the config, and the question"
    add("words", nargs="*", metavar="key.path=value | question", help=words)


def run(arguments: argparse.Namespace) -> None:
    """Answer the question, or the questions that are typed.

    Raises:
        UserError: no such policy or config, or the question could not be answered.
    """
    overrides = [word for word in arguments.words if _OVERRIDE.fullmatch(word)]
    questions = [word for word in arguments.words if word not in overrides]
    if len(questions) > 1:
        raise UserError(f"{len(questions)} questions were given; put quotes around one of several words")
    if not 0 <= arguments.temperature < float("inf"):
        raise UserError(f"--temperature {arguments.temperature:g}: give 0 or more")
    if not arguments.policy.exists():
        raise UserError(f"{arguments.policy}: no such folder; give that of a run or of a HuggingFace model")
    source = find_policy(arguments.policy)
    config = load_config(arguments.config or run_config(source), [*own_tokenizer(source), *overrides])
    if not arguments.config and not arguments.start_programs:
        refuse_programs(config, source)
    console = Console()
    console.note(f"opening {source}, the sampler and the retriever")
    with tempfile.TemporaryDirectory() as folder:
        config = _for_person(config, folder)
        ask(config, source, questions or typed_questions(), arguments.temperature, console.say)


def ask(config: Config, source: PolicySource, questions: Any, temperature: float, say: Say) -> None:
    """Answer questions one after the other.

    Args:
        questions: a list, or an iterator that waits for somebody to type.

    Raises:
        UserError: policy, sampler or retriever cannot be used; or the only question of a list failed.
    """
    model = build_model(config, str(source.model_folder), source.adapters)
    snapshots = Path(config.run.dir) / "snapshots"
    with open_rollouts(config, model, source.model_folder, snapshots) as rollouts:
        rollouts.load(0, rollouts.publish(0, source.params(model.policy, model.mesh)))
        show_turns(rollouts, say)
        for number, text in enumerate(questions):
            question = Question(f"ask{number}", well_formed(text), (), "ask")
            trajectory = answer(rollouts, question, config, temperature)
            if trajectory.error is None:
                say(ending(trajectory))
            elif isinstance(questions, list):
                raise UserError(trajectory.error)
            else:
                say(f"failed: {printable(trajectory.error)}")


def answer(rollouts: Rollouts, question: Question, config: Config, temperature: float) -> Trajectory:
    (group,) = rollouts.collect(
        [question], "ask", config.run.seed, temperature=temperature, group_size=1, max_failed_share=1.0
    )
    return group.attempts[0]


def own_tokenizer(source: PolicySource) -> list[str]:
    """Return the override that takes the policy's own tokenizer, if there is one beside it."""
    return ["policy.tokenizer="] if has_tokenizer(source.model_folder) else []


def run_config(source: PolicySource) -> Path:
    """Return the config of the newest start of the policy's run.

    Raises:
        UserError: the policy belongs to no run, or all kept configs are damaged.
    """
    start = newest_start(source.model_folder.parent)
    if start is None:
        raise UserError(f"{source}: no config of a run beside it; name one with --config")
    return start.path


def refuse_programs(config: Config, source: PolicySource) -> None:
    """Refuse a config that starts programs: a run's folder may come from somebody else.

    Raises:
        UserError: a tool is an MCP server with a command.
    """
    for tool in config.tools:
        if tool.mcp and tool.mcp.command:
            raise UserError(
                f"{source}: the run's config starts a program, {tool.mcp.command!r}; --start-programs allows"
                " it, and --config FILE takes a config of your own"
            )


def _for_person(config: Config, folder: str) -> Config:
    """Write logs into `folder`, use one slot, wait briefly, and ask no judge: there is no golden answer."""
    retriever = config.retriever
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=folder),
        sampler=dataclasses.replace(config.sampler, slots=1),
        retriever=dataclasses.replace(retriever, patience=min(retriever.patience, _PATIENCE)),
        reward=RewardConfig(),
    )


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


def show_turns(rollouts: Rollouts, say: Say) -> None:
    """Print each turn and each observation from now on."""
    context = rollouts.context
    actions = tuple(_PrintingAction(action, say) for action in context.by_name.values())
    rollouts.context = dataclasses.replace(context, sampler=_PrintingSampler(context, say), actions=actions)


class _PrintingSampler:
    def __init__(self, context: RolloutContext, say: Say):
        self._sampler: Sampler = context.sampler
        self._context, self._say = context, say

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> Completion:
        completion = await self._sampler.generate(token_ids, sampling, session)
        ids = completion.token_ids[:-1] if completion.stop_reason == "eos" else completion.token_ids
        text = decode(self._context.tokenizer, ids)
        turn = parse_turn(with_open_tag(text), completion.stop_reason, self._context.grammar)
        for line in turn_lines(turn.kind, turn.think, turn.query, text):
            self._say(line)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


class _PrintingAction(Action):
    """An action that prints its replies, a line a document."""

    def __init__(self, inner: Action, say: Say):
        self._inner, self._say = inner, say
        self.name, self.purpose, self.argument = inner.name, inner.purpose, inner.argument
        self.may_be_empty, self.max_length = inner.may_be_empty, inner.max_length
        self.keeps_documents_whole = inner.keeps_documents_whole

    def parse(self, body: str) -> Any:
        try:
            return self._inner.parse(body)
        except ValueError as error:
            self._say(f"        refused: {printable(str(error))}")
            raise

    async def call(self, argument: Any) -> Reply:
        try:
            reply = await self._inner.call(argument)
        except QueryRefused:
            self._say("        the retriever does not take this query")
            raise
        except ActionRefused as error:
            self._say(f"        refused: {printable(str(error))}")
            raise
        if reply.text:
            self._say(cut(f"        {printable(reply.text)}", LONGEST))
        for number, document in enumerate(reply.documents, 1):
            self._say(folded(number, document))
        if isinstance(self._inner, SearchAction) and not reply.documents:
            self._say(f"        {NOTHING_FOUND}")
        return reply

    def render(self, reply: Reply) -> str:
        return self._inner.render(reply)

    async def close(self) -> None:
        await self._inner.close()
