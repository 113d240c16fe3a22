"""Reinforcement learning: ``calibadv train --config FILE [key.path=value …]``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from calibadv_jax.advantages.estimators import AdvantageResult, compute_advantages
from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.locking import locked_run
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.stopping import Stop
from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.data.pipeline import check_questions
from calibadv_jax.data.questions import answer_warnings, load_questions
from calibadv_jax.distributed.joining import init_distributed
from calibadv_jax.distributed.process_group import Hosts
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import Verdict, guard_metrics
from calibadv_jax.metrics.shown_steps import ShownSteps
from calibadv_jax.metrics.summary import report_metrics, trajectory_metrics
from calibadv_jax.metrics.writer import MetricsWriter
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.prompts import drop_overlong, prompt_lengths
from calibadv_jax.rollout_store.writer import RolloutWriter
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.choices import describe_choices
from calibadv_jax.run.fingerprints import check_same
from calibadv_jax.run.folder import check_service, enter_run_folder
from calibadv_jax.run.model import Model, build_model
from calibadv_jax.run.state import RunState
from calibadv_jax.run.trainer import UpdateResult
from calibadv_jax.run.wiring import check_inputs, open_rollouts
from calibadv_jax.snapshots.checkpoint import newest_step

if TYPE_CHECKING:
    from calibadv_jax.metrics.backends import MetricsBackend
    from calibadv_jax.snapshots.mirror import Mirror


def run(config: Config, kept: Config | None = None) -> None:
    """Train for `learner.steps` steps, or continue from the newest checkpoint of the run's folder.

    `kept` is for the run's folder: without the addresses of services that the caller started for
    this run, so that later readers start them again.
    """
    with init_distributed(config) as hosts:
        console = Console(config.log.progress, silent=not hosts.is_first)
        with locked_run(Path(config.run.dir), console.warn) if hosts.is_first else nullcontext():
            _run(config, kept or config, console, hosts)


def _run(config: Config, kept: Config, console: Console, hosts: Hosts) -> None:
    hosts.share("run.dir", Path(config.run.dir))
    mirror = None
    if config.run.mirror and hosts.is_first:
        from calibadv_jax.snapshots.mirror import open_mirror

        mirror = open_mirror(config, console)
    policy = config.policy
    inputs = mirror.inputs(policy.path, policy.tokenizer, policy.lora.init_from) if mirror else nullcontext()
    with ExitStack() as fetched:
        hosts.run_on_main_and_broadcast("run.mirror", lambda: fetched.enter_context(inputs))
        model, questions, overlong = _prepare(config, kept, console, hosts, mirror)
    folder = Path(config.run.dir)
    resume = "" if config.checkpoint.resume else "with checkpoint.resume=true "
    stop = Stop(
        "the step in progress is finished and saved",
        "the last whole step is saved",
        f"{resume}the same command goes on from the saved step",
    )
    with stop, ExitStack() as stack:
        if mirror:
            stack.enter_context(mirror)  # a store that cannot be written is refused before services start
        newest = newest_step(folder / "checkpoints") or 0
        if newest >= config.learner.steps:  # services take minutes to start, and may be away by now
            console.note(f"{folder}: step {newest} is trained already; to go on, raise learner.steps")
            return
        workers = " and vLLM workers (vllm_worker_*.log)" if config.sampler.name == "vllm" else ""
        with console.phase(f"waiting for the retriever{workers}", announce=True):
            check = partial(check_service, config, folder) if hosts.is_first else lambda _: None
            context = open_rollouts(config, model, folder / "policy", folder / "snapshots", check, hosts)
            rollouts = stack.enter_context(context)
        with console.phase("loading the parameters", announce=True):
            state = RunState(config, model, questions, rollouts, folder, console, hosts, mirror)
        with hosts.steps(stop), state:  # all save the last step together, signal or not
            train(state, stop, overlong)


def _prepare(
    config: Config, kept: Config, console: Console, hosts: Hosts, mirror: Mirror | None
) -> tuple[Model, list[Question], int]:
    """Check all inputs and enter the run's folder; return model, fitting questions, number of others."""
    for line in describe_choices(config):
        console.say(line)
    data, longest = config.data, config.rollout.max_prompt_length
    questions = load_questions(data.train, data.columns)
    for line in answer_warnings(questions, "data.train"):
        console.warn(line)
    check_questions(questions, data.weights, config.prompt.template)
    check_inputs(config, console.warn)
    with console.phase(f"{len(questions)} questions; loading the policy", announce=True):
        model = build_model(config, config.policy.path, Adapters.from_config(config.policy.lora))
        lengths = prompt_lengths(questions, model.tokenizer, config.prompt, longest, make_actions(config))
        fitting, warning = drop_overlong(questions, lengths, longest, data.overlong_prompts, "data.train")
        warnings = [warning]
        if config.evaluate.every:
            from calibadv_jax.commands.evaluate import validation_questions

            warnings.append(validation_questions(config, model.tokenizer)[1])
        for line in filter(None, warnings):
            console.warn(line)
    check_same(config, model, fitting, hosts)
    hosts.run_on_main_and_broadcast(
        "run folder", lambda: bool(enter_run_folder(kept, model, fitting, console.say, mirror))
    )
    return model, fitting, len(lengths)


