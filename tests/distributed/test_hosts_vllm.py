"""Two processes of one run, each with a real vLLM worker of its own."""

from dataclasses import replace

import hosts_rig
import pytest
from small_run import SMALL, write_model

from calibadv_jax.commands import train
from calibadv_jax.config import load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.run.wiring import open_services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("faiss")
pytest.importorskip("fastapi")
pytest.importorskip("vllm")

AHEAD = ["rollout.max_staleness=1", "loss.importance_cap=2.0"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Overrides of all starts of one run, whose services run."""
    home = tmp_path_factory.mktemp("hosts")
    overrides = [*SMALL, *hosts_rig.places(home), f"run.dir={home}/run", "mesh.fsdp=-1"]
    overrides += ["distributed.timeout=60", "reward.answer=hosts_rig:noisy", "checkpoint.every=0"]
    overrides += ["sampler.name=vllm", "policy.init.head_dim=32", "sampler.workers=2"]
    overrides += ["checkpoint.allow_change=[rollout.max_staleness,loss.importance_cap]"]
    config = load_config(hosts_rig.ROOT / "configs/quickstart.yaml", overrides)
    write_world(config.world)
    folder = write_model(home / "model", config)
    with open_services(replace(config, run=replace(config.run, dir=str(home))), folder) as (url, workers):
        yield home / "run", [*overrides, f"retriever.url={url}", f"sampler.urls=[{','.join(workers)}]"]


def test_each_process_samples_with_its_own_worker(settings):
    """Two processes train two steps and three ahead by one; then one process takes over."""
    folder, overrides = settings
    ended = hosts_rig.ends(hosts_rig.start([*overrides, "learner.steps=2"], 2, 2))
    assert [status for _, status in ended] == [0, 0], ended
    ended = hosts_rig.ends(hosts_rig.start([*overrides, *AHEAD, "learner.steps=5"], 2, 2))
    assert [status for _, status in ended] == [0, 0], ended
    train.run(load_config(hosts_rig.ROOT / "configs/quickstart.yaml", [*overrides, "learner.steps=6"]))
    written = hosts_rig.rows(folder)
    assert [row["step"] for row in written] == [1, 2, 3, 4, 5, 6]
    for row in written:
        assert row["rollout/workers"] == 2 and row["rollout/workers_lost"] == 0
        assert row["rollout/probe_logprob_diff_max"] < 1e-2  # both serve what the learner has just made
        assert row["actor/grad_norm"] > 0
    stale = [row["rollout/staleness/max"] for row in written]
    assert stale[:2] == [0, 0] and max(stale[2:5]) == 1
    assert [row["rollout/mixed_versions"] for row in written[:2]] == [0, 0]
    assert all(row["actor/sampler_mismatch"] < 1e-3 for row in written[:2])
    labels = [path.name for path in (folder / "snapshots").glob("v*")]
    assert "v000006" in labels
