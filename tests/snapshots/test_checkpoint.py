"""Full checkpoints: exact resume, another mesh, pruning, and what is refused."""

import asyncio
import gc
import shutil
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from orbax.checkpoint.checkpoint_manager import CheckpointManager

from calibadv_jax.config import MeshConfig
from calibadv_jax.core.errors import UserError, exit_status
from calibadv_jax.policy.sharding import make_mesh, placed_params
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.snapshots.checkpoint import (
    CheckpointStore,
    damage_as_user_error,
    restore_params,
    saved_steps,
)

EXTRA = {"step": 3, "questions": {"epoch": 1, "seen": [4, 2]}, "seed": 2**40, "ratio": 0.1}
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.partition(
        {"matrix": optax.adamw(optax.linear_schedule(1e-3, 0.0, 9)), "rest": optax.sgd(0.1, momentum=0.9)},
        lambda params: jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 3 else "rest", params),
    ),
)


def make_state(params):
    return {"params": params, "opt_state": OPTIMIZER.init(params), "updates": jnp.zeros((), jnp.int32)}


@jax.jit
def updated(state):
    """One optimizer step on made-up gradients, so that no moment is zero."""
    gradients = jax.tree.map(jnp.sin, state["params"])
    changes, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], changes)
    return {"params": params, "opt_state": opt_state, "updates": state["updates"] + 1}


@pytest.fixture(scope="module")
def state(tiny):
    return updated(make_state(tiny.params))


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


def abstract(policy, mesh=None):
    params = placed_params(policy.abstract_params, mesh, jnp.float32)
    shapes = jax.eval_shape(make_state, params)
    everywhere = jax.tree.leaves(params)[0].sharding
    if mesh is not None:
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    whole = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), shapes
    )
    return whole | {"params": params}


def test_only_a_complete_step_is_a_checkpoint(tmp_path):
    (tmp_path / "3.orbax-checkpoint-tmp-0").mkdir()
    assert saved_steps(tmp_path / "absent") == saved_steps(tmp_path) == []
    (tmp_path / "3").mkdir()
    assert saved_steps(tmp_path) == [3]