def train(state: RunState, stop: Stop, overlong: int = 0) -> None:
    """The algorithm; `overlong` is the number of questions whose prompts are too long, for the metrics."""
    console, first, total = state.console, state.step + 1, state.config.learner.steps
    shown = ShownSteps(console, total, state.config.log.transcripts)
    with open_writers(state) as (record, writer):
        with console.phase("publishing the policy"):
            state.publish()  # before the first step, so that a broken path fails at the start
        while state.step < total:
            with Step(state, writer, stop, first) as step:
                groups = step.probe(step.roll_out())
                groups, advantages = step.assign_credit(groups, overlong)
                with stop.held():  # a trained step is also recorded and judged
                    updated = step.update(groups, advantages)
                    verdict = step.record(record, groups, advantages, updated)
                if not state.guards.is_broken:  # a policy that is not finite cannot be sampled from
                    step.publish()
                    step.evaluate()
            shown.show(state.step, step.row, groups)
            for finding in verdict.findings:
                console.warn(finding)
            apply_verdict(verdict, state, writer, record, stop)


class Step:
    """A step of training: its phases, its signals and its row of metrics.

    The row of a trained step is written at the end of the block, whatever ends it: the step is saved, too.
    Step number `first` compiles.
    """

    def __init__(self, state: RunState, writer: MetricsWriter, stop: Stop, first: int):
        self.state, self.config, self.hosts = state, state.config, state.hosts
        self.row: dict[str, float] = {}
        self._writer, self._begun, self._compiles = writer, state.step, state.step + 1 == first
        self._live, self._stop = state.console.live, stop
        self._counts: dict[str, tuple[int, str]] = {}  # for `Console.end_step`
        state.console.begin_step(state.step + 1, state.config.learner.steps)

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        if self.state.step > self._begun:
            self.row |= self.state.console.end_step(self._counts)
            with self._stop.held():
                self._writer.write(self.state.step, self.row)

    def _learn(self, label: str, part: str) -> AbstractContextManager[None]:
        return self._live(label, "microbatches", self.state.trainer.progress, part)

    def roll_out(self) -> list[Group]:
        """Return the oldest complete groups of the stream."""
        stream, progress = self.state.stream, self.state.rollouts.progress()
        with self._live("rollouts", "trajectories", progress, "rollout"), self.hosts.local_work("rollout"):
            groups = stream.take(self._begun)
        attempts = [attempt for group in [*groups, *stream.replaced] for attempt in group.attempts]
        part = "step" if stream.config.max_staleness else "rollout"
        self._counts["searches"] = sum(attempt.num_searches for attempt in attempts), part
        self._counts["sampled_tokens"] = int(sum(attempt.mask.sum() for attempt in attempts)), part
        return groups

    def probe(self, groups: list[Group]) -> list[Group]:
        """Add the golden answers' log-probabilities and the critic's values, if the estimator needs them."""
        trainer = self.state.trainer
        if self.config.advantage.probed:
            with self._learn("golden answers", "probe"):
                groups, self.row = trainer.probe(self.state.state, groups)
        if trainer.critic is not None:
            with self._learn("the critic's values", "values"):
                groups = trainer.critic.with_values(groups)
        return groups

    def assign_credit(self, groups: list[Group], overlong: int) -> tuple[list[Group], AdvantageResult]:
        """Return the scored groups and their advantages."""
        with self._live("rewards and advantages", part="advantage"):
            rng = random_state(self.state.seed, self._begun, "reward")
            groups = score_groups(groups, self.config.reward, rng)
            advantages = compute_advantages(groups, self.config.advantage)
        metrics = trajectory_metrics(groups, self._begun) | guard_metrics(groups) | advantages.metrics
        self.row = metrics | self.row | self.state.sampler_metrics()
        self.row["rollout/overlong_prompts"] = float(overlong)
        return groups, advantages

    def update(self, groups: list[Group], advantages: AdvantageResult) -> UpdateResult:
        """Train the policy, and the critic with PPO. From here on the step counts."""
        with self._learn("update, compiling" if self._compiles else "update", "update"):
            updated = self.state.update(groups, advantages)
        self.row |= updated.metrics
        self._counts["tokens"] = updated.tokens, "step"
        return updated

    def record(
        self, record: RolloutWriter, groups: list[Group], advantages: AdvantageResult, updated: UpdateResult
    ) -> Verdict:
        """Keep the trajectories, and return the verdict of the guards."""
        state, credits = self.state, advantages.credits
        with self.hosts.barrier("record"):
            with self._live("keeping the trajectories", part="record"):
                self.row |= record.write(state.step, groups, credits, updated.logprobs, state.seed)
            verdict = state.guards.check(state.step, self.row)
            self.row |= verdict.metrics
        return verdict

    def publish(self) -> None:
        """Hand the new policy to the samplers."""
        with self._live("publishing the policy", part="publish"):
            self.row |= self.state.publish()

    def evaluate(self) -> None:
        """Score the held-out questions after every `evaluate.every` steps."""
        every, rollouts = self.config.evaluate.every, self.state.rollouts
        if every and self.state.step % every == 0:
            from calibadv_jax.commands.evaluate import validate

            with self._live("evaluation", "trajectories", rollouts.progress(of_collect=True), "evaluate"):
                self.row |= self.hosts.run_on_main_and_broadcast(
                    "evaluation", lambda: report_metrics(validate(self.config, rollouts))
                )


