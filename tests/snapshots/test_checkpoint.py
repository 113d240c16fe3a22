"""Full checkpoints: exact resume, another mesh, pruning, and what is refused."""

import asyncio
import gc
import json
import shutil
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import optax
import pytest
from orbax.checkpoint.checkpoint_manager import CheckpointManager
from tiny_policy import mesh_of

from calibadv_jax.core.errors import UserError, exit_status
from calibadv_jax.policy.sharding import placed_params
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.snapshots import checkpoint
from calibadv_jax.snapshots.checkpoint import (
    CheckpointStore,
    finish_rollback,
    note_rollback,
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
    return jax.tree.map(lambda leaf: leaf.update(sharding=everywhere), shapes) | {"params": params}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saved_state_may_be_donated_and_returns(tiny, state, tmp_path, asynchronous):
    """Named tuples and empty states of the optimizer included: the next update is the same."""
    store = CheckpointStore(tmp_path / "checkpoints", 2, asynchronous)
    assert store.latest_step() is None
    expected, donated = jax.device_get(state), jax.tree.map(jnp.copy, state)
    store.save(3, donated, EXTRA)
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)(donated)
    assert store.wait() == 3 and store.wait() is None and not store.is_writing()
    restored, extra = store.restore(3, abstract(tiny.policy))
    store.close()
    assert extra == EXTRA and tiny.same(jax.device_get(restored), expected)
    assert tiny.same(updated(restored), updated(state))


def test_unreadable_checkpoint_is_not_reported_as_saved(state, tmp_path, monkeypatch):
    """As on a path that Orbax takes for a pattern: it writes every tensor and loses all of them."""
    monkeypatch.setattr(checkpoint, "check_literal", lambda folder: None)
    store = CheckpointStore(tmp_path / "lr[1e-3]", keep=2, asynchronous=True)
    store.save(1, state, EXTRA)
    with pytest.raises(UserError, match="step 1 cannot be saved"):
        store.wait()
    store.close()


def test_barrier_begins_anew_with_each_save(state, tmp_path):
    barrier = Mock(is_broken=False)
    store = CheckpointStore(tmp_path / "checkpoints", 2, asynchronous=True, barrier=barrier)
    for step in (1, 2):
        store.save(step, state, {})
        assert barrier.reset.call_count == step
        barrier.is_broken = True
        assert not store.is_writing()  # `wait` says at once how it ended
    assert store.wait() == 2
    store.close()


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b", "who?", "a\\b"])
def test_path_with_a_pattern_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="checkpoints cannot lie in a folder with"):
        CheckpointStore(tmp_path / name / "checkpoints", keep=1)


def test_checkpoint_restores_on_another_mesh(tiny, store, state):
    store.save(1, state, {})
    target = abstract(tiny.policy, mesh_of(fsdp=4, tensor=2))
    restored, _ = store.restore(1, target)
    kernel = restored["params"]["layers"]["mlp"]["gate"]["kernel"]
    assert kernel.sharding == target["params"]["layers"]["mlp"]["gate"]["kernel"].sharding
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    assert tiny.same(jax.device_get(restored), jax.device_get(state))


def test_new_process_sees_newest_complete_checkpoints(tiny, store, state, tmp_path):
    for step in (1, 2, 5):
        store.save(step, state, {"step": step})
    store.close()
    folder, cut = tmp_path / "checkpoints", tmp_path / "cut/9.orbax-checkpoint-tmp-0"
    assert sorted(path.name for path in folder.iterdir()) == ["2", "5"]
    for place in (folder / cut.name, cut):  # as an interrupted save leaves it
        shutil.copytree(folder / "5", place)
    assert sorted(saved_steps(folder)) == [2, 5]
    assert saved_steps(cut.parent) == saved_steps(tmp_path / "absent") == []
    assert restore_params(folder, placed_params(tiny.policy.abstract_params, None, jnp.float32))[1] == 5
    again = CheckpointStore(folder, keep=2)
    assert again.latest_step() == 5 and again.restore(5, abstract(tiny.policy))[1] == {"step": 5}
    again.close()


def test_step_that_a_run_goes_back_to_stays(store, state, tmp_path):
    for step in (2, 4):
        store.save(step, state, {})
    store.delete_after(4)
    assert store.steps() == [2, 4]
    store.delete_after(2)
    assert store.steps() == saved_steps(tmp_path / "checkpoints") == [2]
    assert store.latest_step() == 2


def test_only_a_complete_step_is_a_checkpoint(tmp_path):
    assert saved_steps(tmp_path / "absent") == []
    assert saved_steps(tmp_path) == []
    (tmp_path / "3.orbax-checkpoint-tmp-0").mkdir()
    assert saved_steps(tmp_path) == []
    (tmp_path / "3").mkdir()
    assert saved_steps(tmp_path) == [3]


def test_saved_step_is_the_latest(store, state):
    store.save(3, state, {})
    assert store.latest_step() == 3


def test_earlier_step_or_invalid_extra_is_refused(store, state):
    """Before anything is written."""
    with pytest.raises(TypeError):
        store.save(1, state, {"state": object()})
    assert store.latest_step() is None
    store.save(5, state, {})
    for step in (5, 4):
        with pytest.raises(UserError, match=f"holds step 5 of an earlier run, step {step} cannot follow"):
            store.save(step, state, {})


def test_other_architecture_or_optimizer_is_refused(tiny, store, state):
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