def test_state_and_extra_come_back_exactly(tiny, store, state):
    """Named tuples and empty states of the optimizer included: the next update is the same."""
    assert store.latest_step() is None
    store.save(3, state, EXTRA)
    assert store.latest_step() == 3
    restored, extra = store.restore(3, abstract(tiny.policy))
    assert extra == EXTRA
    assert tiny.same(restored, state)
    assert tiny.same(updated(restored), updated(state))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_state_may_be_donated_once_saved(tiny, state, tmp_path, asynchronous):
    store = CheckpointStore(tmp_path / "checkpoints", 2, asynchronous)
    expected, mine = jax.device_get(state), jax.tree.map(jnp.copy, state)
    store.save(1, mine, {})
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)
    overwrite(mine)
    assert store.wait() == 1 and store.wait() is None and not store.is_writing()
    restored, _ = store.restore(1, abstract(tiny.policy))
    store.close()
    assert tiny.same(jax.device_get(restored), expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unreadable_checkpoint_is_not_reported_as_saved(state, tmp_path, monkeypatch, asynchronous):
    """As on a path that Orbax takes for a pattern: it writes every tensor and loses all of them."""
    monkeypatch.setattr("calibadv_jax.snapshots.checkpoint.check_literal", lambda folder: None)
    store = CheckpointStore(tmp_path / "lr[1e-3]", keep=2, asynchronous=asynchronous)
    store.save(1, state, EXTRA)
    with pytest.raises(UserError, match="step 1 cannot be saved"):
        store.wait()
    store.close()


class Barrier:
    """Of one process. A save that has failed elsewhere has failed here."""

    is_broken, resets = False, 0

    def __call__(self, *, key, timeout_ms):
        pass

    def reset(self):
        self.is_broken, self.resets = False, self.resets + 1


def test_barrier_begins_anew_with_each_save(state, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", 2, asynchronous=True, barrier=(barrier := Barrier()))
    for step in (1, 2):
        store.save(step, state, {})
        assert (barrier.is_broken, barrier.resets) == (False, step)
        barrier.is_broken = True
        assert not store.is_writing()  # `wait` says at once how it ended
    assert store.wait() == 2
    store.close()


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b", "who?", "a\\b"])
def test_path_with_a_pattern_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="checkpoints cannot lie in a folder with"):
        CheckpointStore(tmp_path / name / "checkpoints", keep=1)


def test_another_mesh_takes_the_checkpoint_over(tiny, store, state):
    store.save(1, state, {})
    target = abstract(tiny.policy, make_mesh(MeshConfig(data=1, fsdp=4, tensor=2)))
    restored, _ = store.restore(1, target)
    kernel = restored["params"]["layers"]["mlp"]["gate"]["kernel"]
    assert kernel.sharding == target["params"]["layers"]["mlp"]["gate"]["kernel"].sharding
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    assert tiny.same(jax.device_get(restored), jax.device_get(state))


def test_a_new_process_sees_the_newest_complete_checkpoints(tiny, store, state, tmp_path):
    for step in (1, 2, 5):
        store.save(step, state, {"step": step})
    store.close()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["2", "5"]
    shutil.copytree(folder / "5", folder / "9.orbax-checkpoint-tmp-0")  # as an interrupted save leaves it
    shutil.copytree(folder / "9.orbax-checkpoint-tmp-0", tmp_path / "cut/9.orbax-checkpoint-tmp-0")
    assert [sorted(saved_steps(tmp_path / name)) for name in ("checkpoints", "cut", "absent")] == [
        [2, 5],
        [],
        [],
    ]
    assert restore_params(folder, placed_params(tiny.policy.abstract_params, None, jnp.float32))[1] == 5
    again = CheckpointStore(folder, keep=2)
    assert again.latest_step() == 5
    assert again.restore(5, abstract(tiny.policy))[1] == {"step": 5}
    again.close()


def test_a_step_that_can_not_follow_is_refused_and_not_dropped(store, state):
    store.save(5, state, {})
    for step in (5, 4):
        with pytest.raises(UserError, match=f"holds step 5 of an earlier run, step {step} cannot follow"):
            store.save(step, state, {})


def test_extra_that_is_not_json_fails_before_anything_is_written(store, state):
    with pytest.raises(TypeError):
        store.save(1, state, {"state": object()})
    assert store.latest_step() is None


def test_another_architecture_or_optimizer_is_refused_with_all_differences(tiny, store, state):
    store.save(1, state, {})
    with pytest.raises(UserError, match="1: does not fit this policy and optimizer") as caught:
        store.restore(1, abstract(tiny.other))
    for name in ("params.layers.mlp.gate.kernel", "params.layers.mlp.down.kernel"):
        assert f"{name} has shape" in str(caught.value)
    target = abstract(tiny.policy) | {"opt_state": (jax.ShapeDtypeStruct((), jnp.int32),)}
    with pytest.raises(UserError, match=r"missing opt_state.0 \[\].*unexpected opt_state.1.inner_states"):
        store.restore(1, target)


@pytest.mark.usefixtures("swept")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["state gone", "extra gone", "data cut"])
def test_damaged_checkpoints_are_one_line(tiny, store, state, how):
    store.save(1, state, EXTRA)
    folder = store.folder / "1"
    if how == "data cut":
        files = (path for path in (folder / "state").rglob("*") if path.is_file())
        largest = max(files, key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    else:
        shutil.rmtree(folder / how.split()[0])
    with pytest.raises(UserError, match="1: damaged checkpoint") as caught:
        store.restore(1, abstract(tiny.policy))
    assert "\n" not in str(caught.value)


def given_up():
    """A read as Orbax does it, which answers even the end of its generator with an error."""
    try:
        yield
    except BaseException as error:
        raise Exception("Encountered error while reading array index: (slice(0, 2, 1),)") from error


@pytest.mark.medium
@pytest.mark.usefixtures("swept")
@pytest.mark.filterwarnings("ignore")
def test_the_other_tensors_of_a_damaged_checkpoint_are_not_heard(tiny, store, state, caplog, monkeypatch):
    """Orbax reads them side by side. asyncio would tell of each that failed later, Python of each that came
    when the event loop was closed."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: heard.append(str(report.exc_value)))
    store.save(1, state, EXTRA)
    for path in (store.folder / "1/state").rglob("d/*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="1: damaged checkpoint"):
        store.restore(1, abstract(tiny.policy))

    async def forget():
        asyncio.get_running_loop().create_future().set_exception(ValueError("another tensor"))
        gc.collect()

    asyncio.run(forget())
    gc.collect()
    assert not [report.getMessage() for report in caplog.records if report.name == "asyncio"]
    reading = given_up()
    reading.send(None)
    del reading
    gc.collect()
    for words in ("Event loop is closed", "something else"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(words)))
    assert heard == ["something else"]


def test_parameters_alone_in_another_precision(tiny, store, state):
    """What export reads: neither the optimizer nor its state is known."""
    store.save(4, state, {})
    params, step = restore_params(
        store.folder, placed_params(tiny.policy.abstract_params, None, jnp.bfloat16)
    )
    assert step == 4
    assert tiny.same(params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state["params"]))
    with pytest.raises(UserError, match="has shape"):
        restore_params(store.folder, placed_params(tiny.other.abstract_params, None, jnp.float32))
    with pytest.raises(UserError, match="no complete checkpoint of step 7 there"):
        restore_params(store.folder, placed_params(tiny.policy.abstract_params, None, jnp.float32), step=7)


def test_other_errors_are_no_damage():
    with pytest.raises(ZeroDivisionError), damage_as_user_error("damaged"):
        raise ZeroDivisionError


def test_no_checkpoint_is_one_line(tiny, tmp_path):
    with pytest.raises(UserError, match="absent: no complete checkpoint there; train first"):
        restore_params(tmp_path / "absent", placed_params(tiny.policy.abstract_params, None, jnp.float32))
    assert not (tmp_path / "absent").exists()


def test_all_that_numerics_leave_out(tiny):
    """The same checkpoint serves any way of computing: a policy's tree does not depend on Numerics."""
    other = Policy(tiny.policy.architecture, Numerics(jnp.bfloat16, jnp.bfloat16, "full", "xla", 8))
    assert jax.tree.structure(other.abstract_params) == jax.tree.structure(tiny.policy.abstract_params)


def test_failed_save_leaves_the_older_checkpoints(tiny, state, tmp_path, monkeypatch):
    """Orbax forgets them: without a reload the next save would keep too many, and none would be restored."""
    store = CheckpointStore(tmp_path / "checkpoints", keep=2, asynchronous=True)
    for step in (1, 2):
        store.save(step, state, {"step": step})
    assert store.wait() == 2

    def fail(manager, *arguments):
        manager._save_progress_tracker.set(False)
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "_finalize", fail)
        store.save(3, state, {"step": 3})
        with pytest.raises(
            UserError, match="step 3 cannot be saved; the older .* are whole.*no room"
        ) as ended:
            store.wait()
    assert exit_status(ended.value) == 75
    assert store.steps() == [1, 2] and store.latest_step() == 2
    assert store.restore(2, abstract(tiny.policy))[1] == {"step": 2}
    store.save(4, state, {"step": 4})
    assert store.wait() == 4 and store.steps() == [2, 4]
    store.close()
