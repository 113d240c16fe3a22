"""The names of all keys, and what somebody may have meant by another name."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable
from typing import Any

from pydantic.dataclasses import is_pydantic_dataclass

from calibadv_jax.config import peer_keys
from calibadv_jax.config.peer_keys import PeerKey
from calibadv_jax.config.root import Config
from calibadv_jax.config.sections.section import Mark
from calibadv_jax.core.errors import UserError


def known_keys(section: type = Config, prefix: str = "") -> dict[str, Any]:
    """Dotted name of every key -> its type, sections included; not the keys of sections in a list."""
    keys: dict[str, Any] = {}
    for name, kind in _fields(section).items():
        keys[prefix + name] = kind
        if isinstance(kind, type):
            keys |= known_keys(kind, f"{prefix}{name}.")
    return keys


def marked(mark: Mark, section: type = Config, prefix: str = "") -> tuple[str, ...]:
    """Dotted names of the keys and sections whose field has this mark; not those inside such a section."""
    found: list[str] = []
    for name, kind in _fields(section).items():
        if mark in section.__pydantic_fields__[name].metadata:  # type: ignore[attr-defined]
            found.append(prefix + name)
        elif isinstance(kind, type):
            found += marked(mark, kind, f"{prefix}{name}.")
    return tuple(found)


def among(keys: Iterable[str], name: str) -> bool:
    """Whether a key or one of its sections is among `keys`."""
    return any(name == one or name.startswith(f"{one}.") for one in keys)


def type_of(dotted: str) -> Any:
    """Declared type of a key such as ``sft.phases.0.steps``; Any if it is unknown or inside a mapping."""
    kind: Any = Config
    for name in filter(None, re.split(r"[.\[\]]+", dotted)):
        if typing.get_origin(kind) is list:
            (kind,) = typing.get_args(kind)
        else:
            kind = _fields(kind).get(name, Any)
    return kind


def refuse_unknown(given: Any, source: str) -> None:
    """Checks the keys of a nested mapping.

    Raises:
        UserError: an unknown key, with `source` and the known key that was probably meant.
    """

    def walk(node: Any, kind: Any, prefix: str) -> None:
        if isinstance(node, list) and typing.get_origin(kind) is list:
            for index, element in enumerate(node):
                walk(element, typing.get_args(kind)[0], f"{prefix}{index}.")
        elif isinstance(node, dict) and (fields := _fields(kind)):
            for name, value in node.items():
                if name not in fields:
                    raise UserError(f"{source}: unknown key {_with_hint(f'{prefix}{name}', value, fields)}")
                walk(value, fields[name], f"{prefix}{name}.")
        elif isinstance(node, dict) and typing.get_origin(kind) is list:  # of sections, by their numbers
            for name, value in node.items():
                if not str(name).isdecimal():
                    raise UserError(f"{source}: unknown key {_with_hint(f'{prefix}{name}', value, {})}")

    walk(given, Config, "")


def _fields(kind: Any) -> dict[str, Any]:
    """Name -> type of a section's keys; none if `kind` is no section."""
    if not is_pydantic_dataclass(kind):
        return {}
    return {name: field.annotation for name, field in kind.__pydantic_fields__.items()}


def counterpart(dotted: str) -> str:
    """Return in words what stands here for a name that is no key; "" where nothing is close."""
    return _hint(dotted, False, _fields(Config))


def _with_hint(dotted: str, value: Any, siblings: dict[str, Any]) -> str:
    """``'learner.lr'; did you mean 'learner.optimizer.lr'?``; a section like none gives its first key."""
    is_section = isinstance(value, dict) and bool(value)
    is_of_peer = is_section and any(key.name.startswith(f"{dotted.lstrip('+')}.") for key in peer_keys.ALL)
    if not is_of_peer and (hint := _hint(dotted, isinstance(value, dict), siblings)):
        return f"{dotted!r}; {hint}"
    if is_section:
        name, inner = next(iter(value.items()))
        return _with_hint(f"{dotted}.{name}", inner, {})
    return f"{dotted!r}; every key is in docs/configuration.md"


def _hint(dotted: str, is_section: bool, siblings: dict[str, Any]) -> str:
    """Return the known keys that an unknown key may stand for, the likeliest first; "" if nothing is close.

    A key of another trainer by its whole name, a key of the same name in the section, a key of another
    trainer by the end of its name, a key of the same name elsewhere, a key of the same section that is
    spelled nearly so, such a name of another trainer, a key anywhere that is spelled nearly so: the first of
    these that exists.
    """
    dotted = dotted.lstrip("+")  # Hydra's mark of a key that is added
    section, _, name = dotted.rpartition(".")
    keys = [key for key, kind in known_keys().items() if bool(_fields(kind)) == is_section]
    same_name = [key for key in keys if key.rpartition(".")[2] == name]
    peers, words = ([], 0) if is_section else peer_keys.find(dotted)
    if any(peer.name == dotted for peer in peers):
        return _of_peers(peers)
    top = section.partition(".")[0]
    if inside := [key for key in same_name if top and key.startswith(f"{top}.")]:
        return _question(inside[:3])
    if words > bool(same_name):
        return _of_peers(peers)
    if same_name:
        return _question(same_name[:3])
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return _question([f"{section}.{near[0]}".lstrip(".")])
    names = [] if is_section else {key.name.rpartition(".")[2] for key in peer_keys.ALL}
    if near := difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.85):
        return _of_peers(peer_keys.find(near[0])[0])
    if top not in _fields(Config) and any(key.name.startswith(f"{top}.") for key in peer_keys.ALL):
        return ""  # a rare key of another trainer: what is spelled nearly so means something else
    last = {key.rpartition(".")[2] for key in keys}
    if near := difflib.get_close_matches(name, sorted(last), n=1, cutoff=0.75):
        return _question(_nearest_to(section, [key for key in keys if key.rpartition(".")[2] == near[0]]))
    return ""


def _question(keys: Iterable[str]) -> str:
    return f"did you mean {' or '.join(map(repr, keys))}?"


def _of_peers(peers: Iterable[PeerKey]) -> str:
    """``did you mean 'loss.clip_low' and 'loss.clip_high'? (verl: docs/coming_from.md)``"""
    peers = list(peers)
    trainers = ", ".join(dict.fromkeys(peer.trainer for peer in peers if peer.trainer))
    page = f"{trainers}: {peer_keys.PAGE}" if trainers else ""
    notes = "; ".join(list(dict.fromkeys(peer.note for peer in peers if peer.note))[:3])
    if not peers[0].keys:
        return f"it has no counterpart: {notes}" + (f" ({page})" if page else "")
    meant = list(dict.fromkeys(" and ".join(map(repr, peer.keys)) for peer in peers))[:3]
    more = "; ".join(filter(None, (notes, page)))
    return f"did you mean {' or '.join(meant)}?{f' ({more})' if more else ''}"


def _nearest_to(section: str, keys: list[str]) -> list[str]:
    """The `keys` inside the section that was named, or of all sections if none is, at most three."""
    top = section.partition(".")[0]
    inside = [key for key in keys if top and key.startswith(f"{top}.")]
    return (inside or keys)[:3]
