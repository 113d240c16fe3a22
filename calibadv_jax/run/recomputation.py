"""`policy.remat=auto`: the least recomputation whose update fits the devices, by the compiler's own plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from calibadv_jax.config import Config
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.distributed.process_group import ProcessGroup
from calibadv_jax.learner.learner import policy_learner
from calibadv_jax.learner.objective import policy_loss
from calibadv_jax.learner.optimizer import run_schedule
from calibadv_jax.policy.recomputation import REMATS
from calibadv_jax.policy.transformer import Policy
from calibadv_jax.run.model import Model

# Share of the room that a planned update may take: the allocator needs space between arrays.
USABLE_SHARE = 0.95


def least_recomputation(needed: Callable[[str], float], room: float) -> str:
    """Return the fastest setting of `policy.remat` that fits.

    Args:
        needed: returns the bytes of the update on a device, given a setting. It is called for one after the
            other, the fastest first, until one fits; never for the last one, which is the least memory.
        room: bytes of a device for the update.
    """
    for remat in REMATS[:-1]:
        if needed(remat) <= USABLE_SHARE * room:
            return remat
    return REMATS[-1]


def with_chosen_remat(
    config: Config, model: Model, process_group: ProcessGroup, say: Callable[[str], object]
) -> Model:
    """Return the model with the recomputation that `policy.remat=auto` chooses; else the model.

    Args:
        config: The run's config.
        model: The run's model.
        process_group: The processes of the run, which choose the same.
        say: Gets a line that names the choice.
    """
    if config.policy.remat != "auto":
        return model
    memory = load_optional("planning.memory")
    room = memory.update_room(config, model.policy.architecture, dict(model.mesh.shape))
    if not room:
        say(f"policy.remat=auto: {REMATS[-1]}, since the device does not say how much memory it has")
        return model

    def needed(remat: str) -> float:
        """Return the bytes of the update by the formula where it is far too large, else by the compiler."""
        expected = memory.update_memory(config, model.policy.architecture, dict(model.mesh.shape), remat)
        if expected > memory.FORMULA_MARGIN * room:
            return float(expected)
        return planned_update(config, model, remat)

    slowest = max(REMATS.index(remat) for remat in _choices(process_group, least_recomputation(needed, room)))
    chosen = REMATS[slowest]
    say(f"policy.remat=auto: {chosen}, the least recomputation that fits {room / memory.GIB:.1f} GiB")
    return replace(model, policy=with_remat(model.policy, chosen))


def _choices(process_group: ProcessGroup, own: str) -> list[str]:
    """Return the choices of all processes: their devices may have unequal memory."""
    return process_group.all_gather("policy.remat", own)


def planned_update(config: Config, model: Model, remat: str) -> float:
    """Return the bytes on a device that the compiler plans for the update, with its arguments.

    Args:
        config: The run's config.
        model: The run's model.
        remat: A setting of `policy.remat`.
    """
    schedule = run_schedule(config, config.learner.optimizer)
    learner = policy_learner(config, with_remat(model.policy, remat), model.mesh, schedule)
    program = learner.lower_update(config.learner.pack_length, policy_loss(config)).compile()
    memory: Any = program.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return float(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)


def with_remat(policy: Policy, remat: str) -> Policy:
    """Return a policy that differs in what its backward pass computes again."""
    numerics = replace(policy.numerics, remat=remat)
    return Policy(policy.architecture, numerics, policy.adapters, policy.kind)
