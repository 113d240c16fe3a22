"""Supervised cold start: ``calibadv sft --config FILE [key.path=value …]``.

Trains on demonstrations and writes a HuggingFace folder that `train` starts from.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.config import Config, SftPhase, dump_config
from calibadv_jax.config.kept import refuse_other_run
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_text
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.locking import locked_output, locked_run
from calibadv_jax.core.own_function import load_optional
from calibadv_jax.core.stopping import Stop
from calibadv_jax.core.tags import behind_opening, neutralise_observation, parse_turn
from calibadv_jax.data.demonstration_files import load_demonstrations, split_off
from calibadv_jax.data.demonstrations import Demonstration
from calibadv_jax.hosts.joining import alone
from calibadv_jax.learner.batching import Batch, Sample, pack, token_weights
from calibadv_jax.learner.learner import Learner
from calibadv_jax.learner.losses import negative_log_likelihood
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.learner.packing import place
from calibadv_jax.metrics.backends import open_backends
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import Guards
from calibadv_jax.metrics.writer import MetricsWriter
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rollout.actions import AccessAction, SearchAction, grammar_of
from calibadv_jax.rollout.observation import (
    Observations,
    added_token_strings,
    encode,
    neutralise_documents,
)
from calibadv_jax.rollout.prompts import drop_overlong, open_prompt, prompt_lengths
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.choices import describe_adapters
from calibadv_jax.run.folder import COLD_START, TOOLS, content_hash, tools_hash
from calibadv_jax.run.model import base_of, build_model, initial_params
from calibadv_jax.run.sft_state import SftState, kept_row_length
from calibadv_jax.snapshots.huggingface import save_folder

DEFAULT_STEPS = 100  # of a phase that gives no length
_NOTHING = np.zeros(0, np.float32)


def run(config: Config) -> None:
    """Runs every phase in order, then writes the policy to `sft.output`; goes on where it was interrupted."""
    alone(config.distributed, "sft")
    sft, folder = config.sft, Path(config.run.dir)
    if not sft.phases:
        raise UserError("sft.phases is empty: nothing would be trained; add a phase, such as {steps: 100}")
    console = Console(config.log.progress)
    output = Path(sft.output)
    refuse_other_run(output, "sft.output", folder)
    with locked_run(folder, console.warn), locked_output(output, "sft.output", console.warn):
        _run(config, console)
    console.note(f"cold start written to {output}")


def _run(config: Config, console: Console) -> None:
    folder = Path(config.run.dir)
    length = config.sft.row_length or kept_row_length(folder) or config.rollout.max_length
    config = dataclasses.replace(config, sft=dataclasses.replace(config.sft, row_length=length))
    sft = config.sft
    for line in describe_adapters(config.policy.lora):
        console.note(line)
    model = build_model(config, sft.init_from, Adapters.from_config(config.policy.lora))
    training, held_out = _own_demonstrations(config, model.tokenizer, console.warn)
    updates = [
        count_updates(config, phase, training, model.tokenizer, config.run.seed + number)
        for number, phase in enumerate(sft.phases)
    ]
    schedule = make_schedule(sft.optimizer, sum(updates))
    learner = Learner(
        model.policy,
        make_optimizer(sft.optimizer, schedule),
        model.mesh,
        sft.rows,
        logprob_chunk=config.policy.logprob_chunk,
        rows_key="sft.rows",
        entropy_gradient=False,
        offload=sft.optimizer.offload == "host",
    )
    identity = {
        "demonstrations": content_hash([dataclasses.asdict(one) for one in training]),
        "policy.config": content_hash(model.hf_config),
        "policy.vocabulary": model.tokenizer_hash,
    }
    if tools := tools_hash(config):
        identity[TOOLS] = tools
    if base := base_of(config, model, sft.init_from):
        identity["policy.weights"] = base.sha256
    initial = partial(initial_params, config, model, sft.init_from)
    stop = Stop(
        "the update in progress is finished and saved",
        "the last update is saved",
        "the same command goes on from the saved update",
    )
    with stop, SftState(config, identity, learner, initial, console) as kept:
        batches = _all_batches(config, updates, training, model.tokenizer, kept.step)
        _train(config, learner, kept, batches, schedule, updates, held_out, console, stop)
        write_text(folder / COLD_START, dump_config(config))
        hub.write_pins(folder, model.pins)
        dtype, tokenizer = config.policy.param_dtype, model.tokenizer_folder
        trained = model.policy.merged(learner.whole(kept.state["params"]), dtype)
        save_folder(trained, model.hf_config, Path(sft.output), dtype, tokenizer)
        kept.finish()


def _train(
    config: Config,
    learner: Learner,
    kept: SftState,
    batches: Iterator[Batch],
    schedule: Callable[[int], Any],
    updates: Sequence[int],
    held_out: Batch | None,
    console: Console,
    stop: Stop,
) -> None:
    """Trains on the batches.

    Args:
        updates: of each phase.

    Raises:
        UserError: it diverged: the parameters are not finite, or no update is, for guards.patience updates in
            a row or from the first to the last.
    """
    folder, every = Path(config.run.dir) / "sft_metrics", config.sft.held_out_every
    total = sum(updates)
    patience = min(config.guards.patience, total)
    guards = Guards(dataclasses.replace(config.guards, patience=patience), "sft.optimizer.lr")
    backends = open_backends(config.log, folder, kept.step + 1, console.warn)
    with (
        MetricsWriter(folder, backends, start_step=kept.step + 1) as writer,
        console.bar("cold start", total, "steps") as show,
    ):
        for batch in batches:
            if line := phase_line(config, updates, kept.step):
                console.note(line)
            begun = time.monotonic()
            rate = float(schedule(kept.step))
            tokens = int((batch.segment_ids > 0).sum())
            with stop.held():
                state, metrics = learner.update(kept.state, [batch], negative_log_likelihood)
                seconds = time.monotonic() - begun
                metrics = {
                    "sft/loss": metrics.pop("actor/loss"),
                    "sft/lr": rate,
                    "sft/tokens": float(tokens),
                    "perf/tokens_per_second": tokens / seconds,
                    "timing_s/step": seconds,
                } | metrics
                step = kept.step + 1
                if held_out is not None and (step % every == 0 or step == total):
                    metrics["sft/held_out_loss"] = held_out_loss(learner, state["params"], held_out)
                metrics["actor/finite"] = float(learner.is_finite(state["params"]))
                verdict = guards.check(step, metrics)
                writer.write(step, metrics | verdict.metrics)
                if guards.is_broken:  # neither the policy nor a state to go on from is written
                    raise UserError(verdict.findings[0])
                kept.updated(state)
            show(step)
            if step % 10 == 0 or step == total:
                console.step(step, total, metrics)


def phase_line(config: Config, updates: Sequence[int], done: int) -> str:
    """Say which phase begins after `done` updates, and with what data; "" if none or the only one does."""
    number = sum(done >= end for end in itertools.accumulate(updates))
    if len(updates) == 1 or done != sum(updates[:number]):
        return ""
    phase, source = config.sft.phases[number], config.sft.demonstrations
    data = f"generated demonstrations, kind {phase.kind}" if source == "world" else source
    line = f"phase {number + 1} of {len(updates)}: {updates[number]} updates on {data}"
    line += f", loss on {phase.loss_on} tokens"
    return line + "; its loss is no continuation of the phase before" if number else line


def count_updates(
    config: Config, phase: SftPhase, own: Sequence[Demonstration], tokenizer: Any, seed: int
) -> int:
    """Optimizer updates of a phase.

    Raises:
        UserError: its length is given in epochs, and a generator, which never repeats itself, writes it.
    """
    if not phase.epochs:
        return phase.steps or DEFAULT_STEPS
    if config.sft.demonstrations == "world":
        raise UserError(
            f"sft.phases: epochs={phase.epochs}, but sft.demonstrations=world writes new demonstrations all"
            " the time: give steps"
        )
    lengths = (demonstration_length(one, config, tokenizer) for one in own)
    shapes = [Sample(np.zeros(length, np.int32), _NOTHING, _NOTHING, _NOTHING) for length in lengths]
    fulls = _row_fulls(
        (shapes[index] for index in _order(len(own), phase.epochs, seed)),
        config.sft.rows,
        config.sft_row_length,
        with_rest=True,
    )
    return sum(1 for _ in fulls)


def _all_batches(
    config: Config, updates: Sequence[int], own: Sequence[Demonstration], tokenizer: Any, done: int
) -> Iterator[Batch]:
    """The batches of every phase from update `done` on."""
    for number, (phase, count) in enumerate(zip(config.sft.phases, updates, strict=True)):
        skipped = min(done, count)
        done -= skipped
        if skipped < count:
            batches = _batches(config, phase, own, tokenizer, config.run.seed + number, skipped)
            yield from _made_ahead(batches, count - skipped)


def _made_ahead(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """The next `count` batches, each made by another thread while the batch before is trained."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches)
        for left in reversed(range(count)):
            batch = coming.result()
            if left:
                coming = thread.submit(next, batches)
            yield batch


