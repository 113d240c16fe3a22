"""Reinforcement learning: ``python -m calibadv_jax.train --config FILE [key.path=value …]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calibadv_jax import cli
from calibadv_jax.config import Config

if TYPE_CHECKING:
    from pathlib import Path

    from calibadv_jax.advantages.registry import AdvantageResult
    from calibadv_jax.metrics.console import Console
    from calibadv_jax.rollout.retriever_client import RetrieverClient
    from calibadv_jax.trajectory import Group, Question
    from calibadv_jax.wiring import Model


def run(config: Config) -> None:
    """Trains for `learner.steps` steps, or goes on from the newest checkpoint of the run folder."""
    from calibadv_jax.advantages.registry import describe
    from calibadv_jax.metrics.console import Console
    from calibadv_jax.wiring import build_model, open_retriever, prepare_run_folder

    console = Console(config.log.progress)
    for line in describe(config.advantage):
        console.say(line)
    model = build_model(config, config.policy.path)
    folder = prepare_run_folder(config, model, "train")
    with open_retriever(config) as retriever:
        train(config, model, retriever, folder, console)


def train(config: Config, model: Model, retriever: RetrieverClient, folder: Path, console: Console) -> None:
    """The algorithm, on parts that are ready."""
    from calibadv_jax.advantages.registry import compute_advantages
    from calibadv_jax.data.pipeline import question_iterator
    from calibadv_jax.data.questions import load_questions
    from calibadv_jax.metrics.summary import trajectory_metrics
    from calibadv_jax.metrics.timing import Stopwatch
    from calibadv_jax.metrics.writer import MetricsWriter
    from calibadv_jax.rewards.score import score_groups
    from calibadv_jax.wiring import Rollouts, random_state

    per_step = config.rollout.questions_per_step
    questions = question_iterator(
        load_questions(config.data.train), per_step, config.run.seed, config.data.shuffle
    )
    rollouts = Rollouts(config, model, retriever)
    trainer = Trainer(config, model, folder, rollouts, questions)
    with trainer, MetricsWriter(folder, config.log.tensorboard, start_step=trainer.step + 1) as writer:
        while trainer.step < config.learner.steps:
            watch = Stopwatch()
            asked = trainer.next_questions()
            with watch("rollout"):
                groups = rollouts.collect(asked, f"step{trainer.step}", trainer.rollout_seed())
            with watch("advantage"):
                rng = random_state(config.run.seed, trainer.step, "reward")
                score_groups(groups, config.reward, config.prompt.prepend_think, rng)
                advantages = compute_advantages(groups, config.advantage)
            with watch("update"):
                metrics = trainer.update(groups, advantages)
            with watch("publish"):
                trainer.publish()
            trainer.record(groups, advantages)
            metrics |= trajectory_metrics(groups) | advantages.metrics
            metrics |= watch.metrics(tokens=trainer.trained_tokens)
            writer.write(trainer.step, metrics)
            console.step(trainer.step, config.learner.steps, metrics)
            trainer.checkpoint_if_due()


class Trainer:
    """The state between steps: policy and optimizer, data position, checkpoints and snapshots."""

    def __init__(self, config: Config, model: Model, folder: Path, rollouts: Any, questions: Any):
        from calibadv_jax.learner.learner import Learner, on_policy_only
        from calibadv_jax.learner.losses import policy_gradient
        from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
        from calibadv_jax.snapshots.checkpoint import CheckpointStore
        from calibadv_jax.wiring import initial_params, snapshot_store

        learner = config.learner
        self.config, self.model, self.folder = config, model, folder
        self.rollouts, self.questions = rollouts, questions
        trajectories = config.rollout.questions_per_step * config.rollout.group_size
        per_epoch = -(-trajectories // (learner.minibatch_size or trajectories))
        self.schedule = make_schedule(learner.optimizer, learner.steps * per_epoch * learner.epochs)
        self.learner = Learner(
            model.policy,
            make_optimizer(learner.optimizer, self.schedule),
            model.mesh,
            learner.microbatch_rows,
            config.rollout.temperature or 1.0,
            config.policy.logprob_chunk,
        )
        on_policy = on_policy_only(config.loss, learner.minibatch_size, learner.epochs)
        self.loss = policy_gradient(config.loss, on_policy)
        params = initial_params(config, model, config.policy.path)
        self.reference = initial_params(config, model, config.policy.path) if config.loss.kl_coef else None
        self.state = self.learner.init(params)
        self.step = 0
        self.trained_tokens = 0
        self.checkpoints = CheckpointStore(folder / "checkpoints", config.checkpoint.keep)
        self.snapshots = snapshot_store(config)
        self._position = questions.get_state()
        if config.checkpoint.resume:
            self._resume()
        self.publish()  # before the first step, so that a broken path fails at the start

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Whatever stops the run, the last whole step is saved, unless the update itself broke off."""
        import jax

        whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        if whole and self.checkpoints.latest_step() != self.step:
            self._save()
        self.checkpoints.close()

    def next_questions(self) -> list[Question]:
        self._position = self.questions.get_state()  # a step that is not finished is drawn again
        return next(self.questions)

    def rollout_seed(self) -> int:
        from calibadv_jax.wiring import random_state

        return int(random_state(self.config.run.seed, self.step, "rollout").integers(2**31))

    def update(self, groups: list[Group], advantages: AdvantageResult) -> dict[str, float]:
        """One learner step on the groups' trajectories; ends the step."""
        from calibadv_jax.learner.step import learn, make_samples
        from calibadv_jax.wiring import random_state

        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        per_token = [values for group in advantages.advantages for values in group]
        samples, skipped = make_samples(trajectories, per_token)
        rate = float(self.schedule(int(self.state["updates"])))
        metrics = {"actor/lr": rate, "actor/untrained_trajectories": float(skipped)}
        if samples:
            config = self.config
            rng = random_state(config.run.seed, self.step, "minibatches")
            self.state, learned = learn(
                self.learner, self.state, samples, config.learner, config.loss, self.loss, rng, self.reference
            )
            metrics |= learned
        self.trained_tokens = sum(len(sample.tokens) for sample in samples)
        self.step += 1
        self._position = self.questions.get_state()
        return metrics

    def publish(self) -> None:
        """Publishes the policy as version `step` and hands it to the sampler."""
        snapshot = self.snapshots.publish(
            self.step,
            self.state["params"],
            step=self.step,
            hf_config=self.model.hf_config,
            tokenizer_hash=self.model.tokenizer_hash,
        )
        self.rollouts.load(snapshot)

    def record(self, groups: list[Group], advantages: AdvantageResult) -> None:
        """Keeps the step's trajectories as rollouts/step_N.jsonl, one a line."""
        import json

        from calibadv_jax.rollout.record import trajectory_to_json

        if not self.config.log.rollouts:
            return
        path = self.folder / "rollouts" / f"step_{self.step}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for group in groups:
                for trajectory in group.trajectories:
                    file.write(json.dumps(trajectory_to_json(trajectory), ensure_ascii=False) + "\n")

    def checkpoint_if_due(self) -> None:
        every = self.config.checkpoint.every
        if self.step == self.config.learner.steps or (every and self.step % every == 0):
            self._save()

    def _save(self) -> None:
        extra = {"questions": self._position, "step": self.step}
        self.checkpoints.save(self.step, self.state, extra)

    def _resume(self) -> None:
        newest = self.checkpoints.latest_step()
        if newest is None:
            return
        self.state, extra = self.checkpoints.restore(newest, self.learner.abstract_state())
        self.step = extra["step"]
        self._position = extra["questions"]
        self.questions.set_state(self._position)


if __name__ == "__main__":
    cli.main(run, "calibadv_jax.train", "Reinforcement learning of a search agent.")
