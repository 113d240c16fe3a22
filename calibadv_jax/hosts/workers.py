"""Which vLLM workers belong to which process of a run: each swaps weights into its own and asks only these.

So nobody waits for another's swap, and a worker is never told two things at once.
"""

from __future__ import annotations

from dataclasses import replace

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.errors import UserError


def own_workers(config: SamplerConfig, index: int, count: int) -> tuple[SamplerConfig, int]:
    """The section `sampler` with the workers of process `index` of `count` alone, and how many are before.

    The lists are shared out in their order, as evenly as can be.

    Raises:
        UserError: there are fewer workers than processes, or workers that are started here cannot be shared
            out evenly.
    """
    known = len(config.urls)
    if known and known < count:
        raise UserError(
            f"sampler.urls names {known} vLLM worker{'s' if known > 1 else ''} for {count} processes: each"
            f" process needs one of its own; start {count - known} more"
        )
    if not known and config.workers % count:
        raise UserError(
            f"sampler.workers is {config.workers}, for {count} processes that start as many each: set it to a"
            f" multiple of {count}"
        )
    begin, end = ((known or config.workers) * number // count for number in (index, index + 1))
    if known:
        return replace(config, urls=config.urls[begin:end]), begin
    return replace(config, workers=end - begin, worker_devices=config.worker_devices[begin:end]), begin


def check_workers(config: SamplerConfig, count: int) -> None:
    """Raises as `own_workers`, where the sampler has workers."""
    if config.name == "vllm":
        own_workers(config, 0, count)
