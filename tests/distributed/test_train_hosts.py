"""Training in several processes equals training in one, whoever is stopped or killed on the way."""

import json
import re
import time
from contextlib import suppress
from functools import partial

import hosts_rig
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file
from small_run import SMALL

from calibadv_jax.commands import evaluate, export, train
from calibadv_jax.config import load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.weights import flatten
from calibadv_jax.rollout_store.schema import kept_steps
from calibadv_jax.run import model
from calibadv_jax.run.wiring import open_services
from calibadv_jax.snapshots import mirror_marker
from calibadv_jax.snapshots.checkpoint import newest_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("faiss")
pytest.importorskip("fastapi")

STEPS, PER_STEP = 5, 16  # trajectories


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Overrides of all runs: one world, one retriever, five steps."""
    home = tmp_path_factory.mktemp("hosts")
    overrides = [*SMALL, *hosts_rig.places(home), f"learner.steps={STEPS}", "mesh.fsdp=-1"]
    overrides += ["distributed.timeout=30"]
    overrides += ["reward.answer=hosts_rig:noisy", "checkpoint.every=0", "evaluate.every=4"]
    overrides += ["evaluate.sample_size=2", "evaluate.temperatures=[0.0]"]
    overrides += ["loss.kl_coef=0.01", "advantage.probes=[current]"]  # passes that read log-probabilities
    config = load_config(hosts_rig.ROOT / "configs/quickstart.yaml", [*overrides, f"run.dir={home}/services"])
    write_world(config.world)
    with open_services(config, home) as (url, _):
        yield home, [*overrides, f"retriever.url={url}"]


def arguments(settings, name, *overrides):
    home, common = settings
    return [*common, f"run.dir={home / name}", *overrides]


def config_of(settings, name, *overrides):
    return load_config(hosts_rig.ROOT / "configs/quickstart.yaml", arguments(settings, name, *overrides))


@pytest.fixture(scope="module")
def undisturbed(settings):
    """The folder of a run in one process with eight devices."""
    train.run(config_of(settings, "whole"))
    return settings[0] / "whole"


def trained(folder):
    """Parameters of the newest checkpoint, by path."""
    path = folder / "checkpoints" / str(newest_step(folder / "checkpoints")) / "state"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=arrays))
    return flatten(state["params"])


def is_same(folder, other):
    """Whether two runs have the same rows and parameters, up to rounding."""
    ours, other_rows = hosts_rig.rows(folder), hosts_rig.rows(other)
    assert [row["step"] for row in ours] == [row["step"] for row in other_rows] == list(range(1, STEPS + 1))
    for own, two in zip(ours, other_rows, strict=True):
        assert own.keys() == two.keys()
        for name in own:
            assert own[name] == pytest.approx(two[name], rel=1e-4, abs=1e-6), (own["step"], name)
        assert own["actor/grad_norm"] > 0
    for name, array in trained(folder).items():
        np.testing.assert_allclose(array, trained(other)[name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert kept_steps(folder).keys() == kept_steps(other).keys()
    return True


def finished(settings, name):
    """The exported policy of a run, and its scores."""
    output = settings[0] / f"{name}_exported"
    places = [f"export.output={output}", f"evaluate.output={output}.json", "data.eval_limit=2"]
    config = config_of(settings, name, *places, "export.dtype=float32")
    export.export(config)
    report = evaluate.evaluate_policy(config, evaluate.choose_policy(config))
    return load_file(output / "model.safetensors"), report.means


@pytest.fixture(scope="module")
def expected(settings, undisturbed):
    return finished(settings, "whole")


def test_one_device_trains_as_eight_do(settings, undisturbed, monkeypatch):
    monkeypatch.setattr(model, "make_mesh", partial(make_mesh, devices=jax.devices()[:1]))
    train.run(config_of(settings, "one"))
    assert is_same(settings[0] / "one", undisturbed)


def test_signal_or_kill_of_one_ends_both(settings, undisturbed, expected, capfd):
    """Two starts of two processes end so, while process 1 scores; one process then trains to the end."""
    folder, store = settings[0] / "parts", settings[0] / "store"
    overrides = arguments(settings, "parts", f"run.mirror={store}")
    first, second = hosts_rig.ends(hosts_rig.start(overrides, 2, 4, signals={1: f"{2 * PER_STEP + 3}:15"}))
    assert (first[1], second[1]) == (143, 143), (first, second)
    assert "checkpoint saved at step 2" in first[0]
    assert "step 1/5" in first[0] and "step 1/5" not in second[0]
    assert [row["step"] for row in hosts_rig.rows(folder)] == [1, 2]
    overrides += ["checkpoint.every=1"]
    first, second = hosts_rig.ends(hosts_rig.start(overrides, 2, 4, signals={1: f"{PER_STEP + 3}:9"}))
    line = next(line for line in first[0].splitlines() if line.startswith("error: "))
    assert (first[1], second[1]) == (75, -9) and "process 1" in line and "is lost" in line, first
    train.run(config_of(settings, "parts", f"run.mirror={store}"))
    # The third checkpoint may have been on its way to the disk.
    assert re.search("resuming from step [23]", capfd.readouterr().err)
    assert is_same(folder, undisturbed)
    assert len(list((folder / "configs").glob("*.yaml"))) == 3
    copied = json.loads(max((store / mirror_marker.MARKER).glob("*")).read_text())
    assert max(copied["steps"]) == STEPS
    (weights, scores), (whole, expected_scores) = finished(settings, "parts"), expected
    assert weights.keys() == whole.keys()
    for name, array in weights.items():
        np.testing.assert_allclose(array, whole[name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert scores == expected_scores and scores


def test_adapters_and_critic_continue_in_two_processes(settings, expected):
    """On the policy of another run. Its moments lie in host memory, and tied groups give way."""
    more = [f"policy.path={settings[0]}/whole_exported", "policy.lora.rank=2", "policy.lora.alpha=4"]
    more += ["learner.optimizer.offload=host", "advantage.name=gae", "critic.optimizer.lr=0.01"]
    more += ["rollout.dynamic_sampling=3", "reward.answer=hosts_rig:coarse"]
    more += ["advantage.probes=[]", "evaluate.every=0"]  # programs that other tests compile
    train.run(config_of(settings, "adapted", *more))
    train.run(config_of(settings, "shared", *more, "learner.steps=2"))
    ended = hosts_rig.ends(hosts_rig.start(arguments(settings, "shared", *more), 2, 2))
    assert [status for _, status in ended] == [0, 0], ended
    assert "resuming from step 2" in ended[0][0]
    assert is_same(settings[0] / "shared", settings[0] / "adapted")
    assert sum(row["rollout/replaced_groups"] for row in hosts_rig.rows(settings[0] / "shared")[2:]) > 0


def test_kill_of_one_of_four_ends_all_and_two_go_on(settings, undisturbed, expected):
    """From one process to four, of which one is killed, to two, whose policy is exported and evaluated."""
    folder = settings[0] / "killed"
    train.run(config_of(settings, "killed", "learner.steps=2", "evaluate.every=0"))
    overrides = arguments(settings, "killed", "checkpoint.every=1")
    killed = hosts_rig.ends(hosts_rig.start(overrides, 4, 2, signals={2: f"{PER_STEP + 3}:9"}))
    assert killed[2][1] == -9
    for errors, status in (killed[0], killed[1], killed[3]):
        line = next(line for line in errors.splitlines() if line.startswith("error: "))
        assert status == 75 and "process 2" in line and "is lost" in line, (status, errors)
    ended = hosts_rig.ends(hosts_rig.start(overrides, 2, 4))
    assert [status for _, status in ended] == [0, 0], ended
    # The third checkpoint may have been on its way to the disk.
    assert re.search("resuming from step [23]", ended[0][0])
    assert is_same(folder, undisturbed)
    (weights, scores), (whole, expected_scores) = finished(settings, "killed"), expected
    assert weights.keys() == whole.keys()
    for name, array in weights.items():
        np.testing.assert_allclose(array, whole[name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert scores == expected_scores and scores


def take_over(store):
    """Write the next version of a mirror's marker, once it has a checkpoint, as another start of the run."""
    names = sorted(path.name for path in (store / mirror_marker.MARKER).glob("[0-9]*"))
    with suppress(IndexError, FileNotFoundError, FileExistsError):  # a newer version may replace it
        version = json.loads((store / mirror_marker.MARKER / names[-1]).read_text())
        if version["steps"]:
            version["owner"] = {"token": "another", "host": "elsewhere", "process": 7}
            whole = store.with_name("next version")
            whole.write_text(json.dumps(version))
            (store / mirror_marker.MARKER / f"{int(names[-1]) + 1:08}").hardlink_to(whole)


def test_mirror_that_is_taken_over_ends_both_at_one_step(settings):
    """Only process 0, which copies, can find that out."""
    folder, store = settings[0] / "overtaken", settings[0] / "overtaken_store"
    overrides = ["checkpoint.every=1", "learner.steps=200", "evaluate.every=0", f"run.mirror={store}"]
    running = hosts_rig.start(arguments(settings, "overtaken", *overrides), 2, 4)
    while running[0].poll() is None:
        take_over(store)
        time.sleep(0.1)
    (first, status), (second, other_status) = hosts_rig.ends(running)
    assert (status, other_status) == (2, 2), (first, second)
    assert "was taken over by another start of this run (process 7 on elsewhere)" in first
    assert re.search(r"error: process 0 \(.*\) has ended: run.mirror=.* was taken over", second), second
    assert newest_step(folder / "checkpoints") == len(hosts_rig.rows(folder)) < 200
