"""What vLLM calls at its start, in every process: the entry point of ``vllm.general_plugins``."""

from __future__ import annotations


def register() -> None:
    """Makes the weight-transfer backend ``orbax`` known; may be called more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    name = "orbax"
    if name not in WeightTransferEngineFactory._registry:  # no public way to ask
        WeightTransferEngineFactory.register_engine(
            name, "calibadv_jax.snapshots.vllm_engine", "OrbaxWeightTransferEngine"
        )