def _own_demonstrations(
    config: Config, tokenizer: Any, warn: Callable[[str], object] = lambda _: None
) -> tuple[list[Demonstration], Batch | None]:
    """Demonstrations of the file to train on, and the held-out ones in rows; none if a generator writes them.

    Args:
        warn: told how many are left out because they, or their prompts, are too long.

    Raises:
        UserError: the file cannot be used, or some are too long; see `drop_overlong` and `_drop_long`.
    """
    sft = config.sft
    if sft.demonstrations == "world":
        if sft.held_out:
            raise UserError(
                f"sft.held_out is {sft.held_out:g}, but sft.demonstrations=world writes new demonstrations"
                " all the time: sft/loss is a held-out loss already; set it to 0"
            )
        return [], None
    own, longest = _load(config), config.rollout.max_prompt_length
    questions = [one.question for one in own]
    lengths = prompt_lengths(questions, tokenizer, config.prompt, longest, make_actions(config))
    _, overlong = drop_overlong(
        questions, lengths, longest, config.data.overlong_prompts, "sft.demonstrations"
    )
    if overlong:
        warn(overlong)
    fitting = [one for place, one in enumerate(own) if place not in lengths]
    fitting, too_long = _drop_long(fitting, config, tokenizer)
    if too_long:
        warn(too_long)
    training, held_out = split_off(fitting, sft.held_out, config.run.seed)
    samples = [encode_demonstration(one, config, tokenizer, "sampled") for one in held_out]
    return training, pack(samples, config.sft_row_length) if samples else None


