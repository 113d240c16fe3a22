"""Supervised cold start: ``calibadv sft --config FILE [key.path=value …]``.

Trains on demonstrations and writes a HuggingFace folder that `train` starts from.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calibadv_jax.commands.demonstration_encoder import make_encoder
from calibadv_jax.commands.demonstration_tokens import DemonstrationEncoder
from calibadv_jax.config import Config, SftPhase, dump_config
from calibadv_jax.config.kept import COLD_START, refuse_other_run
from calibadv_jax.config.load import kept_values
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json, write_text
from calibadv_jax.core.locking import locked_output, locked_run
from calibadv_jax.core.signals import Stop
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.data.demonstrations import Demonstration, load_demonstrations, split_held_out
from calibadv_jax.distributed.joining import require_single_process
from calibadv_jax.learner.batching import Batch, RowShape, Sample, pack, plan, token_weights
from calibadv_jax.learner.learner import Learner, LearnerOptions, State
from calibadv_jax.learner.objective import negative_log_likelihood
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import Guards
from calibadv_jax.metrics.metrics_writer import MetricsWriter
from calibadv_jax.metrics.trackers import open_backends
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rollout.actions import grammar_of
from calibadv_jax.rollout.prompts import drop_overlong
from calibadv_jax.run.comparison import COLD_START_KEYS, changed_keys, differences, with_defaults
from calibadv_jax.run.fingerprints import cold_start_identity
from calibadv_jax.run.model import Model, adapter_base, build_model, initial_params
from calibadv_jax.run.tracking import COLD_START_KIND, describe_run
from calibadv_jax.run.untrained_tokens import check_control_tokens
from calibadv_jax.snapshots.checkpoint import CheckpointStore, newest_step
from calibadv_jax.snapshots.huggingface import save_folder

Schedule = Callable[[int], Any]  # learning rate of an update, given the number of updates before it

DEFAULT_STEPS = 100  # Updates of a phase that gives no length.
CHECKPOINTS = "sft_checkpoints"  # Folder in the run's folder, until the policy is written.
START = "sft_start.json"  # File beside it: the config and the hashes of the cold start in progress.
GONE = "sft_checkpoints.removed"  # The folder's name while it is deleted.
MAX_UNSAVED_SECONDS = 600.0  # Work that a kill may cost if updates are slow.
LOGGED_EVERY = 10  # Updates between lines on the console.
# Keys whose change makes another cold start. The contents of files are compared by their hash.
COMPARED = (
    *COLD_START_KEYS,
    "policy.compute_dtype",
    "policy.param_dtype",
    "rollout.max_prompt_length",
    "rollout.max_observation_length",
)
# Keys among them that may change all the same.
FREE = (
    "sft.output",
    "sft.init_from",
    "sft.demonstrations",
    "sft.held_out_every",
    "sft.checkpoint_every",
    "sft.optimizer.offload",
    "world.dir",
)


def run(config: Config) -> None:
    """Train every phase in order, or continue, then write the policy to `sft.output`.

    Args:
        config: The config of the command.

    Raises:
        UserError: Bad input, files that another process writes, or the training diverged.
    """
    require_single_process(config.distributed, "sft")
    if not config.sft.phases:
        raise UserError("sft.phases is empty: nothing would be trained; add a phase, such as {steps: 100}")
    console = Console(config.log.progress)
    folder = Path(config.run.dir)
    output = Path(config.sft.output)
    refuse_other_run(output, "sft.output", folder)
    with locked_run(folder, console.warn), locked_output(output, "sft.output", console.warn):
        _run(config, console)
    console.note(f"cold start written to {output}")


def _run(config: Config, console: Console) -> None:
    folder = Path(config.run.dir)
    sft = dataclasses.replace(config.sft, pack_length=config.sft_row_length)
    config = dataclasses.replace(config, sft=sft)
    model = build_model(config, sft.init_from, Adapters.from_config(config.policy.lora))
    check_control_tokens(config, model, sft.init_from)
    training, held_out = _own_demonstrations(config, model.tokenizer, console.warn)
    updates = [
        count_updates(config, phase, training, model.tokenizer, config.run.seed + number)
        for number, phase in enumerate(sft.phases)
    ]
    total = sum(updates)
    schedule = make_schedule(sft.optimizer, total)
    learner = _make_learner(config, model, schedule)
    identity = cold_start_identity(config, model, training, adapter_base(config, model, sft.init_from))

    def initial() -> Params:
        """Return the parameters to begin with."""
        return initial_params(config, model, sft.init_from)

    stop = Stop(
        "the update in progress is finished and saved",
        "the last update is saved",
        "the same command goes on from the saved update",
    )
    with stop, ColdStart(config, identity, learner, initial, console) as cold_start:
        batches = _all_batches(config, updates, training, model.tokenizer, cold_start.step)
        _train(config, cold_start, batches, schedule, updates, held_out, stop)
        write_text(folder / COLD_START, dump_config(config))
        hub.write_pins(folder, model.pins)
        dtype = config.policy.param_dtype
        params = model.policy.fold_adapters(learner.with_base(cold_start.state["params"]), dtype)
        save_folder(params, model.hf_config, Path(sft.output), dtype, model.tokenizer_folder)
        cold_start.finish()


def _make_learner(config: Config, model: Model, schedule: Schedule) -> Learner:
    optimizer = config.sft.optimizer
    options = LearnerOptions(
        config.sft.rows,
        logprob_chunk=config.policy.logprob_chunk,
        rows_key="sft.rows",
        entropy_gradient=False,
        offload=optimizer.offload == "host",
    )
    return Learner(model.policy, make_optimizer(optimizer, schedule), model.mesh, options)


def _train(
    config: Config,
    cold_start: ColdStart,
    batches: Iterator[Batch],
    schedule: Schedule,
    updates: Sequence[int],
    held_out: Batch | None,
    stop: Stop,
) -> None:
    """Train on the batches of all phases; `updates`: number of updates of each.

    Raises UserError if the training diverged: the parameters are not finite, or no update is finite, for
    guards.patience_steps updates in a row or from the first to the last.
    """
    folder = Path(config.run.dir) / "sft_metrics"
    console = cold_start.console
    total = sum(updates)
    headings: dict[int, str] = {}
    if config.sft.demonstrations == "world":
        headings = phase_headings(config.sft.phases, updates, cold_start.step)
    first = cold_start.step + 1
    patience = min(config.guards.patience_steps, total)
    guards = Guards(dataclasses.replace(config.guards, patience_steps=patience), "sft.optimizer.lr")
    description = describe_run(config, Path(config.run.dir), COLD_START_KIND)
    backends = open_backends(config.log, folder, first, console.warn, description)
    with MetricsWriter(folder, backends, first) as writer, console.live("cold start"):
        for step, batch in enumerate(batches, first):
            is_last = step == total
            if step in headings:
                console.note(headings[step])
            console.begin_step(step, total)
            rate = float(schedule(step - 1))
            with stop.held():
                state, metrics = _update(cold_start, batch, rate)
                if held_out is not None and (is_last or step % config.sft.held_out_every == 0):
                    loss = _held_out_loss(cold_start.learner, state, held_out)
                    metrics["sft/held_out_loss"] = loss
                metrics["actor/finite"] = float(cold_start.learner.is_finite(state["params"]))
                verdict = guards.check(step, metrics)
                writer.write(step, metrics | verdict.metrics)
                if guards.is_broken:  # neither the policy nor a state to go on from is written
                    raise UserError(verdict.findings[0])
                cold_start.updated(state)
            if is_last or step % LOGGED_EVERY == 0:
                console.step(step, total, metrics)


def phase_headings(phases: Sequence[SftPhase], updates: Sequence[int], done: int) -> dict[int, str]:
    """Return a line for the first update of each phase, by its number, and for the first one after `done`.

    Args:
        phases: The phases, with generated demonstrations.
        updates: The number of updates of each.
        done: The number of updates that an earlier start has made.
    """
    headings = {}
    start = 0
    for number, (phase, count) in enumerate(zip(phases, updates, strict=True), 1):
        first = max(start, done) + 1
        start += count
        if first <= start:
            line = f"phase {number} of {len(phases)}: {phase.kind}, updates {start - count + 1} to {start}"
            is_change = number > 1 and first > done + 1
            headings[first] = f"{line}; other demonstrations, so the loss jumps" if is_change else line
    return headings


def _update(cold_start: ColdStart, batch: Batch, rate: float) -> tuple[State, dict[str, float]]:
    """Train on a batch; return the new state and the metrics. The old state is donated."""
    num_tokens = int((batch.segment_ids > 0).sum())
    state, learned = cold_start.learner.update(cold_start.state, [batch], negative_log_likelihood)
    metrics = {
        "sft/loss": learned.pop("actor/loss"),
        "sft/lr": rate,
        "sft/tokens": float(num_tokens),
    }
    metrics.update(cold_start.console.end_step({"tokens": (num_tokens, "step")}))
    metrics.update(learned)
    return state, metrics


def _held_out_loss(learner: Learner, state: State, batch: Batch) -> float:
    """Return the weighted mean of the negative log-probabilities, in nats."""
    logprobs = learner.logprobs(state["params"], batch)  # float32 [R, L]
    logprobs = np.where(batch.weights > 0, logprobs, 0.0)
    return float(-np.sum(batch.weights * logprobs))


def count_updates(
    config: Config, phase: SftPhase, demonstrations: Sequence[Demonstration], tokenizer: Any, seed: int
) -> int:
    """Return the number of optimizer updates of a phase.

    Args:
        config: The config of the cold start.
        phase: The phase. With epochs, its demonstrations are packed here to count the updates.
        demonstrations: The training demonstrations; empty with a generator.
        tokenizer: The policy's tokenizer.
        seed: Seed of the demonstrations' order.

    Returns:
        The number; DEFAULT_STEPS if the phase gives neither epochs nor steps.

    Raises:
        UserError: The phase gives epochs, but its generator has no end.
    """
    if not phase.epochs:
        return phase.steps or DEFAULT_STEPS
    if config.sft.demonstrations == "world":
        raise UserError(
            f"sft.phases: epochs={phase.epochs}, but sft.demonstrations=world writes new demonstrations all"
            " the time: give steps"
        )
    encoder = make_encoder(config, tokenizer)
    samples = [encoder.encode(demonstration, phase.loss_on) for demonstration in demonstrations]
    drawn = (samples[index] for index in _order(len(demonstrations), phase.epochs, seed))
    return sum(1 for _ in _fill_rows(drawn, config.sft.rows, config.sft_row_length))


def _all_batches(
    config: Config, updates: Sequence[int], demonstrations: Sequence[Demonstration], tokenizer: Any, done: int
) -> Iterator[Batch]:
    """Yield the batches of all phases, without those of the first `done` updates."""
    for number, (phase, count) in enumerate(zip(config.sft.phases, updates, strict=True)):
        skipped = min(done, count)
        done -= skipped
        if skipped < count:
            seed = config.run.seed + number
            batches = _batches(config, phase, demonstrations, tokenizer, seed, skipped)
            yield from _prefetch(batches, count - skipped)


def _prefetch(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
    """Yield the next `count` batches; another thread makes each while the batch before is trained."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, batches)
        for _ in range(count - 1):
            batch = future.result()
            future = thread.submit(next, batches)
            yield batch
        yield future.result()


