"""The folder of a run: its config at every start, and whether a start continues the same experiment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from calibadv_jax.config import Config, SftPhase, ToolConfig, dump_config, known_keys
from calibadv_jax.config.kept import Start, add_start, newest_start, read_config, rebase_paths
from calibadv_jax.config.keys import among, marked
from calibadv_jax.config.load import kept_values, with_references
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.trajectory import Question
from calibadv_jax.metrics.console import table
from calibadv_jax.metrics.writer import read_metrics
from calibadv_jax.rollout_store.schema import kept_steps
from calibadv_jax.run.fingerprints import IDENTITY, OPTIONAL, run_identity
from calibadv_jax.run.model import BASE, Model, base_of
from calibadv_jax.services.retriever_health import difference
from calibadv_jax.services.retriever_health import identity as index_identity
from calibadv_jax.snapshots.checkpoint import finish_rollback, newest_step, saved_steps
from calibadv_jax.snapshots.huggingface import copy_tokenizer

if TYPE_CHECKING:
    from calibadv_jax.snapshots.mirror import Mirror

UNLEARNED, LEARNED, TUNED = marked(Mark.UNLEARNED), marked(Mark.LEARNED), marked(Mark.TUNED)
COLD_START_KEYS = marked(Mark.COLD_START)
SERVICE = "retriever.content"  # the index; compared when the service answers, by `check_service`
SERVICE_FILE = "retriever.json"  # in the run's folder: how the retrieval service described its index
COLD_START = "sft.yaml"  # the config of the cold start


def enter_run_folder(
    config: Config,
    model: Model,
    questions: Sequence[Question],
    say: Callable[[str], None],
    mirror: Mirror | None = None,
) -> Path:
    """Return the run's folder, with this start's ``configs/N.yaml``, and the policy's config and tokenizer.

    Everything is checked before anything is written, or fetched from the `mirror`, whose configs and inputs
    are here already. `config` lacks the addresses of services that this start itself began. Raises UserError
    if the folder holds another experiment, must not be resumed, or cannot be written.
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
        policy, base = folder / "policy", base_of(config, model, config.policy.path)
        policy.mkdir(exist_ok=True)
        if base:
            base.write(policy)
        else:
            (policy / BASE).unlink(missing_ok=True)
        write_json(policy / "config.json", model.hf_config)
        copy_tokenizer(model.tokenizer_folder, policy)
        hub.write_pins(folder, model.pins)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
        raise UserError(f"run.dir={folder} cannot be written ({reason}); choose another folder") from error
    return folder


def holds_training(folder: Path) -> bool:
    """Whether a run's folder holds trained steps, with or without a checkpoint of them."""
    return bool(saved_steps(folder / "checkpoints") or _logged_steps(folder) or kept_steps(folder))


def _logged_steps(folder: Path) -> set[int]:
    path = folder / "metrics.jsonl"
    return {row["step"] for row in read_metrics(path)} if path.is_file() else set()


def _say_history(folder: Path, say: Callable[[str], None]) -> None:
    saved = newest_step(folder / "checkpoints") or 0
    if again := sum(step > saved for step in _logged_steps(folder) | kept_steps(folder).keys()):
        newest = f"the newest checkpoint is that of step {saved}" if saved else "there is no checkpoint yet"
        count = "1 step is" if again == 1 else f"{again} steps are"
        say(f"{count} trained again: {newest} (checkpoint.every)")


def check_cold_start(config: Config, may_differ: Sequence[str] = ()) -> None:
    """Refuse (UserError) a cold start in sft.output with other settings, `may_differ` apart."""
    path = Path(config.run.dir) / COLD_START
    if not path.is_file():
        return
    values = read_config(path, f"remove {config.sft.output}, and the cold start is made again")
    before = with_defaults(rebase_paths(values, path.parent))
    now = with_defaults(rebase_paths(kept_values(config), path.parent))
    if config.sft.pack_length is None:  # the cold start has chosen it
        now["sft"]["pack_length"] = before["sft"]["pack_length"]
    if changed := changed_keys(before, now, COLD_START_KEYS, may_differ):
        fault = f"holds a cold start with other settings ({', '.join(changed)})"
        raise UserError(f"{config.sft.output}: {fault}; choose another run.dir, or remove the folder")


def check_service(config: Config, folder: Path, state: Mapping[str, Any]) -> None:
    """Compare the retrieval service, by its health reply, with the last start's, and keep its description.

    Raises UserError if the folder holds steps that were trained with another index, and
    checkpoint.allow_change names neither retriever.content nor its section; or it cannot be written.
    """
    path = folder / SERVICE_FILE
    if holds_training(folder) and not among(config.checkpoint.allow_change, SERVICE):
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:  # an earlier version wrote none
            before = index_identity(state)
        except ValueError as error:
            fault = "damaged, so that the index of the last start is not known"
            advice = "remove it to accept the service that is there now"
            raise UserError(f"{path}: {fault}; {advice}") from error
        if other := difference(before, state):
            fault = f"the retrieval service has another index than at the last start ({other})"
            advice = f"choose another run.dir, or accept it: checkpoint.allow_change=[{SERVICE}]"
            raise UserError(f"run.dir={folder}: {fault}; serve that index, {advice}")
    try:
        write_json(path, index_identity(state))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error


