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
# Parts of the table that belong to no trainer: names of papers, and keys of earlier versions of this project.
_SHORT_NAMES = "short names"
_EARLIER_VERSIONS = "earlier versions"
# Key of an earlier version -> the only value that is possible now; the table of peers' keys says why.
REMOVED = {
    "policy.lora.dropout": 0.0,
    "reward.judge.max_answer": 2000,
    "sampler.request_timeout": 1800.0,
}
# Key of an earlier version -> its present name. Configs that runs have kept get the present names; in a
# user's own config the old name is refused, with a hint from the table of peers' keys.
RENAMED = {
    "rollout.replace_tied": "rollout.dynamic_sampling",
    "learner.row_length": "learner.pack_length",
    "sft.row_length": "sft.pack_length",
    "learner.optimizer.warmup_steps": "learner.optimizer.warmup_updates",
    "critic.optimizer.warmup_steps": "critic.optimizer.warmup_updates",
    "sft.optimizer.warmup_steps": "sft.optimizer.warmup_updates",
    "guards.patience": "guards.patience_steps",
}


@dataclass(frozen=True)
class PeerKey:
    """A key of another trainer, or of an earlier version of this one.

    Attributes:
        trainer: Name of the trainer; empty for a short name from a paper.
        name: Dotted name of the key there.
        keys: Dotted keys of this project that together do the same; empty: there is no counterpart.
        note: How the value differs, or why there is no counterpart.
    """

    trainer: str
    name: str
    keys: tuple[str, ...]
    note: str


@functools.cache
def peer_keys() -> tuple[PeerKey, ...]:
    """Return the keys of other trainers, from the table beside this module.

    A row of the table is ``NAME: KEY, KEY; note``.
    """
    table = yaml.safe_load(_PEER_TABLE.read_text(encoding="utf-8"))
    peers = []
    for part, rows in table.items():
        trainer = "" if part == _SHORT_NAMES else part
        for name, text in rows.items():
            key_list, _, note = text.partition("; ")
            keys = tuple(key for key in key_list.split(", ") if key)
            peers.append(PeerKey(trainer, name, keys, note))
    return tuple(peers)


def find_peer_keys(dotted: str) -> tuple[list[PeerKey], int]:
    """Return the peers' keys that share the longest end with a name.

    Args:
        dotted: Dotted name of a key that this project does not have.

    Returns:
        The keys of exactly this name or, if there are none, those with the most equal last words. Keys
        without a counterpart are left out if others have one. And the number of words that they share.
    """
    words = dotted.split(".")
    num_shared = len(words)
    matches = [peer for peer in peer_keys() if peer.name == dotted]
    while not matches and num_shared > 0:
        ending = words[-num_shared:]
        matches = [peer for peer in peer_keys() if peer.name.split(".")[-num_shared:] == ending]
        if not matches:
            num_shared -= 1
    with_counterpart = [peer for peer in matches if peer.keys]
    return with_counterpart or matches, num_shared


def _walk(section: Any, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name and the field of every key of a section, each section before its keys."""
    for name, field in getattr(section, "__pydantic_fields__", {}).items():
        yield prefix + name, field
        yield from _walk(field.annotation, f"{prefix}{name}.")


def known_keys() -> dict[str, Any]:
    """Return the type of every key and section by its dotted name, except keys of sections in a list."""
    return {name: field.annotation for name, field in _walk(Config)}


def keys_with_mark(mark: Mark) -> tuple[str, ...]:
    """Return the dotted names of the keys and sections whose field has this mark."""
    return tuple(name for name, field in _walk(Config) if mark in field.metadata)


def is_among(keys: Iterable[str], name: str) -> bool:
    """Return whether a key, or a section that holds it, is among `keys`.

    Args:
        keys: Dotted names of keys and sections.
        name: Dotted name of a key.
    """
    return any(name == key or name.startswith(f"{key}.") for key in keys)


def type_of(dotted: str) -> Any:
    """Return the declared type of a key such as ``sft.phases.0.steps`` or ``sft.phases[0].steps``.

    The type is Any if the key is unknown or inside a mapping.
    """
    kind: Any = Config
    for name in re.split(r"[.\[\]]+", dotted):
        if not name:
            continue
        if typing.get_origin(kind) is list:
            (kind,) = typing.get_args(kind)
        else:
            kind = _fields(kind).get(name, Any)
    return kind


def refuse_unknown(values: Any, source: str) -> None:
    """Refuse an unknown key of a nested mapping.

    Args:
        values: Nested values of a config.
        source: File, or "command line", for the message.

    Raises:
        UserError: A key is unknown; the message names the key that was probably meant.
    """
    _refuse_unknown_below(values, Config, "", source)


def _refuse_unknown_below(node: Any, kind: Any, prefix: str, source: str) -> None:
    """Refuse an unknown key in the values `node` of type `kind`, whose dotted name is `prefix` with a dot."""
    is_list = typing.get_origin(kind) is list
    if isinstance(node, list) and is_list:
        element_kind = typing.get_args(kind)[0]
        for index, element in enumerate(node):
            _refuse_unknown_below(element, element_kind, f"{prefix}{index}.", source)
        return
    fields = _fields(kind)
    is_section = bool(fields)
    if not isinstance(node, dict) or not (is_section or is_list):
        return
    for name, value in node.items():
        # An override such as sft.phases.0.steps=5 names an element of a list of sections by its number.
        if is_list and str(name).isdecimal():
            continue
        if name not in fields:
            raise UserError(f"{source}: unknown key {_with_hint(f'{prefix}{name}', value, fields)}")
        _refuse_unknown_below(value, fields[name], f"{prefix}{name}.", source)


def drop_removed(values: dict[str, Any]) -> None:
    """Drop the keys of REMOVED from nested values, if they have the only value that is possible now."""
    for dotted, fixed in REMOVED.items():
        section, name = _find_section(values, dotted)
        if section.get(name) == fixed:
            del section[name]


def rename_old_keys(values: dict[str, Any]) -> None:
    """Give the keys of earlier versions in the nested values of a kept config their present names."""
    for old, new in RENAMED.items():
        section, old_name = _find_section(values, old)
        if old_name in section:
            new_name = _last_part(new)
            section[new_name] = section.pop(old_name)
    _rename_depths_of_reranking(values.get("retriever"))


def _rename_depths_of_reranking(retriever: Any) -> None:
    """Give the two depths of a reranked search their present names, which depend on whether it was on.

    Earlier versions had `topk` without a reranker, and `retrieval_topk` and `rerank_topk` with one.
    """
    if not isinstance(retriever, dict) or "rerank_topk" not in retriever:
        return
    candidates = retriever.pop("retrieval_topk", 0)
    kept = retriever.pop("rerank_topk")
    if kept:
        retriever["topk"] = kept
        retriever["rerank_candidates"] = candidates
    else:
        retriever["rerank_candidates"] = kept


def _find_section(values: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    """Return the section that holds a dotted key, and the key's last part; a missing section is empty."""
    *path, name = dotted.split(".")
    section: Any = values
    for part in path:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict):
        section = {}
    return section, name


