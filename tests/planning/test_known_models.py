"""The shape that `plan` and `doctor --offline` use: never that of another model than policy.path names."""

from pathlib import Path

import pytest
from plan_rig import ROOT, small

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.planning.known_models import find_architecture, known_shapes
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf

# Billions of parameters by the model's own card.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 0.49,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-Coder-7B": 7.61,
    "Qwen/Qwen2.5-14B": 14.7,
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-1.7B-Base": 1.7,
    "Qwen/Qwen3-4B": 4.0,
    "Qwen/Qwen3-8B": 8.2,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B-Instruct": 3.21,
    "HuggingFaceTB/SmolLM2-135M": 0.135,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 0.362,
}


@pytest.mark.parametrize(("name", "billions"), PARAMETERS.items())
def test_known_shape_has_the_parameters_of_the_model(name, billions):
    architecture = architecture_from_hf(known_shapes()[name])
    assert architecture.num_parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_shapes_of_the_papers_configs_are_those_of_the_table():
    for file in (ROOT / "configs/paper").glob("*.yaml"):
        config = load_config([file], [])
        known = known_shapes().get(config.policy.path)
        if known and config.policy.init:
            shape = architecture_from_hf(dict(config.policy.init))
            assert shape.num_parameters == architecture_from_hf(known).num_parameters, file


def test_named_model_is_planned_and_not_the_shape_of_the_config(tmp_path):
    config = small(tmp_path, policy__path="meta-llama/Llama-3.1-8B")  # beside a small policy.init
    found = find_architecture(config)
    assert found.architecture.num_parameters == pytest.approx(8.03e9, rel=0.01)
    assert found.source == "meta-llama/Llama-3.1-8B in this project's table of models"


def test_folder_counts_before_everything_else(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}'
    )
    found = find_architecture(small(tmp_path, policy__path=str(tmp_path)))
    assert (found.architecture.vocab_size, found.source) == (64, f"{tmp_path}/config.json")


@pytest.mark.parametrize("path", ["own-lab/unknown-9b", "/nowhere/model"])
def test_unknown_model_is_refused_and_not_replaced_by_policy_init(tmp_path, path):
    with pytest.raises(UserError, match=f"policy.path is {path}, where no config.json is"):
        find_architecture(small(tmp_path, policy__path=path))


def test_folder_that_the_run_makes_has_the_shape_of_policy_init(tmp_path):
    folder = str(Path("runs") / "a")
    found = find_architecture(small(tmp_path, run__dir=folder, policy__path=f"{folder}/sft"))
    assert found.architecture.hidden_size == 512
    assert found.source == "policy.init, since runs/a/sft is not there yet"


def test_offline_doctor_fails_where_the_shape_is_unknown(tmp_path, capsys):
    small(tmp_path)
    arguments = ["doctor", "--offline", "--config", str(tmp_path / "small.yaml"), "policy.path=own-lab/model"]
    with pytest.raises(SystemExit) as status:
        cli.calibadv(arguments)
    assert status.value.code == 1
    assert "FAIL policy: policy.path is own-lab/model" in capsys.readouterr().out
