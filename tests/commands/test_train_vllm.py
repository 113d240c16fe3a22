"""The whole trainer over a real vLLM worker. Beside test_train.py, so that both can run at once."""

from dataclasses import replace

import pytest
from small_run import write_model
from test_train import config_of, noisy_rewards, rows

from calibadv_jax.commands import train
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.run.wiring import open_services

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

__all__ = ["noisy_rewards"]  # the fixture


@pytest.mark.slow
def test_vllm_worker_synchronous_and_ahead_by_one_step(tmp_path, noisy_rewards):
    """The trainer over a real worker: on-policy first, then resumed with rollouts one step ahead."""
    pytest.importorskip("vllm")
    overrides = ["sampler.name=vllm", "policy.init.head_dim=32"]
    config = config_of(tmp_path / "run", *overrides, "learner.steps=3")
    write_world(config.world)
    folder = write_model(tmp_path / "model", config)
    with open_services(config, folder) as (retriever, workers):
        sampler = replace(config.sampler, urls=workers)
        config = replace(config, sampler=sampler, retriever=replace(config.retriever, url=retriever))
        train.run(config)
        ahead = replace(
            config,
            rollout=replace(config.rollout, max_staleness=1),
            loss=replace(config.loss, importance_cap=2.0),
            learner=replace(config.learner, steps=7),
            checkpoint=replace(
                config.checkpoint, allow_change=["rollout.max_staleness", "loss.importance_cap"]
            ),
        )
        train.run(ahead)
    written = rows(tmp_path / "run")
    assert [row["step"] for row in written] == list(range(1, 8))
    for row in written[:3]:
        assert row["rollout/staleness/max"] == 0 and row["rollout/mixed_versions"] == 0
    stale = [row["rollout/staleness/max"] for row in written[3:]]
    assert max(stale) == 1 and min(stale) >= 0
    for row in written:
        assert row["rollout/probe_logprob_diff_mean"] < 1e-3 and row["rollout/workers"] == 1
        assert row["actor/grad_norm"] > 0
    assert all(row["actor/sampler_mismatch"] < 1e-3 for row in written[:3])
