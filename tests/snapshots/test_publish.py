"""Policy snapshots: versions, completeness, and what is refused."""

import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from calibadv_jax.config import MeshConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.sharding import make_mesh, param_shardings
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.policy.weights import unflatten
from calibadv_jax.snapshots import publish as publish_module
from calibadv_jax.snapshots.checkpoint import tensor_shapes
from calibadv_jax.snapshots.publish import SnapshotStore, load_snapshot, read_manifest, read_tensors


def publish(store, tiny, version, params=None):
    chosen = tiny.params if params is None else params
    return store.publish(version, chosen, hf_config=tiny.config, tokenizer_hash="abc")


@pytest.fixture
def store(tmp_path):
    return SnapshotStore(tmp_path / "snapshots", keep=2, dtype=jnp.float32)


def test_the_manifest_says_what_the_snapshot_holds(tiny, tmp_path):
    folder = publish(SnapshotStore(tmp_path, keep=1, dtype=jnp.bfloat16), tiny, 7)
    manifest = read_manifest(folder)
    assert folder.name == "v000007"
    assert {name: manifest[name] for name in ("format", "version", "tokenizer")} == {
        "format": 2,
        "version": 7,
        "tokenizer": "abc",
    }
    assert manifest["config"] == tiny.config
    kernel = np.asarray(tiny.params["layers"]["attn"]["q"]["kernel"].astype(jnp.bfloat16))
    bytes_of_file = kernel.swapaxes(1, 2).tobytes()  # as in HuggingFace's files
    assert manifest["tensors"]["layers.attn.q.kernel"] == {
        "shape": [2, 32, 16],
        "dtype": "bfloat16",
        "sha256": hashlib.sha256(bytes_of_file).hexdigest(),
    }
    assert (folder / "params/layers.attn.q.kernel/0.0.0").read_bytes() == bytes_of_file
    assert (folder / "params/embed.embedding/0.0").read_bytes() == np.asarray(
        tiny.params["embed"]["embedding"].astype(jnp.bfloat16)
    ).tobytes()


def test_orbax_alone_reads_what_was_published_and_has_nothing_to_warn_of(tiny, store, caplog):
    folder = publish(store, tiny, 0)
    assert not caplog.records
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(folder / "params")
    kernel = np.asarray(tiny.params["layers"]["attn"]["q"]["kernel"])
    assert np.array_equal(restored["layers"]["attn"]["q"]["kernel"], kernel.swapaxes(1, 2))
    assert tensor_shapes(restored).keys() == tensor_shapes(tiny.params).keys()


@pytest.mark.medium
def test_parameters_come_back_in_compute_precision_and_sharding(tiny, tmp_path):
    """Published from one mesh in bfloat16, loaded on another."""
    first, second = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2)), make_mesh(MeshConfig(2, 2, 2))
    params = jax.device_put(tiny.params, param_shardings(tiny.policy.abstract_params, first))
    folder = publish(SnapshotStore(tmp_path, keep=1, dtype=jnp.bfloat16), tiny, 0, params)
    rounded = jax.device_get(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params))
    half = Policy(tiny.policy.architecture, Numerics(compute_dtype=jnp.bfloat16))
    loaded = load_snapshot(folder, half, second, verify=True)
    assert tiny.same(jax.device_get(loaded), rounded)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == param_shardings(half.abstract_params, second)
    widened = jax.tree.map(lambda leaf: leaf.astype(np.float32), rounded)
    assert tiny.same(jax.device_get(load_snapshot(folder, tiny.policy, None, verify=True)), widened)


def test_old_versions_are_pruned(tiny, store):
    for version in (0, 1, 2):
        publish(store, tiny, version)
    assert sorted(path.name for path in store.folder.iterdir()) == ["v000001", "v000002"]


def test_publishing_after_a_resume_replaces_this_and_later_versions(tiny, store):
    publish(store, tiny, 1)
    publish(store, tiny, 2)
    doubled = jax.tree.map(lambda leaf: leaf * 2, tiny.params)
    folder = publish(store, tiny, 1, doubled)
    assert [path.name for path in store.folder.iterdir()] == ["v000001"]
    assert tiny.same(load_snapshot(folder, tiny.policy, None, verify=True), doubled)


def test_a_snapshot_of_another_policy_is_refused_with_all_differences(tiny, store):
    folder = publish(store, tiny, 0)
    with pytest.raises(UserError, match=r"snapshot of another policy; 3 tensor\(s\) do not fit: ") as caught:
        load_snapshot(folder, tiny.other, None)
    for name, array, expected in (
        ("gate", "[2, 16, 24]", "[2, 16, 32]"),
        ("up", "[2, 16, 24]", "[2, 16, 32]"),
        ("down", "[2, 24, 16]", "[2, 32, 16]"),
    ):
        assert f"layers.mlp.{name}.kernel has shape {array} instead of {expected}" in str(caught.value)


