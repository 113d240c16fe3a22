"""The training of a step: of the policy, and with PPO of its critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from calibadv_jax.advantages.estimators import AdvantageResult
from calibadv_jax.config import Config
from calibadv_jax.config.sections.teacher import CURRENT, INITIAL
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from calibadv_jax.learner.batching import Sample, content_hash
from calibadv_jax.learner.distillation import guided_samples
from calibadv_jax.learner.learner import Learner, State, policy_learner
from calibadv_jax.learner.objective import policy_loss
from calibadv_jax.learner.optimizer import run_schedule
from calibadv_jax.learner.step import StepResult, learn, make_sample
from calibadv_jax.policy.adapters import merge_params
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rollout_store.schema import Logprobs
from calibadv_jax.run.configured_protocol import configured_protocol
from calibadv_jax.run.model import Model, initial_params

if TYPE_CHECKING:
    from calibadv_jax.run.critic_training import Critic


@dataclass(frozen=True)
class UpdateResult:
    """The result of a training step."""

    state: State  # the policy's train state after the step; the critic keeps its own
    metrics: dict[str, float]
    logprobs: Logprobs  # float32 [T] a response, before the first update; None where not computed
    tokens: int  # tokens trained on, including prompts and observations


class TeacherScores(Protocol):
    """The teacher of distillation, as the trainer sees it; see `contrib.teacher`."""

    learner: Learner | None  # computes a teacher with weights of its own

    def with_logprobs(
        self, learner: Learner, params: Params | None, groups: Sequence[Group]
    ) -> tuple[list[Group], dict[str, float]]:
        """Score the sampled tokens of the trajectories that the teacher guides.

        Args:
            learner: The policy's learner.
            params: Trained parameters of the policy that is the teacher; None: the teacher is another one.
            groups: The scored groups of the step.

        Returns:
            Copies of the groups, in which the turns of guided trajectories have `teacher_logprobs`; and
            metrics.
        """
        ...


class Trainer:
    """Learner, loss, reference policy, teacher and critic of a run.

    The trainer does not keep the policy's train state: `RunState` does, and passes it in.

    Args:
        config: The run's config.
        model: The policy without parameters, its tokenizer and its mesh.
        process_group: The processes of the run.
    """

    def __init__(self, config: Config, model: Model, process_group: ProcessGroup = SINGLE_PROCESS):
        self.config = config
        self.model = model
        self.process_group = process_group
        self.schedule = run_schedule(config, config.learner.optimizer)
        self.learner = policy_learner(config, model.policy, model.mesh, self.schedule)
        self.loss = policy_loss(config)
        # Parameters that, joined with the learner's base, are the policy that the run begins with. None: the
        # run does not need that policy.
        self.reference: Params | None = None
        self.critic: Critic | None = None
        self.teacher: TeacherScores | None = None

    def begin(self, is_fresh: bool, questions: Sequence[Question] = ()) -> State:
        """Load the reference policy, the teacher and the critic; return the first train state.

        Args:
            is_fresh: Whether the run has no checkpoint. With a checkpoint, no parameters are loaded here,
                since the checkpoint restores them. A policy with adapters is loaded all the same: its
                checkpoints do not hold the base.
            questions: The training questions, which a teacher's hint may need.

        Returns:
            The first train state; empty if the parameters come from a checkpoint alone.

        Raises:
            UserError: A policy cannot be loaded.
        """
        policy = self.model.policy
        params: Params | None = None
        base: Params = {}
        trained: Params = {}
        if is_fresh or policy.adapters:
            params = initial_params(self.config, self.model, self.config.policy.path)
            base, trained = policy.split(params)
        if self.config.keeps_initial_policy:
            self.reference = self._initial_reference(base, trained)
        if self.config.teacher.is_on:
            teacher_class = load_optional("teacher").Teacher
            self.teacher = teacher_class(self.config, self.model, questions, self.process_group)
        if self.config.advantage.has_critic:
            from calibadv_jax.run.critic_training import Critic

            critic_source: Params | None = None
            if params is not None:
                critic_source = merge_params(base, jax.tree.map(jnp.copy, trained))
            self.critic = Critic(self.config, self.model, critic_source)
        if params is None:
            return {}
        return self.learner.init(params)

    def _initial_reference(self, base: Params, trained: Params) -> Params:
        """Return the trained part of the policy that the run begins with, to be joined with `base`."""
        if not base:
            return initial_params(self.config, self.model, self.config.policy.path)
        if self.config.policy.lora.init_from:
            return jax.tree.map(jnp.copy, trained)
        return {}  # new adapters change nothing, so the base alone is the initial policy

    def probe(self, state: State, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """Compute the log-probability of the golden answer after each turn.

        Args:
            state: The policy's train state; not donated.
            groups: The groups of the step.

        Returns:
            Copies of the groups whose turns have `golden_logprobs` (nats) of every policy that
            advantage.probes names, and the metrics of the probe.
        """
        params = {"current": state["params"], "initial": self.reference}
        policies = {name: params[name] for name in self.config.advantage.probed}
        with_golden_logprobs = load_optional("probe").with_golden_logprobs
        tokenizer = self.model.tokenizer
        begin_answer = configured_protocol(self.config, tokenizer).begin_answer
        return with_golden_logprobs(
            self.learner, policies, groups, self.config.learner, tokenizer, begin_answer
        )

    def consult_teacher(
        self, state: State, step: int, groups: Sequence[Group]
    ) -> tuple[list[Group], dict[str, float]]:
        """Let the teacher score the tokens that the policy sampled.

        Args:
            state: The policy's train state; not donated.
            step: Number of steps trained so far.
            groups: The scored groups of the step.

        Returns:
            Copies of the groups whose guided turns have `teacher_logprobs`, and the teacher's metrics. In a
            step in which the teacher has no weight, the groups themselves.

        Raises:
            UserError: The teacher's server cannot be asked.
        """
        coef = self.config.teacher.coef_at(step)
        metrics = {"teacher/coef": coef}
        if self.teacher is None or not coef or self._trains_critic_alone(step):
            return list(groups), metrics
        own_policies = {CURRENT: state["params"], INITIAL: self.reference}
        params = own_policies.get(self.config.teacher.policy)
        scored, teacher_metrics = self.teacher.with_logprobs(self.learner, params, groups)
        return scored, metrics | teacher_metrics

    def train_step(
        self, state: State, step: int, seed: int, groups: Sequence[Group], advantages: AdvantageResult
    ) -> UpdateResult:
        """Train the policy and the critic on the groups of one step.

        Args:
            state: The policy's train state; donated.
            step: Number of steps trained so far.
            seed: Seed of the run; together with `step` it orders the mini-batches.
            groups: The scored groups.
            advantages: The advantages of the groups' tokens.

        Returns:
            The new state, the metrics, and the log-probabilities before the first update.

        Raises:
            UserError: The processes of the run have different batches.
        """
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        token_advantages = [values for group in advantages.advantages for values in group]
        samples = [
            make_sample(trajectory, values)
            for trajectory, values in zip(trajectories, token_advantages, strict=True)
        ]
        if self.teacher is not None:
            coef = self.config.teacher.coef_at(step)
            samples = guided_samples(samples, trajectories, self.config.teacher, coef)
        self.process_group.assert_equal("batch to train on", lambda: content_hash(samples))
        rate = float(self.schedule(int(state["updates"])))
        trained = [sample for sample in samples if sample.mask.any()]
        learned = self._train_policy(state, step, seed, samples)
        num_attempts = sum(len(group.attempts) for group in groups)
        metrics = {
            "actor/lr": rate,
            "actor/untrained_trajectories": float(num_attempts - len(trained)),
        }
        metrics.update(learned.metrics)
        if trained:
            metrics["actor/finite"] = float(self.learner.is_finite(learned.state["params"]))
        if self.critic is not None:
            metrics.update(self.critic.train_step(groups, random_state(seed, step, "critic")))
        logprobs = _response_logprobs(groups, learned.samples)
        num_tokens = sum(len(sample.tokens) for sample in trained)
        return UpdateResult(learned.state, metrics, logprobs, num_tokens)

    def _train_policy(self, state: State, step: int, seed: int, samples: list[Sample]) -> StepResult:
        """Train the policy, except during the critic.warmup_steps steps that train the critic alone."""
        if self._trains_critic_alone(step):
            return StepResult(state, {}, samples)
        rng = random_state(seed, step, "minibatches")
        reference = self.reference if self.config.loss.kl_coef else None
        return learn(self.learner, state, samples, self.config.learner, self.loss, rng, reference)

    def _trains_critic_alone(self, step: int) -> bool:
        """Return whether a step, counted from 0, leaves the policy as it is."""
        return self.critic is not None and step < self.config.critic.warmup_steps

    def progress(self) -> tuple[int, int, str]:
        """Return the progress of the computation for `Console.live`.

        Returns:
            The number of computed microbatches, the number of all, and an empty detail.
        """
        done, total = self.learner.microbatches()
        if self.critic and not total:
            done, total = self.critic.learner.microbatches()
        if self.teacher and self.teacher.learner and not total:
            done, total = self.teacher.learner.microbatches()
        return done, total, ""


def _response_logprobs(groups: Sequence[Group], samples: Sequence[Sample]) -> Logprobs:
    """Return the old log-probabilities of every response, by group; `samples` are in the groups' order."""
    logprobs: Logprobs = []
    start = 0
    for group in groups:
        end = start + len(group.trajectories)
        group_logprobs = [
            _without_prompt(trajectory, sample.old_logprobs)
            for trajectory, sample in zip(group.trajectories, samples[start:end], strict=True)
        ]
        logprobs.append(group_logprobs)
        start = end
    return logprobs


def _without_prompt(trajectory: Trajectory, logprobs: np.ndarray | None) -> np.ndarray | None:
    """Return the values of the response's tokens, float32 [T], or None if there are no values."""
    if logprobs is None:
        return None
    return logprobs[len(trajectory.prompt_ids) :]
