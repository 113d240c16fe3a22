"""The folder of a run: its config at every start, and whether a start continues the same experiment."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from calibadv_jax import hub
from calibadv_jax.config import Config, dump_config, known_keys
from calibadv_jax.errors import UserError
from calibadv_jax.metrics.console import table
from calibadv_jax.model import Model
from calibadv_jax.snapshots.checkpoint import has_checkpoint
from calibadv_jax.snapshots.huggingface import copy_tokenizer
from calibadv_jax.trajectory import Question

# Keys and sections that do not change what is learned: where things lie, how fast they run, what is shown.
FREE = (
    "run.dir",
    "mesh",
    "world",
    "data.train",  # what the file holds is data.content
    "data.eval",
    "data.eval_limit",
    "policy.path",  # what the folder holds is policy.config and policy.vocabulary
    "policy.tokenizer",
    "policy.attention",
    "policy.attention_chunk",
    "policy.logprob_chunk",
    "policy.remat",
    "rollout.max_concurrency",
    "rollout.max_failed_share",
    "rollout.time_limit",
    "sampler",
    "retriever",
    "learner.microbatch_rows",
    "learner.row_length",
    "learner.row_widths",
    "learner.optimizer.offload",
    "sft",
    "checkpoint",
    "evaluate",
    "guards",
    "export",
    "log",
)
SERVICE = "retriever.content"  # which index is searched: known when the service answers (run_service.py)
COLD_START = "sft.yaml"  # the config of the cold start
COLD_START_KEYS = ("run.seed", "policy.init", "world", "prompt", "sft")
BINDING = (  # of the sections above
    "sampler.name",
    "retriever.encoder",
    "retriever.topk",
    "retriever.retrieval_topk",
    "retriever.rerank_topk",
    "retriever.reranker",
)


def enter_run_folder(
    config: Config, model: Model, questions: Sequence[Question], say: Callable[[str], None]
) -> Path:
    """The run's folder, with this start's config as ``configs/N.yaml`` and the policy's config and tokenizer.

    Everything is checked before anything is written.

    Args:
        questions: of data.train.
        say: prints how this start differs from the last one.

    Raises:
        UserError: the folder holds checkpoints of another experiment, or of a run that is not to be resumed,
            or it cannot be written.
    """
    folder = Path(config.run.dir)
    identity = {
        "data.content": _hash([dataclasses.astuple(question) for question in questions]),
        "policy.config": _hash(model.hf_config),
        "policy.vocabulary": model.tokenizer_hash,
    }
    numbered = [path for path in (folder / "configs").glob("*.yaml") if path.stem.isdigit()]
    starts = sorted(numbered, key=lambda path: int(path.stem))
    if has_checkpoint(folder / "checkpoints"):
        _check_resume(config, identity, starts, say)
    path = folder / "configs" / f"{int(starts[-1].stem) + 1 if starts else 0}.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(identity, indent=2), encoding="utf-8")
        path.write_text(dump_config(config), encoding="utf-8")
        write_policy_folder(folder / "policy", model)
        hub.write_pins(folder, model.pins)
    except OSError as error:
        raise UserError(
            f"run.dir={folder} cannot be written ({error.strerror}: {error.filename}); choose another folder"
        ) from error
    return folder


def check_cold_start(config: Config, may_differ: Sequence[str] = ()) -> None:
    """Whether the cold start that lies in sft.output is the one that the config describes.

    Args:
        may_differ: keys and sections that do not count.

    Raises:
        UserError: it was made with other settings.
    """
    path = Path(config.run.dir) / COLD_START
    if not path.is_file():
        return
    before = _written(path)
    changed = [
        name
        for name, _, _ in differences(before, dataclasses.asdict(config))
        if _names(COLD_START_KEYS, name) and not _names(may_differ, name)
    ]
    if changed:
        raise UserError(
            f"{config.sft.output}: holds a cold start with other settings ({', '.join(changed)}); choose"
            " another run.dir, or remove the folder"
        )


def write_policy_folder(folder: Path, model: Model) -> None:
    """Writes config.json and tokenizer, which export and vLLM workers take."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.hf_config, indent=2), encoding="utf-8")
    copy_tokenizer(model.tokenizer_folder, folder)


def _check_resume(
    config: Config, identity: Mapping[str, str], starts: Sequence[Path], say: Callable[[str], None]
) -> None:
    folder, allowed = Path(config.run.dir), config.checkpoint.allow_change
    keys = known_keys().keys() | identity.keys() | {SERVICE}
    unknown = [name for name in allowed if name not in keys]
    if unknown:
        raise UserError(
            f"checkpoint.allow_change names {unknown[0]!r}, which is no key; see docs/configuration.md"
        )
    if not config.checkpoint.resume:
        raise UserError(
            f"run.dir={folder} holds checkpoints, and checkpoint.resume is false; choose another run.dir, or"
            " remove the folder"
        )
    if not starts:
        raise UserError(
            f"run.dir={folder} holds checkpoints, but no configs/: an earlier version wrote them; choose"
            " another run.dir"
        )
    before = _written(starts[-1])
    known = json.loads(starts[-1].with_suffix(".json").read_text(encoding="utf-8"))
    changes = list(differences(before, dataclasses.asdict(config)))
    changes += differences(known, identity)
    refused = [name for name, _, _ in changes if is_binding(name, config) and not _names(allowed, name)]
    if changes:
        rows = [
            [name, _short(old), _short(new), "refused" if name in refused else "accepted"]
            for name, old, new in changes
        ]
        say(table(rows, ["changed since the last start", "then", "now", ""]))
    if refused:
        keys = known_keys().keys() | identity.keys()
        refused = list(dict.fromkeys(_known(name, keys) for name in refused))
        raise UserError(
            f"run.dir={folder} holds another experiment: {', '.join(refused)} changed (table above); choose"
            f" another run.dir, or accept it: checkpoint.allow_change=[{', '.join(refused)}]"
        )


def _written(path: Path) -> dict[str, Any]:
    """The config that an earlier start wrote. A key that is newer than the file had its default."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    found: Any = OmegaConf.to_container(OmegaConf.merge(dataclasses.asdict(Config()), values))
    return dict(found)


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value before, value now) of every key that differs; None where a side lacks it."""
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield prefix + name, old, new


def is_binding(name: str, config: Config) -> bool:
    """Whether a change of this key makes a resumed run another experiment."""
    # A longer run is the same one, unless its learning rate depends on the length.
    if name == "learner.steps":
        optimizer = config.learner.optimizer
        return optimizer.schedule != "constant" and not optimizer.decay_updates
    return _names(BINDING, name) or not _names(FREE, name)


def _known(name: str, keys: Collection[str]) -> str:
    """The key that `name` is, or is an entry of: data.weights of data.weights.nq."""
    while name not in keys:
        name = name.rpartition(".")[0]
    return name


def _names(keys: Sequence[str], name: str) -> bool:
    """Whether a key or its section is among `keys`."""
    return any(name == one or name.startswith(f"{one}.") for one in keys)


def _short(value: Any) -> str:
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:36]}…"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
