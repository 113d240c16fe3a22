"""Policy snapshots: versions, completeness, and what is refused."""

import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_policy import mesh_of

from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.sharding import param_shardings
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.policy.weights import flatten, unflatten
from calibadv_jax.snapshots import publish as publish_module
from calibadv_jax.snapshots.checkpoint import tensor_shapes
from calibadv_jax.snapshots.publish import SnapshotStore, load_snapshot, read_manifest, read_tensors


def publish(store, tiny, version, params=None):
    chosen = tiny.params if params is None else params
    return store.publish(version, chosen, hf_config=tiny.config, tokenizer_hash="abc")


@pytest.fixture
def store(tmp_path):
    return SnapshotStore(tmp_path / "snapshots", keep=2, dtype=jnp.float32)


def test_manifest_describes_the_files(tiny, tmp_path):
    folder = publish(SnapshotStore(tmp_path, keep=1, dtype=jnp.bfloat16), tiny, 7)
    manifest = read_manifest(folder)
    assert folder.name == "v000007" and manifest["config"] == tiny.config
    assert [manifest[name] for name in ("format", "version", "tokenizer")] == [2, 7, "abc"]
    kernel = np.asarray(tiny.params["layers"]["attn"]["q"]["kernel"].astype(jnp.bfloat16))
    content = kernel.swapaxes(1, 2).tobytes()  # as in HuggingFace's files
    sha256 = hashlib.sha256(content).hexdigest()
    expected = {"shape": [2, 32, 16], "dtype": "bfloat16", "sha256": sha256}
    assert manifest["tensors"]["layers.attn.q.kernel"] == expected
    assert (folder / "params/layers.attn.q.kernel/0.0.0").read_bytes() == content
    embedding = np.asarray(tiny.params["embed"]["embedding"].astype(jnp.bfloat16))
    assert (folder / "params/embed.embedding/0.0").read_bytes() == embedding.tobytes()


def test_manifest_has_a_hash_of_every_tensor(tiny, store):
    tensors = read_manifest(publish(store, tiny, 0))["tensors"]
    assert tensors.keys() == flatten(tiny.params).keys()
    assert all(len(entry["sha256"]) == 64 for entry in tensors.values())


def test_orbax_reads_snapshots_without_warning(tiny, store, caplog):
    folder = publish(store, tiny, 0)
    assert not caplog.records
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(folder / "params")
    kernel = np.asarray(tiny.params["layers"]["attn"]["q"]["kernel"])
    assert np.array_equal(restored["layers"]["attn"]["q"]["kernel"], kernel.swapaxes(1, 2))
    assert tensor_shapes(restored).keys() == tensor_shapes(tiny.params).keys()


@pytest.mark.medium
def test_parameters_load_in_compute_precision_and_sharding(tiny, tmp_path):
    """Published from one mesh in bfloat16, loaded on another."""
    first, second = mesh_of(fsdp=4, tensor=2), mesh_of(data=2, fsdp=2, tensor=2)
    params = jax.device_put(tiny.params, param_shardings(tiny.policy.abstract_params, first))
    folder = publish(SnapshotStore(tmp_path, keep=1, dtype=jnp.bfloat16), tiny, 0, params)
    rounded = jax.device_get(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params))
    half = Policy(tiny.policy.architecture, Numerics(compute_dtype=jnp.bfloat16))
    loaded = load_snapshot(folder, half, second)
    assert tiny.same(jax.device_get(loaded), rounded)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == param_shardings(half.abstract_params, second)
    widened = jax.tree.map(lambda leaf: leaf.astype(np.float32), rounded)
    assert tiny.same(jax.device_get(load_snapshot(folder, tiny.policy, None)), widened)


def test_old_and_resumed_versions_are_removed(tiny, store, monkeypatch):
    old = publish(store, tiny, 0)
    for version in (1, 2):
        publish(store, tiny, version)
    assert sorted(path.name for path in store.folder.iterdir()) == ["v000001", "v000002"]
    doubled = jax.tree.map(lambda leaf: leaf * 2, tiny.params)
    folder = publish(store, tiny, 1, doubled)  # by a run that was resumed
    assert [path.name for path in store.folder.iterdir()] == ["v000001"]
    assert tiny.same(load_snapshot(folder, tiny.policy, None), doubled)
    with monkeypatch.context() as patch:  # as a kill leaves it in the middle of the removal
        patch.setattr(publish_module.shutil, "rmtree", lambda folder: None)
        for version in (2, 3):
            publish(store, tiny, version)
    assert folder.is_dir() and not old.exists()
    with pytest.raises(UserError, match="not a complete snapshot"):
        read_manifest(folder)


