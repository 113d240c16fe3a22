"""The folder of a run: its config at every start, and whether a start continues the same experiment.

What a resumed run compares, in this order:

1. every config key with the newest kept config, unless it is marked as changing no result (here);
2. hashes of what the config only names: questions, model, vocabulary, weights, judge, tools
   (`run/fingerprints.py`); both differences are shown in one table (`run/comparison.py`);
3. the index of the retriever, when it has answered (`check_service`, here);
4. shapes of the parameters, the base of adapters, and pending questions, when the checkpoint is restored
   (`run/state.py`, `snapshots/checkpoint.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from calibadv_jax.config import Config, dump_config, known_keys
from calibadv_jax.config.kept import KeptStart, add_start, newest_start, read_config, rebase_paths
from calibadv_jax.config.keys import is_among
from calibadv_jax.config.load import kept_values
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.trajectory import Question
from calibadv_jax.metrics.console import table
from calibadv_jax.metrics.metrics_writer import read_metrics
from calibadv_jax.rollout_store.schema import kept_steps
from calibadv_jax.run.comparison import (
    COLD_START_KEYS,
    changed_keys,
    differences,
    is_binding,
    offers_same,
    with_defaults,
)
from calibadv_jax.run.fingerprints import IDENTITY, OPTIONAL, own_functions, run_identity
from calibadv_jax.run.model import BASE, Model, adapter_base
from calibadv_jax.services.retriever_health import index_difference
from calibadv_jax.services.retriever_health import index_identity as index_identity
from calibadv_jax.snapshots.checkpoint import finish_rollback, newest_step, saved_steps
from calibadv_jax.snapshots.huggingface import copy_tokenizer

if TYPE_CHECKING:
    from calibadv_jax.snapshots.mirror import Mirror

SERVICE = "retriever.content"  # Name of the index, which `check_service` compares when the service answers.
SERVICE_FILE = "retriever.json"  # File in the run's folder: how the retrieval service described its index.
COLD_START = "sft.yaml"  # File in the run's folder: the config of the cold start.
MAX_CELL = 40  # Characters of a value in the table of changes.


@dataclass(frozen=True)
class Change:
    """A difference between a start and the one before it."""

    name: str  # dotted key, or name of a hash in `IDENTITY`
    old: Any
    new: Any
    is_binding: bool  # whether it makes the run another experiment


def enter_run_folder(
    config: Config,
    model: Model,
    questions: Sequence[Question],
    say: Callable[[str], None],
    mirror: Mirror | None = None,
) -> Path:
    """Write this start's ``configs/N.yaml``, and the policy's config and tokenizer, to the run's folder.

    Everything is checked before anything is written, or fetched from the mirror.

    Args:
        config: The config to keep, without the addresses of services that this start itself began.
        model: The run's model.
        questions: The training questions whose prompts fit.
        say: Gets lines for the terminal.
        mirror: The run's mirror, whose configs and inputs are here already; its checkpoints are fetched.

    Returns:
        The run's folder.

    Raises:
        UserError: The folder holds another experiment, must not be resumed, or cannot be written.
    """
    folder = Path(config.run.dir)
    identity = run_identity(config, model, questions)
    is_newer = bool(mirror and mirror.has_newer())
    if is_newer or holds_training(folder):
        _check_resume(config, identity, say, is_newer)
    finish_rollback(folder)
    if mirror:
        mirror.fetch(claim=True)
    if holds_training(folder):
        _say_history(folder, say)
    try:
        add_start(folder, dump_config(config), identity)
        _write_policy_files(config, model, folder / "policy")
        hub.write_pins(folder, model.pins)
    except OSError as error:
        raise UserError(
            f"run.dir={folder} cannot be written ({error.strerror}: {error.filename}); choose another folder"
        ) from error
    return folder


def _write_policy_files(config: Config, model: Model, folder: Path) -> None:
    """Write config.json and the tokenizer, and with adapters base.json, for readers of the checkpoints."""
    base = adapter_base(config, model, config.policy.path)
    folder.mkdir(exist_ok=True)
    if base:
        base.write(folder)
    else:
        (folder / BASE).unlink(missing_ok=True)
    write_json(folder / "config.json", model.hf_config)
    copy_tokenizer(model.tokenizer_folder, folder)


def holds_training(folder: Path) -> bool:
    """Whether a run's folder holds trained steps, with or without a checkpoint of them."""
    return bool(saved_steps(folder / "checkpoints") or _logged_steps(folder) or kept_steps(folder))


