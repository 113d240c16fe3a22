"""Weight-transfer engine ``orbax``: a vLLM worker takes its weights from a policy snapshot.

vLLM's workers load it (`vllm_plugin`) if the server was started with ``--weight-transfer-config
'{"backend": "orbax"}'``. The workers of a tensor-parallel group share the checks: each of those on a machine
compares a share of the tensors with their hashes. If all succeed, each worker reads its own part of every
tensor.
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
    """The trainer's session; a new session may begin with any version.

    Attributes:
        session: its name.
        tokenizer: hash of the trainer's vocabulary, as in manifests.
    """

    session: str
    tokenizer: str


@dataclass
class OrbaxUpdateInfo(WeightTransferUpdateInfo):
    """The snapshot to load.

    Attributes:
        path: its folder.
        version: of the policy, as in its manifest.
    """

    path: str
    version: int


class OrbaxWeightTransferEngine(WeightTransferEngine[OrbaxInitInfo, OrbaxUpdateInfo]):
    """The engine inside a vLLM worker. It checks a snapshot before it changes the model.

    If the snapshot is refused, the old weights stay.
    """

    init_info_cls = OrbaxInitInfo
    update_info_cls = OrbaxUpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: OrbaxInitInfo) -> None:
        """Begin a session: a new trainer counts its versions from the start.

        Args:
            init_info: the session.
        """
        jax.config.update("jax_platforms", "cpu")  # the accelerator is vLLM's
        self._session = init_info
        self._version = -1  # version of the loaded snapshot; -1: none was loaded in this session
        machine = socket.gethostname()
        ranks_here = [rank for rank, name in enumerate(_all_gather(machine)) if name == machine]
        first = ranks_here.index(get_tp_group().rank_in_group)
        # Every n-th tensor is this worker's to compare, if n workers are on this machine.
        self._share = slice(first, None, len(ranks_here))

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` loads a snapshot in one go, once it is known to be complete."""

    def finish_weight_update(self) -> None:
        """Do nothing; see `start_weight_update`."""

    def shutdown(self) -> None:
        """Do nothing: the engine holds no connections."""

    def receive_weights(self, update_info: OrbaxUpdateInfo) -> None:
        """Load a snapshot into the model.

        Args:
            update_info: the snapshot.

        Raises:
            UserError: it is old, damaged or another model's, for this worker or another one of its group;
                the old weights stay.
        """
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        tensors: dict[str, np.ndarray] = {}
        failure: Exception | None = None
        message: str | None = None
        try:
            tensors = self._read(Path(update_info.path), update_info.version)
        except UserError as error:
            failure = error
            message = f"{REFUSAL}{error}"
        except Exception as error:  # passed on to the other workers, who wait for it
            failure = error
            message = repr(error)
        for reason in _all_gather(message):
            if reason is not None:
                raise UserError(reason) from failure
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_as_torch(tensors))
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_heads()
        self._version = update_info.version

    def _read(self, snapshot: Path, version: int) -> dict[str, np.ndarray]:
        """Return the tensors of a snapshot; raise UserError unless it is the next one of this session."""
        if not hasattr(self, "_session"):
            raise UserError(f"{snapshot}: no session; call /init_weight_transfer_engine first")
        manifest = read_manifest(snapshot)
        if manifest["version"] != version:
            raise UserError(f"{snapshot}: holds version {manifest['version']}, but {version} was asked for")
        if version <= self._version:
            raise UserError(
                f"{snapshot}: version {version} is stale; this worker has version {self._version}"
            )
        if manifest["tokenizer"] != self._session.tokenizer:
            raise UserError(f"{snapshot}: written for another tokenizer than this session's")
        architecture = architecture_from_hf(self.model_config.hf_config.to_dict(), "the worker's config")
        published = asdict(architecture_from_hf(manifest["config"], f"{snapshot}: config"))
        differences = []
        for name, value in asdict(architecture).items():
            if value != published[name]:
                differences.append(f"{name} {published[name]} instead of {value}")
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


def _all_gather(value: Any) -> list[Any]:
    """Return the values of all workers of the tensor-parallel group, by rank."""
    group = get_tp_group()
    values = [value] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _as_torch(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values that HuggingFace gives the tensors."""
    for name, array in to_hf(unflatten(tensors)):
        if array.dtype.name == "bfloat16":  # NumPy's type is not torch's, but the bits are the same
            yield name, torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        else:
            yield name, torch.from_numpy(array)