def _own_demonstrations(
    config: Config, tokenizer: Any, warn: Callable[[str], object] = lambda _: None
) -> tuple[list[Demonstration], Batch | None]:
    """Return the file's training demonstrations, and the packed held-out ones; none with a generator.

    `warn` gets a line on the demonstrations that do not fit. Raises UserError as `drop_overlong`.
    """
    sft = config.sft
    if sft.demonstrations == "world":
        if sft.held_out:
            raise UserError(
                f"sft.held_out is {sft.held_out:g}, but sft.demonstrations=world writes new demonstrations"
                " all the time: sft/loss is a held-out loss already; set it to 0"
            )
        return [], None
    encoder = make_encoder(config, tokenizer)
    grammar = grammar_of(encoder.protocol.settings.actions)
    demonstrations = load_demonstrations(Path(sft.demonstrations), grammar, encoder.message_reader)
    demonstrations = _drop_long_prompts(config, demonstrations, encoder, warn)
    demonstrations = _drop_long_demonstrations(config, demonstrations, encoder, warn)
    training, held_out = split_held_out(demonstrations, sft.held_out, config.run.seed)
    samples = [encoder.encode(demonstration, "sampled") for demonstration in held_out]
    if not samples:
        return training, None
    return training, pack(samples, config.sft_row_length)


