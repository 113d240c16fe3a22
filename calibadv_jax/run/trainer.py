"""What a training run carries from step to step: restore, update, publish, save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from calibadv_jax.advantages.estimators import AdvantageResult
from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.own_function import load_optional
from calibadv_jax.core.seeds import attempt_seed, random_state
from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.data.pipeline import QuestionIterator
from calibadv_jax.hosts.exchange import ALONE, Hosts, SharedGroups
from calibadv_jax.learner.batching import content_of
from calibadv_jax.learner.learner import State, policy_learner
from calibadv_jax.learner.losses import policy_loss
from calibadv_jax.learner.optimizer import schedule_of
from calibadv_jax.learner.step import Learned, agreement, fixed_text, learn, make_sample
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import Guards
from calibadv_jax.policy.adapters import joined
from calibadv_jax.policy.transformer import Params
from calibadv_jax.record.rows import Logprobs
from calibadv_jax.rewards.score import trajectory_scores
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.rollout.stream import RolloutStream, any_done
from calibadv_jax.run.critic import RunCritic
from calibadv_jax.run.model import Model, base_of, initial_params
from calibadv_jax.snapshots.checkpoint import EXTRA, ROLLBACK, CheckpointStore, read_rollback
from calibadv_jax.snapshots.mirror import Mirror

CRITIC = "critic"  # its part of a checkpoint's state


@dataclass(frozen=True)
class Updated:
    """What a learner step came to."""

    metrics: dict[str, float]
    logprobs: Logprobs  # of each response before the first update; None where they were not computed
    tokens: int  # trained on, prompts and observations included


class Trainer:
    """Policy and optimizer between the steps, the stream of rollouts that trains them, and their checkpoints.

    Args:
        questions: to train on.
        rollouts: take every new policy.
        folder: of the run.
        hosts: the processes that train together.

    It goes on from the newest checkpoint of the folder, if there is one.

    Raises:
        UserError: that checkpoint is damaged, or of another policy, optimizer or question file.
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
    ):
        learner, self.hosts, self.folder = config.learner, hosts, folder
        self.config, self.model, self.rollouts, self.console = config, model, rollouts, console
        self.by_id = {question.id: question for question in questions}
        self.questions = QuestionIterator(
            questions,
            config.run.seed,
            config.data.shuffle,
            config.data.weights,
            config.data.rest_below,
            config.data.rest_above,
        )
        self.stream = self._make_stream()
        self.guards = Guards(config.guards)
        self.schedule = schedule_of(config, learner.optimizer)
        self.learner = policy_learner(config, model.policy, model.mesh, self.schedule)
        self.loss = policy_loss(config)
        self.base = base_of(config, model, config.policy.path)
        self.checkpoints = CheckpointStore(
            folder / "checkpoints",
            config.checkpoint.keep,
            config.checkpoint.asynchronous,
            hosts.save_barrier(),
        )
        self.mirror: Mirror | None = None  # is told of every checkpoint that is complete
        self.state: State = {}
        self.step = 0
        newest = self.checkpoints.latest_step()
        self._begin(is_fresh=newest is None)
        if newest is None and hosts.is_first:
            (folder / ROLLBACK).unlink(missing_ok=True)
        if newest is not None:
            self._restore(newest, with_guards=True)
            self._count_last_rollback()
            self.rollouts.seed = self.seed
            console.note(f"resuming from step {self.step}")

    def _begin(self, is_fresh: bool) -> None:
        """The policies that the run begins with; no parameters that a checkpoint replaces at once."""
        config, model, params = self.config, self.model, None
        if is_fresh or model.policy.adapters:  # a checkpoint holds adapters without their base
            params = initial_params(config, model, config.policy.path)
        self.reference = self._reference(params) if config.keeps_initial_policy else None
        self.critic = None
        if config.advantage.has_critic:
            self.critic = RunCritic(config, model, None if params is None else self._copy(params))
        if params is not None:
            self.state = self.learner.init(params)

    def _copy(self, params: Params) -> Params:
        """The policy that the run begins with once more; a frozen base is not copied."""
        base, trained = self.model.policy.split(params)
        return joined(base, jax.tree.map(jnp.copy, trained))

    def _reference(self, params: Params | None) -> Params:
        """What makes the learner's base the policy that the run begins with: no second copy of a base."""
        config, model = self.config, self.model
        if params is None or model.policy.adapters is None:
            return initial_params(config, model, config.policy.path)
        if not config.policy.lora.init_from:
            return {}  # new adapters change nothing
        return jax.tree.map(jnp.copy, model.policy.split(params)[1])

    @property
    def seed(self) -> int:
        """Of everything that is drawn from now on."""
        return attempt_seed(self.config.run.seed, self.guards.rollbacks)

    def roll_back(self) -> None:
        """Goes back to the newest checkpoint of a good step, and on from there with other random draws.

        Raises:
            UserError: there is no such checkpoint.
        """
        collapsed, last_good = self.step, self.guards.last_good_step
        self._wait_for_checkpoint()
        good = [step for step in self.checkpoints.steps() if step <= last_good]
        if not good:
            raise UserError(
                f"the policy collapsed at step {collapsed}, and no checkpoint is as old as the last good step"
                f" {last_good}; raise checkpoint.keep or lower checkpoint.every"
            )
        self.stream.close()
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

    def _count_last_rollback(self) -> None:
        """The rollback that ended at this step, whose checkpoint is older than it: other draws follow."""
        last = read_rollback(self.folder)
        if last.get("step") == self.step:
            self.guards.rollbacks = int(last["rollbacks"])

    def _restore(self, step: int, with_guards: bool = False) -> None:
        critic = {} if self.critic is None else {CRITIC: self.critic.learner.abstract_state()}
        self.state = {}  # there is room for one state
        if self.critic is not None:
            self.critic.state = {}
        state, extra = self.checkpoints.restore(step, self.learner.abstract_state() | critic)
        try:
            self._check_base(step, extra.get("base"))
            self.questions.set_state(extra["questions"])
            self.stream.restore(extra["stream"], self.by_id)
            if with_guards:
                self.guards.restore(extra["guards"])
            self.step = int(extra["step"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.checkpoints.folder / str(step)}: damaged checkpoint; delete it to use an older"
                f" checkpoint (in {EXTRA}: {type(error).__name__} {error})"
            ) from error
        if self.critic is not None:
            self.critic.state = state.pop(CRITIC)
        self.state = state

    def _check_base(self, step: int, said: dict[str, str] | None) -> None:
        """That the adapters of a checkpoint belong to the run's base."""
        ours = self.base.said() if self.base else None
        if (said or {}).get("sha256") != (ours or {}).get("sha256"):
            raise UserError(
                f"{self.checkpoints.folder / str(step)}: its adapters belong to another base ({said} instead"
                f" of {ours}); set policy.path to that one, or choose another run.dir"
            )

    def _make_stream(self) -> RolloutStream:
        rollout = self.config.rollout
        shared = SharedGroups(self.rollouts.begin, self.hosts, rollout.max_staleness > 0)
        is_alone = self.hosts.count == 1
        return RolloutStream(
            self.rollouts.begin if is_alone else shared.begin,
            self.questions,
            rollout.questions_per_step,
            rollout.max_staleness,
            rollout.max_failed_share,
            rollout.replace_tied,
            self._are_tied,
            any_done if is_alone else shared.wait,
        )

    def _are_tied(self, groups: Sequence[Group]) -> list[bool]:
        """Of each group whether its trajectories all have the same score.

        Raises:
            UserError: another process scores them otherwise: it would ask for other groups in their place.
        """
        scores = [self._scores(group) for group in groups]
        self.hosts.same("score of a group", lambda: scores)
        return [len(set(one)) < 2 for one in scores]

    def _scores(self, group: Group) -> list[float]:
        return trajectory_scores(group, self.config.reward)

    def probe(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """The groups with the golden answers' log-probabilities that the section `advantage` asks for."""
        params = {"current": self.state["params"], "initial": self.reference}
        policies = {name: params[name] for name in self.config.advantage.probed}
        probe = load_optional("probe").with_golden_logprobs
        return probe(self.learner, policies, groups, self.config.learner, self.model.tokenizer)

    def update(self, groups: list[Group], advantages: AdvantageResult) -> Updated:
        """One learner step on the groups' trajectories, the critic's too if there is one; ends the step."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        per_token = [values for group in advantages.advantages for values in group]
        samples = [make_sample(one, values) for one, values in zip(trajectories, per_token, strict=True)]
        self.hosts.same("batch to train on", lambda: content_of(samples))
        rate = float(self.schedule(int(self.state["updates"])))
        learned = Learned(self.state, {}, samples)
        if self.critic is None or self.step >= self.config.critic.warmup_steps:
            rng = random_state(self.seed, self.step, "minibatches")
            reference = self.reference if self.config.loss.kl_coef else None
            learned = learn(self.learner, self.state, samples, self.config.learner, self.loss, rng, reference)
        trained = [sample for sample in samples if sample.mask.any()]
        untrained = sum(len(group.attempts) for group in groups) - len(trained)
        metrics = {"actor/lr": rate, "actor/untrained_trajectories": float(untrained)} | learned.metrics
        if trained:
            metrics["actor/finite"] = float(self.learner.is_finite(learned.state["params"]))
        if self.critic is not None:
            metrics |= self.critic.update(groups, random_state(self.seed, self.step, "critic"))
        metrics |= self._note(groups)
        self.state = learned.state  # with the step's number: half a step must not be saved as the one before
        self.step += 1
        self.stream.commit()
        old = iter(
            None if sample.old_logprobs is None else sample.old_logprobs[len(one.prompt_ids) :]
            for one, sample in zip(trajectories, learned.samples, strict=True)
        )
        logprobs = [[next(old) for _ in group.trajectories] for group in groups]
        return Updated(metrics, logprobs, sum(len(sample.tokens) for sample in trained))

    def _note(self, groups: Sequence[Group]) -> dict[str, float]:
        """Tells the questions' order what the step's groups scored, those that were replaced too."""
        metrics, replaced = {}, self.stream.replaced
        for group in groups:
            self.questions.note(group.question.id, [one.relative_score for one in group.trajectories])
        for group in replaced:
            scores = [score / self.config.reward.max_score for score in self._scores(group)]
            self.questions.note(group.question.id, scores)
        if self.config.rollout.replace_tied:
            metrics["rollout/replaced_groups"] = float(len(replaced))
        if self.config.data.has_curriculum:
            metrics["rollout/resting_questions"] = float(self.questions.resting)
        return metrics

    def publish(self) -> dict[str, float]:
        """Hands the policy to the sampler as version `step`.

        Returns:
            How far each vLLM worker's log-probabilities of a fixed text are from the learner's.
        """
        published = self.rollouts.publish(self.step, self.learner.whole(self.state["params"]))
        tokens = fixed_text(len(self.model.tokenizer), self.config.rollout.max_length)
        with self.hosts.local_work("weights of the samplers"):
            self.rollouts.load(self.step, published)
            mine = self.rollouts.prompt_logprobs(tokens.tolist())
        found = self.hosts.exchange("log-probabilities of the samplers", mine)
        theirs = [values for samplers in found for values in samplers.values()]
        return agreement(self.learner, self.state["params"], self.config.learner, tokens, theirs)

    def sampler_metrics(self) -> dict[str, float]:
        """What the samplers of all processes count together."""
        counts = self.hosts.exchange("counts of the samplers", self.rollouts.metrics())
        return {name: sum(one[name] for one in counts) for name in counts[0]}

    def save_if_due(self) -> None:
        """Saves after every `checkpoint.every` steps, but no step in doubt, and after the last step.

        Raises:
            UserError: in all processes, where one learns that the checkpoint before could not be written, or
                that another start writes to run.mirror.
        """
        every = self.config.checkpoint.every
        is_due = self.step == self.config.learner.steps or bool(
            every and self.step % every == 0 and not self.guards.in_doubt
        )
        with self.hosts.barrier("checkpoint"):  # the save itself is a program of all: nobody may be missing
            if self.mirror:
                self.mirror.check()
            if is_due or not self.checkpoints.is_writing():
                self._wait_for_checkpoint()
        if is_due:
            self.save()

    def save(self) -> None:
        """Writes a full checkpoint, or begins to (checkpoint.asynchronous): the next update may begin."""
        extra = {
            "step": self.step,
            "questions": self.questions.get_state(),
            "stream": self.stream.state(),
            "guards": self.guards.state(),
        } | ({"base": self.base.said()} if self.base else {})
        with self.console.phase("saving a checkpoint"):
            self._wait_for_checkpoint()
            self.checkpoints.save(self.step, self._whole_state(), extra)
        if not self.checkpoints.is_writing():
            self._wait_for_checkpoint()

    def _wait_for_checkpoint(self) -> None:
        """Until the checkpoint that was begun last is complete."""
        step = self.checkpoints.wait()
        if step is not None:
            self.console.note(f"checkpoint saved at step {step}")
            if self.mirror:
                self.mirror.put(step)

    def _whole_state(self) -> State:
        """The policy's, and the critic's beside it."""
        return self.state if self.critic is None else self.state | {CRITIC: self.critic.state}

    def why_stopped(self) -> str:
        """The line with which the run ends if a guard says so."""
        if not self.guards.is_broken:
            return "stopped by guards.action; the state is saved: see the warnings above"
        newest = self.checkpoints.latest_step()
        kept = (
            "no checkpoint was saved" if newest is None else f"the newest checkpoint is that of step {newest}"
        )
        return f"step {self.step} diverged (see the warning above) and is not saved: {kept}"

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Whatever stops the run, the last complete step is saved, unless its update failed or diverged.

        Nor one in a row of bad ones that would take the place of the last good checkpoint.
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
            is_new = self.step not in saved[-1:]
            if whole and is_new and self.guards.may_save(self.step, saved, keep):
                self.save()
                self._wait_for_checkpoint()
        except Exception as error:  # whatever Orbax raises: it must not hide why the run stopped
            self.hosts.out_of_step()
            if kind is None:
                raise
            self.console.note(f"step {self.step} could not be saved: {' '.join(str(error).split())}")
        self.checkpoints.close()
