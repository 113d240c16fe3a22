"""Puts the stages together for the entry points; holds no algorithm."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from calibadv_jax.config import Config, dump_config
from calibadv_jax.errors import UserError
from calibadv_jax.learner.learner import init_params
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.rollout.collect import collect_groups
from calibadv_jax.rollout.jax_sampler import JaxSampler
from calibadv_jax.rollout.retriever_client import RetrieverClient, RetrieverProcess
from calibadv_jax.snapshots.huggingface import copy_tokenizer, load_params, read_hf_config
from calibadv_jax.snapshots.publish import SnapshotStore, load_snapshot, read_manifest
from calibadv_jax.trajectory import Group, Question


@dataclass(frozen=True)
class Model:
    """A policy without parameters, and what belongs to it."""

    policy: Policy
    hf_config: dict[str, Any]
    tokenizer: Any
    tokenizer_folder: Path
    mesh: Mesh

    @property
    def tokenizer_hash(self) -> str:
        """Identity of the vocabulary: SHA-256 over every token and its id."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def load_tokenizer(folder: str | Path) -> Any:
    """A HuggingFace tokenizer that can write and end the protocol's turns.

    Raises:
        UserError: no tokenizer there, no end-of-text token, or a tag does not survive a round trip.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such tokenizer folder; set policy.tokenizer or policy.path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no tokenizer can be loaded: {' '.join(str(error).split())}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder}: the tokenizer has no eos_token; add one to tokenizer_config.json")
    for name in ("think", "search", "information", "answer"):
        for tag in (f"<{name}>", f"</{name}>"):
            ids = tokenizer.encode(f"{tag} a", add_special_tokens=False)
            if tag not in tokenizer.decode(ids, skip_special_tokens=False):
                raise UserError(
                    f"{folder}: the tokenizer can not write {tag}: encoding and decoding loses it;"
                    " add the eight protocol tags as tokens"
                )
    return tokenizer


def build_model(config: Config, path: str) -> Model:
    """The policy's shape, tokenizer and mesh: from the HuggingFace folder `path`, or from policy.init.

    Raises:
        UserError: neither is given, or one can not be used.
    """
    if path:
        hf_config = read_hf_config(Path(path))
    elif config.policy.init:
        hf_config = dict(config.policy.init)
    else:
        raise UserError("policy.path is empty: set it to a HuggingFace folder, or give policy.init")
    folder = Path(config.policy.tokenizer or path)
    tokenizer = load_tokenizer(folder)
    hf_config.setdefault("vocab_size", len(tokenizer))
    if hf_config["vocab_size"] < len(tokenizer):
        raise UserError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, but the policy's vocab_size is"
            f" {hf_config['vocab_size']}; use the tokenizer that belongs to the policy"
        )
    hf_config.setdefault("eos_token_id", tokenizer.eos_token_id)
    source = f"{path}/config.json" if path else "policy.init"
    policy = Policy(architecture_from_hf(hf_config, source), Numerics.from_config(config.policy))
    return Model(policy, hf_config, tokenizer, folder, make_mesh(config.mesh))


def initial_params(config: Config, model: Model, path: str) -> Params:
    """Parameters of the HuggingFace folder `path`, or random ones where it is empty."""
    if path:
        return load_params(Path(path), model.policy, model.mesh)
    return init_params(model.policy, model.mesh, config.run.seed)


def prepare_run_folder(config: Config, model: Model, name: str) -> Path:
    """Writes the resolved config, and what export needs of the policy, into the run folder."""
    folder = Path(config.run.dir)
    policy = folder / "policy"
    policy.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(dump_config(config))
    (policy / "config.json").write_text(json.dumps(model.hf_config, indent=2))
    copy_tokenizer(model.tokenizer_folder, policy)
    return folder


def snapshot_store(config: Config) -> SnapshotStore:
    return SnapshotStore(
        Path(config.run.dir) / "snapshots",
        keep=config.checkpoint.snapshots_kept,
        dtype=snapshot_dtype(config),
    )


def snapshot_dtype(config: Config) -> np.dtype[Any]:
    return jnp.dtype(config.checkpoint.snapshot_dtype)


@contextmanager
def open_retriever(config: Config) -> Iterator[RetrieverClient]:
    """A client of retriever.url, or of a child service that ends with the block."""
    if config.retriever.url:
        yield RetrieverClient(config.retriever, config.retriever.url)
        return
    if not config.retriever.corpus:
        raise UserError("retriever.url is empty: set it, or retriever.corpus to start a service here")
    with RetrieverProcess(config.retriever, Path(config.run.dir) / "retriever.log") as process:
        yield RetrieverClient(config.retriever, process.url)


class Rollouts:
    """A sampler and a retriever, ready to write trajectories."""

    def __init__(self, config: Config, model: Model, retriever: RetrieverClient):
        self.config, self.model, self.retriever = config, model, retriever

        def restore(path: Path) -> tuple[int, Params]:
            return read_manifest(path)["version"], load_snapshot(path, model.policy, model.mesh)

        self.sampler = JaxSampler(
            model.policy,
            model.tokenizer,
            config.sampler,
            model.mesh,
            config.rollout.max_length,
            restore,
        )

    def load(self, snapshot: Path) -> None:
        asyncio.run(self.sampler.load(snapshot))

    def collect(
        self,
        questions: Sequence[Question],
        name: str,
        seed: int,
        on_group: Callable[[Group], object] | None = None,
        **changes: Any,
    ) -> list[Group]:
        """Groups of trajectories in the order of the questions.

        Args:
            name: prefix of the sessions' names.
            changes: fields of RolloutConfig that differ from the config here.
        """
        rollout = replace(self.config.rollout, **changes)
        return asyncio.run(
            collect_groups(
                questions,
                sampler=self.sampler,
                retriever=self.retriever,
                tokenizer=self.model.tokenizer,
                rollout=rollout,
                prompt=self.config.prompt,
                seed=seed,
                name=name,
                on_group=on_group,
            )
        )


def random_state(seed: int, step: int, purpose: str) -> np.random.Generator:
    """Randomness of one step and purpose; a function of its arguments, so that resuming is exact."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))