def _load(config: Config) -> list[Demonstration]:
    return load_demonstrations(Path(config.sft.demonstrations), grammar_of(make_actions(config)))


def _drop_long(
    own: Sequence[Demonstration], config: Config, tokenizer: Any
) -> tuple[list[Demonstration], str]:
    """The demonstrations that fit in a row, and in words how many do not; "" where all fit.

    Raises:
        UserError: some do not fit and data.overlong_prompts is "refuse", or none fits.
    """
    longest = config.sft_row_length
    lengths = [demonstration_length(one, config, tokenizer) for one in own]
    kept = [one for one, length in zip(own, lengths, strict=True) if length <= longest]
    if len(kept) == len(own):
        return kept, ""
    worst = max(range(len(own)), key=lambda place: lengths[place])
    found = (
        f"sft.demonstrations: {len(own) - len(kept)} of {len(own)} have more tokens than"
        f" sft.row_length={longest}, the longest {lengths[worst]} (question {own[worst].question.id!r})"
    )
    if config.data.overlong_prompts == "refuse":
        raise UserError(f"{found}: raise it, or leave them out with data.overlong_prompts=leave_out")
    if not kept:
        raise UserError(f"{found}: none is left; raise it")
    return kept, f"{found}: they are left out"


def held_out_loss(learner: Learner, params: Params, batch: Batch) -> float:
    """Negative log-likelihood of the tokens that the policy would sample, their mean."""
    logprobs = learner.logprobs(params, batch)
    return float(-np.sum(batch.weights * np.where(batch.weights > 0, logprobs, 0.0)))


def _batches(
    config: Config,
    phase: SftPhase,
    own: Sequence[Demonstration],
    tokenizer: Any,
    seed: int,
    skipped: int = 0,
) -> Iterator[Batch]:
    """Packed batches of exactly `sft.rows` rows, the last one of epochs apart; endless if there are none.

    Args:
        skipped: batches that are left out at the beginning.
    """
    sft = config.sft
    demonstrations = _demonstrations(config, phase, own, seed)
    samples = (encode_demonstration(one, config, tokenizer, phase.loss_on) for one in demonstrations)
    for full in islice(_row_fulls(samples, sft.rows, config.sft_row_length, with_rest=True), skipped, None):
        yield pack(full, config.sft_row_length, weights=token_weights(full, "token_mean"))