def test_snapshot_of_another_policy_is_refused(tiny, store):
    folder = publish(store, tiny, 0)
    with pytest.raises(UserError, match=r"snapshot of another policy; 3 tensor\(s\) do not fit: ") as caught:
        load_snapshot(folder, tiny.other, None)
    for name, shape, expected in (
        ("gate", "[2, 16, 24]", "[2, 16, 32]"),
        ("up", "[2, 16, 24]", "[2, 16, 32]"),
        ("down", "[2, 24, 16]", "[2, 32, 16]"),
    ):
        assert f"layers.mlp.{name}.kernel has shape {shape} instead of {expected}" in str(caught.value)


def flip_last_bit(file):
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def rename_tensor(manifest):
    content = json.loads(manifest.read_text())
    content["tensors"]["../../other"] = content["tensors"].pop("final_norm.scale")
    manifest.write_text(json.dumps(content))


DAMAGES = {  # of the manifest and the file of a tensor
    r"not a complete snapshot \(no manifest.json\)": lambda manifest, file: manifest.unlink(),
    "not valid JSON": lambda manifest, file: manifest.write_text(manifest.read_text()[:50]),
    "format is 1, not 2": lambda manifest, file: manifest.write_text('{"format": 1}'),
    "again; .*embed.embedding is missing": lambda manifest, file: shutil.rmtree(file.parents[1]),
    "again; layers.mlp.up.kernel is missing": lambda manifest, file: (file.unlink(), file.mkdir()),
    "layers.mlp.up.kernel has 9 bytes instead of ": lambda manifest, file: file.write_bytes(bytes(9)),
    "layers.mlp.up.kernel differs from manifest.json": lambda manifest, file: flip_last_bit(file),
    r"\.\./\.\./other is no parameter": lambda manifest, file: rename_tensor(manifest),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_damaged_snapshot_is_refused(tiny, store, words):
    folder = publish(store, tiny, 0)
    DAMAGES[words](folder / "manifest.json", folder / "params/layers.mlp.up.kernel/0.0.0")
    for read in (read_tensors, lambda folder: load_snapshot(folder, tiny.policy, None)):
        with pytest.raises(UserError, match=words) as caught:
            read(folder)
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


@pytest.mark.parametrize("difference", [1, -1])
def test_length_of_a_damaged_file_is_named(tiny, store, difference):
    folder = publish(store, tiny, 0)
    file = folder / "params/layers.mlp.up.kernel/0.0.0"
    content = file.read_bytes()
    file.write_bytes((content + b"0")[: len(content) + difference])
    words = f"layers.mlp.up.kernel has {len(content) + difference} bytes instead of {len(content)}"
    with pytest.raises(UserError, match=f"damaged snapshot, publish it again; {words}"):
        read_tensors(folder)


def test_missing_file_is_named(tiny, store):
    folder = publish(store, tiny, 0)
    (folder / "params/layers.mlp.up.kernel/0.0.0").unlink()
    for read in (read_tensors, lambda folder: load_snapshot(folder, tiny.policy, None)):
        with pytest.raises(UserError, match="publish it again; layers.mlp.up.kernel is missing") as caught:
            read(folder)
        assert "\n" not in str(caught.value)


def test_hash_that_differs_from_the_manifest_is_found(tiny, store):
    folder = publish(store, tiny, 0)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"]["embed.embedding"]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="damaged snapshot, publish it again; embed.embedding differ"):
        load_snapshot(folder, tiny.policy, None)


def test_read_tensors_outlive_their_snapshot(tiny, store):
    """Views of files: whoever still holds them must not see a later version in them."""
    held = read_tensors(publish(store, tiny, 1))
    publish(store, tiny, 1, jax.tree.map(lambda leaf: leaf * 2, tiny.params))
    for version in (2, 3):
        publish(store, tiny, version)
    assert not (store.folder / "v000001").exists()
    assert tiny.same(unflatten(held), tiny.params)


def test_workers_sharing_hashes_find_every_damage(tiny, store):
    folder = publish(store, tiny, 0)
    for file in [path for path in (folder / "params").rglob("*") if path.name.startswith("0")]:
        flip_last_bit(file)
        names = []
        for rank in range(3):
            try:
                read_tensors(folder, slice(rank, None, 3))
            except UserError as error:
                names.append(str(error))
        assert len(names) == 1 and f"{file.parent.name} differs" in names[0], file
        flip_last_bit(file)
    assert tiny.same(unflatten(read_tensors(folder)), tiny.params)
