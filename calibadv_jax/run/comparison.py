"""Compare the configs of two starts, and decide which changes make a run another experiment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calibadv_jax.config import Config, SftPhase, ToolConfig
from calibadv_jax.config.keys import is_among, keys_with_mark
from calibadv_jax.config.load import with_references
from calibadv_jax.config.sections.section import Mark

UNLEARNED = keys_with_mark(Mark.UNLEARNED)
LEARNED = keys_with_mark(Mark.LEARNED)
COLD_START_KEYS = keys_with_mark(Mark.COLD_START)


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a config that an earlier version may have kept.

    Args:
        values: The config as nested values.

    Returns:
        The values, defaults for the keys that they lack, and references in place of values of earlier
        versions.
    """
    config: dict[str, Any] = _merged(dataclasses.asdict(Config()), values)
    default_phase = dataclasses.asdict(SftPhase())
    config["sft"]["phases"] = [default_phase | phase for phase in config["sft"]["phases"]]
    default_tool = dataclasses.asdict(ToolConfig("search")) | {"name": ""}
    tools = []
    for entry in config["tools"]:
        tool = {"name": entry} if isinstance(entry, str) else entry
        tools.append(default_tool | tool)
    config["tools"] = tools
    return with_references(config)


def _merged(defaults: Any, values: Any) -> Any:
    """Return the values, completed by the defaults in every nested mapping."""
    if not isinstance(defaults, Mapping) or not isinstance(values, Mapping):
        return values
    merged = dict(defaults)
    for name, value in values.items():
        merged[name] = _merged(defaults.get(name), value)
    return merged


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Compare two nested configs.

    Args:
        before: The earlier config.
        now: The later config.
        prefix: Put before the names of the keys: the section of the two mappings, with a dot at its end.

    Yields:
        The dotted key, the value before and the value now of every key that differs. A value is None if its
        config lacks the key.
    """
    for name in dict.fromkeys([*before, *now]):
        old = before.get(name)
        new = now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield prefix + name, old, new


def offers_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the actions of two configs differ only in addresses and timeouts.

    What the actions offer to the policy is compared by another hash, `tools_hash`.
    """
    before_tools = [_without_connection(tool) for tool in before["tools"]]
    now_tools = [_without_connection(tool) for tool in now["tools"]]
    return before_tools == now_tools


def _without_connection(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `tools` with constants in place of its timeouts and its address."""
    constant = {**tool, "timeout": 0}
    server = tool["mcp"]
    if server:
        constant["mcp"] = {**server, "timeout": 0, "patience": 0, "url": bool(server["url"])}
    return constant


def changed_keys(
    before: Mapping[str, Any], now: Mapping[str, Any], compared: Sequence[str], free: Sequence[str]
) -> list[str]:
    """Return the keys that differ between two configs.

    Args:
        before: The earlier config, as nested values.
        now: The later config.
        compared: Keys and sections to compare.
        free: Keys and sections that may differ.

    Returns:
        The dotted keys. `tools` is among them only if the actions differ in more than addresses and timeouts.
    """
    changed = []
    for name, _, _ in differences(before, now):
        if not is_among(compared, name) or is_among(free, name):
            continue
        if name == "tools" and offers_same(before, now):
            continue
        changed.append(name)
    return changed


def is_binding(name: str, config: Config) -> bool:
    """Whether a change of this key makes a resumed run another experiment.

    Args:
        name: A dotted key.
        config: The config of the resumed run.
    """
    if name == "learner.steps":
        # A longer run is the same experiment, unless a learning rate depends on the length.
        optimizers = [config.learner.optimizer]
        if config.advantage.has_critic:
            optimizers.append(config.critic.optimizer)
        return any(rule.schedule != "constant" and not rule.decay_updates for rule in optimizers)
    if is_among(["policy.init"], name):
        return not config.policy.path
    return is_among(LEARNED, name) or not is_among(UNLEARNED, name)