@pytest.mark.medium
@pytest.mark.usefixtures("swept")
@pytest.mark.filterwarnings("ignore")
def test_errors_of_other_tensors_are_hidden(tiny, store, state, caplog, monkeypatch):
    """Orbax reads them side by side: asyncio would tell of later ones, and Python when the loop is closed."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(str(report.exc_value)))
    checkpoint._hide_late_errors.__wrapped__()
    store.save(1, state, EXTRA)
    for path in (store.folder / "1/state").rglob("d/*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="1: damaged checkpoint"):
        store.restore(1, abstract(tiny.policy))

    async def forget():
        asyncio.get_running_loop().create_future().set_exception(ValueError("another tensor"))

    asyncio.run(forget())
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
    for words in (*checkpoint.LATE, "something else"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(words)))
    assert reported == ["something else"]


def abandoned_read():
    """A read as Orbax does it, which answers even the end of its generator with an error."""
    try:
        yield
    except BaseException as error:
        raise Exception("Encountered error while reading array index: (slice(0, 2, 1),)") from error


def test_reports_of_abandoned_reads_are_hidden(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(str(report.exc_value)))
    checkpoint._hide_late_errors.__wrapped__()
    read = abandoned_read()
    next(read)
    del read
    gc.collect()
    for message in ("Event loop is closed", "something else"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(message)))
    assert reported == ["something else"]


def test_parameters_alone_are_restored_in_other_precision(tiny, store, state, tmp_path):
    """What export reads: neither the optimizer nor its state is known."""
    store.save(4, state, {})
    half = placed_params(tiny.policy.abstract_params, None, jnp.bfloat16)
    params, step = restore_params(store.folder, half)
    assert step == 4
    assert tiny.same(params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state["params"]))
    other = placed_params(tiny.other.abstract_params, None, jnp.float32)
    for folder, target, step, message in (
        (store.folder, other, None, "has shape"),
        (store.folder, half, 7, "no complete checkpoint of step 7 there"),
        (tmp_path / "absent", half, None, "absent: no complete checkpoint there; train first"),
    ):
        with pytest.raises(UserError, match=message):
            restore_params(folder, target, step)
    assert not (tmp_path / "absent").exists()


def test_tree_of_parameters_does_not_depend_on_numerics(tiny):
    """The same checkpoint serves any way of computing."""
    numerics = Numerics(jnp.bfloat16, jnp.bfloat16, remat="full", kernel="splash", attention_chunk=8)
    other = Policy(tiny.policy.architecture, numerics)
    assert jax.tree.structure(other.abstract_params) == jax.tree.structure(tiny.policy.abstract_params)


def test_other_errors_are_no_damage():
    with pytest.raises(ZeroDivisionError), checkpoint.damage_as_user_error("damaged"):
        raise ZeroDivisionError


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
        with pytest.raises(UserError, match="step 3 cannot be saved; .*no room") as ended:
            store.wait()
    assert exit_status(ended.value) == 75
    assert store.steps() == [1, 2] and store.latest_step() == 2
    assert store.restore(2, abstract(tiny.policy))[1] == {"step": 2}
    store.save(4, state, {"step": 4})
    assert store.wait() == 4 and store.steps() == [2, 4]
    store.close()


def test_unfinished_rollback_keeps_the_step_that_it_went_back_to(tmp_path):
    """The run went back to step 2, and later to step 3. A checkpoint names the rollbacks before it."""
    rollbacks_before = {1: 0, 2: 0, 3: 1, 4: 1, 5: None}
    for step, count in rollbacks_before.items():
        extra = tmp_path / f"checkpoints/{step}/{checkpoint.EXTRA}/metadata"
        extra.parent.mkdir(parents=True)
        if count is not None:
            extra.write_text(json.dumps({"guards": {"rollbacks": count}}))
    finish_rollback(tmp_path)
    assert sorted(saved_steps(tmp_path / "checkpoints")) == [1, 2, 3, 4, 5]  # there was no rollback
    note_rollback(tmp_path, 2, 1)
    note_rollback(tmp_path, 3, 2)
    finish_rollback(tmp_path)
    # Step 4 is of the second attempt. Step 5 is half deleted: it has lost its metadata.
    assert sorted(saved_steps(tmp_path / "checkpoints")) == [1, 2, 3]


def test_unfinished_rollback_reads_no_checkpoint_that_stays_in_any_case(tmp_path):
    """A damaged one up to the step of the rollback does not keep the run from going on."""
    note_rollback(tmp_path, 2, 1)
    for step in (1, 2, 3):
        extra = tmp_path / f"checkpoints/{step}/{checkpoint.EXTRA}/metadata"
        extra.parent.mkdir(parents=True)
        extra.write_text("{damaged")
    with pytest.raises(UserError, match=f"delete {tmp_path}/checkpoints/3$"):
        finish_rollback(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints/3")
    finish_rollback(tmp_path)
    assert sorted(saved_steps(tmp_path / "checkpoints")) == [1, 2]


@pytest.mark.parametrize("is_half_deleted", [False, True])
def test_checkpoint_of_an_attempt_that_was_given_up_goes(tmp_path, is_half_deleted):
    """The run went back from step 3 to step 2, and was killed then; step 4 is of the next attempt."""
    for step, count in ((2, 0), (3, 0), (4, 1)):
        extra = tmp_path / f"checkpoints/{step}/{checkpoint.EXTRA}/metadata"
        extra.parent.mkdir(parents=True)
        if step != 3 or not is_half_deleted:
            extra.write_text(json.dumps({"guards": {"rollbacks": count}}))
    note_rollback(tmp_path, 2, 1)
    finish_rollback(tmp_path)
    assert sorted(saved_steps(tmp_path / "checkpoints")) == [2, 4]
