"""calibadv_jax.config: reading, overriding, refusing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from calibadv_jax.config import Config, dump_config, known_keys, load_config
from calibadv_jax.errors import UserError
from scripts import document_config


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_an_empty_file_is_the_defaults(write):
    config = load_config(write(""))
    assert config.learner == Config().learner
    assert config.sft.output == "runs/default/sft"


def test_values_of_the_file_and_overrides(write):
    path = write("learner: {steps: 3, optimizer: {lr: 1.0e-3}}\nrun: {dir: runs/a}\n")
    config = load_config(path, ["learner.steps=9", "evaluate.temperatures=[0.0,1.0]", "run.dir=runs/b"])
    assert config.learner.steps == 9
    assert config.learner.optimizer.lr == 1e-3
    assert config.evaluate.temperatures == [0.0, 1.0]
    assert config.export.output == "runs/b/hf", "an interpolation sees the override"


def test_lists_of_sections_become_typed(write):
    config = load_config(write("sft: {phases: [{steps: 5, loss_on: all}]}\n"))
    assert (config.sft.phases[0].steps, config.sft.phases[0].loss_on) == (5, "all")


def test_free_form_section_keeps_its_keys(write):
    config = load_config(write("policy: {init: {model_type: qwen2, hidden_size: 64}}\n"))
    assert config.policy.init == {"model_type": "qwen2", "hidden_size": 64}


def test_a_resolved_config_reads_back_as_itself(write):
    config = load_config(write("run: {dir: runs/x}\nlearner: {steps: 4}\n"))
    assert load_config(write(dump_config(config))) == config
    assert set(yaml.safe_load(dump_config(config))) == {f.name for f in dataclasses.fields(Config)}


@pytest.mark.parametrize(
    ("text", "overrides", "named"),
    [
        ("learner: {step: 3}", [], "unknown key 'learner.step'; did you mean 'learner.steps'?"),
        ("", ["learner.optimizer.leaning_rate=1"], "unknown key 'learner.optimizer.leaning_rate'"),
        ("", ["lr=1"], "'learner.optimizer.lr'"),
        ("trainer: {}", [], "unknown key 'trainer'"),
        ("learner: {steps: many}", [], "learner.steps"),
        ("learner: {steps: 0}", [], "learner.steps: must be greater than 0 (got 0)"),
        ("rollout: {top_p: 1.5}", [], "rollout.top_p: must be less than or equal to 1 (got 1.5)"),
        ("advantage: {name: ppo}", [], "advantage.name"),
        ("sft: {phases: [{step: 5}]}", [], "sft.phases.0.step"),
        ("learner: {row_length: 100}", [], "rollout.max_length"),
        ("rollout: {max_staleness: 1}", [], "sampler.name=jax samples on the learner's own devices"),
        ("sampler: {name: vllm, workers: 2, worker_devices: ['0']}", [], "worker_devices names 1 workers"),
        (
            "{sampler: {name: vllm}, rollout: {top_p: 0.9}, loss: {importance_cap: 2}}",
            [],
            "set rollout.top_p=1",
        ),
        ("rollout: {max_prompt_length: 20000}", [], "max_prompt_length is 20000"),
        ("learner: [1, 2", [], "not valid YAML"),
        ("- a\n- b\n", [], "expected a mapping of sections"),
        ("learner: 3", [], "learner"),
        ("run: {dir: '${run.folder}'}", [], "run.folder"),
        ("", ["learner.steps"], "not of the form key.path=value"),
    ],
)
def test_what_is_refused_is_named(write, text, overrides, named):
    message = refusal(write(text), *overrides)
    assert named in message, message


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"run: \xff\xfe\n")
    assert "not valid YAML" in refusal(path)


def test_a_missing_file_names_the_place_of_the_shipped_ones(tmp_path):
    message = refusal(tmp_path / "none.yaml")
    assert "none.yaml" in message and "configs/" in message


def test_the_page_of_all_keys_is_up_to_date():
    assert document_config.PAGE.read_text(encoding="utf-8") == document_config.page(), (
        "run: python -m scripts.document_config"
    )


def test_every_key_is_described():
    keys = document_config.keys()
    assert len(keys) > 100
    assert not [f"{key.section}.{key.name}" for key in keys if not key.meaning]


@pytest.mark.parametrize(
    "line",
    [
        "| `learner.steps` | integer > 0 | `410` | Training steps; one step = one batch of rollouts. |",
        "| `learner.optimizer.name` | `adamw` or `muon` |",
        "| `rollout.top_p` | number > 0, ≤ 1 | `1.0` |",
        "| `sampler.urls` | list of text | `[]` |",
        "| `policy.init` | mapping | `{}` |",
        "| `sft.phases[].steps` | integer > 0 | `100` |",
    ],
)
def test_the_page_shows_values_limits_and_defaults(line):
    assert line in document_config.page()


def test_a_replaced_value_is_checked_and_a_section_cannot_be_changed():
    config = Config()
    assert dataclasses.replace(config.learner, steps=3).steps == 3
    with pytest.raises(ValueError, match="greater than 0"):
        dataclasses.replace(config.learner, steps=0)
    with pytest.raises(ValueError, match="raise the one or lower the other"):
        dataclasses.replace(config, learner=dataclasses.replace(config.learner, row_length=100))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.learner.steps = 3


def test_known_keys_are_dotted():
    keys = known_keys()
    assert {"learner", "learner.steps", "learner.optimizer.lr", "policy.init"} <= keys.keys()
