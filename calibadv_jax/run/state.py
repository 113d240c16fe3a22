"""The state of a run between its steps: restore, roll back, publish, save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from calibadv_jax.advantages.estimators import AdvantageResult
from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.seeds import attempt_seed
from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.data.pipeline import QuestionIterator
from calibadv_jax.distributed.process_group import ALONE, Hosts
from calibadv_jax.distributed.shared_groups import SharedGroups
from calibadv_jax.learner.learner import State
from calibadv_jax.learner.step import logprob_mismatch, probe_tokens
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import Guards
from calibadv_jax.rewards.score import trajectory_scores
from calibadv_jax.rollout.runner import Rollouts, RolloutStream, any_done
from calibadv_jax.run.model import Model, base_of
from calibadv_jax.run.trainer import Trainer, UpdateResult
from calibadv_jax.snapshots.checkpoint import EXTRA, ROLLBACK, CheckpointStore, read_rollback

if TYPE_CHECKING:
    from calibadv_jax.snapshots.mirror import Mirror

CRITIC = "critic"  # its part of a checkpoint's state


class RunState:
    """All that a checkpoint holds: policy, optimizer, critic, order of questions, stream, guards.

    Continues from the newest checkpoint of the folder; UserError if it is damaged, or of another policy,
    optimizer or question file. As a block, it ends by saving the last step. `mirror` gets every checkpoint.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        questions: Sequence[Question],
        rollouts: Rollouts,
        folder: Path,
        console: Console,
        hosts: Hosts = ALONE,
        mirror: Mirror | None = None,
    ):
        self.config, self.model, self.rollouts, self.folder = config, model, rollouts, folder
        self.console, self.hosts, self.mirror = console, hosts, mirror
        self.by_id = {question.id: question for question in questions}
        data, checkpoint = config.data, config.checkpoint
        self.questions = QuestionIterator(
            questions, config.run.seed, data.shuffle, data.weights, data.rest_below, data.rest_above
        )
        self.stream = self._make_stream()
        self.guards = Guards(config.guards)
        self.trainer = Trainer(config, model, hosts)
        base = base_of(config, model, config.policy.path)
        # Of the adapters, for checkpoints: they name it, and do not hold it.
        self.base = {"base": {"name": base.name, "sha256": base.sha256}} if base else {}
        self.checkpoints = CheckpointStore(
            folder / "checkpoints", checkpoint.keep, checkpoint.asynchronous, hosts.save_barrier()
        )
        self.step = 0
        newest = self.checkpoints.latest_step()
        self.state: State = self.trainer.begin(is_fresh=newest is None)
        if newest is None:
            if hosts.is_first:
                (folder / ROLLBACK).unlink(missing_ok=True)
            return
        self._restore(newest, with_guards=True)
        last = read_rollback(folder)
        if last.get("step", -1) >= self.step:  # the checkpoint is older than the rollback
            self.guards.rollbacks = int(last["rollbacks"])
        self.rollouts.seed = self.seed
        console.note(f"resuming from step {self.step}")

    def _make_stream(self) -> RolloutStream:
        rollout, is_alone = self.config.rollout, self.hosts.count == 1
        shared = SharedGroups(self.rollouts.begin, self.hosts, rollout.max_staleness > 0)
        return RolloutStream(
            self.rollouts.begin if is_alone else shared.begin,
            self.questions,
            rollout,
            self._are_tied,
            any_done if is_alone else shared.wait,
        )

    def _are_tied(self, groups: Sequence[Group]) -> list[bool]:
        scores = [trajectory_scores(group, self.config.reward) for group in groups]
        self.hosts.assert_equal(
            "score of a group", lambda: scores
        )  # else it would ask for other groups instead
        return [len(set(of_group)) < 2 for of_group in scores]

    @property
    def seed(self) -> int:
        """The seed of all draws from now on; changes with every rollback."""
        return attempt_seed(self.config.run.seed, self.guards.rollbacks)

    def update(self, groups: Sequence[Group], advantages: AdvantageResult) -> UpdateResult:
        """Train on the groups and end the step; `metrics` of the result tell of the questions' order too."""
        result = self.trainer.update(self.state, self.step, self.seed, groups, advantages)
        result.metrics.update(self._note_scores(groups))
        self.state = result.state  # with the step's number: half a step must not be saved as the one before
        self.step += 1
        self.stream.commit()
        return result

    def _note_scores(self, groups: Sequence[Group]) -> dict[str, float]:
        metrics, reward, replaced = {}, self.config.reward, self.stream.replaced
        for group in groups:
            scores = [trajectory.relative_score for trajectory in group.trajectories]
            self.questions.note(group.question.id, scores)
        for group in replaced:
            scores = [score / reward.max_score for score in trajectory_scores(group, reward)]
            self.questions.note(group.question.id, scores)
        if self.config.rollout.dynamic_sampling:
            metrics["rollout/replaced_groups"] = float(len(replaced))
        if self.config.data.has_curriculum:
            metrics["rollout/resting_questions"] = float(self.questions.resting)
        return metrics

    def publish(self) -> dict[str, float]:
        """Hand the policy to the sampler as version `step`.

        Returns how far each vLLM worker's log-probabilities of a fixed text are from the learner's. Workers
        return them at temperature 1 only, so at another `rollout.temperature` nothing is compared.
        """
        learner = self.trainer.learner
        published = self.rollouts.publish(self.step, learner.whole(self.state["params"]))
        tokens = probe_tokens(len(self.model.tokenizer), self.config.rollout.max_length)
        with self.hosts.local_work("weights of the samplers"):
            self.rollouts.load(self.step, published)
            local = self.rollouts.prompt_logprobs(tokens.tolist())
        processes = self.hosts.exchange("log-probabilities of the samplers", local)
        logprobs = [values for samplers in processes for values in samplers.values()]
        if logprobs and learner.options.temperature != 1.0:
            return {"rollout/workers": float(len(logprobs))}
        return logprob_mismatch(learner, self.state["params"], self.config.learner, tokens, logprobs)

    def sampler_metrics(self) -> dict[str, float]:
        """Return the sums of the samplers' counts over all processes."""
        counts = self.hosts.exchange("counts of the samplers", self.rollouts.metrics())
        return {name: sum(count[name] for count in counts) for name in counts[0]}

    def roll_back(self) -> None:
        """Return to the newest checkpoint of a good step, with another seed; UserError if there is none."""
        collapsed, last_good = self.step, self.guards.last_good_step
        self._wait_for_checkpoint()
        good = [step for step in self.checkpoints.steps() if step <= last_good]
        if not good:
            fault = f"no checkpoint is as old as the last good step {last_good}"
            advice = "raise checkpoint.keep or lower checkpoint.every"
            raise UserError(f"the policy collapsed at step {collapsed}, and {fault}; {advice}")
        self.stream.close()
        self._drop_state()  # the end of the run does not save it, even if the next lines fail
        self.guards.rolled_back(good[-1])
        if self.hosts.is_first:  # before anything is deleted: a kill brings no deleted checkpoint back
            write_json(self.folder / ROLLBACK, {"step": good[-1], "rollbacks": self.guards.rollbacks})
        if self.mirror:
            self.mirror.drop_after(good[-1])
        self.checkpoints.delete_after(good[-1])
        self.stream = self._make_stream()
        self._restore(good[-1])
        self.rollouts.seed = self.seed
        if self.mirror:
            self.mirror.put(self.step)
        self.console.note(f"rolled back from step {collapsed} to step {self.step}")

    def _drop_state(self) -> None:
        self.state = {}
        if self.trainer.critic is not None:
            self.trainer.critic.state = {}

    def _restore(self, step: int, with_guards: bool = False) -> None:
        critic, path = self.trainer.critic, self.checkpoints.folder / str(step)
        target = dict(self.trainer.learner.abstract_state)
        if critic is not None:
            target[CRITIC] = critic.learner.abstract_state
        self._drop_state()  # there is room for one state
        state, extra = self.checkpoints.restore(step, target)
        try:
            saved, base = extra.get("base"), self.base.get("base")
            if (saved or {}).get("sha256") != (base or {}).get("sha256"):
                fault = f"its adapters belong to another base ({saved} instead of {base})"
                raise UserError(f"{path}: {fault}; set policy.path to that one, or choose another run.dir")
            self.questions.set_state(extra["questions"])
            self.stream.restore(extra["stream"], self.by_id)
            if with_guards:
                self.guards.restore(extra["guards"])
            self.step = int(extra["step"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"in {EXTRA}: {type(error).__name__} {error}"
            advice = "delete it to use an older checkpoint"
            raise UserError(f"{path}: damaged checkpoint; {advice} ({reason})") from error
        if critic is not None:
            critic.state = state.pop(CRITIC)
        self.state = state

    def save_if_due(self) -> None:
        """Save after every `checkpoint.every` steps, unless a guard doubts the step, and after the last step.

        Raises UserError in all processes, if the checkpoint before could not be written, or another start
        writes to run.mirror.
        """
        every = self.config.checkpoint.every
        is_due = bool(every and self.step % every == 0 and not self.guards.in_doubt)
        is_due = is_due or self.step == self.config.learner.steps
        with self.hosts.barrier("checkpoint"):  # the save itself is a program of all: nobody may be missing
            if self.mirror:
                self.mirror.check()
            if is_due or not self.checkpoints.is_writing():
                self._wait_for_checkpoint()
        if is_due:
            self.save()

    def save(self) -> None:
        """Write a full checkpoint, or begin to (checkpoint.asynchronous): the next update may begin."""
        extra: dict[str, Any] = {"step": self.step, "questions": self.questions.get_state(), **self.base}
        extra |= {"stream": self.stream.state(), "guards": self.guards.state()}
        with self.console.phase("saving a checkpoint"):
            self._wait_for_checkpoint()
            self.checkpoints.save(self.step, self._whole_state(), extra)
        if not self.checkpoints.is_writing():
            self._wait_for_checkpoint()

    def _wait_for_checkpoint(self) -> None:
        step = self.checkpoints.wait()
        if step is not None:
            self.console.note(f"checkpoint saved at step {step}")
            if self.mirror:
                self.mirror.put(step)

    def _whole_state(self) -> State:
        critic = self.trainer.critic
        return self.state if critic is None else self.state | {CRITIC: critic.state}

    def why_stopped(self) -> str:
        """Return the line with which the run ends if a guard stops it."""
        if not self.guards.is_broken:
            return "stopped by guards.action; the state is saved: see the warnings above"
        step = self.checkpoints.latest_step()
        newest = "no checkpoint was saved" if step is None else f"the newest checkpoint is of step {step}"
        return f"step {self.step} diverged (see the warning above) and is not saved: {newest}"

    def __enter__(self) -> RunState:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Save the last complete step, whatever stops the run, unless its update failed or diverged.

        Nor does a bad step take the place of the last good checkpoint.
        """
        self.stream.close()
        if kind is not None and not self.hosts.in_step:
            return  # a checkpoint is written by all processes, and the others are elsewhere
        leaves = jax.tree.leaves(self._whole_state())
        whole = bool(leaves) and not any(leaf.is_deleted() for leaf in leaves)
        try:
            self._wait_for_checkpoint()
        except UserError as error:
            self.console.note(str(error))  # this step is saved in its place, if it can be
        try:
            saved, keep = self.checkpoints.steps(), self.config.checkpoint.keep
            if whole and self.step not in saved[-1:] and self.guards.may_save(self.step, saved, keep):
                self.save()
                self._wait_for_checkpoint()
        except Exception as error:  # whatever Orbax raises: it must not hide why the run stopped
            self.hosts.out_of_step()
            if kind is None:
                raise
            self.console.note(f"step {self.step} could not be saved: {' '.join(str(error).split())}")
        self.checkpoints.close()