def _logged_steps(folder: Path) -> set[int]:
    """Return the steps that have a row of metrics."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return set()
    return {row["step"] for row in read_metrics(path)}


def _say_history(folder: Path, say: Callable[[str], None]) -> None:
    """Say how many steps were trained after the newest checkpoint, and are trained again."""
    saved = newest_step(folder / "checkpoints") or 0
    trained = _logged_steps(folder) | kept_steps(folder).keys()
    num_repeated = sum(step > saved for step in trained)
    if not num_repeated:
        return
    count = "1 step is" if num_repeated == 1 else f"{num_repeated} steps are"
    newest = f"the newest checkpoint is that of step {saved}" if saved else "there is no checkpoint yet"
    say(f"{count} trained again: {newest} (checkpoint.every)")


def check_cold_start(config: Config, may_differ: Sequence[str] = ()) -> None:
    """Check that sft.output holds the cold start that the config describes.

    Args:
        config: The config of the run that begins with it.
        may_differ: Keys and sections that are not compared.

    Raises:
        UserError: The cold start had other settings. Without a kept config nothing is compared.
    """
    path = Path(config.run.dir) / COLD_START
    if not path.is_file():
        return
    values = read_config(path, f"remove {config.sft.output}, and the cold start is made again")
    before = with_defaults(rebase_paths(values, path.parent))
    now = with_defaults(rebase_paths(kept_values(config), path.parent))
    if config.sft.pack_length is None:  # the cold start has chosen it
        now["sft"]["pack_length"] = before["sft"]["pack_length"]
    changed = changed_keys(before, now, COLD_START_KEYS, may_differ)
    if changed:
        raise UserError(
            f"{config.sft.output}: holds a cold start with other settings ({', '.join(changed)}); choose"
            " another run.dir, or remove the folder"
        )


def check_service(config: Config, folder: Path, state: Mapping[str, Any]) -> None:
    """Check that the retrieval service has the index of the last start, and keep its description.

    Args:
        config: The run's config. If checkpoint.allow_change names retriever.content or its section, any index
            is accepted.
        folder: The run's folder.
        state: The reply of the service's health endpoint.

    Raises:
        UserError: The folder holds steps that were trained with another index, or cannot be written.
    """
    path = folder / SERVICE_FILE
    if holds_training(folder) and not is_among(config.checkpoint.allow_change, SERVICE):
        _check_index(path, state)
    try:
        write_json(path, index_identity(state))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error


def _check_index(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse (UserError) an index that differs from the one described in the file."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # earlier versions of this project wrote no such file
        return
    except ValueError as error:
        raise UserError(
            f"{path}: damaged, so that the index of the last start is not known; remove it to accept the"
            " service that is there now"
        ) from error
    other = index_difference(before, state)
    if other:
        raise UserError(
            f"run.dir={path.parent}: the retrieval service has another index than at the last start"
            f" ({other}); serve that index, choose another run.dir, or accept it:"
            f" checkpoint.allow_change=[{SERVICE}]"
        )


def _check_resume(
    config: Config, identity: Mapping[str, str], say: Callable[[str], None], is_newer: bool
) -> None:
    """Refuse (UserError) to continue the folder's run if this start makes another experiment of it."""
    folder = Path(config.run.dir)
    allowed = config.checkpoint.allow_change
    keys = known_keys().keys() | {*IDENTITY, SERVICE}
    for name in allowed:
        if name not in keys:
            raise UserError(
                f"checkpoint.allow_change names {name!r}, which is no key; see docs/configuration.md"
            )
    holds_checkpoints = is_newer or saved_steps(folder / "checkpoints")
    if holds_checkpoints and not config.checkpoint.resume:
        place = f"run.mirror={config.run.mirror}" if is_newer else f"run.dir={folder}"
        raise UserError(
            f"{place} holds checkpoints, and checkpoint.resume is false; choose another place, or remove it"
        )
    start = newest_start(folder)
    if start is None:
        raise UserError(
            f"run.dir={folder} holds trained steps, but their configs/ is lost; choose another run.dir"
        )
    refused = []
    rows = []
    for change in _changes(start, config, identity):
        verdict = "accepted"
        if change.is_binding and not is_among(allowed, change.name):
            verdict = "refused"
            refused.append(change.name)
        rows.append([change.name, _short(change.old), _short(change.new), verdict])
    if rows:
        say(table(rows, ["changed since the last start", "then", "now", ""]))
    if refused:
        owners = dict.fromkeys(_owning_key(name, keys) for name in refused)
        _refuse(config, start, list(owners))


def _owning_key(name: str, keys: Iterable[str]) -> str:
    """Return the config key of a changed value: data.weights of data.weights.nq, for example."""
    owners = [key for key in keys if is_among([key], name)]
    return max(owners, key=len, default=name)


def _changes(start: KeptStart, config: Config, identity: Mapping[str, str]) -> list[Change]:
    """Return what differs between the last start and this one."""
    now = with_defaults(rebase_paths(kept_values(config), Path(config.run.dir)))
    before = with_defaults(start.config)
    changes = []
    for name, old, new in differences(before, now):
        binds = is_binding(name, config)
        if name == "tools" and offers_same(before, now):
            binds = False
        changes.append(Change(name, old, new, binds))
    in_both = start.identity.keys() & identity.keys()
    for name, old, new in differences(start.identity, identity):
        if name not in OPTIONAL or name in in_both:
            changes.append(Change(name, old, new, is_binding=True))
    return changes


def _refuse(config: Config, start: KeptStart, refused: Sequence[str]) -> NoReturn:
    """Raise the error for a start with other values of the `refused` keys and hashes."""
    names = ", ".join(refused)
    lost = [name for name in refused if name in IDENTITY and not start.identity]
    reason = f"{names} changed (table above)"
    if "learner.steps" in refused:
        reason += (
            ": the learning rate falls over learner.steps, unless decay_updates was set or it is constant"
        )
    functions = own_functions(config)
    edited = [address for name in refused for address in functions.get(name, [])]
    if edited:
        reason += f": the code of {', '.join(edited)}, or of your modules that it imports, was edited"
    if lost:
        reason += f": {start.path.with_suffix('.json')} is lost, so that they cannot be compared"
    place = f"run.dir={Path(config.run.dir)}"
    hint = "choose another run.dir"
    if config.run.mirror:
        place += f" or run.mirror={config.run.mirror}"
        hint += " and another run.mirror"
    hint += f", or go on with this run all the same: checkpoint.allow_change=[{names}]"
    raise UserError(f"{place} holds another experiment: {reason}; {hint}")


def _short(value: Any) -> str:
    """Return a value as text for a cell of the table of changes."""
    if value is None:
        text = "-"
    elif isinstance(value, str):
        text = value
    else:
        text = json.dumps(value)
    if len(text) <= MAX_CELL:
        return text
    return f"{text[: MAX_CELL - 4]}…"
