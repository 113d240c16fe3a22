"""Reinforcement learning: ``calibadv train --config FILE [key.path=value …]``.

`train` is the loop over the steps. Its calls are the stages in the table of docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import jax

from calibadv_jax.advantages.estimators import AdvantageResult, compute_advantages
from calibadv_jax.config import Config
from calibadv_jax.core.errors import Faults, UserError
from calibadv_jax.core.locking import locked_run
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.signals import Stop
from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.data.pipeline import check_questions
from calibadv_jax.data.questions import answer_warnings, load_questions
from calibadv_jax.distributed.joining import init_distributed
from calibadv_jax.distributed.process_group import ProcessGroup
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import Verdict, guard_metrics
from calibadv_jax.metrics.metrics_writer import MetricsWriter
from calibadv_jax.metrics.shown_steps import StepReporter
from calibadv_jax.metrics.summary import report_metrics, trajectory_metrics
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.rewards.evidence import check_evidence
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.prompts import drop_overlong
from calibadv_jax.rollout.runner import GroupParts, Rollouts
from calibadv_jax.rollout_store.trajectory_table import COLUMNS, trajectory_table
from calibadv_jax.rollout_store.writer import RolloutWriter
from calibadv_jax.run.choices import describe_choices
from calibadv_jax.run.configured_protocol import configured_protocol
from calibadv_jax.run.fingerprints import check_processes_agree
from calibadv_jax.run.folder import check_service, enter_run_folder
from calibadv_jax.run.model import Model, build_model, check_start
from calibadv_jax.run.recomputation import with_chosen_remat
from calibadv_jax.run.state import RunState
from calibadv_jax.run.trainer import UpdateResult
from calibadv_jax.run.untrained_tokens import check_control_tokens
from calibadv_jax.run.wiring import check_inputs, group_parts, impatient, open_rollouts
from calibadv_jax.snapshots.checkpoint import newest_step

if TYPE_CHECKING:
    from calibadv_jax.metrics.trackers import MetricsBackend
    from calibadv_jax.snapshots.mirror import Mirror

PROFILE = "profile"  # folder of the trace of log.profile_step, in the run's folder


def run(config: Config, kept: Config | None = None) -> None:
    """Train for `learner.steps` steps, or continue from the newest checkpoint of the run's folder.

    Args:
        config: The config of this start.
        kept: The config to write into the run's folder; None: `config`. A caller that started services for
            this run leaves their addresses out, so that a later start with this config starts them again.

    Raises:
        UserError: Bad input, or a guard has stopped the run.
    """
    with init_distributed(config) as process_group:
        console = Console(config.log.progress, silent=not process_group.is_main)
        lock: AbstractContextManager[object] = nullcontext()
        if process_group.is_main:
            lock = locked_run(Path(config.run.dir), console.warn)
        with lock:
            _run(config, kept or config, console, process_group)


def _run(config: Config, kept: Config, console: Console, process_group: ProcessGroup) -> None:
    folder = Path(config.run.dir)
    process_group.assert_shared_folder("run.dir", folder)
    mirror = _open_mirror(config, console, process_group)
    with _fetched_inputs(config, process_group, mirror):
        model, questions, num_overlong, parts = _prepare(config, kept, console, process_group, mirror)
        model = with_chosen_remat(config, model, process_group, console.say)
    with _stop_on_signal(config) as stop, ExitStack() as stack:
        if mirror:
            stack.enter_context(mirror)  # a store that cannot be written is refused before services start
        newest = newest_step(folder / "checkpoints") or 0
        if newest >= config.learner.steps:
            # Returns before services are started: that takes minutes, and a running one may be gone by now.
            console.note(f"{folder}: step {newest} is trained already; to go on, raise learner.steps")
            return
        rollouts = stack.enter_context(_opened_rollouts(config, model, console, process_group))
        rollouts.parts = parts
        with console.phase("loading the parameters", announce=True):
            state = RunState(config, model, questions, rollouts, folder, console, process_group, mirror)
        # All processes end the block of `state`, and so save the last step together, after a signal too.
        with process_group.stop_at_barriers(stop), state:
            train(state, stop, num_overlong)


def _open_mirror(config: Config, console: Console, process_group: ProcessGroup) -> Mirror | None:
    """Return the run's mirror in process 0, if run.mirror is set."""
    if not config.run.mirror or not process_group.is_main:
        return None
    from calibadv_jax.snapshots.mirror import open_mirror

    return open_mirror(config, console)


