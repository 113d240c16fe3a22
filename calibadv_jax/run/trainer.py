"""The update of a training step: of the policy, and with PPO of its critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from calibadv_jax.advantages.estimators import AdvantageResult
from calibadv_jax.config import Config
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Group
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.distributed.exchange import ALONE, Hosts
from calibadv_jax.learner.batching import content_of
from calibadv_jax.learner.learner import State, policy_learner
from calibadv_jax.learner.objective import policy_loss
from calibadv_jax.learner.optimizer import schedule_of
from calibadv_jax.learner.step import Learned, learn, make_sample
from calibadv_jax.policy.adapters import merge_params
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rollout_store.schema import Logprobs
from calibadv_jax.run.model import Model, initial_params

if TYPE_CHECKING:
    from calibadv_jax.run.critic import Critic


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update."""

    state: State  # of the policy; the critic keeps its own
    metrics: dict[str, float]
    logprobs: Logprobs  # float32 [T] a response, before the first update; None where not computed
    tokens: int  # trained on, prompts and observations included


class Trainer:
    """Learner, loss, reference policy and critic of a run; `run.state` keeps the policy's state."""

    def __init__(self, config: Config, model: Model, hosts: Hosts = ALONE):
        self.config, self.model, self.hosts = config, model, hosts
        self.schedule = schedule_of(config, config.learner.optimizer)
        self.learner = policy_learner(config, model.policy, model.mesh, self.schedule)
        self.loss = policy_loss(config)
        self.reference: Params | None = None  # makes the learner's base the policy that the run begins with
        self.critic: Critic | None = None

    def begin(self, is_fresh: bool) -> State:
        """Load reference and critic, and return the state that the run begins with.

        Unless `is_fresh`, a checkpoint replaces the state, which is empty, except for adapters: their
        checkpoints lack the base.
        """
        config, model, params = self.config, self.model, None
        base: Params = {}
        trained: Params = {}
        if is_fresh or model.policy.adapters:
            params = initial_params(config, model, config.policy.path)
            base, trained = model.policy.split(params)
        if config.keeps_initial_policy:
            self.reference = {}  # new adapters change nothing
            if not base:
                self.reference = initial_params(config, model, config.policy.path)
            elif config.policy.lora.init_from:
                self.reference = jax.tree.map(jnp.copy, trained)
        if config.advantage.has_critic:
            from calibadv_jax.run.critic import Critic

            copied = None if params is None else merge_params(base, jax.tree.map(jnp.copy, trained))
            self.critic = Critic(config, model, copied)
        return {} if params is None else self.learner.init(params)

    def probe(self, state: State, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """Return the groups with the golden answers' log-probabilities of each probed policy, and metrics."""
        params = {"current": state["params"], "initial": self.reference}
        policies = {name: params[name] for name in self.config.advantage.probed}
        probe = load_optional("probe").with_golden_logprobs
        return probe(self.learner, policies, groups, self.config.learner, self.model.tokenizer)

    def update(
        self, state: State, step: int, seed: int, groups: Sequence[Group], advantages: AdvantageResult
    ) -> UpdateResult:
        """Train policy and critic after `step` steps; donates `state`. `seed` orders the mini-batches."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        per_token = [values for group in advantages.advantages for values in group]
        samples = [make_sample(*pair) for pair in zip(trajectories, per_token, strict=True)]
        self.hosts.assert_equal("batch to train on", lambda: content_of(samples))
        rate = float(self.schedule(int(state["updates"])))
        trained = [sample for sample in samples if sample.mask.any()]
        learned = Learned(state, {}, samples)
        if self.critic is None or step >= self.config.critic.warmup_steps:
            rng = random_state(seed, step, "minibatches")
            reference = self.reference if self.config.loss.kl_coef else None
            learned = learn(self.learner, state, samples, self.config.learner, self.loss, rng, reference)
        untrained = sum(len(group.attempts) for group in groups) - len(trained)
        metrics = {"actor/lr": rate, "actor/untrained_trajectories": float(untrained)} | learned.metrics
        if trained:
            metrics["actor/finite"] = float(self.learner.is_finite(learned.state["params"]))
        if self.critic is not None:
            metrics |= self.critic.update(groups, random_state(seed, step, "critic"))
        old = iter(
            None if sample.old_logprobs is None else sample.old_logprobs[len(trajectory.prompt_ids) :]
            for trajectory, sample in zip(trajectories, learned.samples, strict=True)
        )
        logprobs = [[next(old) for _ in group.trajectories] for group in groups]
        return UpdateResult(learned.state, metrics, logprobs, sum(len(sample.tokens) for sample in trained))

    def progress(self) -> tuple[int, int, str]:
        """Return the computed microbatches, of how many, and no detail, for `Console.live`."""
        done, total = self.learner.microbatches()
        if self.critic and not total:
            done, total = self.critic.learner.microbatches()
        return done, total, ""
