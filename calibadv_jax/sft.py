"""Supervised cold start: ``calibadv sft --config FILE [key.path=value …]``.

Trains on demonstrations and writes a HuggingFace folder that `train` starts from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax import cli, hub
from calibadv_jax.config import Config, SftPhase, dump_config
from calibadv_jax.data.demonstrations import GENERATORS, Demonstration, load_demonstrations
from calibadv_jax.errors import UserError
from calibadv_jax.learner.batching import Batch, Sample, pack, place, token_weights
from calibadv_jax.learner.learner import Learner
from calibadv_jax.learner.losses import negative_log_likelihood
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.writer import MetricsWriter
from calibadv_jax.model import build_model, initial_params
from calibadv_jax.protocol import OPEN_THINK
from calibadv_jax.rollout.observation import encode, render_observation
from calibadv_jax.rollout.prompts import build_prompt
from calibadv_jax.run_folder import COLD_START
from calibadv_jax.snapshots.huggingface import save_folder


def run(config: Config) -> None:
    """Runs every phase in order, then writes the policy to `sft.output`."""
    sft = config.sft
    if not sft.phases:
        raise UserError("sft.phases is empty: nothing would be trained; add one, such as {steps: 100}")
    console = Console(config.log.progress)
    folder = Path(config.run.dir)
    model = build_model(config, sft.init_from)
    total = sum(phase.steps for phase in sft.phases)
    schedule = make_schedule(sft.optimizer, total)
    learner = Learner(
        model.policy,
        make_optimizer(sft.optimizer, schedule),
        model.mesh,
        sft.rows,
        logprob_chunk=config.policy.logprob_chunk,
        rows_key="sft.rows",
    )
    state = learner.init(initial_params(config, model, sft.init_from))
    step = 0
    with MetricsWriter(folder / "sft_metrics", config.log.tensorboard, start_step=0) as writer:
        for number, phase in enumerate(sft.phases):
            batches = _batches(config, phase, model.tokenizer, config.run.seed + number)
            for batch in (next(batches) for _ in range(phase.steps)):
                begun = time.monotonic()
                rate = float(schedule(step))
                state, metrics = learner.update(state, batch, negative_log_likelihood)
                tokens = int((batch.segment_ids > 0).sum())
                seconds = time.monotonic() - begun
                step += 1
                metrics = {
                    "sft/loss": metrics.pop("actor/loss"),
                    "sft/lr": rate,
                    "sft/tokens": float(tokens),
                    "perf/tokens_per_second": tokens / seconds,
                    "timing_s/step": seconds,
                } | metrics
                writer.write(step, metrics)
                if step % 10 == 0 or step == total:
                    console.step(step, total, metrics)
    output = Path(sft.output)
    (folder / COLD_START).write_text(dump_config(config), encoding="utf-8")
    hub.write_pins(folder, model.pins)
    save_folder(state["params"], model.hf_config, output, config.policy.param_dtype, model.tokenizer_folder)
    console.note(f"cold start written to {output}")


def _batches(config: Config, phase: SftPhase, tokenizer: Any, seed: int) -> Iterator[Batch]:
    """Endless packed batches of exactly `sft.rows` rows."""
    sft = config.sft
    pending: list[Sample] = []
    for demonstration in _demonstrations(config, phase, seed):
        pending.append(encode_demonstration(demonstration, config, tokenizer, phase.loss_on))
        _, rows = place([len(sample.tokens) for sample in pending], sft.row_length)
        if rows > sft.rows:
            full, pending = pending[:-1], pending[-1:]
            yield pack(full, sft.row_length, weights=token_weights(full, "token_mean"))


def _demonstrations(config: Config, phase: SftPhase, seed: int) -> Iterator[Demonstration]:
    if config.sft.demonstrations == "world":
        yield from GENERATORS[phase.kind](seed, config.world)
        return
    demonstrations = load_demonstrations(Path(config.sft.demonstrations))
    rng = np.random.default_rng(seed)
    while True:
        yield from (demonstrations[index] for index in rng.permutation(len(demonstrations)))


def encode_demonstration(
    demonstration: Demonstration, config: Config, tokenizer: Any, loss_on: str
) -> Sample:
    """A demonstration in exactly the tokens that the agent loop would have written."""
    prompt = build_prompt(demonstration.question, tokenizer, config.prompt, config.rollout.max_prompt_length)
    parts: list[tuple[np.ndarray, bool]] = [(prompt, False)]
    think = config.prompt.prepend_think
    for turn in demonstration.turns:
        text = turn.text.removeprefix(OPEN_THINK) if think else turn.text
        parts.append((np.asarray(encode(tokenizer, text), np.int32), turn.trained))
        if turn.documents:
            shown, _ = render_observation(
                turn.documents, tokenizer, config.rollout.max_observation_length, think
            )
            parts.append((shown, False))
    tokens = np.concatenate([ids for ids, _ in parts]).astype(np.int32)
    mask = np.concatenate([np.full(len(ids), learned or loss_on == "all") for ids, learned in parts])
    mask[0] = False  # nothing precedes the first token
    if len(tokens) > config.sft.row_length:
        raise UserError(
            f"demonstration of question {demonstration.question.id!r} has {len(tokens)} tokens,"
            f" but sft.row_length is {config.sft.row_length}: raise it"
        )
    nothing = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, nothing, nothing)


if __name__ == "__main__":
    cli.main("sft", run)