@contextmanager
def _fetched_inputs(config: Config, process_group: ProcessGroup, mirror: Mirror | None) -> Iterator[None]:
    """Fetch policy, tokenizer and adapters from the mirror, in process 0, for the time of the block."""
    policy = config.policy
    inputs: AbstractContextManager[Any] = nullcontext()
    if mirror:
        teacher = config.teacher.policy if config.teacher.has_own_weights else ""
        inputs = mirror.inputs(policy.path, policy.tokenizer, policy.lora.init_from, teacher)
    with ExitStack() as stack:
        process_group.run_on_main_and_broadcast("run.mirror", lambda: stack.enter_context(inputs))
        yield


def _stop_on_signal(config: Config) -> Stop:
    """Return the handler of signals for the block of a training run."""
    resume = "" if config.checkpoint.resume else "with checkpoint.resume=true "
    return Stop(
        "the step in progress is finished and saved",
        "the last whole step is saved",
        f"{resume}the same command goes on from the saved step",
    )


@contextmanager
def _opened_rollouts(
    config: Config, model: Model, console: Console, process_group: ProcessGroup
) -> Iterator[Rollouts]:
    """Wait for the services, and yield the agent loop that uses them."""
    folder = Path(config.run.dir)

    def check(description: Mapping[str, Any]) -> None:
        """Check in process 0 that the run still has the same retrieval service."""
        if process_group.is_main:
            check_service(config, folder, description)

    workers = " and vLLM workers (vllm_worker_*.log)" if config.sampler.name == "vllm" else ""
    with ExitStack() as stack:
        with console.phase(f"waiting for the retriever{workers}", announce=True):
            context = open_rollouts(
                config, model, folder / "policy", folder / "snapshots", check, process_group
            )
            rollouts = stack.enter_context(context)
        yield rollouts


def _prepare(
    config: Config, kept: Config, console: Console, process_group: ProcessGroup, mirror: Mirror | None
) -> tuple[Model, list[Question], int, GroupParts]:
    """Check all inputs and enter the run's folder.

    Returns:
        The model, the questions whose prompts fit, the number of questions whose prompts are too long, and
        what groups hold beside trajectories from the prompt.
    """
    faults = Faults()
    questions: list[Question] = []
    with faults.collected():
        questions = load_questions(config.data.train, config.data.columns)
        for line in answer_warnings(questions, "data.train"):
            console.warn(line)
        check_questions(questions, config.data.weights, config.prompt.template)
        check_evidence(questions, config.reward, config.continuations)
    with console.phase(f"{len(questions)} questions; loading the policy", announce=True), faults.collected():
        model = build_model(config, config.policy.path, Adapters.from_config(config.policy.lora))
        if _begins_with_weights(config):
            check_start(config, model)
            check_control_tokens(config, model, config.policy.path)
        if config.teacher.is_on:
            asked = impatient(config) if faults else config
            model = load_optional("teacher").check_teacher(asked, model)
    # Services come last. After a fault the start ends anyway, so they are asked once and not waited for.
    with faults.collected():
        for line in describe_choices(impatient(config) if faults else config):
            console.say(line)
    with faults.collected():
        check_inputs(impatient(config) if faults else config, console.warn)
    faults.raise_all()
    fitting, num_overlong = _fitting_questions(config, model, questions, console)
    parts = group_parts(config, model.tokenizer, fitting, console.warn)
    check_processes_agree(config, model, fitting, process_group)

    def enter_folder() -> bool:
        """Enter the run's folder, and return a value that processes can exchange."""
        return bool(enter_run_folder(kept, model, fitting, console.say, mirror))

    process_group.run_on_main_and_broadcast("run folder", enter_folder)
    return model, fitting, num_overlong, parts


def _begins_with_weights(config: Config) -> bool:
    """Whether this start will read the weights of policy.path, or its first adapters."""
    is_fresh = newest_step(Path(config.run.dir) / "checkpoints") is None
    if is_fresh:
        return not config.run.mirror  # a checkpoint may still come from there
    return config.keeps_initial_policy or config.policy.lora.rank > 0


