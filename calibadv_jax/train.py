"""Reinforcement learning: ``calibadv train --config FILE [key.path=value …]``."""

from __future__ import annotations

from pathlib import Path

from calibadv_jax import cli
from calibadv_jax.advantages.registry import compute_advantages, describe
from calibadv_jax.config import Config
from calibadv_jax.data.pipeline import QuestionIterator
from calibadv_jax.data.questions import load_questions
from calibadv_jax.evaluate import evaluate
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.summary import report_metrics, trajectory_metrics
from calibadv_jax.metrics.timing import Stopwatch
from calibadv_jax.metrics.writer import MetricsWriter
from calibadv_jax.model import Model, build_model
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.record import write_rollouts
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.rollout.stream import RolloutStream
from calibadv_jax.seeds import random_state
from calibadv_jax.trainer import Trainer
from calibadv_jax.wiring import open_rollouts, prepare_run_folder


def run(config: Config) -> None:
    """Trains for `learner.steps` steps, or goes on from the newest checkpoint of the run folder."""
    console = Console(config.log.progress)
    for line in describe(config.advantage):
        console.say(line)
    model = build_model(config, config.policy.path)
    folder = prepare_run_folder(config, model, "train")
    with open_rollouts(config, model, folder / "policy", folder / "snapshots") as rollouts:
        train(config, model, rollouts, folder, console)


def train(config: Config, model: Model, rollouts: Rollouts, folder: Path, console: Console) -> None:
    """The algorithm, on parts that are ready."""
    known = load_questions(config.data.train)
    questions = QuestionIterator(known, config.run.seed, config.data.shuffle)
    per_step, staleness = config.rollout.questions_per_step, config.rollout.max_staleness
    failed_share = config.rollout.max_failed_share
    stream = RolloutStream(rollouts.begin, questions, per_step, staleness, failed_share)
    trainer = Trainer(config, model, folder, rollouts, questions, stream)
    trainer.restore({question.id: question for question in known})
    with trainer, MetricsWriter(folder, config.log.tensorboard, start_step=trainer.step + 1) as writer:
        trainer.publish()  # before the first step, so that a broken path fails at the start
        while trainer.step < config.learner.steps:
            watch = Stopwatch()
            with watch("rollout"):
                groups = stream.take(trainer.step)
            with watch("advantage"):
                rng = random_state(config.run.seed, trainer.step, "reward")
                score_groups(groups, config.reward, config.prompt.prepend_think, rng)
                advantages = compute_advantages(groups, config.advantage)
                metrics = trajectory_metrics(groups, trainer.step) | advantages.metrics | rollouts.metrics()
            with watch("update"):
                metrics |= trainer.update(groups, advantages)
            with watch("publish"):
                metrics |= trainer.publish()
            if config.log.rollouts:
                write_rollouts(folder / "rollouts" / f"step_{trainer.step}.jsonl", groups)
            if config.evaluate.every and trainer.step % config.evaluate.every == 0:
                with watch("evaluate"):
                    metrics |= report_metrics(evaluate(config, rollouts))
            metrics |= watch.metrics(tokens=trainer.trained_tokens)
            writer.write(trainer.step, metrics)
            console.step(trainer.step, config.learner.steps, metrics)
            trainer.save_if_due()


if __name__ == "__main__":
    cli.main("train", run)
