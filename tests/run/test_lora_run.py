"""A run that trains adapters: resumed, rolled back, evaluated and exported; and what its checkpoints hold."""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trainer_rig
from tiny_policy import tiny
from trainer_rig import GUARDED, HF_CONFIG, Collapsing, ScriptedRollouts, make_config, resumed, rows, run

from calibadv_jax.commands.export import export
from calibadv_jax.config import ExportConfig, LoraConfig, RunConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.adapters import Adapters, split
from calibadv_jax.run.model import adapter_base, find_policy
from calibadv_jax.snapshots.huggingface import load_params, save_folder
from calibadv_jax.snapshots.peft import load_adapters
from calibadv_jax.snapshots.publish import SnapshotStore, load_snapshot, read_manifest, read_tensors

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("shared_programs")]

LORA = LoraConfig(rank=2, alpha=4.0, targets=["q", "down"], base_dtype="float32")
ADAPTERS = Adapters.from_config(LORA)
MODEL = replace(trainer_rig.MODEL, policy=tiny(HF_CONFIG, ADAPTERS))


def assert_equal(params, other):
    np.testing.assert_equal(jax.device_get(params), jax.device_get(other))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A HuggingFace folder."""
    params = jax.jit(tiny(HF_CONFIG).init)(jax.random.key(5))
    return save_folder(params, HF_CONFIG, tmp_path_factory.mktemp("base") / "hf", "float32", None)


@pytest.fixture(autouse=True)
def with_adapters(monkeypatch):
    monkeypatch.setattr(trainer_rig, "MODEL", MODEL)


def config_of(folder, base, **sections):
    optimizer = replace(make_config(folder).learner.optimizer, lr=0.01)
    learner = {"steps": 4, "optimizer": optimizer} | sections.pop("learner", {})
    policy = {"path": str(base), "lora": LORA}
    return make_config(folder, policy=policy, loss={"kl_coef": 0.1}, learner=learner, **sections)


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory, shared_programs):
    """The folder of a run of four steps, and what its sampler was given."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    config = config_of(folder, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_rig, "MODEL", MODEL)
        rollouts = run(config, ScriptedRollouts(), folder)
    (folder / "policy").mkdir()
    (folder / "policy/config.json").write_text(json.dumps(HF_CONFIG))
    adapter_base(config, MODEL, str(base)).write(folder / "policy")
    return folder, rollouts.loaded


def test_adapters_alone_are_trained_against_the_base(whole):
    folder, loaded = whole
    first, last = (split(params) for params in (loaded[0][1], loaded[-1][1]))
    assert_equal(first[0], last[0])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), first[1], last[1])
    assert min(jax.tree.leaves(moved)) > 1e-3
    kl = [row["actor/kl_loss"] for row in rows(folder)]
    assert kl[0] == 0 and min(kl[1:]) > 0  # new adapters are the base


def test_killed_and_resumed_equals_uninterrupted(whole, base, tmp_path):
    folder, loaded = whole
    second = resumed(config_of(tmp_path, base), tmp_path, 3 * 2 + 1)
    assert [version for version, _ in second.loaded] == [3, 4]
    assert_equal(second.loaded[-1][1], loaded[-1][1])
    assert rows(tmp_path) == rows(folder)


def test_killed_run_goes_on_from_an_older_checkpoint(whole, base, tmp_path):
    folder, loaded = whole
    config = config_of(tmp_path, base)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        run(config, ScriptedRollouts(fails_at=3 * 2 + 1), tmp_path)
    shutil.rmtree(tmp_path / "checkpoints/3")  # which a killed run would not have saved
    second = run(config, ScriptedRollouts(), tmp_path)
    assert [version for version, _ in second.loaded] == [2, 3, 4]
    assert_equal(second.loaded[-1][1], loaded[-1][1])
    assert rows(tmp_path) == rows(folder)


def test_rollback_restores_the_adapters(base, tmp_path):
    guards = GUARDED | {"action": "rollback"}
    rollouts = run(config_of(tmp_path, base, guards=guards), Collapsing(), tmp_path)
    assert [version for version, _ in rollouts.loaded] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert_equal(rollouts.loaded[5][1], rollouts.loaded[2][1])


def test_checkpoint_holds_adapters_and_names_base(whole, base):
    folder, loaded = whole
    source = find_policy(folder)
    assert source.adapters == ADAPTERS
    assert_equal(source.params(MODEL.policy, MODEL.mesh), loaded[-1][1])
    names = set(json.loads((folder / "checkpoints/4/state/_METADATA").read_text())["tree_metadata"])
    assert not any("kernel" in name or "embedding" in name for name in names)
    assert sum("lora_a" in name for name in names) == 3 * len(LORA.targets)  # and both moments
    extra = json.loads((folder / "checkpoints/4/extra/metadata").read_text())
    assert extra["base"]["name"] == str(base) and len(extra["base"]["sha256"]) == 64


