"""Weight-transfer engine ``orbax``: a vLLM worker takes its weights from a policy snapshot.

vLLM's workers load it (`vllm_plugin`) if the server was started with ``--weight-transfer-config
'{"backend": "orbax"}'``. Those of one tensor-parallel group share the work: each of a machine compares its
share of the tensors with their hashes. If all succeed, each reads its own part of every tensor.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from calibadv_jax.core.errors import REFUSAL, UserError
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.policy.weights import to_hf, unflatten
from calibadv_jax.snapshots.publish import read_manifest, read_tensors


@dataclass
class OrbaxInitInfo(WeightTransferInitInfo):
    """The trainer's session; a new one forgets the versions of the last."""

    session: str
    tokenizer: str  # hash of the trainer's vocabulary, as in the manifest


@dataclass
class OrbaxUpdateInfo(WeightTransferUpdateInfo):
    path: str
    version: int


class OrbaxWeightTransferEngine(WeightTransferEngine[OrbaxInitInfo, OrbaxUpdateInfo]):
    """Checks the whole snapshot before it touches the live model: if it is refused, the old weights stay."""

    init_info_cls = OrbaxInitInfo
    update_info_cls = OrbaxUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: OrbaxInitInfo) -> None:
        """Begin a session: a new trainer counts its versions from the start."""
        jax.config.update("jax_platforms", "cpu")  # the accelerator is vLLM's
        self._session, self._version = init_info, -1
        machines = _of_all(socket.gethostname())
        ranks = [rank for rank, machine in enumerate(machines) if machine == socket.gethostname()]
        self._share = slice(ranks.index(get_tp_group().rank_in_group), None, len(ranks))

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` loads a snapshot in one go, once it is known to be complete."""

    finish_weight_update = shutdown = start_weight_update

    def receive_weights(self, update_info: OrbaxUpdateInfo) -> None:
        """Load a snapshot; UserError, and the old weights stay, if it is old, damaged or another model's."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        tensors, failure = {}, None
        try:
            tensors = self._read(Path(update_info.path), update_info.version)
        except Exception as error:  # passed on to the other workers, who wait for it
            failure = error
        message = f"{REFUSAL}{failure}" if isinstance(failure, UserError) else failure and repr(failure)
        for reason in _of_all(message):
            if reason is not None:
                raise UserError(reason) from failure
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_as_torch(tensors))
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_heads()
        self._version = update_info.version

    def _read(self, snapshot: Path, version: int) -> dict[str, np.ndarray]:
        if not hasattr(self, "_session"):
            raise UserError(f"{snapshot}: no session; call /init_weight_transfer_engine first")
        manifest = read_manifest(snapshot)
        if manifest["version"] != version:
            raise UserError(f"{snapshot}: holds version {manifest['version']}, but {version} was asked for")
        if version <= self._version:
            fault = f"{snapshot}: version {version} is stale"
            raise UserError(f"{fault}; this worker has version {self._version}")
        if manifest["tokenizer"] != self._session.tokenizer:
            raise UserError(f"{snapshot}: written for another tokenizer than this session's")
        architecture = architecture_from_hf(self.model_config.hf_config.to_dict(), "the worker's config")
        published = asdict(architecture_from_hf(manifest["config"], f"{snapshot}: config"))
        differences = [
            f"{name} {published[name]} instead of {value}"
            for name, value in asdict(architecture).items()
            if value != published[name]
        ]
        if differences:
            raise UserError(f"{snapshot}: snapshot of another model: {'; '.join(differences)}")
        return read_tensors(snapshot, self._share, Policy(architecture, Numerics()))

    def _repack_heads(self) -> None:
        """Renew the packed copy of the output head's weights, which a kernel keeps on CPU.

        If the head is tied to the embedding, a reload leaves that copy unchanged.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _of_all(value: Any) -> list[Any]:
    group = get_tp_group()
    values = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _as_torch(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in to_hf(unflatten(tensors)):
        if array.dtype.name == "bfloat16":  # NumPy's type is not torch's, but the bits are the same
            yield name, torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        else:
            yield name, torch.from_numpy(array)