def _fitting_questions(
    config: Config, model: Model, questions: list[Question], console: Console
) -> tuple[list[Question], int]:
    """Return the training questions whose prompts fit, and the number of the others.

    Warn of the prompts that do not fit, and of those of the validation questions if the run has any.
    """
    longest = config.rollout.max_prompt_length
    protocol = configured_protocol(config, model.tokenizer)
    for line in protocol.describe():
        console.say(line)
    lengths = protocol.prompt_lengths(questions, longest)
    fitting, warning = drop_overlong(questions, lengths, longest, config.data.overlong_prompts, "data.train")
    warnings = [warning]
    if config.evaluate.every:
        from calibadv_jax.commands.evaluate import validation_questions

        _, warning = validation_questions(config, model.tokenizer)
        warnings.append(warning)
    for line in warnings:
        if line:
            console.warn(line)
    return fitting, len(lengths)


def train(state: RunState, stop: Stop, num_overlong: int = 0) -> None:
    """Train until `learner.steps` steps are done.

    Args:
        state: The run, at its newest step; trained in place.
        stop: Handles signals, which end the run only where the newest step is consistent.
        num_overlong: Number of questions whose prompts are too long, for the metrics.

    Raises:
        UserError: A guard has stopped the run, or a service, a file or a user's function has failed.
    """
    console = state.console
    first = state.step + 1
    total = state.config.learner.steps
    shown = StepReporter(console, total, state.config.log.transcripts)
    with open_writers(state) as (record, writer):
        with console.phase("publishing the policy"):
            state.publish()  # before the first step, so that a broken path fails at the start
        while state.step < total:
            with _profiled(state), Step(state, writer, stop, first) as step:
                groups = step.take_groups()
                groups = step.probe(groups)
                groups = step.score(groups)
                groups = step.consult_teacher(groups)
                advantages = step.assign_credit(groups, num_overlong)
                # A signal waits until the trained step is also recorded and judged.
                with stop.held():
                    result = step.train(groups, advantages)
                    with state.process_group.barrier("record"):
                        step.keep_trajectories(record, groups, advantages, result)
                        verdict = step.check_guards()
                if not state.guards.is_broken:  # a policy that is not finite cannot be sampled from
                    step.publish()
                    step.evaluate()
            step.write_table(groups, advantages)
            shown.show(state.step, step.row, groups)
            for finding in verdict.findings:
                console.warn(finding)
            save_or_roll_back(verdict, state, writer, record, stop)


@contextmanager
def _profiled(state: RunState) -> Iterator[None]:
    """Trace the block with JAX's profiler, in process 0, if the next step is log.profile_step."""
    is_traced = state.step + 1 == state.config.log.profile_step and state.process_group.is_main
    if not is_traced:
        yield
        return
    folder = state.folder / PROFILE
    with jax.profiler.trace(str(folder)):
        yield
    state.console.note(f"step {state.step} is traced: {folder}")