def test_exports_are_the_merged_policy_and_the_adapters(whole, base, tmp_path):
    folder, loaded = whole
    params = jax.tree.map(jnp.asarray, loaded[-1][1])
    places = {"output": str(tmp_path / "hf"), "adapter_output": str(tmp_path / "adapter")}
    outputs = ExportConfig(**places, dtype="float32")
    config = replace(config_of(tmp_path, base), run=RunConfig(dir=str(folder)), export=outputs)
    expected = MODEL.policy.fold_adapters(params, jnp.float32)
    for dtype in ("float32", "bfloat16"):
        exported = export(replace(config, export=replace(outputs, dtype=dtype)))
        rounded = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype).astype(jnp.float32), expected)
        assert_equal(load_params(exported, tiny(HF_CONFIG), MODEL.mesh), rounded)
    export(config, adapter=True)
    adapter = export(config, adapter=True)  # over the former export, card and all
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert_equal(load_adapters(adapter, MODEL.policy, MODEL.mesh), split(loaded[-1][1])[1])
    card = (adapter / "README.md").read_text()
    assert 'library_name: "peft"' in card and "| step | 4 |" in card and str(base.parent) not in card
    assert f"the base `{base.name}` in float32" in card
    plain, lost = tmp_path / "plain/checkpoints", folder / "checkpoints/9"
    (plain / "1").mkdir(parents=True)
    for source, words in ((plain, "no checkpoint with adapters"), (lost, "no complete")):
        with pytest.raises(UserError, match=words):
            export(replace(config, export=replace(outputs, source=str(source))), adapter=True)


def test_adapter_snapshot_reads_as_merged_policy(whole, base, tmp_path):
    folder, loaded = whole
    params = jax.tree.map(jnp.asarray, loaded[-1][1])
    store = SnapshotStore(tmp_path / "snapshots", keep=2, dtype=jnp.bfloat16)
    about = {"hf_config": HF_CONFIG, "tokenizer_hash": ""}
    merged = store.publish(1, MODEL.policy.fold_adapters(params, jnp.bfloat16), **about)
    shared = find_policy(folder).base.snapshot_metadata()
    alone = store.publish(2, split(params)[1], base=shared, **about)
    assert len(read_manifest(alone)["tensors"]) == 2 * len(LORA.targets)
    whole_tensors, result = read_tensors(merged), read_tensors(alone)
    assert result.keys() == whole_tensors.keys()
    assert all(result[path].dtype == array.dtype for path, array in whole_tensors.items())
    assert_equal(result, whole_tensors)
    first, second = (load_snapshot(item, MODEL.policy, MODEL.mesh) for item in (merged, alone))
    assert_equal(first, second)
    for change, words in (({"folder": "/none"}, "is not there"), ({"sha256": "0"}, "another model than")):
        version = 3 + len(words)
        with pytest.raises(UserError, match=f"{words}.*policy.lora.snapshots=merged"):
            read_tensors(store.publish(version, split(params)[1], base=shared | change, **about))


def test_missing_or_different_base_is_refused(whole, base, tmp_path):
    folder, _ = whole
    moved = shutil.copytree(folder, tmp_path / "run")
    output = json.loads((moved / "policy/base.json").read_text())
    other = shutil.copytree(base, tmp_path / "other")
    for place, words in ((tmp_path / "none", "is not there"), (other, "another model than the base")):
        (moved / "policy/base.json").write_text(json.dumps(output | {"folder": str(place)}))
        if place == other:
            shutil.rmtree(other)
            params = jax.jit(tiny(HF_CONFIG).init)(jax.random.key(6))
            save_folder(params, HF_CONFIG, other, "float32", None)
        with pytest.raises(UserError, match=words) as caught:
            find_policy(moved).params(MODEL.policy, MODEL.mesh)
        assert "\n" not in str(caught.value) and "base.json" in str(caught.value)
    with pytest.raises(UserError, match="belong to another base"):
        run(config_of(moved, other, learner={"steps": 5}), ScriptedRollouts(), moved)


def test_initial_adapters_come_from_init_from(whole, base, tmp_path):
    folder, loaded = whole
    outputs = ExportConfig(adapter_output=str(tmp_path / "adapter"))
    config = replace(make_config(tmp_path), run=RunConfig(dir=str(folder)), export=outputs)
    adapter = export(config, adapter=True)
    begun = config_of(tmp_path, base)
    policy = replace(begun.policy, lora=replace(LORA, init_from=str(adapter)))
    begun = trainer_rig.make_state(replace(begun, policy=policy), tmp_path)
    for params in (begun.learner_state["params"], begun.trainer.reference):
        assert_equal(begun.trainer.learner.with_base(params), loaded[-1][1])
    for change, words in (
        ({"rank": 3}, "r is 2, but policy.lora.rank is 3: set policy.lora.rank=2"),
        ({"alpha": 3.0}, "lora_alpha is 4.0, but policy.lora.alpha is 3: set policy.lora.alpha=4.0"),
        ({"targets": ["q"]}, r"on down, q, but .* is q: set policy.lora.targets=\[down, q\]"),
    ):
        adapters = Adapters.from_config(replace(LORA, **change))
        with pytest.raises(UserError, match=words) as caught:
            load_adapters(adapter, tiny(HF_CONFIG, adapters), None)
        assert "\n" not in str(caught.value)
