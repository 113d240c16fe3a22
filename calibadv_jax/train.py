"""Reinforcement learning: ``calibadv train --config FILE [key.path=value …]``."""

from __future__ import annotations

from pathlib import Path

from calibadv_jax import cli
from calibadv_jax.advantages.registry import compute_advantages, describe
from calibadv_jax.config import Config
from calibadv_jax.data.pipeline import check_questions
from calibadv_jax.data.questions import load_questions
from calibadv_jax.doctor import check_inputs
from calibadv_jax.errors import UserError
from calibadv_jax.evaluate import evaluate
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import guard_metrics
from calibadv_jax.metrics.summary import report_metrics, trajectory_metrics
from calibadv_jax.metrics.timing import Stopwatch
from calibadv_jax.metrics.writer import MetricsWriter
from calibadv_jax.model import build_model
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.record import write_rollouts
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run_folder import enter_run_folder
from calibadv_jax.seeds import random_state
from calibadv_jax.stopping import Stop
from calibadv_jax.trainer import Trainer
from calibadv_jax.wiring import open_rollouts


def run(config: Config) -> None:
    """Trains for `learner.steps` steps, or continues from the newest checkpoint of the run folder."""
    console = Console(config.log.progress)
    for line in describe(config.advantage):
        console.say(line)
    questions = load_questions(config.data.train)
    check_questions(questions, config.data.weights, config.prompt.template)
    check_inputs(config)
    console.note(f"{len(questions)} questions; opening the policy and its services")
    model = build_model(config, config.policy.path)
    folder = enter_run_folder(config, model, questions, console.say)
    with Stop() as stop, open_rollouts(config, model, folder / "policy", folder / "snapshots") as rollouts:
        trainer = Trainer(config, model, questions, rollouts, folder, console)
        trainer.restore()
        with trainer:
            train(config, trainer, rollouts, folder, console, stop)


def train(
    config: Config, trainer: Trainer, rollouts: Rollouts, folder: Path, console: Console, stop: Stop
) -> None:
    """The algorithm. All parts of the run are built before."""
    with MetricsWriter(folder, config.log.tensorboard, start_step=trainer.step + 1) as writer:
        trainer.publish()  # before the first step, so that a broken path fails at the start
        if trainer.step < config.learner.steps:
            console.note("the first step compiles; those after it are faster")
        while trainer.step < config.learner.steps:
            watch, begun = Stopwatch(), trainer.step
            with watch("rollout"), console.bar("rollout", config.rollout.questions_per_step) as done:
                groups = trainer.stream.take(begun, done)
            with watch("advantage"):
                rng = random_state(trainer.seed, begun, "reward")
                score_groups(groups, config.reward, config.prompt.prepend_think, rng)
                advantages = compute_advantages(groups, config.advantage)
                metrics = trajectory_metrics(groups, begun) | guard_metrics(groups) | advantages.metrics
                metrics |= rollouts.metrics()
            try:
                with stop.held(), watch("update"):
                    metrics |= trainer.update(groups, advantages)
                    if config.log.rollouts:
                        write_rollouts(folder / "rollouts" / f"step_{trainer.step}.jsonl", groups)
                    verdict = trainer.guards.check(trainer.step, metrics)
                    metrics |= verdict.metrics
                with watch("publish"):
                    metrics |= trainer.publish()
                if config.evaluate.every and trainer.step % config.evaluate.every == 0:
                    with watch("evaluate"):
                        metrics |= report_metrics(evaluate(config, rollouts))
            finally:
                if trainer.step > begun:  # what is trained is saved, so its row must not be lost
                    with stop.held():
                        writer.write(trainer.step, metrics | watch.metrics(trainer.trained_tokens))
            console.step(trainer.step, config.learner.steps, metrics | watch.metrics(trainer.trained_tokens))
            for finding in verdict.findings:
                console.say(finding)
            if verdict.action == "stop":
                raise UserError("stopped by guards.action; the state is saved: see the findings above")
            if verdict.action == "rollback":
                with stop.held():
                    trainer.roll_back()
                    writer.rewind(trainer.step + 1)
                trainer.publish()
                continue
            with stop.held():
                trainer.save_if_due()


if __name__ == "__main__":
    cli.main("train", run)
