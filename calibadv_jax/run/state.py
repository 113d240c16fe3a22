"""The state of a run between its steps: restore, train, publish, save, roll back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from calibadv_jax.advantages.estimators import AdvantageResult
from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.seeds import attempt_seed
from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.data.pipeline import QuestionIterator
from calibadv_jax.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from calibadv_jax.distributed.shared_groups import SharedGroups
from calibadv_jax.learner.learner import State
from calibadv_jax.learner.step import logprob_mismatch, probe_tokens
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import Guards
from calibadv_jax.rewards.evidence import max_score
from calibadv_jax.rewards.score import trajectory_scores
from calibadv_jax.rollout.runner import Rollouts, RolloutStream, wait_for_any
from calibadv_jax.run.model import Model, adapter_base
from calibadv_jax.run.trainer import Trainer, UpdateResult
from calibadv_jax.snapshots.checkpoint import EXTRA, ROLLBACK, CheckpointStore, note_rollback, read_rollback

if TYPE_CHECKING:
    from calibadv_jax.snapshots.mirror import Mirror

CRITIC = "critic"  # key of the critic's train state in a checkpoint


class RunState:
    """Everything that a checkpoint holds: policy, optimizer, critic, order of questions, stream, guards.

    The constructor continues from the newest checkpoint of the folder. As a context manager, the state saves
    the last complete step when the block ends.

    Args:
        config: The run's config.
        model: The policy without parameters, its tokenizer and its mesh.
        questions: The training questions whose prompts fit.
        rollouts: The agent loop, with its sampler and retriever.
        folder: The run's folder.
        console: Gets notes on the progress.
        process_group: The processes of the run.
        mirror: Copy of the run's folder in an object store, which gets every checkpoint. None: no copy.

    Raises:
        UserError: The checkpoint is damaged, or belongs to another policy, optimizer or question file.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        questions: Sequence[Question],
        rollouts: Rollouts,
        folder: Path,
        console: Console,
        process_group: ProcessGroup = SINGLE_PROCESS,
        mirror: Mirror | None = None,
    ):
        self.config = config
        self.model = model
        self.rollouts = rollouts
        self.folder = folder
        self.console = console
        self.process_group = process_group
        self.mirror = mirror
        self.by_id = {question.id: question for question in questions}
        self.questions = QuestionIterator(
            questions,
            config.run.seed,
            config.data.shuffle,
            config.data.weights,
            config.data.rest_below,
            config.data.rest_above,
            config.data.rest_after,
            config.data.rest_for,
            config.data.rest_share,
        )
        self.stream = self._make_stream()
        self.guards = Guards(config.guards)
        self.trainer = Trainer(config, model, process_group)
        # Metadata of a checkpoint of adapters, which names the base and does not hold it; else empty.
        self.base: dict[str, Any] = {}
        base = adapter_base(config, model, config.policy.path)
        if base:
            self.base["base"] = {"name": base.name, "sha256": base.sha256}
        self.checkpoints = CheckpointStore(
            folder / "checkpoints",
            config.checkpoint.keep,
            config.checkpoint.asynchronous,
            process_group.save_barrier(),
        )
        self.step = 0  # number of steps trained
        newest = self.checkpoints.latest_step()
        self.learner_state: State = self.trainer.begin(newest is None, questions)
        if newest is None:
            if process_group.is_main:
                (folder / ROLLBACK).unlink(missing_ok=True)
        else:
            self._resume(newest)

    def _resume(self, step: int) -> None:
        """Continue from the newest checkpoint, and count a rollback that is newer than it."""
        self._restore(step, with_guards=True)
        rollback = read_rollback(self.folder)
        if rollback.get("step", -1) >= self.step:  # the checkpoint is older than the rollback
            self.guards.rollbacks = int(rollback["rollbacks"])
        self.rollouts.seed = self.seed
        self.console.note(f"resuming from step {self.step}")

    def _make_stream(self) -> RolloutStream:
        rollout = self.config.rollout
        if self.process_group.process_count == 1:
            return RolloutStream(self.rollouts.begin, self.questions, rollout, self._are_tied, wait_for_any)
        shared = SharedGroups(self.rollouts.begin, self.process_group, rollout.max_staleness > 0)
        return RolloutStream(shared.begin, self.questions, rollout, self._are_tied, shared.wait)

    def _are_tied(self, groups: Sequence[Group]) -> list[bool]:
        """Return for each group whether all its scores are equal."""
        scores = [trajectory_scores(group, self.config.reward) for group in groups]
        # Processes with different scores would replace different groups.
        self.process_group.assert_equal("score of a group", lambda: scores)
        return [len(set(group_scores)) < 2 for group_scores in scores]

    @property
    def seed(self) -> int:
        """The seed of all draws from now on; changes with every rollback."""
        return attempt_seed(self.config.run.seed, self.guards.rollbacks)

    def train_on(self, groups: Sequence[Group], advantages: AdvantageResult) -> UpdateResult:
        """Train on the groups and count the step.

        Args:
            groups: The scored groups of the step.
            advantages: The advantages of the groups' tokens.

        Returns:
            The trainer's result. Its metrics also describe the order of the questions.

        Raises:
            UserError: The processes of the run have different batches.
        """
        result = self.trainer.train_step(self.learner_state, self.step, self.seed, groups, advantages)
        result.metrics.update(self._note_scores(groups))
        # State and step change together: the new state must not be saved under the number of the old one.
        self.learner_state = result.state
        self.step += 1
        self.stream.commit()
        return result

    def _note_scores(self, groups: Sequence[Group]) -> dict[str, float]:
        """Tell the order of questions the scores of trained and replaced groups, and return its metrics."""
        reward = self.config.reward
        replaced = self.stream.replaced
        for group in groups:
            scores = [trajectory.relative_score for trajectory in group.from_prompt.trajectories]
            self.questions.record_scores(group.question.id, scores)
        for group in replaced:
            largest = max_score(group.question.supporting_ids, reward)
            scores = [score / largest for score in trajectory_scores(group.from_prompt, reward)]
            self.questions.record_scores(group.question.id, scores)
        metrics = {}
        if self.config.rollout.dynamic_sampling:
            metrics["rollout/replaced_groups"] = float(len(replaced))
        if self.config.data.has_curriculum:
            metrics["rollout/resting_questions"] = float(self.questions.num_resting)
        return metrics

    def publish(self) -> dict[str, float]:
        """Hand the policy to the sampler as version `step`.

        Returns:
            How far each vLLM worker's log-probabilities of a fixed text are from the learner's. Workers
            return them at temperature 1 only, so at another rollout.temperature nothing is compared. Empty
            with the embedded sampler.
        """
        learner = self.trainer.learner
        params = self.learner_state["params"]
        published = self.rollouts.publish(self.step, learner.with_base(params))
        tokens = probe_tokens(len(self.model.tokenizer), self.config.rollout.max_length)
        with self.process_group.local_work("weights of the samplers"):
            self.rollouts.load(self.step, published)
            own_logprobs = self.rollouts.prompt_logprobs(tokens.tolist())
        worker_logprobs: list[np.ndarray] = []  # float32 [T - 1] of each worker
        for process_logprobs in self.process_group.all_gather(
            "log-probabilities of the samplers", own_logprobs
        ):
            worker_logprobs.extend(process_logprobs.values())
        if worker_logprobs and learner.options.temperature != 1.0:
            return {"rollout/workers": float(len(worker_logprobs))}
        return logprob_mismatch(learner, params, self.config.learner, tokens, worker_logprobs)

    def sampler_metrics(self) -> dict[str, float]:
        """Return the sums of the samplers' counts over all processes."""
        counts = self.process_group.all_gather("counts of the samplers", self.rollouts.metrics())
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    def roll_back(self) -> None:
        """Return to the newest checkpoint of a good step, with another seed.

        Raises:
            UserError: No checkpoint is as old as the last good step.
        """
        collapsed = self.step
        last_good = self.guards.last_good_step
        self._wait_for_checkpoint()
        good_steps = [step for step in self.checkpoints.steps() if step <= last_good]
        if not good_steps:
            raise UserError(
                f"the policy collapsed at step {collapsed}, and no checkpoint is as old as the last good"
                f" step {last_good}; raise checkpoint.keep or lower checkpoint.every"
            )
        target = good_steps[-1]
        self.stream.close()
        self._drop_state()  # the end of the run does not save it, even if the next lines fail
        self.guards.reset_after_rollback(target)
        # Written before anything is deleted, so that a start after a kill completes the rollback.
        if self.process_group.is_main:
            note_rollback(self.folder, target, self.guards.rollbacks)
        if self.mirror:
            self.mirror.drop_after(target)
        self.checkpoints.delete_after(target)
        self.stream = self._make_stream()
        self._restore(target)
        self.rollouts.seed = self.seed
        if self.mirror:
            self.mirror.put(self.step)
        self.console.note(f"rolled back from step {collapsed} to step {self.step}")

    def _drop_state(self) -> None:
        self.learner_state = {}
        if self.trainer.critic is not None:
            self.trainer.critic.state = {}

    def _restore(self, step: int, with_guards: bool = False) -> None:
        critic = self.trainer.critic
        path = self.checkpoints.folder / str(step)
        target = dict(self.trainer.learner.abstract_state)
        if critic is not None:
            target[CRITIC] = critic.learner.abstract_state
        self._drop_state()  # the devices have room for one state only
        state, extra = self.checkpoints.restore(step, target)
        try:
            self._check_base(path, extra)
            self.questions.set_state(extra["questions"])
            self.stream.restore(extra["stream"], self.by_id)
            if with_guards:
                self.guards.restore(extra["guards"])
            self.step = int(extra["step"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}: damaged checkpoint; delete it to use an older checkpoint"
                f" (in {EXTRA}: {type(error).__name__} {error})"
            ) from error
        if critic is not None:
            critic.state = state.pop(CRITIC)
        self.learner_state = state

    def _check_base(self, path: Path, extra: dict[str, Any]) -> None:
        """Refuse (UserError) a checkpoint whose adapters were trained on another base."""
        saved = extra.get("base")
        base = self.base.get("base")
        if (saved or {}).get("sha256") != (base or {}).get("sha256"):
            raise UserError(
                f"{path}: its adapters belong to another base ({saved} instead of {base}); set policy.path to"
                " that one, or choose another run.dir"
            )

    def save_if_due(self) -> None:
        """Save after every `checkpoint.every` steps, unless a guard doubts the step, and after the last step.

        Raises:
            UserError: In all processes, if the previous checkpoint could not be written, or another start
                writes to run.mirror.
        """
        every = self.config.checkpoint.every
        is_due = bool(every and self.step % every == 0 and not self.guards.has_nonfinite_updates)
        is_last = self.step == self.config.learner.steps
        is_due = is_due or is_last
        # All processes run the save together, so all must know of an error before any of them begins.
        with self.process_group.barrier("checkpoint"):
            if self.mirror:
                self.mirror.check()
            if is_due or not self.checkpoints.is_writing():
                self._wait_for_checkpoint()
        if is_due:
            self.save()

    def save(self) -> None:
        """Write a full checkpoint.

        With checkpoint.asynchronous the checkpoint is written by another thread; on return the next update
        may begin.

        Raises:
            UserError: This checkpoint or the previous one could not be written.
        """
        extra: dict[str, Any] = {"step": self.step, "questions": self.questions.get_state()}
        extra.update(self.base)
        extra["stream"] = self.stream.state()
        extra["guards"] = self.guards.state()
        with self.console.phase("saving a checkpoint"):
            self._wait_for_checkpoint()
            self.checkpoints.save(self.step, self._checkpoint_state(), extra)
        if not self.checkpoints.is_writing():
            self._wait_for_checkpoint()

    def _wait_for_checkpoint(self) -> None:
        step = self.checkpoints.wait()
        if step is not None:
            self.console.note(f"checkpoint saved at step {step}")
            if self.mirror:
                self.mirror.put(step)

    def _checkpoint_state(self) -> State:
        """Return the train states of the policy and of the critic, as a checkpoint holds them."""
        critic = self.trainer.critic
        if critic is None:
            return self.learner_state
        return self.learner_state | {CRITIC: critic.state}

    def why_stopped(self) -> str:
        """Return the line with which the run ends if a guard stops it."""
        if not self.guards.is_broken:
            return "stopped by guards.action; the state is saved: see the warnings above"
        newest = self.checkpoints.latest_step()
        hint = "no checkpoint was saved" if newest is None else f"the newest checkpoint is of step {newest}"
        return f"step {self.step} diverged (see the warning above) and is not saved: {hint}"

    def __enter__(self) -> RunState:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Save the last complete step, unless its update failed or diverged.

        A bad step does not replace the last good checkpoint either.
        """
        self.stream.close()
        if kind is not None and not self.process_group.can_save_together:
            # All processes write a checkpoint together, and the others do not wait here.
            return
        try:
            self._wait_for_checkpoint()
        except UserError as error:
            self.console.note(str(error))  # this step is saved in its place, if it can be
        try:
            if self._needs_save():
                self.save()
                self._wait_for_checkpoint()
        except Exception as error:  # Orbax may raise anything: it must not hide why the run stopped
            self.process_group.mark_desynchronized()
            if kind is None:
                raise
            self.console.note(f"step {self.step} could not be saved: {' '.join(str(error).split())}")
        self.checkpoints.close()

    def _needs_save(self) -> bool:
        """Whether the newest step is complete, not saved yet, and good enough to be saved."""
        leaves = jax.tree.leaves(self._checkpoint_state())
        is_complete = bool(leaves) and not any(leaf.is_deleted() for leaf in leaves)
        saved = self.checkpoints.steps()
        if not is_complete or self.step in saved[-1:]:
            return False
        return self.guards.may_save(self.step, saved, self.config.checkpoint.keep)
