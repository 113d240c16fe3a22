"""`policy.remat=auto`: the least recomputation whose update fits the devices, by the compiler's own plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax

from calibadv_jax.config import Config
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.distributed.process_group import ProcessGroup
from calibadv_jax.policy.recomputation import REMATS
from calibadv_jax.policy.transformer import Policy
from calibadv_jax.run.model import Model

# Share of a device's memory that a planned update may fill: the allocator needs space between arrays.
USABLE_SHARE = 0.95
LEAST_MEMORY = REMATS[-1]


def with_chosen_remat(
    config: Config, model: Model, process_group: ProcessGroup, say: Callable[[str], object]
) -> Model:
    """Return the model with the recomputation that `policy.remat=auto` chooses; else the model.

    Every process compiles for its own devices; all take the choice of the process with the least room.

    Args:
        config: The run's config.
        model: The run's model.
        process_group: The processes of the run.
        say: Gets a line that names the choice.
    """
    if config.policy.remat != "auto":
        return model
    memory = load_optional("planning.memory")
    limit = memory.device_limit(model.mesh.devices.size)
    own_choice = least_recomputation(lambda remat: fits(config, model, remat, USABLE_SHARE * limit))
    choices = process_group.all_gather("policy.remat", own_choice)
    chosen = max(choices, key=REMATS.index)
    if limit:
        reason = f"the least recomputation that fits {limit / memory.GIB:.1f} GiB of a device"
    else:
        reason = "since the device does not say how much memory it has"
    say(f"policy.remat=auto: {chosen}, {reason}")
    return replace(model, policy=with_remat(model.policy, chosen))


def least_recomputation(fits: Callable[[str], bool]) -> str:
    """Return the fastest setting of `policy.remat` that fits; the last one if none does.

    Args:
        fits: Whether the run fits with a setting. It is called for one after the other, the fastest first,
            until one fits; never for the last one, which needs the least memory.
    """
    for remat in REMATS[:-1]:
        if fits(remat):
            return remat
    return LEAST_MEMORY


def fits(config: Config, model: Model, remat: str, limit: float) -> bool:
    """Return whether the updates of policy and critic fit with all that a run holds beside them.

    The formula of `calibadv doctor` spares the compiler what is far too large.

    Args:
        config: The run's config.
        model: The run's model.
        remat: A setting of `policy.remat`.
        limit: Bytes of a device that the run may use.
    """
    memory = load_optional("planning.memory")
    compiled = load_optional("planning.compiled")
    hardware = load_optional("planning.hardware")
    architecture = model.policy.architecture
    mesh = dict(model.mesh.shape)
    config = replace(config, policy=replace(config.policy, remat=remat))  # type: ignore[arg-type]
    sampling = None
    if jax.process_count() > 1:
        sampling = hardware.process_sampler(config, mesh, model.mesh.size, jax.process_count())
    estimate = memory.estimate_memory(config, architecture, mesh, sampling)
    expected = memory.program_memory(estimate)
    updates = ["update"]
    if config.advantage.has_critic:
        updates.append("critic's update")
    beside = {name: memory.memory_beside(estimate, name) for name in updates}
    if any(expected[name] / memory.FORMULA_MARGIN + beside[name] > limit for name in updates):
        return False
    for name in updates:
        program = compiled.lowered_program(config, architecture, model.mesh, name)
        figures = compiled.compiled_figures(program, beside[name])
        if "refused" in figures or figures["needed"] * memory.GIB > limit:
            return False
    return True


def with_remat(policy: Policy, remat: str) -> Policy:
    """Return a policy that differs in what its backward pass computes again."""
    numerics = replace(policy.numerics, remat=remat)
    return Policy(policy.architecture, numerics, policy.adapters, policy.kind)
