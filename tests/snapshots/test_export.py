"""From a run's folder to a HuggingFace folder, by the entry point's own function."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from calibadv_jax.config import Config, ExportConfig, RunConfig
from calibadv_jax.errors import UserError
from calibadv_jax.export import export
from calibadv_jax.snapshots.checkpoint import CheckpointStore
from calibadv_jax.snapshots.huggingface import load_params
from calibadv_jax.snapshots.publish import SnapshotStore


@pytest.fixture
def run(tiny, tmp_path):
    """A run with checkpoints of steps 1 and 2 and a snapshot of version 2; (config, params by step)."""
    folder = tmp_path / "run"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "config.json").write_text(json.dumps(tiny.config))
    (folder / "policy" / "tokenizer.json").write_text("{}")
    params = {step: jax.tree.map(lambda leaf, k=step: leaf * k, tiny.params) for step in (1, 2)}
    store = CheckpointStore(folder / "checkpoints", keep=2)
    for step, values in params.items():
        store.save(
            step, {"params": values, "opt_state": jax.tree.leaves(values), "updates": jnp.int32(0)}, {}
        )
    store.close()
    snapshots = SnapshotStore(folder / "snapshots", keep=1, dtype=jnp.bfloat16)
    snapshots.publish(2, params[2], step=2, hf_config=tiny.config, tokenizer_hash="")
    output = ExportConfig(output=str(tmp_path / "hf"), dtype="float32")
    return Config(run=RunConfig(dir=str(folder)), export=output), params


def with_source(config, source, **changes):
    return replace(config, export=replace(config.export, source=source, **changes))


def test_the_newest_checkpoint_is_the_default(tiny, run, tmp_path):
    config, params = run
    assert export(config) == tmp_path / "hf"
    assert tiny.same(load_params(tmp_path / "hf", tiny.policy, None), params[2])
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_a_step_and_a_snapshot_of_any_run_can_be_named(tiny, run, tmp_path):
    config, params = run
    elsewhere = replace(config, run=RunConfig(dir=str(tmp_path / "another")))
    export(with_source(elsewhere, f"{config.run.dir}/checkpoints/1"))
    assert tiny.same(load_params(tmp_path / "hf", tiny.policy, None), params[1])
    export(with_source(elsewhere, f"{config.run.dir}/snapshots/v000002"))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params[2])
    assert tiny.same(load_params(tmp_path / "hf", tiny.policy, None), rounded)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{run}/checkpoints/3", "no complete checkpoint of step 3"),
        ("{run}/snapshots/v000009", "v000009: not a complete snapshot"),
        ("{run}/nothing", "no complete checkpoint there"),
        ("{run}/../nothing/checkpoints", "policy/config.json: no such file"),
    ],
)
def test_a_source_that_is_not_there_is_one_line(run, source, words):
    config, _ = run
    with pytest.raises(UserError) as caught:
        export(with_source(config, source.format(run=config.run.dir)))
    assert words in str(caught.value) and "\n" not in str(caught.value)
