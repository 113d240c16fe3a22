"""The names of all keys, and the keys that an unknown name may stand for."""

from __future__ import annotations

import difflib
import functools
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from calibadv_jax.config.root import Config
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError

PEER_PAGE = "docs/coming_from.md"
_PEER_TABLE = Path(__file__).with_name("peer_keys.yaml")
# Parts of the table that are no trainer's: names of papers, and keys of earlier versions of this project.
_SHORT_NAMES = "short names"
_EARLIER_VERSIONS = "earlier versions"
# Keys of earlier versions -> the value that is fixed now; the table of peers' keys says why.
REMOVED = {"policy.lora.dropout": 0.0, "reward.judge.max_answer": 2000, "sampler.request_timeout": 1800.0}
# Keys of earlier versions -> their present names. Configs that runs have kept get the present names;
# in a user's own config the old name is refused with a hint from the table of peers' keys.
RENAMED = {
    "rollout.replace_tied": "rollout.dynamic_sampling",
    "learner.row_length": "learner.pack_length",
    "learner.optimizer.warmup_steps": "learner.optimizer.warmup_updates",
    "critic.optimizer.warmup_steps": "critic.optimizer.warmup_updates",
    "sft.optimizer.warmup_steps": "sft.optimizer.warmup_updates",
    "guards.patience": "guards.patience_steps",
}


@dataclass(frozen=True)
class PeerKey:
    """A key of another trainer, or of an earlier version of this one."""

    trainer: str  # "" for a short name
    name: str  # dotted
    keys: tuple[str, ...]  # of this project, that together stand for it; empty: it has no counterpart
    note: str  # how the value differs, or why there is no counterpart


@functools.cache
def peer_keys() -> tuple[PeerKey, ...]:
    """Return the keys of other trainers, from the table beside this module."""
    table = yaml.safe_load(_PEER_TABLE.read_text(encoding="utf-8"))
    keys = []
    for trainer, rows in table.items():
        for name, text in rows.items():
            names, _, note = text.partition("; ")
            trainer_name = "" if trainer == _SHORT_NAMES else trainer
            keys.append(PeerKey(trainer_name, name, tuple(filter(None, names.split(", "))), note))
    return tuple(keys)


def find_peer_keys(dotted: str) -> tuple[list[PeerKey], int]:
    """Return the peers' keys that share the longest end with a name, and the number of words they share.

    Keys with a counterpart come alone, if there are any. A key of exactly this name shares all words.
    """
    words = dotted.split(".")
    best, longest = [key for key in peer_keys() if key.name == dotted], len(words)
    while longest and not best:
        best = [key for key in peer_keys() if key.name.split(".")[-longest:] == words[-longest:]]
        longest -= not best
    return [key for key in best if key.keys] or best, longest