def _last_part(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def hint_for_key(dotted: str) -> str:
    """Return a sentence with the keys that an unknown name may stand for.

    Args:
        dotted: Dotted name of an unknown key.

    Returns:
        ``did you mean 'learner.steps'?``, or why the key has no counterpart; empty if no key is similar.
    """
    return _hint(dotted, False, _fields(Config))


def _fields(kind: Any) -> dict[str, Any]:
    """Return the types of a section's keys; empty if `kind` is not a section."""
    fields: dict[str, FieldInfo] = getattr(kind, "__pydantic_fields__", {})
    return {name: field.annotation for name, field in fields.items()}


def _with_hint(dotted: str, value: Any, siblings: dict[str, Any]) -> str:
    """Return an unknown key with a hint: ``'learner.lr'; did you mean 'learner.optimizer.lr'?``.

    An unknown section that another trainer has, or that resembles no key, is named by its first key.
    """
    is_filled_section = isinstance(value, dict) and bool(value)
    is_peer_section = is_filled_section and _is_section_of_peer(dotted)
    hint = "" if is_peer_section else _hint(dotted, isinstance(value, dict), siblings)
    if hint:
        return f"{dotted!r}; {hint}"
    if is_filled_section:
        name, inner = next(iter(value.items()))
        return _with_hint(f"{dotted}.{name}", inner, {})
    return f"{dotted!r}; every key is in docs/configuration.md"


def _is_section_of_peer(dotted: str) -> bool:
    """Return whether another trainer has keys in a section of this name."""
    prefix = f"{dotted.lstrip('+')}."
    return any(peer.name.startswith(prefix) and peer.trainer != _EARLIER_VERSIONS for peer in peer_keys())


def _hint(dotted: str, is_section: bool, siblings: dict[str, Any]) -> str:
    """Return a sentence with the keys that an unknown name may stand for; empty if there are none.

    The first of these that exists: a peer's key of exactly this name; a key of this name in the same top
    section; a peer's key that ends like this name; a key of this name elsewhere; a similar name among the
    `siblings`, the keys of the section.
    """
    # Hydra marks a key that is added with "+".
    dotted = dotted.lstrip("+")
    section, _, name = dotted.rpartition(".")
    top_section = section.partition(".")[0]
    same_name = _keys_named(name, is_section)
    same_name_inside = [key for key in same_name if top_section and key.startswith(f"{top_section}.")]
    peers: list[PeerKey] = []
    num_shared = 0
    if not is_section:
        peers, num_shared = find_peer_keys(dotted)
    has_exact_peer = any(peer.name == dotted for peer in peers)
    # A single shared word says no more than a key of the same name elsewhere.
    is_best_known_by_peer = num_shared > 1 if same_name else num_shared > 0
    if has_exact_peer or (is_best_known_by_peer and not same_name_inside):
        return _peer_hint(peers)
    if same_name:
        return _question(same_name_inside or same_name)
    similar = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if not similar:
        return ""
    return _question([f"{section}.{similar[0]}".lstrip(".")])


def _keys_named(name: str, is_section: bool) -> list[str]:
    """Return the dotted names of the sections, or of the other keys, whose last part is `name`."""
    keys = []
    for key, kind in known_keys().items():
        if _last_part(key) == name and bool(_fields(kind)) == is_section:
            keys.append(key)
    return keys


def _question(keys: list[str]) -> str:
    names = [repr(key) for key in keys[:3]]
    return f"did you mean {' or '.join(names)}?"


def _peer_hint(peers: list[PeerKey]) -> str:
    """``did you mean 'loss.clip_low' and 'loss.clip_high'? (verl: docs/coming_from.md)``"""
    counterparts = _distinct(" and ".join(map(repr, peer.keys)) for peer in peers)[:3]
    details = _distinct(peer.note for peer in peers if peer.note)[:3]
    trainers = _distinct(peer.trainer for peer in peers if peer.trainer)
    if trainers:
        details.append(f"{', '.join(trainers)}: {PEER_PAGE}")
    answer = "it has no counterpart"
    if peers[0].keys:
        answer = f"did you mean {' or '.join(counterparts)}?"
    return f"{answer} ({'; '.join(details)})" if details else answer


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