def _drop_long_prompts(
    config: Config,
    demonstrations: list[Demonstration],
    encoder: DemonstrationEncoder,
    warn: Callable[[str], object],
) -> list[Demonstration]:
    """Leave out demonstrations whose prompts are too long, or refuse them (data.overlong_prompts)."""
    longest = config.rollout.max_prompt_length
    questions = [demonstration.question for demonstration in demonstrations]
    overlong = encoder.protocol.prompt_lengths(questions, longest)
    rule = config.data.overlong_prompts
    _, warning = drop_overlong(questions, overlong, longest, rule, "sft.demonstrations")
    if warning:
        warn(warning)
    return _without(demonstrations, overlong)


def _drop_long_demonstrations(
    config: Config,
    demonstrations: list[Demonstration],
    encoder: DemonstrationEncoder,
    warn: Callable[[str], object],
) -> list[Demonstration]:
    """Leave out demonstrations that exceed a row, or refuse them (data.overlong_prompts)."""
    pack_length = config.sft_row_length
    overlong = {}
    for place, demonstration in enumerate(demonstrations):
        length = encoder.length(demonstration)
        if length > pack_length:
            overlong[place] = length
    questions = [demonstration.question for demonstration in demonstrations]
    _, warning = drop_overlong(
        questions,
        overlong,
        pack_length,
        config.data.overlong_prompts,
        "sft.demonstrations",
        "demonstrations",
        "sft.pack_length",
    )
    if warning:
        warn(warning)
    return _without(demonstrations, overlong)


