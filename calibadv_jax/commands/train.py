"""Reinforcement learning: ``calibadv train --config FILE [key.path=value …]``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.commands.evaluate import validate, validation_questions
from calibadv_jax.config import Config, RolloutConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.locking import locked_run
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.stopping import Stop
from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.pipeline import check_questions
from calibadv_jax.data.questions import answer_warnings, load_questions
from calibadv_jax.hosts.exchange import Hosts
from calibadv_jax.hosts.joining import joined
from calibadv_jax.metrics.backends import open_backends
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import Verdict, guard_metrics
from calibadv_jax.metrics.shown_steps import ShownSteps
from calibadv_jax.metrics.summary import report_metrics, trajectory_metrics
from calibadv_jax.metrics.timing import Phases
from calibadv_jax.metrics.writer import MetricsWriter
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.record.writer import RolloutWriter
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.prompt_lengths import drop_overlong, prompt_lengths
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.choices import describe_choices
from calibadv_jax.run.folder import content_hash, enter_run_folder, initial_hash, judge_hash, tools_hash
from calibadv_jax.run.model import Model, build_model
from calibadv_jax.run.service import check_service
from calibadv_jax.run.trainer import Trainer
from calibadv_jax.run.wiring import check_inputs, open_rollouts
from calibadv_jax.snapshots.checkpoint import newest_step
from calibadv_jax.snapshots.mirror import Mirror, open_mirror
from calibadv_jax.snapshots.peft import adapters_hash


def run(config: Config, kept: Config | None = None) -> None:
    """Trains for `learner.steps` steps, or continues from the newest checkpoint of the run folder.

    Args:
        kept: what the run's folder keeps; default: `config`. It lacks the addresses of services that the
            caller started for this run, so that whoever reads it starts them again.
    """
    with joined(config) as hosts:
        console = Console(config.log.progress, silent=not hosts.is_first)
        with locked_run(Path(config.run.dir), console.warn) if hosts.is_first else nullcontext():
            _run(config, kept or config, console, hosts)


def _run(config: Config, kept: Config, console: Console, hosts: Hosts) -> None:
    hosts.share("run.dir", Path(config.run.dir))
    mirror = open_mirror(config, console) if hosts.is_first else None
    inputs = (config.policy.path, config.policy.tokenizer, config.policy.lora.init_from)
    with ExitStack() as fetched:
        hosts.first("run.mirror", lambda: fetched.enter_context(mirror.inputs(*inputs)) if mirror else 0)
        model, questions, left_out = _prepare(config, kept, console, hosts, mirror)
    folder = Path(config.run.dir)
    resume = "" if config.checkpoint.resume else "with checkpoint.resume=true "
    stop = Stop(
        "the step in progress is finished and saved",
        "the last whole step is saved",
        f"{resume}the same command goes on from the saved step",
    )
    with stop, ExitStack() as stack:
        if mirror:
            stack.enter_context(mirror)  # a store that cannot be written is told before services start
        newest = newest_step(folder / "checkpoints") or 0
        if newest >= config.learner.steps:  # services take minutes to start, and may be away by now
            console.note(f"{folder}: step {newest} is trained already; to go on, raise learner.steps")
            return
        with console.phase(f"waiting for {services(config)}", announce=True):
            check = partial(check_service, config, folder) if hosts.is_first else lambda _: None
            opened = open_rollouts(config, model, folder / "policy", folder / "snapshots", check, hosts)
            rollouts = stack.enter_context(opened)
        with console.phase("loading the parameters", announce=True):
            trainer = Trainer(config, model, questions, rollouts, folder, console, hosts)
            trainer.mirror = mirror
        with hosts.steps(stop), trainer:  # all save the last step together, signal or not
            train(config, trainer, rollouts, folder, console, stop, left_out)


def _prepare(
    config: Config, kept: Config, console: Console, hosts: Hosts, mirror: Mirror | None
) -> tuple[Model, list[Question], int]:
    """Check all inputs, then enter the run's folder.

    Returns:
        The model, the questions that fit, and how many do not.
    """
    for line in describe_choices(config):
        console.say(line)
    questions = load_questions(config.data.train, config.data.columns)
    for line in answer_warnings(questions, "data.train"):
        console.warn(line)
    check_questions(questions, config.data.weights, config.prompt.template)
    check_inputs(config, console.warn)
    with console.phase(f"{len(questions)} questions; loading the policy", announce=True):
        model = build_model(config, config.policy.path, Adapters.from_config(config.policy.lora))
        fitting, left_out = fitting_questions(config, questions, model.tokenizer, console)
    check_same(config, model, fitting, hosts)
    hosts.first("run folder", lambda: bool(enter_run_folder(kept, model, fitting, console.say, mirror)))
    return model, fitting, left_out


def check_same(config: Config, model: Model, questions: Sequence[Question], hosts: Hosts) -> None:
    """Whether all processes read the same in the files that the config names: each may have its own copies.

    And whether the same actions are offered to all: a server or own code may differ from host to host.

    Raises:
        UserError: one of them reads something else.
    """
    hosts.same("data.train", lambda: content_hash([dataclasses.astuple(one) for one in questions]))
    hosts.same("policy or tokenizer", lambda: content_hash([model.hf_config, model.tokenizer_hash]))
    hosts.same("file reward.judge.prompt", lambda: judge_hash(config))
    hosts.same("set of actions (key tools)", lambda: tools_hash(config))
    newest = newest_step(Path(config.run.dir) / "checkpoints")
    hosts.same("newest checkpoint in run.dir", lambda: newest)
    lora = config.policy.lora
    # A checkpoint holds neither the policy that the run began with nor the base of its adapters.
    if config.policy.path and (newest is None or config.keeps_initial_policy or lora.rank):
        hosts.same("set of weights in policy.path", lambda: initial_hash(config, model))
    if lora.init_from and (newest is None or config.keeps_initial_policy):
        hosts.same("set of adapters in policy.lora.init_from", lambda: adapters_hash(Path(lora.init_from)))


def fitting_questions(
    config: Config, questions: Sequence[Question], tokenizer: Any, console: Console
) -> tuple[list[Question], int]:
    """The training questions whose prompts fit, and how many do not; said for the held-out questions too.

    Raises:
        UserError: some do not fit and data.overlong_prompts is "refuse".
    """
    longest = config.rollout.max_prompt_length
    lengths = prompt_lengths(questions, tokenizer, config.prompt, longest, make_actions(config))
    kept, overlong = drop_overlong(questions, lengths, longest, config.data.overlong_prompts, "data.train")
    held_out = validation_questions(config, tokenizer)[1] if config.evaluate.every else ""
    for found in filter(None, (overlong, held_out)):
        console.warn(found)
    return kept, len(lengths)


def services(config: Config) -> str:
    """What a run waits for before it can begin, for the terminal."""
    if config.sampler.name != "vllm":
        return "the retriever"
    count = len(config.sampler.urls) or config.sampler.workers
    started = "" if config.sampler.urls else ", which takes minutes (vllm_worker_*.log in the run's folder)"
    return f"the retriever and {count} vLLM worker{'s' if count > 1 else ''}{started}"


def train(
    config: Config,
    trainer: Trainer,
    rollouts: Rollouts,
    folder: Path,
    console: Console,
    stop: Stop,
    left_out: int = 0,
) -> None:
    """The algorithm. All parts of the run are built before.

    Args:
        left_out: questions whose prompts are too long, for the metrics.
    """
    first, total, hosts = trainer.step + 1, config.learner.steps, trainer.hosts
    shown = ShownSteps(console, total, config.log.transcripts)
    with written_by_first(config, folder, first, hosts, console.warn) as (record, writer):
        with console.phase("publishing the policy"):
            trainer.publish()  # before the first step, so that a broken path fails at the start
        if trainer.step < total:
            console.note("the first step compiles; the steps after it are faster")
        while trainer.step < total:
            phase, begun = Phases(console, stop), trainer.step
            with (
                phase("rollout"),
                hosts.local_work("rollout"),
                trajectory_bar(console, config.rollout) as done,
            ):
                groups = trainer.stream.take(begun, done)
            probed: dict[str, float] = {}
            if config.advantage.probed:
                with phase("probe", "golden answers"):
                    groups, probed = trainer.probe(groups)
            if trainer.critic is not None:
                with phase("values", "the critic's values"):
                    groups = trainer.critic.valued(groups)
            with phase("advantage", "rewards and advantages"):
                rng = random_state(trainer.seed, begun, "reward")
                groups = score_groups(groups, config.reward, rng)
                advantages = compute_advantages(groups, config.advantage)
            row = trajectory_metrics(groups, begun) | guard_metrics(groups) | advantages.metrics
            row |= probed | trainer.sampler_metrics() | {"rollout/overlong_prompts": float(left_out)}
            with written(writer, trainer, row, phase):
                with phase.held():  # what is trained is also kept and judged
                    with phase("update", "update, compiling" if begun + 1 == first else "update"):
                        updated = trainer.update(groups, advantages)
                    row |= updated.metrics
                    phase.tokens = updated.tokens
                    with hosts.barrier("record"):
                        with phase("record", "keeping the trajectories"):
                            kept = updated.logprobs
                            row |= record.write(trainer.step, groups, advantages.credits, kept, trainer.seed)
                        verdict = trainer.guards.check(trainer.step, row)
                        row |= verdict.metrics
                if not trainer.guards.is_broken:  # a policy that is not finite is nothing to sample from
                    with phase("publish", "publishing the policy"):
                        row |= trainer.publish()
                    row |= evaluate_if_due(config, trainer, rollouts, phase)
            shown.show(trainer.step, row, groups)
            for finding in verdict.findings:
                console.warn(finding)
            heed(verdict, trainer, writer, record, phase)


@contextmanager
def written_by_first(
    config: Config, folder: Path, first: int, hosts: Hosts, warn: Callable[[str], object]
) -> Iterator[tuple[RolloutWriter, MetricsWriter]]:
    """The writers of trajectories and metrics; those of the other processes write where nobody reads.

    Args:
        first: step that will be written.
        warn: told where a service for metrics has gone.
    """
    with ExitStack() as stack:
        if not hosts.is_first:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="calibadv-")))
            log = dataclasses.replace(config.log, backends=[], rollouts="none")
            config = dataclasses.replace(config, log=log)
        record = RolloutWriter(folder, config, first)
        writer = MetricsWriter(folder, open_backends(config.log, folder, first, warn), first)
        yield record, stack.enter_context(writer)


@contextmanager
def written(writer: MetricsWriter, trainer: Trainer, row: dict[str, float], phase: Phases) -> Iterator[None]:
    """Writes the step's row at the end of the block, with the times, if the step was trained.

    What is trained is saved, so its row must not be lost, whatever ends the block.

    Args:
        row: filled in the block, and after it.
    """
    begun = trainer.step
    try:
        yield
    finally:
        if trainer.step > begun:
            row |= phase.metrics()
            with phase.held():
                writer.write(trainer.step, row)


def evaluate_if_due(config: Config, trainer: Trainer, rollouts: Rollouts, phase: Phases) -> dict[str, float]:
    """The held-out scores of the new policy after every `evaluate.every` steps."""
    every = config.evaluate.every
    if not every or trainer.step % every:
        return {}
    with phase("evaluate", "evaluation"):
        return trainer.hosts.first("evaluation", lambda: report_metrics(validate(config, rollouts)))


def heed(
    verdict: Verdict, trainer: Trainer, writer: MetricsWriter, record: RolloutWriter, phase: Phases
) -> None:
    """Ends the run or goes back, if a guard says so; else saves the step if it is due.

    Raises:
        UserError: a guard ends the run, or there is nothing to go back to.
    """
    if verdict.action == "stop":
        with trainer.hosts.barrier("guards"):
            raise UserError(trainer.why_stopped())
    if verdict.action == "go_on":
        with phase.held():
            trainer.save_if_due()
        return
    with phase.held():
        trainer.roll_back()
        writer.rewind(trainer.step + 1)
        record.rewind(trainer.step + 1)
    trainer.publish()


@contextmanager
def trajectory_bar(console: Console, rollout: RolloutConfig) -> Iterator[Callable[[int], None]]:
    """A bar of the step's trajectories; yields what is told how many groups are complete."""
    size = rollout.group_size
    with console.bar("rollouts", rollout.questions_per_step * size, "trajectories") as show:
        yield lambda groups: show(groups * size)
