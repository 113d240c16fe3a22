"""The share of a device's rates that the parts of a step reach: measured where it was, else assumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calibadv_jax.contrib.planning.hardware import Target
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import Architecture

ASSUMED = 0.4
# A figure counts for policies that are at most so many times larger or smaller than the measured one.
NEAR = 2.0
FORWARD_PARTS = ("log-probabilities", "critic's values")
SAMPLING_PARTS = ("prefill", "decode")


@dataclass(frozen=True)
class Efficiency:
    """Shares of the devices' rates in (0, 1], with recomputation counted as work.

    Attributes:
        update: of gradients and the optimizer's step.
        forward: of forward passes of the learner.
        sampling: of the embedded sampler's prefill and decoding together.
        source: where the figures come from, in words.
    """

    update: float
    forward: float
    sampling: float
    source: str

    def of(self, part: str) -> float:
        """Return the share of a part of a step (`work.Part.name`)."""
        if part in SAMPLING_PARTS:
            return self.sampling
        if part in FORWARD_PARTS:
            return self.forward
        return self.update

    def __str__(self) -> str:
        if self.update == self.forward == self.sampling:
            return f"{self.update:g} ({self.source})"
        shares = f"{self.update:g} (update), {self.forward:g} (forward passes), {self.sampling:g} (sampling)"
        return f"{shares}, {self.source}"


def efficiency_of(share: float, architecture: Architecture, target: Target, samples_here: bool) -> Efficiency:
    """Return the shares that a plan uses.

    Args:
        share: Of `--efficiency`, for all parts; 0: what was measured near this size, else an assumption.
        architecture: The policy's architecture.
        target: The devices.
        samples_here: Whether the embedded sampler writes the trajectories; vLLM was not measured.

    Raises:
        UserError: The share is out of range.
    """
    if not 0 <= share <= 1:
        raise UserError(f"--efficiency {share:g}: must be above 0, and at most 1; 0 takes measured figures")
    if share:
        return Efficiency(share, share, share, "--efficiency")
    size = architecture.num_parameters
    for figure in measured_figures():
        is_near = 1 / NEAR <= size / figure["parameters"] <= NEAR
        if target.platform == figure["platform"] and is_near:
            sampling = figure["sampling"] if samples_here else ASSUMED
            source = f"measured: {figure['source']}"
            if not samples_here:
                source += "; vLLM's is an assumption"
            return Efficiency(figure["update"], figure["forward"], sampling, source)
    return Efficiency(
        ASSUMED, ASSUMED, ASSUMED, "an assumption: nothing was measured near this size on such devices"
    )


def measured_figures() -> list[dict[str, Any]]:
    """Return the entries of efficiency.yaml."""
    entries: list[dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("efficiency.yaml").read_text(encoding="utf-8")
    )
    return entries
