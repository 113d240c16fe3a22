"""Supervised cold start: ``calibadv sft --config FILE [key.path=value …]``.

Trains on demonstrations and writes a HuggingFace folder that `train` starts from.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calibadv_jax.config import Config, SftPhase, dump_config
from calibadv_jax.config.kept import refuse_other_run
from calibadv_jax.config.load import kept_values
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json, write_text
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.locking import locked_output, locked_run
from calibadv_jax.core.stopping import Stop
from calibadv_jax.core.tags import behind_opening, neutralise_observation, parse_turn
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.data.demonstrations import Demonstration, load_demonstrations, split_off
from calibadv_jax.distributed.joining import alone
from calibadv_jax.learner.batching import Batch, RowShape, Sample, pack, plan, token_weights
from calibadv_jax.learner.learner import Learner, LearnerOptions, State
from calibadv_jax.learner.objective import negative_log_likelihood
from calibadv_jax.learner.optimizer import make_optimizer, make_schedule
from calibadv_jax.metrics.backends import open_backends
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.guards import Guards
from calibadv_jax.metrics.writer import MetricsWriter
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.transformer import Params
from calibadv_jax.rollout.actions import AccessAction, SearchAction, grammar_of
from calibadv_jax.rollout.observation import Observations, added_token_strings, encode, neutralise_documents
from calibadv_jax.rollout.prompts import drop_overlong, open_prompt, prompt_lengths
from calibadv_jax.run.actions import make_actions
from calibadv_jax.run.fingerprints import cold_start_identity
from calibadv_jax.run.folder import COLD_START, COLD_START_KEYS, changed_keys, differences, with_defaults
from calibadv_jax.run.model import base_of, build_model, initial_params
from calibadv_jax.snapshots.checkpoint import CheckpointStore, newest_step
from calibadv_jax.snapshots.huggingface import save_folder

DEFAULT_STEPS = 100  # of a phase that gives no length
CHECKPOINTS, START = "sft_checkpoints", "sft_start.json"  # in the run's folder, until the policy is written
GONE = "sft_checkpoints.removed"  # the checkpoints while they are deleted
COMPARED = (
    *COLD_START_KEYS,
    "policy.compute_dtype",
    "policy.param_dtype",
    "rollout.max_prompt_length",
    "rollout.max_observation_length",
)
FREE = (  # of those; contents of files are compared by their hash
    "sft.output",
    "sft.init_from",
    "sft.demonstrations",
    "sft.held_out_every",
    "sft.checkpoint_every",
    "sft.optimizer.offload",
    "world.dir",
)
MOST_SECONDS = 600.0  # of work that a kill may cost if updates are slow


def run(config: Config) -> None:
    """Train every phase in order, or continue, then write the policy to `sft.output`."""
    alone(config.distributed, "sft")
    sft, folder = config.sft, Path(config.run.dir)
    if not sft.phases:
        raise UserError("sft.phases is empty: nothing would be trained; add a phase, such as {steps: 100}")
    console, output = Console(config.log.progress), Path(sft.output)
    refuse_other_run(output, "sft.output", folder)
    with locked_run(folder, console.warn), locked_output(output, "sft.output", console.warn):
        _run(config, console)
    console.note(f"cold start written to {output}")


def _run(config: Config, console: Console) -> None:
    folder, sft = Path(config.run.dir), dataclasses.replace(config.sft, pack_length=config.sft_row_length)
    config = dataclasses.replace(config, sft=sft)
    model = build_model(config, sft.init_from, Adapters.from_config(config.policy.lora))
    training, held_out = _own_demonstrations(config, model.tokenizer, console.warn)
    updates = [
        count_updates(config, phase, training, model.tokenizer, config.run.seed + number)
        for number, phase in enumerate(sft.phases)
    ]
    schedule = make_schedule(sft.optimizer, sum(updates))
    options = LearnerOptions(
        sft.rows,
        logprob_chunk=config.policy.logprob_chunk,
        rows_key="sft.rows",
        entropy_gradient=False,
        offload=sft.optimizer.offload == "host",
    )
    learner = Learner(model.policy, make_optimizer(sft.optimizer, schedule), model.mesh, options)
    identity = cold_start_identity(config, model, training, base_of(config, model, sft.init_from))
    initial = partial(initial_params, config, model, sft.init_from)
    stop = Stop(
        "the update in progress is finished and saved",
        "the last update is saved",
        "the same command goes on from the saved update",
    )
    with stop, ColdStart(config, identity, learner, initial, console) as cold_start:
        batches = _all_batches(config, updates, training, model.tokenizer, cold_start.step)
        _train(config, cold_start, batches, schedule, sum(updates), held_out, stop)
        write_text(folder / COLD_START, dump_config(config))
        hub.write_pins(folder, model.pins)
        dtype, tokenizer = config.policy.param_dtype, model.tokenizer_folder
        trained = model.policy.merged(learner.whole(cold_start.state["params"]), dtype)
        save_folder(trained, model.hf_config, Path(sft.output), dtype, tokenizer)
        cold_start.finish()


def _train(
    config: Config,
    cold_start: ColdStart,
    batches: Iterator[Batch],
    schedule: Callable[[int], Any],
    total: int,
    held_out: Batch | None,
    stop: Stop,
) -> None:
    """Train on the batches, up to update `total`.

    Raises UserError if it diverged: the parameters are not finite, or no update is, for guards.patience_steps
    updates in a row or from the first to the last.
    """
    folder, every = Path(config.run.dir) / "sft_metrics", config.sft.held_out_every
    learner, console = cold_start.learner, cold_start.console
    patience, first = min(config.guards.patience_steps, total), cold_start.step + 1
    guards = Guards(dataclasses.replace(config.guards, patience_steps=patience), "sft.optimizer.lr")
    backends = open_backends(config.log, folder, first, console.warn)
    with MetricsWriter(folder, backends, first) as writer, console.live("cold start"):
        for step, batch in enumerate(batches, first):
            console.begin_step(step, total)
            rate, tokens = float(schedule(step - 1)), int((batch.segment_ids > 0).sum())
            with stop.held():
                state, metrics = learner.update(cold_start.state, [batch], negative_log_likelihood)
                loss = {"sft/loss": metrics.pop("actor/loss"), "sft/lr": rate, "sft/tokens": float(tokens)}
                metrics = loss | console.end_step({"tokens": (tokens, "step")}) | metrics
                if held_out is not None and (step % every == 0 or step == total):
                    logprobs = learner.logprobs(state["params"], held_out)
                    logprobs = np.where(held_out.weights > 0, logprobs, 0.0)
                    metrics["sft/held_out_loss"] = float(-np.sum(held_out.weights * logprobs))
                metrics["actor/finite"] = float(learner.is_finite(state["params"]))
                verdict = guards.check(step, metrics)
                writer.write(step, metrics | verdict.metrics)
                if guards.is_broken:  # neither the policy nor a state to go on from is written
                    raise UserError(verdict.findings[0])
                cold_start.updated(state)
            if step % 10 == 0 or step == total:
                console.step(step, total, metrics)


def count_updates(
    config: Config, phase: SftPhase, demonstrations: Sequence[Demonstration], tokenizer: Any, seed: int
) -> int:
    """Return the optimizer updates of a phase; UserError if it gives epochs to a generator without end."""
    if not phase.epochs:
        return phase.steps or DEFAULT_STEPS
    if config.sft.demonstrations == "world":
        fault = f"epochs={phase.epochs}, but sft.demonstrations=world writes new demonstrations all the time"
        raise UserError(f"sft.phases: {fault}: give steps")
    samples = [encode_demonstration(each, config, tokenizer, phase.loss_on) for each in demonstrations]
    drawn = (samples[index] for index in _order(len(demonstrations), phase.epochs, seed))
    return sum(1 for _ in _row_fulls(drawn, config.sft.rows, config.sft_row_length))


def _all_batches(
    config: Config, updates: Sequence[int], demonstrations: Sequence[Demonstration], tokenizer: Any, done: int
) -> Iterator[Batch]:
    for number, (phase, count) in enumerate(zip(config.sft.phases, updates, strict=True)):
        skipped = min(done, count)
        done -= skipped
        if skipped < count:
            batches = _batches(config, phase, demonstrations, tokenizer, config.run.seed + number, skipped)
            yield from _made_ahead(batches, count - skipped)


def _made_ahead(batches: Iterator[Batch], count: int) -> Iterator[Batch]:
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

    `warn` gets a line on those that do not fit. Raises UserError as `drop_overlong`.
    """
    sft = config.sft
    if sft.demonstrations == "world":
        if sft.held_out:
            fault = "sft.demonstrations=world writes new demonstrations all the time"
            advice = "sft/loss is a held-out loss already; set it to 0"
            raise UserError(f"sft.held_out is {sft.held_out:g}, but {fault}: {advice}")
        return [], None
    name, rule, actions = "sft.demonstrations", config.data.overlong_prompts, make_actions(config)
    longest, pack_length = config.rollout.max_prompt_length, config.sft_row_length
    demonstrations = load_demonstrations(Path(sft.demonstrations), grammar_of(actions))

    def fitting(lengths: dict[int, int], longest: int, *limit: str) -> list[Demonstration]:
        questions = [demonstration.question for demonstration in demonstrations]
        if warning := drop_overlong(questions, lengths, longest, rule, name, *limit)[1]:
            warn(warning)
        return [demonstration for place, demonstration in enumerate(demonstrations) if place not in lengths]

    questions = [demonstration.question for demonstration in demonstrations]
    demonstrations = fitting(prompt_lengths(questions, tokenizer, config.prompt, longest, actions), longest)
    sizes = enumerate(demonstration_length(each, config, tokenizer) for each in demonstrations)
    long_rows = {place: size for place, size in sizes if size > pack_length}
    demonstrations = fitting(long_rows, pack_length, "demonstrations", "sft.pack_length")
    training, held_out = split_off(demonstrations, sft.held_out, config.run.seed)
    samples = [encode_demonstration(each, config, tokenizer, "sampled") for each in held_out]
    return training, pack(samples, pack_length) if samples else None


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
    sft, longest = config.sft, config.sft_row_length
    drawn: Iterable[Demonstration]
    if sft.demonstrations == "world":
        drawn = load_optional("worlds.demonstrations").GENERATORS[phase.kind](seed, config.world)
    else:
        drawn = (demonstrations[index] for index in _order(len(demonstrations), phase.epochs, seed))

    def fitting_sample(demonstration: Demonstration) -> Sample:
        sample = encode_demonstration(demonstration, config, tokenizer, phase.loss_on)
        if (size := len(sample.tokens)) > longest:
            fault = f"demonstration of question {demonstration.question.id!r} has {size} tokens"
            raise UserError(f"{fault}, but sft.pack_length is {longest}: raise it")
        return sample

    for full in islice(_row_fulls(map(fitting_sample, drawn), sft.rows, longest), skipped, None):
        yield pack(full, longest, weights=token_weights(full, "token_mean"))


