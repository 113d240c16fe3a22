"""Puts the stages together for the entry points; holds no algorithm."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from calibadv_jax.config import Config, dump_config
from calibadv_jax.errors import UserError
from calibadv_jax.learner.learner import init_params
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Params, Policy
from calibadv_jax.rollout.child_process import ChildService
from calibadv_jax.rollout.collect import collect_group, collect_groups
from calibadv_jax.rollout.jax_sampler import JaxSampler
from calibadv_jax.rollout.retriever_client import RetrieverClient, RetrieverProcess
from calibadv_jax.snapshots.huggingface import copy_tokenizer, load_params, read_hf_config
from calibadv_jax.snapshots.publish import SnapshotStore, load_snapshot, read_manifest
from calibadv_jax.trajectory import Group, Question

if TYPE_CHECKING:
    from calibadv_jax.rollout.vllm_sampler import VllmSampler

T = TypeVar("T")


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


@contextmanager
def open_workers(config: Config, folder: Path) -> Iterator[list[str]]:
    """URLs of the vLLM workers: sampler.urls, or children that end with the block; none for sampler.name=jax.

    Args:
        folder: HuggingFace folder with the policy's config.json and tokenizer.
    """
    sampler = config.sampler
    if sampler.name != "vllm" or sampler.urls:
        yield sampler.urls
        return
    from calibadv_jax.rollout.vllm_worker import require_vllm

    require_vllm()
    with ExitStack() as stack:
        workers = [_vllm_child(config, folder, number) for number in range(sampler.workers)]
        for worker in workers:  # all begin to start before the first is waited for
            stack.callback(worker.stop)
            worker.start()
        for worker in workers:
            worker.wait()
        yield [worker.url for worker in workers]


def _vllm_child(config: Config, folder: Path, number: int) -> ChildService:
    from calibadv_jax.rollout.vllm_worker import VllmWorkerProcess

    sampler = config.sampler
    options = {
        "flavour": sampler.flavour,
        "dtype": config.policy.compute_dtype,
        "max_model_len": config.rollout.max_length,
        "max_num_seqs": sampler.slots,
    }
    return VllmWorkerProcess(
        folder,
        Path(config.run.dir) / f"vllm_worker_{number}.log",
        options,
        what=f"vLLM worker {number}",
        more=sampler.worker_args,
        devices=sampler.worker_devices[number] if sampler.worker_devices else None,
        start_timeout=sampler.start_timeout,
    )


class Rollouts:
    """A sampler and a retriever, ready to write trajectories, on an event loop of their own.

    The loop runs in a thread for as long as the block, so that rollouts go on while the learner works.
    """

    def __init__(self, config: Config, model: Model, retriever: RetrieverClient, workers: Sequence[str] = ()):
        self.config, self.model, self.retriever = config, model, retriever
        self.sampler: JaxSampler | VllmSampler
        if config.sampler.name == "vllm":
            from calibadv_jax.rollout.vllm_sampler import VllmSampler

            self.sampler = VllmSampler(workers, config.sampler, model.tokenizer_hash)
        else:
            self.sampler = self._jax_sampler()
        self._slots = asyncio.Semaphore(config.rollout.max_concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)

    def __enter__(self) -> Rollouts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def load(self, snapshot: Path) -> None:
        """Hands a published snapshot to the sampler."""
        self._run(self.sampler.load(snapshot))

    def begin(self, number: int, question: Question) -> Future[Group]:
        """Starts the rollout of group `number`, counted over the whole run, in the background."""
        step = number // self.config.rollout.questions_per_step
        seed = int(random_state(self.config.run.seed, step, "rollout").integers(2**31))
        coroutine = collect_group(
            question,
            self._slots,
            rollout=self.config.rollout,
            seed=seed,
            name=f"group{number}",
            **self._common(),
        )
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def collect(self, questions: Sequence[Question], name: str, seed: int, **changes: Any) -> list[Group]:
        """Groups of trajectories in the order of the questions.

        Args:
            name: prefix of the sessions' names.
            changes: fields of RolloutConfig that differ from the config here.
        """
        rollout = replace(self.config.rollout, **changes)
        coroutine = collect_groups(questions, rollout=rollout, seed=seed, name=name, **self._common())
        return self._run(coroutine)

    def probe(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Log-probabilities of a text under each vLLM worker's weights; none where the sampler is ours."""
        if isinstance(self.sampler, JaxSampler):
            return {}
        return self._run(self.sampler.prompt_logprobs(token_ids))

    def _common(self) -> dict[str, Any]:
        return {
            "sampler": self.sampler,
            "retriever": self.retriever,
            "tokenizer": self.model.tokenizer,
            "prompt": self.config.prompt,
        }

    def _jax_sampler(self) -> JaxSampler:
        model = self.model

        def restore(path: Path) -> tuple[int, Params]:
            return read_manifest(path)["version"], load_snapshot(path, model.policy, model.mesh)

        return JaxSampler(
            model.policy,
            model.tokenizer,
            self.config.sampler,
            model.mesh,
            self.config.rollout.max_length,
            restore,
        )

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interruption of this thread must not leave it running
            raise

    async def _finish(self) -> None:
        """Cancels what is running, and closes the connections."""
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self.retriever.close()
        if not isinstance(self.sampler, JaxSampler):
            await self.sampler.close()


def random_state(seed: int, step: int, purpose: str) -> np.random.Generator:
    """Randomness of one step and purpose; a function of its arguments, so that resuming is exact."""
    digest = hashlib.sha256(f"{seed}/{step}/{purpose}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))