@pytest.mark.parametrize("verify", [False, True])
def test_verification_finds_a_tensor_that_is_not_what_was_published(tiny, store, verify):
    folder = publish(store, tiny, 0)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"]["embed.embedding"]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if not verify:
        assert tiny.same(load_snapshot(folder, tiny.policy, None), tiny.params)
        return
    with pytest.raises(UserError, match="damaged snapshot, publish it again; embed.embedding differ"):
        load_snapshot(folder, tiny.policy, None, verify=True)


@pytest.mark.usefixtures("swept")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "how", ["manifest gone", "manifest cut", "format", "tree gone", "data gone", "data cut"]
)
def test_incomplete_and_torn_snapshots_are_one_line(tiny, store, how):
    folder = publish(store, tiny, 0)
    manifest, tree = folder / "manifest.json", folder / "params"
    words = "damaged snapshot, publish it again"
    if how == "manifest gone":
        manifest.unlink()
        words = r"not a complete snapshot \(no manifest.json\)"
    elif how == "manifest cut":
        manifest.write_text(manifest.read_text()[:50])
        words = "not valid JSON"
    elif how == "format":
        manifest.write_text(json.dumps({"format": 1}))
        words = "format is 1, not 2"
    elif how == "tree gone":
        shutil.rmtree(tree)
    else:
        largest = max(
            (path for path in tree.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
        )
        if how == "data gone":
            largest.unlink()
        else:
            largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(UserError, match=words) as caught:
        load_snapshot(folder, tiny.policy, None)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("how", ["changed", "longer", "unknown", "unreadable"])
def test_a_file_that_is_not_what_was_published_is_never_handed_out(tiny, store, how):
    folder = publish(store, tiny, 0)
    file = folder / "params/layers.mlp.up.kernel/0.0.0"
    published = file.read_bytes()
    words = "layers.mlp.up.kernel differs from manifest.json"
    if how == "changed":  # in one bit
        file.write_bytes(published[:-1] + bytes([published[-1] ^ 1]))
    elif how == "longer":
        file.write_bytes(published + b"0")
        words = rf"layers.mlp.up.kernel has {len(published) + 1} bytes instead of {len(published)}"
    elif how == "unknown":
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["tensors"]["../../other"] = manifest["tensors"].pop("final_norm.scale")
        (folder / "manifest.json").write_text(json.dumps(manifest))
        words = r"\.\./\.\./other is no parameter"
    else:
        file.unlink()
        file.mkdir()
        words = "layers.mlp.up.kernel is missing"
    with pytest.raises(UserError, match=f"damaged snapshot, publish it again; {words}"):
        read_tensors(folder)


def test_what_is_read_stays_when_the_snapshot_is_pruned_or_published_again(tiny, store):
    """Views of files: whoever still holds them must not see a later version in them."""
    held = read_tensors(publish(store, tiny, 1))
    publish(store, tiny, 1, jax.tree.map(lambda leaf: leaf * 2, tiny.params))
    for version in (2, 3):
        publish(store, tiny, version)
    assert not (store.folder / "v000001").exists()
    assert tiny.same(unflatten(held), tiny.params)


def test_workers_that_share_the_hashes_find_what_one_finds(tiny, store):
    folder = publish(store, tiny, 0)
    for file in [path for path in (folder / "params").rglob("*") if path.name.startswith("0")]:
        published = file.read_bytes()
        file.write_bytes(published[:-1] + bytes([published[-1] ^ 1]))
        names = []
        for rank in range(3):
            try:
                read_tensors(folder, slice(rank, None, 3))
            except UserError as error:
                names.append(str(error))
        assert len(names) == 1 and f"{file.parent.name} differs" in names[0], file
        file.write_bytes(published)
    assert tiny.same(unflatten(read_tensors(folder)), tiny.params)


def test_half_removed_snapshot_is_not_complete(tiny, store, monkeypatch):
    """As a kill leaves it in the middle of the removal: nobody may load it."""
    old = publish(store, tiny, 0)
    for version in (1, 2):
        monkeypatch.setattr(publish_module.shutil, "rmtree", lambda folder: None)
        publish(store, tiny, version)
    assert old.is_dir()
    with pytest.raises(UserError, match="not a complete snapshot"):
        read_manifest(old)