def apply_verdict(
    verdict: Verdict, state: RunState, writer: MetricsWriter, record: RolloutWriter, stop: Stop
) -> None:
    """End the run (UserError) or roll back, if a guard asks for it; else save the step if it is due."""
    if verdict.action == "stop":
        with state.hosts.barrier("guards"):
            raise UserError(state.why_stopped())
    with stop.held():
        if verdict.action == "go_on":
            state.save_if_due()
            return
        state.roll_back()
        writer.rewind(state.step + 1)
        record.rewind(state.step + 1)
    state.publish()


@contextmanager
def open_writers(state: RunState) -> Iterator[tuple[RolloutWriter, MetricsWriter]]:
    """Open the writers of trajectories and metrics; other processes than the first write to nowhere."""
    config, folder, first = state.config, state.folder, state.step + 1
    with ExitStack() as stack:
        if not state.hosts.is_first:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="calibadv-")))
            log = dataclasses.replace(config.log, backends=[], rollouts="none")
            config = dataclasses.replace(config, log=log)
        record = RolloutWriter(folder, config, first)
        backends: list[MetricsBackend] = []
        if config.log.backends:
            from calibadv_jax.metrics.backends import open_backends

            backends = open_backends(config.log, folder, first, state.console.warn)
        yield record, stack.enter_context(MetricsWriter(folder, backends, first))