def _walk(section: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in getattr(section, "__pydantic_fields__", {}).items():
        yield prefix + name, field
        yield from _walk(field.annotation, f"{prefix}{name}.")


def known_keys() -> dict[str, Any]:
    """Return the type of every key by its dotted name, sections included; not of sections in a list."""
    return {name: field.annotation for name, field in _walk(Config)}


def marked(mark: Mark) -> tuple[str, ...]:
    """Return the dotted names of the keys and sections whose field has this mark."""
    return tuple(name for name, field in _walk(Config) if mark in field.metadata)


def among(keys: Iterable[str], name: str) -> bool:
    """Whether a key or one of its sections is among `keys`."""
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def type_of(dotted: str) -> Any:
    """Declared type of a key such as ``sft.phases.0.steps``; Any if it is unknown or inside a mapping."""
    kind: Any = Config
    for name in filter(None, re.split(r"[.\[\]]+", dotted)):
        if typing.get_origin(kind) is list:
            (kind,) = typing.get_args(kind)
        else:
            kind = _fields(kind).get(name, Any)
    return kind


def refuse_unknown(values: Any, source: str) -> None:
    """Refuse (UserError) an unknown key of a nested mapping, with `source` and the key probably meant."""

    def walk(node: Any, kind: Any, prefix: str) -> None:
        is_list = typing.get_origin(kind) is list
        if isinstance(node, list) and is_list:
            for index, element in enumerate(node):
                walk(element, typing.get_args(kind)[0], f"{prefix}{index}.")
        elif isinstance(node, dict) and ((fields := _fields(kind)) or is_list):
            for name, value in node.items():
                if is_list and str(name).isdecimal():  # an element of a list of sections
                    continue
                if name not in fields:
                    raise UserError(f"{source}: unknown key {_with_hint(f'{prefix}{name}', value, fields)}")
                walk(value, fields[name], f"{prefix}{name}.")

    walk(values, Config, "")


def drop_removed(values: dict[str, Any]) -> None:
    """Drop from nested values the keys of earlier versions that have the value which is fixed now."""
    for dotted, fixed in REMOVED.items():
        section, name = _find_section(values, dotted)
        if section.get(name) == fixed:
            del section[name]


def rename_old_keys(values: dict[str, Any]) -> None:
    """Give the keys of earlier versions in the nested values of a kept config their present names."""
    for old, new in RENAMED.items():
        section, name = _find_section(values, old)
        if name in section:
            section[new.rpartition(".")[2]] = section.pop(name)


def _find_section(values: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    """Return the section of a dotted key, empty where it is missing, and the last part of the key."""
    *parts, name = dotted.split(".")
    section: Any = values
    for part in parts:
        section = section.get(part) if isinstance(section, dict) else None
    return (section if isinstance(section, dict) else {}), name


def counterpart(dotted: str) -> str:
    """Return in words the keys that an unknown name may stand for; "" where nothing is close."""
    return _hint(dotted, False, _fields(Config))


def _fields(kind: Any) -> dict[str, Any]:
    """Return the types of a section's keys; empty if `kind` is no section."""
    return {name: field.annotation for name, field in getattr(kind, "__pydantic_fields__", {}).items()}


def _with_hint(dotted: str, value: Any, siblings: dict[str, Any]) -> str:
    """``'learner.lr'; did you mean 'learner.optimizer.lr'?``; an unknown section gives its first key."""
    is_section = isinstance(value, dict) and bool(value)
    prefix = f"{dotted.lstrip('+')}."
    is_of_peer = is_section and any(
        key.name.startswith(prefix) and key.trainer != _EARLIER_VERSIONS for key in peer_keys()
    )
    if not is_of_peer and (hint := _hint(dotted, isinstance(value, dict), siblings)):
        return f"{dotted!r}; {hint}"
    if is_section:
        name, inner = next(iter(value.items()))
        return _with_hint(f"{dotted}.{name}", inner, {})
    return f"{dotted!r}; every key is in docs/configuration.md"


def _hint(dotted: str, is_section: bool, siblings: dict[str, Any]) -> str:
    """Return a peer's key of this whole name, else a key of this name in the section, a peer's key by the end
    of its name, a key of this name elsewhere, or a similar name in the section."""
    dotted = dotted.lstrip("+")  # Hydra's mark of a key that is added
    section, _, name = dotted.rpartition(".")
    top = section.partition(".")[0]
    keys: dict[str, list[str]] = {}  # dotted names by their last part
    for key, kind in known_keys().items():
        if bool(_fields(kind)) == is_section:
            keys.setdefault(key.rpartition(".")[2], []).append(key)
    peers, words = ([], 0) if is_section else find_peer_keys(dotted)
    inside = [key for key in keys.get(name, ()) if top and key.startswith(f"{top}.")]
    if any(peer.name == dotted for peer in peers) or (not inside and words > (name in keys)):
        return _of_peers(peers)
    if name in keys:
        return _question(inside or keys[name])
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    return _question([f"{section}.{near[0]}".lstrip(".")]) if near else ""


def _question(keys: list[str]) -> str:
    return f"did you mean {' or '.join(map(repr, keys[:3]))}?"


def _of_peers(peers: list[PeerKey]) -> str:
    """``did you mean 'loss.clip_low' and 'loss.clip_high'? (verl: docs/coming_from.md)``"""
    keys = list(dict.fromkeys(" and ".join(map(repr, peer.keys)) for peer in peers))[:3]
    details = list(dict.fromkeys(peer.note for peer in peers if peer.note))[:3]
    if trainers := ", ".join(dict.fromkeys(peer.trainer for peer in peers if peer.trainer)):
        details.append(f"{trainers}: {PEER_PAGE}")
    answer = f"did you mean {' or '.join(keys)}?" if peers[0].keys else "it has no counterpart"
    return f"{answer} ({'; '.join(details)})" if details else answer