def _row_fulls(samples: Iterable[Sample], rows: int, pack_length: int) -> Iterator[list[Sample]]:
    """Yield lists of samples, in their order, that each fill the rows; the last one need not."""
    pending: list[Sample] = []
    lengths: list[int] = []
    shapes = [RowShape(pack_length, 1)]
    for sample in samples:
        pending.append(sample)
        lengths.append(len(sample.tokens))
        if _may_need_more(lengths, rows, pack_length) and plan(lengths, shapes).num_rows[0] > rows:
            yield pending[:-1]
            pending, lengths = pending[-1:], lengths[-1:]
    if pending:
        yield pending


def _may_need_more(lengths: Sequence[int], rows: int, pack_length: int) -> bool:
    """Return False only if `plan` needs at most `rows` rows, at a fraction of its cost.

    A sample opens one more row only if each of the other rows holds too many tokens for it.
    """
    ordered = np.sort(lengths)[::-1]  # as first-fit decreasing takes them
    fewest = rows * (pack_length + 1 - ordered) + ordered
    return bool(np.any(np.cumsum(ordered) >= fewest))


def _order(count: int, epochs: int | None, seed: int) -> Iterator[int]:
    """Yield indices in another order in every epoch; without end if `epochs` is None."""
    rng = np.random.default_rng(seed)
    for _ in itertools.count() if epochs is None else range(epochs):
        yield from rng.permutation(count)