def _check_resume(
    config: Config, identity: Mapping[str, str], say: Callable[[str], None], is_newer: bool
) -> None:
    folder, allowed = Path(config.run.dir), config.checkpoint.allow_change
    keys = known_keys().keys() | {*IDENTITY, SERVICE}
    if unknown := [name for name in allowed if name not in keys]:
        fault = f"checkpoint.allow_change names {unknown[0]!r}, which is no key"
        raise UserError(f"{fault}; see docs/configuration.md")
    if (is_newer or saved_steps(folder / "checkpoints")) and not config.checkpoint.resume:
        place = f"run.mirror={config.run.mirror}" if is_newer else f"run.dir={folder}"
        fault = f"{place} holds checkpoints, and checkpoint.resume is false"
        raise UserError(f"{fault}; choose another place, or remove it")
    start = newest_start(folder)
    if start is None:
        fault = f"run.dir={folder} holds trained steps, but their configs/ is lost"
        raise UserError(f"{fault}; choose another run.dir")
    changes = list(_changes(start, config, identity))
    refused = [name for name, _, _, binds in changes if binds and not among(allowed, name)]
    rows = [
        [name, _short(old), _short(new), "refused" if name in refused else "accepted"]
        for name, old, new, _ in changes
    ]
    if rows:
        say(table(rows, ["changed since the last start", "then", "now", ""]))
    if refused:
        # Of data.weights.nq, for example, the key is data.weights.
        owners = [max((key for key in keys if among([key], name)), key=len, default=name) for name in refused]
        _refuse(config, start, list(dict.fromkeys(owners)))


def _changes(
    start: Start, config: Config, identity: Mapping[str, str]
) -> Iterator[tuple[str, Any, Any, bool]]:
    """Yield (dotted key, value then, value now, whether it makes another experiment)."""
    now = with_defaults(rebase_paths(kept_values(config), Path(config.run.dir)))
    before = with_defaults(start.config)
    for name, old, new in differences(before, now):
        is_equal = name == "tools" and offers_same(before, now)
        yield name, old, new, is_binding(name, config) and not is_equal
    both = start.identity.keys() & identity.keys()
    for name, old, new in differences(start.identity, identity):
        if name not in OPTIONAL or name in both:
            yield name, old, new, True


def _refuse(config: Config, start: Start, refused: Sequence[str]) -> NoReturn:
    folder, mirror, names = Path(config.run.dir), config.run.mirror, ", ".join(refused)
    lost = [name for name in refused if name in IDENTITY and not start.identity]
    why, place, hint = f"{names} changed (table above)", f"run.dir={folder}", "choose another run.dir"
    if "learner.steps" in refused:
        why += ": the learning rate falls over learner.steps, unless decay_updates was set or it is constant"
    if lost:
        why += f": {start.path.with_suffix('.json')} is lost, so that they cannot be compared"
    if mirror:
        place, hint = f"{place} or run.mirror={mirror}", f"{hint} and another run.mirror"
    if lost == list(refused) or all(among(TUNED, name) for name in refused):
        hint += f", or go on with this run all the same: checkpoint.allow_change=[{names}]"
    raise UserError(f"{place} holds another experiment: {why}; {hint}")


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kept config with defaults of newer keys, and references for values of earlier versions."""
    config: dict[str, Any] = _merged(dataclasses.asdict(Config()), values)
    phase, tool = dataclasses.asdict(SftPhase()), dataclasses.asdict(ToolConfig("search")) | {"name": ""}
    config["sft"]["phases"] = [phase | values for values in config["sft"]["phases"]]
    tools = [{"name": entry} if isinstance(entry, str) else entry for entry in config["tools"]]
    config["tools"] = [tool | values for values in tools]
    return with_references(config)


def _merged(defaults: Any, values: Any) -> Any:
    if not (isinstance(defaults, Mapping) and isinstance(values, Mapping)):
        return values
    return {**defaults, **{name: _merged(defaults.get(name), value) for name, value in values.items()}}


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value before, value now) of every key that differs; None if a side lacks it."""
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield prefix + name, old, new


def offers_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two configs' actions differ only in addresses and timeouts; tools have a hash."""

    def offer(tool: Mapping[str, Any]) -> dict[str, Any]:
        server = tool["mcp"] and {"timeout": 0, "patience": 0, "url": bool(tool["mcp"]["url"])}
        return {**tool, "timeout": 0, "mcp": server and {**tool["mcp"], **server}}

    return [offer(tool) for tool in before["tools"]] == [offer(tool) for tool in now["tools"]]


def changed_keys(
    before: Mapping[str, Any], now: Mapping[str, Any], compared: Sequence[str], free: Sequence[str]
) -> list[str]:
    """Return the keys among `compared`, but not among `free`, that differ between two configs."""
    return [
        name
        for name, _, _ in differences(before, now)
        if among(compared, name) and not among(free, name)
        if name != "tools" or not offers_same(before, now)
    ]


def is_binding(name: str, config: Config) -> bool:
    """Whether a change of this key makes a resumed run another experiment."""
    if name == "learner.steps":  # a longer run is the same one, unless a rate depends on the length
        critic = [config.critic.optimizer] if config.advantage.has_critic else []
        optimizers = [config.learner.optimizer, *critic]
        return any(each.schedule != "constant" and not each.decay_updates for each in optimizers)
    if among(["policy.init"], name):
        return not config.policy.path
    return among(LEARNED, name) or not among(UNLEARNED, name)


def _short(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]}…"
