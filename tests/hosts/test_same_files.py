"""What each process reads by itself is compared at the start, and the run's folder must be one."""

import pytest
from run_folder_rig import CALCULATOR, QUESTIONS, StandInModel, another_calculator, write_inputs

from calibadv_jax.config import load_config
from calibadv_jax.hosts.exchange import Hosts
from calibadv_jax.run.fingerprints import ADAPTERS, JUDGE, REFERENCE, TOOLS, check_same

CHECKPOINT = "newest checkpoint in run.dir"


class Noting(Hosts):
    """Notes the values that a process compares with those of the others."""

    def __init__(self):
        self.values = {}

    def same(self, name, value):
        self.values[name] = value()


@pytest.fixture
def hashes(tmp_path, monkeypatch):
    """Returns the compared values of a process whose copies of the files have a change."""
    (tmp_path / "config.yaml").write_text("{}")

    places = [f"policy.path={tmp_path}/hf", f"run.dir={tmp_path}/run"]
    places += [f"reward.judge.prompt={tmp_path}/prompt.txt"]

    def values(*keys, purpose="calculate", questions=QUESTIONS, hidden_size=4, **files):
        write_inputs(tmp_path, **files)
        another_calculator(monkeypatch, purpose)
        model, hosts = StandInModel(tmp_path / "tokenizer", hidden_size=hidden_size), Noting()
        check_same(load_config(tmp_path / "config.yaml", [*places, *keys]), model, questions, hosts)
        return hosts.values

    return values


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"prompt": "Judge mildly."}, JUDGE),
        ({"scale": 2.0}, REFERENCE),
        ({"adapters": 2.0}, ADAPTERS),
        ({"purpose": "guess a number"}, TOOLS),
        ({"questions": QUESTIONS[:1]}, "data.content"),
        ({"hidden_size": 8}, "policy.config"),
    ],
)
def test_another_copy_of_one_file_shows(hashes, tmp_path, change, name):
    keys = [CALCULATOR, "policy.lora.rank=2", f"policy.lora.init_from={tmp_path}"]
    ours = hashes(*keys)
    assert ours == hashes(*keys)
    other = hashes(*keys, **change)
    assert [key for key in ours if ours[key] != other[key]] == [name]


def test_only_weights_that_are_read_are_compared(hashes, tmp_path):
    """A checkpoint lacks the adapters' base; with a KL term the first adapters are the reference."""
    begun = ["policy.lora.rank=2", f"policy.lora.init_from={tmp_path}"]
    before, adapted = hashes(), hashes(*begun)
    (tmp_path / "run/checkpoints/3").mkdir(parents=True)
    after = hashes()
    assert (before[CHECKPOINT], after[CHECKPOINT]) == (None, 3)
    assert before.keys() - after.keys() == {REFERENCE} and adapted.keys() - before.keys() == {ADAPTERS}
    assert hashes(*begun).keys() == before.keys()
    assert hashes(*begun, "loss.kl_coef=0.1").keys() == adapted.keys()
