"""Which keys to change where a run does not fit its devices: every combination of a few levers is tried.

No lever changes what is learned. LEVERS orders them by cost, the cheapest first: rows as short as the longest
trajectory, fewer rows in a microbatch, layers computed again, parameters split instead of copied, the
optimizer's state in the host's memory, layers split, fewer slots of the sampler, a sampler on devices of its
own. The dearest lever of a combination decides which of two is cheaper.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from pydantic import ValidationError

from calibadv_jax.config import Config
from calibadv_jax.contrib.planning.hardware import Target, sampler_of
from calibadv_jax.contrib.planning.memory import GAPS, GIB, estimate_memory, peak_memory
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import Architecture

Changes = dict[str, Any]  # dotted key -> value
MOST_LINES = 4
ADAPTERS: Changes = {"policy.lora.rank": 16}


def changed(config: Config, changes: Changes) -> Config:
    """The config with other values.

    Raises:
        ValidationError: they cannot be.
    """
    parts: dict[str, Changes] = {}
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        parts.setdefault(section, {})[rest] = value
    return replace(config, **{name: _section(getattr(config, name), keys) for name, keys in parts.items()})


def _section(section: Any, changes: Changes) -> Any:
    deep = {key: value for key, value in changes.items() if "." in key}
    flat = {key: value for key, value in changes.items() if key not in deep}
    for key, value in deep.items():
        name, _, rest = key.partition(".")
        flat[name] = _section(flat.get(name, getattr(section, name)), {rest: value})
    return replace(section, **flat)


def memory_of(config: Config, architecture: Architecture, target: Target) -> dict[str, float]:
    """Bytes on one device by purpose, as the doctor counts them; of several hosts each has its own sampler.

    Args:
        config: `placed_on` the target.

    Raises:
        UserError: the sampler's part of the mesh does not fit a host.
    """
    apart = sampler_of(config, target) if target.hosts > 1 and config.sampler.name == "jax" else None
    return estimate_memory(config, architecture, config.mesh.sizes, apart)


def ways_out(
    config: Config, architecture: Architecture, target: Target, limit: float, scale: float = 1.0
) -> list[str]:
    """One line for each combination of changes that fits, the cheapest first; one line if none does.

    Args:
        config: placed on the devices.
        limit: bytes of a device.
        scale: bytes that the verdict counts, over those of the formula.
    """
    search = _Search(architecture, target, limit, scale)
    lines = [f"would fit: {line}" for line in islice(search.fitting(config), MOST_LINES)]
    if lines:
        return lines
    least = f" (the least: {search.least / GIB:.1f} GiB)" if search.least < math.inf else ""
    advice = (
        "no combination of learner.row_length, learner.microbatch_rows, policy.remat, mesh,"
        f" learner.optimizer.offload and sampler fits{least}: take more devices or larger ones"
    )
    if not config.policy.lora.rank:
        with suppress(ValidationError):  # the config may have what adapters cannot have
            line = next(search.fitting(changed(config, ADAPTERS), ADAPTERS), "")
            advice += f", or train adapters: {line}" if line else ""
    return [advice]


class _Search:
    """Combinations of levers that fit; `least`: the fewest bytes of all that were tried."""

    def __init__(self, architecture: Architecture, target: Target, limit: float, scale: float):
        self.architecture, self.target, self.limit, self.scale = architecture, target, limit, scale
        self.least = math.inf

    def fitting(self, config: Config, before: Changes | None = None) -> Iterator[str]:
        """Overrides and bytes of each set of levers that fits where no part of it does, all at their mildest.

        Args:
            before: changes that `config` has already.
        """
        smaller: list[int] = []
        for levers in range(0 if before else 1, 2 ** len(LEVERS)):  # bit n: the n-th cheapest
            chosen = {n: -1 for n in range(len(LEVERS)) if levers >> n & 1}  # lever -> option, first the last
            if any(levers & part == part for part in smaller) or not self._fits(config, chosen):
                continue
            smaller.append(levers)
            for n in sorted(chosen, reverse=True):  # the dearest lever is relaxed first
                chosen[n] = self._mildest(config, chosen, n)
            changes, found = self._with(config, chosen)
            yield self._line((before or {}) | changes, self._needed(found))

    def _mildest(self, config: Config, chosen: Mapping[int, int], n: int) -> int:
        """The first option of a lever with which it fits."""
        _, partly = self._with(config, {lever: chosen[lever] for lever in chosen if lever < n})
        strongest = len(LEVERS[n](partly, self)) - 1
        return bisect_left(
            range(strongest), True, key=lambda option: self._fits(config, {**chosen, n: option})
        )

    def _line(self, changes: Changes, size: float) -> str:
        overrides = " ".join(f"{key}={value}" for key, value in changes.items())
        gaps = GAPS.get(self.target.platform, 1.0)
        scaled = f", times {self.scale:.2f} as the compiler counts" if self.scale > 1 else ""
        more = f"; programs may need up to {gaps} times as much" if size * gaps > self.limit else ""
        more += "; vLLM's workers have devices of their own" if "sampler.name" in changes else ""
        return f"{overrides} ({size / GIB:.1f} GiB by the formula{scaled}{more})"

    def _fits(self, config: Config, chosen: Mapping[int, int]) -> bool:
        try:
            size = self._needed(self._with(config, chosen)[1])
        except (IndexError, ValidationError, UserError):  # a lever has no option, or they do not go together
            return False
        self.least = min(self.least, size)
        return size <= self.limit

    def _with(self, config: Config, chosen: Mapping[int, int]) -> tuple[Changes, Config]:
        """All changes of these options of levers, and the config with them."""
        changes: Changes = {}
        for n, option in sorted(chosen.items()):
            changes |= (step := LEVERS[n](config, self)[option])
            config = changed(config, step)
        return changes, config

    def _needed(self, config: Config) -> float:
        return peak_memory(memory_of(config, self.architecture, self.target)) * self.scale


def _row_length(config: Config, _: _Search) -> list[Changes]:
    longest = config.rollout.max_length
    return [{"learner.row_length": longest}] if config.learner.row_length > longest else []


def _microbatch_rows(config: Config, _: _Search) -> list[Changes]:
    shards, rows = config.mesh.data * config.mesh.fsdp, config.learner.microbatch_rows
    return [{"learner.microbatch_rows": size} for size in range(rows - shards, 0, -shards)]


def _remat(config: Config, _: _Search) -> list[Changes]:
    return [{"policy.remat": "full"}] if config.policy.remat != "full" else []


def _fsdp(config: Config, _: _Search) -> list[Changes]:
    mesh = config.mesh
    return [{"mesh.data": 1, "mesh.fsdp": mesh.data * mesh.fsdp}] if mesh.data > 1 else []


def _offload(config: Config, _: _Search) -> list[Changes]:
    parts = ["learner", *(["critic"] if config.advantage.has_critic else [])]
    rules = {f"{name}.optimizer.offload": getattr(config, name).optimizer.offload for name in parts}
    changes: Changes = {key: "host" for key, value in rules.items() if value == "none"}
    return [changes] if changes else []


def _tensor(size: int) -> Lever:
    def lever(config: Config, search: _Search) -> list[Changes]:
        mesh, rows = config.mesh, config.learner.microbatch_rows // size
        if mesh.tensor > 1 or mesh.fsdp % size or search.architecture.num_kv_heads % size or not rows:
            return []
        return [{"mesh.fsdp": mesh.fsdp // size, "mesh.tensor": size, "learner.microbatch_rows": rows}]

    return lever


def _slots(config: Config, _: _Search) -> list[Changes]:
    shards, slots = config.mesh.data * config.mesh.fsdp, config.sampler.slots
    most = (slots - 1) // shards * shards if config.sampler.name == "jax" else 0
    return [{"sampler.slots": count} for count in range(most, 0, -shards)]


def _workers(config: Config, search: _Search) -> list[Changes]:
    hosts = search.target.hosts
    apart: Changes = {"sampler.name": "vllm"} | ({"sampler.workers": hosts} if hosts > 1 else {})
    return [apart] if config.sampler.name == "jax" else []


# What a lever may change, from the mildest to the strongest; nothing if it is at its end.
Lever = Callable[[Config, _Search], list[Changes]]
LEVERS: tuple[Lever, ...] = (
    _row_length, _microbatch_rows, _remat, _fsdp, _offload, _tensor(2), _tensor(4), _tensor(8), _slots,
    _workers,
)  # fmt: skip