class Step:
    """A step of training: one method for each stage, and the step's row of metrics.

    The end of the block writes the row, unless the step was not trained. It does so also if the block ends
    with an error after the update, because a trained step is saved, too.

    Args:
        state: The run.
        writer: Gets the row of metrics.
        stop: Handles signals.
        first: The number of the first step of this start, which compiles.
    """

    def __init__(self, state: RunState, writer: MetricsWriter, stop: Stop, first: int):
        self.state = state
        self.config = state.config
        self.process_group = state.process_group
        self.row: dict[str, float] = {}
        self._writer = writer
        self._stop = stop
        self._live = state.console.live
        self._steps_before = state.step
        self._compiles = state.step + 1 == first
        # What the step has counted, and the part of the step that took the time: for `Console.end_step`.
        self._counts: dict[str, tuple[int, str]] = {}
        state.console.begin_step(state.step + 1, state.config.learner.steps)

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        is_trained = self.state.step > self._steps_before
        if is_trained:
            self.row.update(self.state.console.end_step(self._counts))
            with self._stop.held():
                self._writer.write(self.state.step, self.row)

    def _show_microbatches(self, label: str, part: str) -> AbstractContextManager[None]:
        """Show the learner's progress under `label`; `part` is the metric of its seconds."""
        return self._live(label, "microbatches", self.state.trainer.progress, part)

    def take_groups(self) -> list[Group]:
        """Wait for the oldest complete groups of the stream, and count their searches and tokens.

        Returns:
            The groups, rollout.questions_per_step of them, not scored yet. All processes get the same groups.

        Raises:
            EnvironmentFailure: Too many trajectories have failed.
            UserError: The error of a rollout, in this process or in another one.
        """
        stream = self.state.stream
        progress = self.state.rollouts.progress()
        with (
            self._live("rollouts", "trajectories", progress, "rollout"),
            self.process_group.local_work("rollout"),
        ):
            groups = stream.take(self._steps_before)
        attempts = [attempt for group in [*groups, *stream.replaced] for attempt in group.attempts]
        new_turns = [turn for attempt in attempts for turn in attempt.new_turns]
        num_searches = sum(turn.kind == "search" for turn in new_turns)
        num_sampled = sum(len(turn.token_ids) for turn in new_turns)
        # With staleness the agent loop samples during the whole step, not only while this stage waits for it.
        part = "step" if stream.config.max_staleness else "rollout"
        self._counts["searches"] = (num_searches, part)
        self._counts["sampled_tokens"] = (num_sampled, part)
        return groups

    def probe(self, groups: list[Group]) -> list[Group]:
        """Add the golden answers' log-probabilities and the critic's values, if the estimator needs them.

        Args:
            groups: The groups of the step.

        Returns:
            Copies of the groups whose turns have `golden_logprobs` (nats) or `values` (float32 [N], for the N
            sampled tokens of the turn). If nothing is needed, the groups themselves.
        """
        trainer = self.state.trainer
        if self.config.advantage.probed:
            with self._show_microbatches("golden answers", "probe"):
                groups, self.row = trainer.probe(self.state.learner_state, groups)
        if trainer.critic is not None:
            with self._show_microbatches("the critic's values", "values"):
                groups = trainer.critic.with_values(groups)
        return groups

    def score(self, groups: list[Group]) -> list[Group]:
        """Return copies of the groups whose trajectories have their scores.

        Args:
            groups: The groups of the step.

        Returns:
            The copies, with the groups and the trajectories in the same order.

        Raises:
            UserError: A user's own reward function has failed, or a verdict of the judge is missing.
        """
        with self._live("rewards", part="advantage"):
            rng = random_state(self.state.seed, self._steps_before, "reward")
            return score_groups(groups, self.config.reward, rng)

    def consult_teacher(self, groups: list[Group]) -> list[Group]:
        """Add the teacher's log-probabilities of the sampled tokens, if the run has a teacher.

        Args:
            groups: The scored groups of the step.

        Returns:
            Copies of the groups whose guided turns have `teacher_logprobs`; without a teacher the groups
            themselves.

        Raises:
            UserError: The teacher's server cannot be asked.
        """
        if not self.config.teacher.is_on:
            return groups
        with self._show_microbatches("the teacher", "teacher"):
            groups, metrics = self.state.trainer.consult_teacher(
                self.state.learner_state, self._steps_before, groups
            )
        self.row.update(metrics)
        return groups

    def assign_credit(self, groups: list[Group], num_overlong: int) -> AdvantageResult:
        """Return the advantages of the scored groups, and begin the step's row of metrics.

        Args:
            groups: The scored groups of the step.
            num_overlong: Number of questions whose prompts are too long, for the metrics.

        Returns:
            The advantages by token and by turn, and their metrics.

        Raises:
            UserError: A user's own estimator has failed, or a trajectory lacks what the estimator needs.
        """
        with self._live("advantages", part="advantage"):
            advantages = compute_advantages(groups, self.config.advantage)
        probe_metrics = self.row
        self.row = trajectory_metrics(groups, self._steps_before)
        self.row.update(guard_metrics(groups))
        self.row.update(advantages.metrics)
        self.row.update(probe_metrics)
        self.row.update(self.state.sampler_metrics())
        self.row["rollout/overlong_prompts"] = float(num_overlong)
        return advantages

    def train(self, groups: list[Group], advantages: AdvantageResult) -> UpdateResult:
        """Train the policy, and with PPO the critic. From here on the step counts as trained.

        Args:
            groups: The scored groups of the step.
            advantages: The result of `assign_credit` for these groups.

        Returns:
            The new train state, the metrics, the log-probabilities before the first update, and the number of
            tokens.

        Raises:
            UserError: The processes of the run have different batches.
        """
        label = "update, compiling" if self._compiles else "update"
        with self._show_microbatches(label, "update"):
            result = self.state.train_on(groups, advantages)
        self.row.update(result.metrics)
        self._counts["tokens"] = (result.tokens, "step")
        return result

    def keep_trajectories(
        self, record: RolloutWriter, groups: list[Group], advantages: AdvantageResult, result: UpdateResult
    ) -> None:
        """Write the trajectories with their credit to the run's folder, if log.rollouts keeps them.

        Args:
            record: The writer of trajectories.
            groups: The scored groups of the step.
            advantages: The result of `assign_credit` for these groups.
            result: The result of `train` for these groups.

        Raises:
            OSError: The file cannot be written, for example because the disk is full.
        """
        state = self.state
        with self._live("keeping the trajectories", part="record"):
            metrics = record.write(state.step, groups, advantages.credits, result.logprobs, state.seed)
        self.row.update(metrics)

    def write_table(self, groups: list[Group], advantages: AdvantageResult) -> None:
        """Hand a table of the trajectories to Weights & Biases and MLflow every log.tables_every steps.

        Args:
            groups: The scored groups of the step.
            advantages: The result of `assign_credit` for these groups.
        """
        step = self.state.step
        every = self.config.log.tables_every
        is_due = every and step % every == 0
        if is_due and self.process_group.is_main and {"wandb", "mlflow"} & set(self.config.log.backends):
            rows = trajectory_table(step, groups, advantages.credits)
            self._writer.write_table(step, COLUMNS, rows)

    def check_guards(self) -> Verdict:
        """Return the guards' verdict on the metrics so far.

        Returns:
            What the run must do, and the guards' metrics, which are also added to the step's row.
        """
        verdict = self.state.guards.check(self.state.step, self.row)
        self.row.update(verdict.metrics)
        return verdict

    def publish(self) -> None:
        """Hand the new policy to the samplers.

        Raises:
            UserError: A sampler refuses the policy.
        """
        with self._live("publishing the policy", part="publish"):
            self.row.update(self.state.publish())

    def evaluate(self) -> None:
        """Score the held-out questions after every `evaluate.every` steps; 0: never.

        Raises:
            UserError: Too many trajectories have failed.
        """
        every = self.config.evaluate.every
        if not every or self.state.step % every:
            return
        from calibadv_jax.commands.evaluate import validate

        rollouts = self.state.rollouts

        def scores() -> dict[str, float]:
            """Evaluate the policy, and return the scores by the names of their metrics."""
            return report_metrics(validate(self.config, rollouts))

        with self._live("evaluation", "trajectories", rollouts.progress(of_evaluation=True), "evaluate"):
            self.row.update(self.process_group.run_on_main_and_broadcast("evaluation", scores))


