"""The entry point of ``vllm.general_plugins``, which vLLM calls in every process at its start."""

from __future__ import annotations


def register() -> None:
    """Register the weight-transfer backend ``orbax``; a further call does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    name = "orbax"
    if name not in WeightTransferEngineFactory._registry:  # no public way to ask
        WeightTransferEngineFactory.register_engine(
            name, "calibadv_jax.snapshots.vllm_engine", "OrbaxWeightTransferEngine"
        )