def _without(demonstrations: list[Demonstration], places: Container[int]) -> list[Demonstration]:
    """Return the demonstrations, except those at these places."""
    return [demonstration for place, demonstration in enumerate(demonstrations) if place not in places]


def _batches(
    config: Config,
    phase: SftPhase,
    demonstrations: Sequence[Demonstration],
    tokenizer: Any,
    seed: int,
    skipped: int = 0,
) -> Iterator[Batch]:
    """Yield packed batches of `sft.rows` rows (the last may have fewer), without the first `skipped`.

    Raises UserError for a demonstration that does not fit in a row.
    """
    samples = _drawn_samples(config, phase, demonstrations, tokenizer, seed)
    longest = config.sft_row_length
    for number, members in enumerate(_fill_rows(samples, config.sft.rows, longest)):
        if number >= skipped:
            yield pack(members, longest, weights=token_weights(members, "token_mean"))


def _drawn_samples(
    config: Config, phase: SftPhase, demonstrations: Sequence[Demonstration], tokenizer: Any, seed: int
) -> Iterator[Sample]:
    """Yield the samples of a phase in the order of their training; UserError if one exceeds a row."""
    longest = config.sft_row_length
    encoder = make_encoder(config, tokenizer)
    drawn: Iterable[Demonstration]
    if config.sft.demonstrations == "world":
        drawn = load_optional("worlds.world_demonstrations").GENERATORS[phase.kind](seed, config.world)
    else:
        drawn = (demonstrations[index] for index in _order(len(demonstrations), phase.epochs, seed))
    for demonstration in drawn:
        sample = encoder.encode(demonstration, phase.loss_on)
        if len(sample.tokens) > longest:
            raise UserError(
                f"demonstration of question {demonstration.question.id!r} has {len(sample.tokens)} tokens,"
                f" but sft.pack_length is {longest}: raise it"
            )
        yield sample


def _fill_rows(samples: Iterable[Sample], rows: int, pack_length: int) -> Iterator[list[Sample]]:
    """Yield lists of samples, in their order, that each fill the rows; the last one need not."""
    pending: list[Sample] = []
    lengths: list[int] = []
    shapes = [RowShape(pack_length, 1)]
    for sample in samples:
        pending.append(sample)
        lengths.append(len(sample.tokens))
        if _may_need_more(lengths, rows, pack_length) and plan(lengths, shapes).num_rows[0] > rows:
            yield pending[:-1]
            pending = pending[-1:]
            lengths = lengths[-1:]
    if pending:
        yield pending


def _may_need_more(lengths: Sequence[int], rows: int, pack_length: int) -> bool:
    """Return False only if `plan` needs at most `rows` rows, at a fraction of its cost.

    A sample opens one more row only if each of the other rows holds too many tokens for it.
    """
    descending = np.sort(lengths)[::-1]  # int [N]: first-fit decreasing takes the longest first
    # For each sample, the fewest tokens up to and including it with which all rows are too full for it.
    fewest_tokens = rows * (pack_length + 1 - descending) + descending
    return bool(np.any(np.cumsum(descending) >= fewest_tokens))


def _order(count: int, epochs: int | None, seed: int) -> Iterator[int]:
    """Yield indices in another order in every epoch; without end if `epochs` is None."""
    rng = np.random.default_rng(seed)
    for _ in itertools.count() if epochs is None else range(epochs):
        yield from rng.permutation(count)


