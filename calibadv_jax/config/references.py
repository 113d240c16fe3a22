"""References of a config to the environment, ``${oc.env:NAME}``: what is kept has them, not the values."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from calibadv_jax.config.root import Config
from calibadv_jax.core.secrets import redact, remember

REFERENCE = re.compile(r"(?<!\\)\$\{\s*oc\.env:\W*(\w+)[^{}]*\}")
_references: dict[tuple[str, str], str] = {}  # (dotted key, value) -> the text that refers to the environment


def note_references(config: DictConfig, resolved: Any) -> None:
    """Remember which values of a config come from the environment, in whole or in part.

    Args:
        resolved: the values of `config`, nested.
    """
    raw = OmegaConf.to_container(config)
    if "oc.env" not in str(raw):
        return
    for name in _names(raw):
        if value := os.environ.get(name):
            remember(name, value)
    named = OmegaConf.create(_escaped(raw))  # resolves to the references themselves

    def walk(node: Any, value: Any, key: str) -> None:
        if isinstance(node, dict) and isinstance(value, dict):
            for name in node:
                walk(node[name], value[name], f"{key}.{name}".lstrip("."))
        elif isinstance(node, list) and isinstance(value, list):
            for index, pair in enumerate(zip(node, value, strict=True)):
                walk(*pair, f"{key}.{index}")
        elif isinstance(node, str) and isinstance(value, str) and "${" in node:
            reference = _reference(named, key, node, value)
            if reference != value:
                _references[key, value] = reference

    walk(raw, resolved, "")


def _reference(named: Any, key: str, node: str, value: str) -> str:
    """The text of a key that resolves to `value`: with references, or `value` itself if it has none."""
    try:
        reference = OmegaConf.select(named, key)
        if "oc.env" not in node and reference == value:
            return value
        return str(reference) if OmegaConf.create({"value": reference}).value == value else node
    except OmegaConfBaseException:  # a reference within another resolver
        return node


def _names(raw: Any) -> list[str]:
    """Variables that nested values refer to."""
    if isinstance(raw, dict | list):
        return [name for value in (raw.values() if isinstance(raw, dict) else raw) for name in _names(value)]
    return REFERENCE.findall(raw) if isinstance(raw, str) else []


def _escaped(raw: Any) -> Any:
    """Nested values whose references to the environment are text."""
    if isinstance(raw, dict):
        return {name: _escaped(value) for name, value in raw.items()}
    if isinstance(raw, list):
        return [_escaped(value) for value in raw]
    return REFERENCE.sub(r"\\\g<0>", raw) if isinstance(raw, str) else raw


def with_references(values: Any, key: str = "") -> Any:
    """Return nested values of a config with references in place of what comes from the environment."""
    if isinstance(values, dict):
        return {name: with_references(value, f"{key}.{name}".lstrip(".")) for name, value in values.items()}
    if isinstance(values, list):
        return [with_references(value, f"{key}.{index}") for index, value in enumerate(values)]
    return _references.get((key, values), values) if isinstance(values, str) else values


def kept_values(config: Config) -> dict[str, Any]:
    """Return the nested values of a config as they are kept; read again they are the same config."""

    def keep(value: Any, referring: Any) -> Any:
        if isinstance(value, dict):
            return {name: keep(value[name], referring[name]) for name in value}
        if isinstance(value, list):
            return [keep(*pair) for pair in zip(value, referring, strict=True)]
        if not isinstance(value, str) or value != referring or value in defaults:
            return referring
        return redact(value.replace("${", "\\${"))

    # Of a config that was not loaded.
    defaults = re.findall(r"'(\$\{[^']*)'", str(dataclasses.asdict(Config())))
    values = dataclasses.asdict(config)
    kept: dict[str, Any] = keep(values, with_references(values))
    return kept