def encode_demonstration(
    demonstration: Demonstration, config: Config, tokenizer: Any, loss_on: str
) -> Sample:
    """Return a demonstration in the agent loop's tokens, whether or not they fit in a row."""
    actions, longest = make_actions(config), config.rollout.max_prompt_length
    grammar = grammar_of(actions)
    prompt, opening = open_prompt(demonstration.question, tokenizer, config.prompt, longest, actions)
    parts: list[tuple[np.ndarray, bool]] = [(prompt, False)]
    shown = Observations(tokenizer, config.rollout.max_observation_length, config.prompt.opening)
    by_name: dict[str, Action] = {action.name: action for action in actions or (SearchAction(),)}
    for number, turn in enumerate(demonstration.turns, 1):
        text = behind_opening(opening if number == 1 else shown.opening, turn.text)
        parts.append((np.asarray(encode(tokenizer, text), np.int32), turn.trained))
        action = by_name.get(parse_turn(turn.text, "eos", grammar).kind)
        goes_on = action is not None and number < len(demonstration.turns)
        if goes_on or turn.documents or turn.observation:
            observation = neutralise_observation(turn.observation, added_token_strings(tokenizer), grammar)
            documents = neutralise_documents(turn.documents, tokenizer, grammar)
            renderer = SearchAction() if isinstance(action, SearchAction) else AccessAction()  # no user code
            body = renderer.render(Reply(tuple(documents), observation))
            parts.append((shown.of(action or SearchAction()).information(body)[0], False))
    tokens = np.concatenate([ids for ids, _ in parts]).astype(np.int32)
    mask = np.concatenate([np.full(len(ids), learned or loss_on == "all") for ids, learned in parts])
    mask[0] = False  # nothing precedes the first token
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, zeros, zeros)