def save_or_roll_back(
    verdict: Verdict, state: RunState, writer: MetricsWriter, record: RolloutWriter, stop: Stop
) -> None:
    """Save the step if a checkpoint is due; instead end the run or roll back if a guard asks for it.

    Args:
        verdict: The guards' verdict on the newest step.
        state: The run, at its newest step. A rollback returns it to the step of a checkpoint.
        writer: The writer of metrics; a rollback removes the rows after that step.
        record: The writer of trajectories; a rollback removes the files after that step.
        stop: Handles signals, which wait until the step is saved or rolled back.

    Raises:
        UserError: A guard stops the run, or there is no checkpoint to return to, or none can be written.
    """
    if verdict.action == "stop":
        with state.process_group.barrier("guards"):
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
    """Open the writers of trajectories and metrics for the steps that follow.

    Processes other than the first write to a temporary folder, which is removed at the end.

    Args:
        state: The run; its newest step is the last one before the first that is written.

    Yields:
        The writer of trajectories and the writer of metrics, which is closed at the end of the block.

    Raises:
        UserError: A backend of log.backends cannot be opened.
    """
    config = state.config
    folder = state.folder
    first = state.step + 1
    with ExitStack() as stack:
        if not state.process_group.is_main:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="calibadv-")))
            log = dataclasses.replace(config.log, backends=[], rollouts="none")
            config = dataclasses.replace(config, log=log)
        record = RolloutWriter(folder, config, first)
        backends: list[MetricsBackend] = []
        if config.log.backends:
            from calibadv_jax.metrics.trackers import open_backends
            from calibadv_jax.run.tracking import describe_run

            description = describe_run(config, folder, "train")
            backends = open_backends(config.log, folder, first, state.console.warn, description)
        writer = stack.enter_context(MetricsWriter(folder, backends, first))
        yield record, writer
