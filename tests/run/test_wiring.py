"""What the config opens: which sampler, with which services, and that all of it is closed again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest
from http_rig import Handler, serving
from tiny_policy import tiny
from trainer_rig import HF_CONFIG, MODEL, make_config

from calibadv_jax.config import LoraConfig
from calibadv_jax.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.policy.weights import flatten
from calibadv_jax.run import wiring
from calibadv_jax.run.model import AdapterBase
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from calibadv_jax.snapshots.publish import read_manifest


@pytest.fixture
def model():
    return replace(MODEL, hf_config=HF_CONFIG | {"eos_token_id": [3]})


class Ready(Handler):
    """A retrieval service that is asked for its health alone."""

    def do_GET(self):
        self.reply(200, {"status": "ready"})


@pytest.fixture
def opened(monkeypatch):
    """What was opened with which arguments, and what was closed, in order."""
    events = []

    def service(name, url):
        @contextmanager
        def open_service(*arguments, **more):
            events.append((name, *arguments[:-1], *more.values()))  # without what is told of waiting
            yield url
            events.append(f"{name} closed")

        return open_service

    monkeypatch.setattr(
        "calibadv_jax.sampler.rollout_workers.open_workers", service("workers", ["http://127.0.0.1:8"])
    )
    with serving(Ready) as url:
        monkeypatch.setattr(wiring, "open_retriever", service("retriever", url))
        yield events


class OneOfTwo(ProcessGroup):
    """As the second of two processes."""

    process_index = 1
    process_count = 2


@pytest.mark.parametrize(
    ("process_group", "slots", "concurrency"), [(SINGLE_PROCESS, 3, 5), (OneOfTwo(), 2, 3)]
)
def test_embedded_sampler_has_the_share_of_its_process(
    tmp_path, model, opened, process_group, slots, concurrency
):
    """And no workers; in one of several processes it copies the parameters in the compute precision."""
    rollout = {"max_length": 16, "max_concurrency": 5}
    policy = {"compute_dtype": "bfloat16"}
    config = make_config(tmp_path, rollout=rollout, sampler={"slots": 3}, policy=policy)
    health, places = [], (tmp_path / "policy", tmp_path / "snapshots")
    with wiring.open_rollouts(config, model, *places, health.append, process_group) as rollouts:
        sampler, context = rollouts.context.sampler, rollouts.context
        assert isinstance(sampler, JaxSampler) and (sampler.max_length, sampler.config.slots) == (16, slots)
        assert context.rollout == replace(config.rollout, max_concurrency=concurrency)
        assert (sampler.stops.end_ids, rollouts.seed) == ({3}, config.run.seed)
        assert context.tokenizer is model.tokenizer
        params = jax.jit(model.policy.init)(jax.random.key(0))
        published = rollouts.publish(0, params)
        assert (published is params) == (process_group is SINGLE_PROCESS)
        jax.tree.map(np.testing.assert_array_equal, published, params)
        assert all(leaf.dtype == model.policy.numerics.compute_dtype for leaf in jax.tree.leaves(published))
    assert health == [{"status": "ready"}]
    assert opened == [("retriever", config.retriever, tmp_path / "retriever.log"), "retriever closed"]


@pytest.mark.parametrize(
    ("kind", "process_group"),
    [
        ("plain", SINGLE_PROCESS),
        ("merged", SINGLE_PROCESS),
        ("adapters", SINGLE_PROCESS),
        ("plain", OneOfTwo()),
    ],
)
def test_vllm_workers_take_published_snapshots(tmp_path, model, opened, monkeypatch, kind, process_group):
    """Of all parameters, of the sum with the adapters, or of the adapters alone; the first process writes."""

    async def close(sampler):
        opened.append("sampler closed")

    monkeypatch.setattr(VllmSampler, "close", close)
    folder, policy, checkpoint = tmp_path / "policy", {"compute_dtype": "float32"}, {"snapshots_kept": 2}
    if kind != "plain":
        adapters = Adapters(2, 4.0, ("q",), "float32")
        model = replace(model, policy=tiny(HF_CONFIG, adapters))
        folder.mkdir()
        AdapterBase("base", str(tmp_path), "0" * 64, 0, adapters).write(folder)
        policy |= {"lora": LoraConfig(rank=2, targets=["q"], snapshots=kind), "path": "p"}
        checkpoint["snapshot_dtype"] = "bfloat16"
    sampler = {"name": "vllm", "workers": 2}
    config = make_config(tmp_path, sampler=sampler, policy=policy, checkpoint=checkpoint)
    params = jax.jit(model.policy.init)(jax.random.key(0))
    with wiring.open_rollouts(
        config, model, folder, tmp_path / "snapshots", process_group=process_group
    ) as rollouts:
        share = replace(config.sampler, workers=2 // process_group.process_count)
        assert opened[1] == ("workers", share, folder, tmp_path, "float32", 16, process_group.process_index)
        sampler = rollouts.context.sampler
        assert [worker.url for worker in sampler.workers] == ["http://127.0.0.1:8"]
        assert (sampler.tokenizer_hash, sampler.vocab_size) == (model.tokenizer_hash, 24)
        folders = [rollouts.publish(version, params) for version in (3, 4, 5)]
    assert opened[2:] == ["sampler closed", "workers closed", "retriever closed"]
    assert [path.is_dir() for path in folders] == [False, process_group.is_main, process_group.is_main]
    if not process_group.is_main:
        return
    manifest = read_manifest(folders[-1])
    assert (manifest["tokenizer"], manifest["config"]) == (model.tokenizer_hash, model.hf_config)
    whole = len(flatten(MODEL.policy.abstract_params))
    assert len(manifest["tensors"]) == (2 if kind == "adapters" else whole)
    dtypes = {entry["dtype"] for entry in manifest["tensors"].values()}
    assert dtypes == {"bfloat16" if kind == "merged" else "float32"}
    if kind == "adapters":
        expected = {"folder": str(tmp_path), "sha256": "0" * 64, "base_dtype": "float32", "scale": 2.0}
        assert manifest["base"] == expected | {"dtype": "bfloat16"}