def demonstration_length(demonstration: Demonstration, config: Config, tokenizer: Any) -> int:
    return len(encode_demonstration(demonstration, config, tokenizer, "sampled").tokens)


class ColdStart:
    """State and checkpoints of a cold start. As a block, it saves its last update if it is interrupted.

    `initial` returns the parameters to begin with, which are donated, unless a checkpoint has them. Raises
    UserError if the folder holds an unfinished cold start of other settings, or a damaged one.
    """

    def __init__(
        self,
        config: Config,
        identity: Mapping[str, str],
        learner: Learner,
        initial: Callable[[], Params],
        console: Console,
    ):
        self.folder, self.every = Path(config.run.dir), config.sft.checkpoint_every
        self.learner, self.console = learner, console
        now = {"config": kept_values(config), "identity": dict(identity)}
        if (self.folder / GONE).exists():
            shutil.rmtree(self.folder / GONE)
        newest = newest_step(self.folder / CHECKPOINTS)
        if newest is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / START, now)
        else:
            _check_unfinished(self.folder, now["config"], identity)
        self.state: State = {}
        if newest is None or learner.policy.adapters:  # a checkpoint holds adapters without their base
            self.state = learner.init(initial())
        self._store = CheckpointStore(self.folder / CHECKPOINTS, keep=1)
        self.step = self._saved = newest or 0
        self._saved_at = time.monotonic()
        if newest is not None:
            self.state, _ = self._store.restore(newest, learner.abstract_state)
            console.note(f"going on from update {newest}")

    def updated(self, state: State) -> None:
        """Take the state after one more update, and save it if that is due."""
        self.state, self.step = state, self.step + 1
        if self.every and (self.step % self.every == 0 or time.monotonic() - self._saved_at > MOST_SECONDS):
            self._save()

    def finish(self) -> None:
        self._saved = self.step
        self._store.close()
        # All checkpoints go at once: after a kill the next cold start continues or begins anew.
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
        except Exception as error:  # whatever Orbax raises: it must not hide why the cold start stopped
            self.console.note(f"update {self.step} could not be saved: {' '.join(str(error).split())}")

    def _save(self) -> None:
        self._store.save(self.step, self.state, {})
        self._store.wait()
        self._saved, self._saved_at = self.step, time.monotonic()


def _check_unfinished(folder: Path, config: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    advice = f"choose another run.dir, or remove {folder / CHECKPOINTS} to begin again"
    try:
        start = json.loads((folder / START).read_text(encoding="utf-8"))
        before, hashes = with_defaults(start["config"]), start["identity"]
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        fault = f"lost or damaged, so that the settings of {CHECKPOINTS} are unknown"
        raise UserError(f"{folder / START}: {fault}; {advice}") from error
    changed = changed_keys(before, config, COMPARED, FREE)
    changed += [name for name, _, _ in differences(hashes, identity)]
    if changed:
        fault = f"an unfinished cold start with other settings ({', '.join(changed)})"
        raise UserError(f"run.dir={folder} holds {fault}; {advice}")
