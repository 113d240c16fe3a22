"""What each process reads by itself is compared at the start, and the run's folder must be one."""

import numpy as np
import pytest
from run_folder_rig import CALCULATOR, QUESTIONS, StandInModel, another_calculator
from safetensors.numpy import save_file

from calibadv_jax.config import load_config
from calibadv_jax.hosts.exchange import Hosts
from calibadv_jax.run.fingerprints import check_same


class Told(Hosts):
    """What a process tells the others of what it has read."""

    def __init__(self):
        self.values = {}

    def same(self, what, value):
        self.values[what] = value()


@pytest.fixture
def hashes(tmp_path):
    """Tells what stands in a process' copies of the files, with a change."""
    (tmp_path / "config.yaml").write_text("{}")

    def tell(prompt="Judge.", scale=1.0, questions=QUESTIONS, keys=(), **hf_config):
        policy, file = tmp_path / "policy", tmp_path / "prompt.txt"
        model = StandInModel(policy, **hf_config)
        save_file({"a": np.full(3, scale, np.float32)}, policy / "model.safetensors")
        file.write_text(prompt)
        places = [f"policy.path={policy}", f"run.dir={tmp_path / 'run'}", f"reward.judge.prompt={file}"]
        hosts = Told()
        check_same(load_config(tmp_path / "config.yaml", [*places, *keys]), model, questions, hosts)
        return hosts.values

    tell.run = tmp_path / "run"
    return tell


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"prompt": "Judge mildly."}, "file reward.judge.prompt"),
        ({"scale": 2.0}, "set of weights in policy.path"),
        ({"questions": QUESTIONS[:1]}, "data.train"),
        ({"hidden_size": 8}, "policy or tokenizer"),
    ],
)
def test_another_copy_of_one_file_shows(hashes, change, what):
    ours, other = hashes(), hashes(**change)
    assert [name for name in ours if ours[name] != other[name]] == [what]
    assert ours == hashes()


def test_another_description_of_actions_shows(hashes, monkeypatch):
    ours = hashes(keys=[CALCULATOR])
    another_calculator(monkeypatch, "guess a number")
    other = hashes(keys=[CALCULATOR])
    assert [name for name in ours if ours[name] != other[name]] == ["set of actions (key tools)"]


def test_weights_behind_a_checkpoint_are_optional(hashes):
    before = hashes()
    (hashes.run / "checkpoints" / "3").mkdir(parents=True)
    after = hashes()
    assert before["newest checkpoint in run.dir"] is None and after["newest checkpoint in run.dir"] == 3
    assert before.keys() - after.keys() == {"set of weights in policy.path"}
    adapted = hashes(keys=["policy.lora.rank=2"])
    assert adapted.keys() == before.keys()  # a checkpoint lacks the adapters' base


def test_initial_adapters_are_compared_while_used(hashes, tmp_path):
    begun = ["policy.lora.rank=2", f"policy.lora.init_from={tmp_path}"]
    values = []
    for scale in (1, 2):
        save_file({"a": np.full(3, scale, np.float32)}, tmp_path / "adapter_model.safetensors")
        values.append(hashes(keys=begun))
    adapters = "set of adapters in policy.lora.init_from"
    assert [name for name in values[0] if values[0][name] != values[1][name]] == [adapters]
    (hashes.run / "checkpoints" / "3").mkdir(parents=True)
    assert adapters not in hashes(keys=begun)
    assert adapters in hashes(keys=[*begun, "loss.kl_coef=0.1"])  # they are the reference
