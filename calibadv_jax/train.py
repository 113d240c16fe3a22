"""Reinforcement learning: ``python -m calibadv_jax.train --config FILE [key.path=value …]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from calibadv_jax import cli
from calibadv_jax.config import Config

if TYPE_CHECKING:
    from pathlib import Path

    from calibadv_jax.advantages.registry import AdvantageResult
    from calibadv_jax.metrics.console import Console
    from calibadv_jax.rollout.stream import RolloutStream
    from calibadv_jax.trajectory import Group
    from calibadv_jax.wiring import Model, Rollouts

PROBE_TOKENS = 256  # of the fixed text on which workers and learner are compared after a swap


def run(config: Config) -> None:
    """Trains for `learner.steps` steps, or goes on from the newest checkpoint of the run folder."""
    from calibadv_jax.advantages.registry import describe
    from calibadv_jax.metrics.console import Console
    from calibadv_jax.wiring import Rollouts, build_model, open_retriever, open_workers, prepare_run_folder

    console = Console(config.log.progress)
    for line in describe(config.advantage):
        console.say(line)
    model = build_model(config, config.policy.path)
    folder = prepare_run_folder(config, model, "train")
    with (
        open_retriever(config) as retriever,
        open_workers(config, folder / "policy") as workers,
        Rollouts(config, model, retriever, workers) as rollouts,
    ):
        train(config, model, rollouts, folder, console)


def train(config: Config, model: Model, rollouts: Rollouts, folder: Path, console: Console) -> None:
    """The algorithm, on parts that are ready."""
    from calibadv_jax.advantages.registry import compute_advantages
    from calibadv_jax.evaluate import evaluate
    from calibadv_jax.metrics.summary import report_metrics, trajectory_metrics
    from calibadv_jax.metrics.timing import Stopwatch
    from calibadv_jax.metrics.writer import MetricsWriter
    from calibadv_jax.rewards.score import score_groups
    from calibadv_jax.wiring import random_state

    trainer = Trainer(config, model, folder, rollouts)
    with trainer, MetricsWriter(folder, config.log.tensorboard, start_step=trainer.step + 1) as writer:
        while trainer.step < config.learner.steps:
            watch = Stopwatch()
            with watch("rollout"):
                groups = trainer.stream.take(trainer.step)
            with watch("advantage"):
                rng = random_state(config.run.seed, trainer.step, "reward")
                score_groups(groups, config.reward, config.prompt.prepend_think, rng)
                advantages = compute_advantages(groups, config.advantage)
            with watch("update"):
                metrics = trajectory_metrics(groups, trainer.step) | advantages.metrics
                metrics |= trainer.update(groups, advantages)
            with watch("publish"):
                metrics |= trainer.publish()
            trainer.record(groups, advantages)
            if config.evaluate.every and trainer.step % config.evaluate.every == 0:
                with watch("evaluate"):
                    metrics |= report_metrics(evaluate(config, rollouts))
            metrics |= watch.metrics(tokens=trainer.trained_tokens)
            writer.write(trainer.step, metrics)
            console.step(trainer.step, config.learner.steps, metrics)
            trainer.checkpoint_if_due()


class Trainer:
    """The state between steps: policy and optimizer, rollouts ahead, checkpoints and snapshots."""

    def __init__(self, config: Config, model: Model, folder: Path, rollouts: Rollouts):
        from calibadv_jax.learner.learner import Learner, on_policy_only
        from calibadv_jax.learner.losses import policy_gradient
        from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
        from calibadv_jax.snapshots.checkpoint import CheckpointStore
        from calibadv_jax.wiring import initial_params, snapshot_store

        learner = config.learner
        self.config, self.model, self.folder, self.rollouts = config, model, folder, rollouts
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
        self.stream = self._open_stream()
        self.publish()  # before the first step, so that a broken path fails at the start

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Whatever stops the run, the last whole step is saved, unless the update itself broke off."""
        import jax

        self.stream.close()
        whole = not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        if whole and self.checkpoints.latest_step() != self.step:
            self._save()
        self.checkpoints.close()

    def _open_stream(self) -> RolloutStream:
        """The rollouts that come next, after the newest checkpoint was restored if there is one."""
        from calibadv_jax.data.pipeline import question_iterator
        from calibadv_jax.data.questions import load_questions
        from calibadv_jax.errors import UserError
        from calibadv_jax.rollout.stream import RolloutStream

        config = self.config
        known = load_questions(config.data.train)
        per_step = config.rollout.questions_per_step
        self.questions = question_iterator(known, per_step, config.run.seed, config.data.shuffle)
        asked, pending = 0, []
        newest = self.checkpoints.latest_step() if config.checkpoint.resume else None
        if newest is not None:
            self.state, extra = self.checkpoints.restore(newest, self.learner.abstract_state())
            self.step, asked = extra["step"], extra["asked"]
            self.questions.set_state(extra["questions"])
            by_id = {question.id: question for question in known}
            missing = [name for _, name in extra["pending"] if name not in by_id]
            if missing:
                raise UserError(f"{config.data.train}: question {missing[0]!r} of the checkpoint is gone")
            pending = [(number, by_id[name]) for number, name in extra["pending"]]
        return RolloutStream(
            self.rollouts.begin,
            lambda: next(self.questions),
            per_step,
            config.rollout.max_staleness,
            asked,
            pending,
        )

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
        self.stream.commit()
        return metrics

    def publish(self) -> dict[str, float]:
        """Publishes the policy as version `step` and hands it to the sampler.

        Returns:
            How far each vLLM worker's log-probabilities of a fixed text are from the learner's.
        """
        snapshot = self.snapshots.publish(
            self.step,
            self.state["params"],
            step=self.step,
            hf_config=self.model.hf_config,
            tokenizer_hash=self.model.tokenizer_hash,
        )
        self.rollouts.load(snapshot)
        return self._probe()

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
        extra = {"questions": self.questions.get_state(), "step": self.step} | self.stream.state()
        self.checkpoints.save(self.step, self.state, extra)

    def _probe(self) -> dict[str, float]:
        import numpy as np

        from calibadv_jax.learner.batching import Sample, pack, unpack

        length = min(PROBE_TOKENS, self.config.rollout.max_length - 1)  # a worker samples one more
        tokens = np.random.default_rng(0).integers(0, len(self.model.tokenizer), length).astype(np.int32)
        theirs = self.rollouts.probe(tokens.tolist())
        if not theirs:
            return {}
        nothing = np.zeros(length, np.float32)
        batch = pack([Sample(tokens, nothing == 0, nothing, nothing)], self.config.learner.row_length)
        (ours,) = unpack(self.learner.logprobs(self.state["params"], batch), [length], batch.tokens.shape[1])
        gaps = [np.abs(values - ours[1:]) for values in theirs.values()]
        return {
            "rollout/probe_logprob_diff_mean": float(np.mean(gaps)),
            "rollout/probe_logprob_diff_max": float(np.max(gaps)),
            "rollout/workers": float(len(gaps)),
        }


if __name__ == "__main__":
    cli.main(run, "calibadv_jax.train", "Reinforcement learning of a search agent.")