def encode_demonstration(
    demonstration: Demonstration, config: Config, tokenizer: Any, loss_on: str
) -> Sample:
    """Return a demonstration in the tokens of the agent loop, see `DemonstrationEncoder.encode`.

    Args:
        demonstration: The question and the turns.
        config: The config; its protocol, actions and prompt decide the text around the turns.
        tokenizer: The policy's tokenizer.
        loss_on: "sampled" or "all".
    """
    return make_encoder(config, tokenizer).encode(demonstration, loss_on)


class ColdStart:
    """State and checkpoints of a cold start.

    As a context manager, it saves the last update if the block ends with an error or a signal.

    Args:
        config: The config of the cold start.
        identity: Hashes of the contents that the config only names.
        learner: Its train state is kept here.
        initial: Returns the parameters to begin with, which are donated. Not called if a checkpoint has them.
        console: Gets notes on the progress.

    Raises:
        UserError: The folder holds an unfinished cold start of other settings, or a damaged one.
    """

    def __init__(
        self,
        config: Config,
        identity: Mapping[str, str],
        learner: Learner,
        initial: Callable[[], Params],
        console: Console,
    ):
        self.folder = Path(config.run.dir)
        self.every = config.sft.checkpoint_every
        self.learner = learner
        self.console = console
        checkpoints = self.folder / CHECKPOINTS
        if (self.folder / GONE).exists():
            shutil.rmtree(self.folder / GONE)
        newest = newest_step(checkpoints)
        values = kept_values(config)
        if newest is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / START, {"config": values, "identity": dict(identity)})
        else:
            _check_unfinished(self.folder, values, identity)
        self.state: State = {}
        if newest is None or learner.policy.adapters:  # a checkpoint holds adapters without their base
            self.state = learner.init(initial())
        self._store = CheckpointStore(checkpoints, keep=1)
        self.step = newest or 0
        self._saved = self.step
        self._saved_at = time.monotonic()
        if newest is not None:
            self.state, _ = self._store.restore(newest, learner.abstract_state)
            console.note(f"going on from update {newest}")

    def updated(self, state: State) -> None:
        """Take the state after one more update, and save it if a checkpoint is due.

        It is due after every sft.checkpoint_every updates, and if the newest checkpoint is older than
        MAX_UNSAVED_SECONDS. With sft.checkpoint_every 0 none is saved here.

        Args:
            state: The train state after the update. It is kept, and may be donated to the next update.

        Raises:
            UserError: The checkpoint cannot be written.
        """
        self.state = state
        self.step += 1
        if not self.every:
            return
        seconds = time.monotonic() - self._saved_at
        if self.step % self.every == 0 or seconds > MAX_UNSAVED_SECONDS:
            self._save()

    def finish(self) -> None:
        """Delete the checkpoints, after the policy has been written."""
        self._saved = self.step
        self._store.close()
        # Renamed first, so that after a kill all checkpoints are there or none.
        (self.folder / CHECKPOINTS).rename(self.folder / GONE)
        (self.folder / START).unlink(missing_ok=True)
        shutil.rmtree(self.folder / GONE)

    def __enter__(self) -> ColdStart:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_donated = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        if kind is None or is_donated or self.step == self._saved:
            return
        try:
            self._save()
            self.console.note(f"update {self.step} is saved; the same command goes on from there")
        except Exception as error:  # Orbax may raise anything: it must not hide why the cold start stopped
            self.console.note(f"update {self.step} could not be saved: {' '.join(str(error).split())}")

    def _save(self) -> None:
        self._store.save(self.step, self.state, {})
        self._store.wait()
        self._saved = self.step
        self._saved_at = time.monotonic()


def _check_unfinished(folder: Path, config: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    """Refuse (UserError) to continue a cold start that had other settings."""
    advice = f"choose another run.dir, or remove {folder / CHECKPOINTS} to begin again"
    try:
        start = json.loads((folder / START).read_text(encoding="utf-8"))
        before = with_defaults(start["config"])
        hashes = start["identity"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / START}: lost or damaged, so that the settings of {CHECKPOINTS} are unknown; {advice}"
        ) from error
    changed = changed_keys(before, config, COMPARED, FREE)
    changed += [name for name, _, _ in differences(hashes, identity)]
    if changed:
        raise UserError(
            f"run.dir={folder} holds an unfinished cold start with other settings ({', '.join(changed)});"
            f" {advice}"
        )