def _row_fulls(
    samples: Iterable[Sample], rows: int, row_length: int, with_rest: bool = False
) -> Iterator[list[Sample]]:
    """Samples in their order, in lists that each fill the rows.

    Args:
        with_rest: the last samples come too, though they do not fill the rows.
    """
    pending: list[Sample] = []
    lengths: list[int] = []
    for sample in samples:
        pending.append(sample)
        lengths.append(len(sample.tokens))
        if _may_need_more(lengths, rows, row_length) and place(lengths, row_length)[1] > rows:
            yield pending[:-1]
            pending, lengths = pending[-1:], lengths[-1:]
    if with_rest and pending:
        yield pending


def _may_need_more(lengths: Sequence[int], rows: int, row_length: int) -> bool:
    """False only if `place` needs no more than so many rows; costs a small part of it.

    If a sample opens one more row, it has room in none of the other rows: so many tokens lie there already.
    """
    ordered = np.sort(lengths)[::-1]  # as first-fit decreasing takes them
    fewest = rows * (row_length + 1 - ordered) + ordered
    return bool(np.any(np.cumsum(ordered) >= fewest))


def _demonstrations(
    config: Config, phase: SftPhase, own: Sequence[Demonstration], seed: int
) -> Iterator[Demonstration]:
    if config.sft.demonstrations == "world":
        yield from load_optional("worlds.demonstrations").GENERATORS[phase.kind](seed, config.world)
        return
    yield from (own[index] for index in _order(len(own), phase.epochs, seed))


def _order(count: int, epochs: int | None, seed: int) -> Iterator[int]:
    """Indices in another order in every epoch; None: without end."""
    rng = np.random.default_rng(seed)
    for _ in itertools.count() if epochs is None else range(epochs):
        yield from rng.permutation(count)


def encode_demonstration(
    demonstration: Demonstration, config: Config, tokenizer: Any, loss_on: str
) -> Sample:
    """A demonstration in exactly the tokens that the agent loop would have written.

    Raises:
        UserError: they are more than sft.row_length.
    """
    sample = _encoded(demonstration, config, tokenizer, loss_on)
    if len(sample.tokens) > config.sft_row_length:
        raise UserError(
            f"demonstration of question {demonstration.question.id!r} has {len(sample.tokens)} tokens,"
            f" but sft.row_length is {config.sft_row_length}: raise it"
        )
    return sample


def demonstration_length(demonstration: Demonstration, config: Config, tokenizer: Any) -> int:
    """Its tokens, however many."""
    return len(_encoded(demonstration, config, tokenizer, "sampled").tokens)


def _encoded(demonstration: Demonstration, config: Config, tokenizer: Any, loss_on: str) -> Sample:
    actions, longest = make_actions(config), config.rollout.max_prompt_length
    grammar = grammar_of(actions)
    prompt, opening = open_prompt(demonstration.question, tokenizer, config.prompt, longest, actions)
    parts: list[tuple[np.ndarray, bool]] = [(prompt, False)]
    shown = Observations(tokenizer, config.rollout.max_observation_length, config.prompt.opening)
    by_name: dict[str, Action] = {one.name: one for one in actions or (SearchAction(),)}
    for number, turn in enumerate(demonstration.turns, 1):
        text = behind_opening(opening if number == 1 else shown.opening, turn.text)
        parts.append((np.asarray(encode(tokenizer, text), np.int32), turn.trained))
        action = by_name.get(parse_turn(turn.text, "eos", grammar).kind)
        goes_on = action is not None and number < len(demonstration.turns)
        if goes_on or turn.documents or turn.observation:
            said = neutralise_observation(turn.observation, added_token_strings(tokenizer), grammar)
            documents = neutralise_documents(turn.documents, tokenizer, grammar)
            # Not a user's own code.
            renderer = SearchAction() if isinstance(action, SearchAction) else AccessAction()
            body = renderer.render(Reply(tuple(documents), said))
            parts.append((shown.of(action or SearchAction()).information(body)[0], False))
    tokens = np.concatenate([ids for ids, _ in parts]).astype(np.int32)
    mask = np.concatenate([np.full(len(ids), learned or loss_on == "all") for ids, learned in parts])
    mask[0] = False  # nothing precedes the first token
    nothing = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, nothing, nothing)
