"""calibadv_jax.config: reading, overriding, refusing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from calibadv_jax.config import Config, counterpart, dump_config, known_keys, load_config
from calibadv_jax.config.keys import PEER_PAGE, peer_keys
from calibadv_jax.core.errors import UserError
from scripts import document_config, document_peer_keys


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
        ("learner: {steps: many}", [], 'learner.steps: must be an integer, without quotes (got "many")'),
        ("learner: {steps: true}", [], "learner.steps: must be an integer, without quotes (got true)"),
        ("learner: {optimizer: {lr: '1e-3'}}", [], "learner.optimizer.lr: must be a number"),
        ("learner: {optimizer: {lr: .nan}}", [], "learner.optimizer.lr: must be a finite number"),
        ("log: {progress: 'no'}", [], 'log.progress: must be true or false, without quotes (got "no")'),
        ("run: {dir: 2026_11_21}", [], "run.dir: must be text: put the value in quotes (got 20261121)"),
        ("run: {dir: 'runs/lr[1e-3]'}", [], "runs/lr[1e-3]: checkpoints cannot lie in a folder with '['"),
        ("", [r"run.dir='runs/a\\b'"], r"cannot lie in a folder with '\\' in its path; rename it"),
        ("prompt: {chat: off}", [], "prompt.chat: must be 'auto', 'on' or 'off', in quotes: YAML takes"),
        (
            "evaluate: {temperatures: 1.0}",
            [],
            "evaluate.temperatures: must be a list, such as [a, b] (got 1.0)",
        ),
        ("policy: {init: 3}", [], "policy.init: must be a mapping of keys to values (got 3)"),
        ("policy: {init: {a: !!binary aGk=}}", [], "values are text, numbers"),
        ("policy: {path: {a: 1}}", [], "policy.path: must be text"),
        ("learner: 3", [], "learner: must be a section with keys of its own"),
        ("learner:", [], "leave it out for the defaults (got null)"),
        ("learner: {steps: 0}", [], "learner.steps: must be greater than 0 (got 0)"),
        ("", ["learner.steps=0"], "learner.steps: must be greater than 0 (got 0 on the command line)"),
        ("rollout: {top_p: 1.5}", [], "rollout.top_p: must be less than or equal to 1 (got 1.5)"),
        ("data: {eval_limit: -1}", [], "data.eval_limit: must be greater than or equal to 0 (got -1)"),
        ("evaluate: {temperatures: [0, -1]}", [], "evaluate.temperatures.1: must be greater than or equal"),
        ("", ["evaluate.temperatures=[-1]"], "evaluate.temperatures.0: must be greater than or equal to 0"),
        ("", ["learner.optimizer.beta1=1"], "learner.optimizer.beta1: must be less than 1"),
        ("", ["learner.optimizer.beta2=-0.1"], "learner.optimizer.beta2: must be greater than or equal to 0"),
        ("sft: {optimizer: {beta2: 1.0}}", [], "sft.optimizer.beta2: must be less than 1 (got 1.0)"),
        ("mesh: {fsdp: 0}", [], "mesh.fsdp: must be at least 1, or -1 for all remaining devices (got 0)"),
        ("mesh: {tensor: -2}", [], "mesh.tensor: must be at least 1, or -1 for all remaining devices"),
        ("mesh: {data: -1}", [], "mesh: data=-1, fsdp=-1 and tensor=1: only one of them can be -1"),
        ("run: {seed: -1}", [], "run.seed: must be greater than or equal to 0 (got -1)"),
        (
            "world: {one_hop: 0, two_hop: 0, comparison: 0}",
            [],
            "world: one_hop, two_hop, comparison, rumour and age",
        ),
        ("world: {rumour: 1, cities: 1}", [], "people, cities and companies must be 2 or more"),
        ("advantage: {name: ppo}", [], "advantage.name: must be one of calibadv, grpo, "),
        (
            "advantage: {adjust: both}",
            [],
            """advantage.adjust: must be 'positive', 'negative' or 'clip' (got "both")""",
        ),
        ("learner: {row_length: 100}", [], "rollout.max_length"),
        ("rollout: {max_staleness: 1}", [], "sampler.name=jax samples on the learner's own devices"),
        (
            "{sampler: {name: vllm}, rollout: {max_staleness: 1}}",
            [],
            "set loss.importance_cap=2, or rollout.max_staleness=0",
        ),
        ("sampler: {name: vllm, workers: 2, worker_devices: ['0']}", [], "worker_devices names 1 workers"),
        (
            "{sampler: {name: vllm}, rollout: {top_p: 0.9}, loss: {importance_cap: 2}}",
            [],
            "set rollout.top_p=1",
        ),
        ("rollout: {max_prompt_length: 20000}", [], "rollout: max_prompt_length is 20000"),
        ("learner: [1, 2", [], "not valid YAML"),
        ("- a\n- b\n", [], "expected a mapping of sections"),
        ("run: {dir: '${run.folder}'}", [], "run.folder"),
        ("", ["learner.steps"], "not of the form key.path=value"),
        ("", ["=3"], "not of the form key.path=value"),
        ("", ["evaluate.temperatures=[1"], "command line: evaluate.temperatures=[1: not valid YAML"),
    ],
)
def test_what_is_refused_is_named(write, text, overrides, named):
    message = refusal(write(text), *overrides)
    assert named in message, message


def test_a_policy_may_run_ahead_where_the_loss_corrects_for_it(write):
    path = write("{sampler: {name: vllm}, rollout: {max_staleness: 1}}")
    assert load_config(path, ["loss.importance_cap=2"]).rollout.max_staleness == 1
    assert load_config(path, ["loss.old_logprobs=sampler"]).rollout.max_staleness == 1


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("run.dir=2026_11_21", "2026_11_21"),
        ("run.dir=1e3", "1e3"),
        ("policy.path=007", "007"),
        ("policy.path=true", "true"),
        ("policy.path=", ""),
        ("policy.path=''", ""),
        ('policy.path="a b"', "a b"),
        ("policy.path='${run.dir}/x'", "runs/default/x"),
        ("policy.path='", "'"),
        ("policy.path=a: [b", "a: [b"),
        ("policy.path=${run.dir}/x=y", "runs/default/x=y"),
        ("prompt.chat=off", "off"),
        ("sampler.urls=[1_0, 2026-11-21]", ["1_0", "2026-11-21"]),
        ('sampler.worker_args=["a,b", --port=1]', ["a,b", "--port=1"]),
        ("learner.steps=1_000", 1000),
        ("learner.optimizer.lr=1e-3", 1e-3),
        ("log.progress=off", False),
        ("policy.init.hidden_size=64", 64),
        ("sft.phases.0.steps=7", 7),
        ("sft.phases[0].kind=drills", "drills"),
    ],
)
def test_the_type_of_a_key_decides_how_an_override_is_read(write, override, read):
    value = load_config(write("sft: {phases: [{steps: 5}]}"), [override])
    for name in override.partition("=")[0].replace("[", ".").replace("]", "").split("."):
        if isinstance(value, list):
            value = value[int(name)]
        else:
            value = value[name] if isinstance(value, dict) else getattr(value, name)
    assert value == read and type(value) is type(read)


def test_a_section_given_on_the_command_line_is_merged(write):
    config = load_config(write("learner: {steps: 4}"), ["learner={epochs: 2}"])
    assert (config.learner.steps, config.learner.epochs) == (4, 2)


@pytest.mark.parametrize(
    ("text", "overrides", "named"),
    [
        ("learner: {step: 3}", [], "unknown key 'learner.step'; did you mean 'learner.steps'?"),
        ("", ["learner.step=3"], "command line: unknown key 'learner.step'; did you mean 'learner.steps'?"),
        (
            "",
            ["learner={step: 3}"],
            "command line: unknown key 'learner.step'; did you mean 'learner.steps'?",
        ),
        ("", ["learner.lr=1"], "did you mean 'learner.optimizer.lr'?"),
        ("learner: {optimizer: {leaning_rate: 1}}", [], "did you mean 'learner.optimizer.lr'?"),
        (
            "",
            ["lr=1"],
            "did you mean 'learner.optimizer.lr' or 'critic.optimizer.lr' or 'sft.optimizer.lr'?",
        ),
        ("", ["seed=1"], "did you mean 'run.seed' or 'world.seed'?"),
        ("", ["temperature=1"], "did you mean 'rollout.temperature'?"),
        ("learner: {group_size: 4}", [], "did you mean 'rollout.group_size'?"),
        ("advantage: {lambda: 1}", [], "did you mean 'advantage.target_ratio'?"),
        ("rollout: {max_new_tokens: 5}", [], "did you mean 'rollout.max_turn_length'?"),
        ("rollout: {grop_size: 5}", [], "did you mean 'rollout.group_size'?"),
        ("run: {grop_size: 5}", [], "did you mean 'rollout.group_size'?"),
        (
            "optimizer: {lr: 1}",
            [],
            "did you mean 'learner.optimizer' or 'critic.optimizer' or 'sft.optimizer'?",
        ),
        ("reward: {model: judge}", [], "did you mean 'reward.judge.model'?"),
        ("lerner: {steps: 1}", [], "unknown key 'lerner'; did you mean 'learner'?"),
        ("sft: {phases: [{steps: 5}, {step: 5}]}", [], "unknown key 'sft.phases.1.step'; did you mean"),
        ("sft: {phases: [{steps: 5}]}", ["sft.phases.0.step=1"], "sft.phases.0.step: unknown key"),
        ("", ["trainer.steps=3"], "unknown key 'trainer.steps'; did you mean 'learner.steps'?"),
        ("actor: {optim: {lr: 1}}", [], "unknown key 'actor.optim.lr'; did you mean 'learner.optimizer.lr'"),
        ("rollout: {n: 5}", [], "did you mean 'rollout.group_size'?"),
        ("", ["reranker.select_num=3"], "did you mean 'retriever.rerank_topk'?"),
        ("retriever: {topk_retrieval: 20}", [], "did you mean 'retriever.retrieval_topk'?"),
        ("xyzzy: {}", [], "unknown key 'xyzzy'; every key is in docs/configuration.md"),
        ("xyzzy: 3", [], "unknown key 'xyzzy'; every key is in docs/configuration.md"),
    ],
)
def test_an_unknown_key_is_refused_with_the_one_that_was_meant(write, text, overrides, named):
    message = refusal(write(text), *overrides)
    assert named in message, message


def test_every_key_of_a_peer_has_an_answer():
    """Also with Hydra's plus; it names only keys that exist, or says why there is none."""
    for key in peer_keys():
        assert set(key.keys) <= known_keys().keys()
        message = counterpart(f"+{key.name}")
        assert ("did you mean" in message) == bool(key.keys) and (key.keys or key.note), key
        assert all(repr(name) in message for name in key.keys) and key.note in message, key
        assert key.trainer in message and (PEER_PAGE in message) == bool(key.trainer), key


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("data.max_obs_length", "did you mean 'rollout.max_observation_length'? (Search-R1: "),
        ("max_obs_length", "did you mean 'rollout.max_observation_length'?"),
        ("max_completion_length", "did you mean 'rollout.max_turn_length'? (it limits one turn"),
        ("data.max_start_length", "did you mean 'rollout.max_prompt_length'?"),
        ("data.max_prompt_length", "did you mean 'rollout.max_prompt_length' or 'rollout.max_length'? (in"),
        ("actor_rollout_ref.rollout.n_agent", "did you mean 'rollout.group_size'?"),
        ("n_agent", "did you mean 'rollout.group_size'?"),
        ("train_files", "did you mean 'data.train'?"),
        ("val_files", "did you mean 'data.eval'?"),
        ("total_training_steps", "did you mean 'learner.steps'?"),
        ("num_generations", "did you mean 'rollout.group_size'?"),
        ("num_generation", "did you mean 'rollout.group_size'?"),
        ("actor_rollout_ref.rollout.agent.num_workers", "; every key is in docs/configuration.md"),
        ("optim.lr", "did you mean 'learner.optimizer.lr' or 'critic.optimizer.lr'?"),
        ("clip_ratio", "did you mean 'loss.clip_low' and 'loss.clip_high'?"),
        ("model.path", "did you mean 'policy.path'?"),
        ("critic.model.path", "has no counterpart: the critic begins as a copy of the policy"),
        ("tools.search.topk", "did you mean 'retriever.topk'?"),
        ("+learner.steps", "unknown key '+learner'; did you mean 'learner'?"),
    ],
)
def test_end_of_a_peers_key_is_enough(write, name, meant):
    assert meant in refusal(write(""), f"{name}=1")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (
            "data: {max_obs_length: 500}",
            "'data.max_obs_length'; did you mean 'rollout.max_observation_length'?",
        ),
        (
            "actor_rollout_ref: {rollout: {n_agent: 5}}",
            "rollout.n_agent'; did you mean 'rollout.group_size'?",
        ),
        ("reranker: {topk: 3}", "'reranker.topk'; did you mean 'retriever.rerank_topk'?"),
        ("tools: {search: {topk: 3}}", "'tools.search.topk'; did you mean 'retriever.topk'?"),
        ("max_completion_length: 512", "did you mean 'rollout.max_turn_length'?"),
        ("grpo_config: {num_generations: 2}", "did you mean 'rollout.group_size'?"),
    ],
)
def test_config_of_a_peer_names_its_first_key(write, text, meant):
    assert meant in refusal(write(text))


def test_page_of_peers_keys_is_current():
    assert document_peer_keys.PAGE.read_text(encoding="utf-8") == document_peer_keys.page(), (
        "run: python -m scripts.document_peer_keys"
    )


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
        "| `learner.epochs` | integer > 0 | `1` | Number of passes over the step's trajectories. |",
        "| `learner.optimizer.name` | `adamw` or `muon` |",
        "| `rollout.top_p` | number > 0, ≤ 1 | `1.0` |",
        "| `sampler.urls` | list of text | `[]` |",
        "| `policy.init` | mapping | `{}` |",
        "| `sft.phases[].steps` | integer > 0 or null | `null` |",
    ],
)
def test_the_page_shows_values_limits_and_defaults(line):
    assert line in document_config.page()


@pytest.fixture
def files(tmp_path: Path):
    """Writes config files by name; their paths in that order."""

    def files(**texts: str) -> list[Path]:
        for name, text in texts.items():
            path = tmp_path / f"{name}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return [tmp_path / f"{name}.yaml" for name in texts]

    return files


def test_later_files_win_key_by_key_and_the_command_line_over_all(files):
    paths = files(
        a="{learner: {steps: 3, optimizer: {lr: 0.5, beta1: 0.8}}, run: {dir: x}, sampler: {urls: [u, v]}}",
        b="{learner: {optimizer: {lr: 0.25}}, run: {dir: 'runs/${advantage.name}'}, sampler: {urls: [w]}}",
        c="advantage: {name: grpo}",
    )
    config = load_config(paths, ["learner.optimizer.beta1=0.7"])
    optimizer = config.learner.optimizer
    assert (config.learner.steps, optimizer.lr, optimizer.beta1) == (3, 0.25, 0.7)
    assert (config.run.dir, config.export.output) == ("runs/grpo", "runs/grpo/hf")
    assert config.sampler.urls == ["w"], "a list replaces a list"
    assert load_config(paths[::-1]).run.dir == "x"


def test_a_file_builds_upon_another(files, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/child.yaml").write_text("base: ../middle.yaml\nrun: {seed: 3}\n")
    files(
        root="{run: {seed: 1, dir: r}, learner: {steps: 2}}", middle="{base: root.yaml, learner: {steps: 4}}"
    )
    config = load_config(tmp_path / "sub/child.yaml")
    assert (config.run.seed, config.run.dir, config.learner.steps) == (3, "r", 4)
    over = load_config([tmp_path / "sub/child.yaml", tmp_path / "root.yaml"])
    assert (over.run.seed, over.learner.steps) == (1, 2), "an overlay wins over all that a file builds upon"


@pytest.mark.parametrize(
    ("texts", "overrides", "message"),
    [
        (
            {"a": "{}", "b": "learner: {steps: 0}"},
            [],
            "b.yaml: learner.steps: must be greater than 0 (got 0)",
        ),
        ({"a": "learner: {steps: 0}", "b": "learner: {epochs: 2}"}, [], "a.yaml: learner.steps: must be"),
        (
            {"a": "learner: {steps: 0}", "b": "learner: {steps: x}"},
            [],
            "b.yaml: learner.steps: must be",
        ),
        ({"a": "{}", "b": "lerner: {}"}, [], "b.yaml: unknown key 'lerner'"),
        ({"a": "{}", "b": "learner: [1"}, [], "b.yaml: not valid YAML"),
        ({"a": "base: b.yaml", "b": "run: {seed: -1}"}, [], "b.yaml: run.seed: must be"),
        (
            {"a": "learner: {steps: 1}", "b": "run: {seed: 1}"},
            ["learner.steps=0"],
            "a.yaml + {folder}/b.yaml: learner.steps: must be greater than 0 (got 0 on the command line)",
        ),
        (
            {
                "a": "rollout: {max_length: 9}",
                "b": "run: {seed: 1}",
                "c": "rollout: {max_prompt_length: 9}",
            },
            [],
            "a.yaml + {folder}/c.yaml: rollout: max_prompt_length is 9",
        ),
        (
            {"a": "sft: {phases: [{steps: 0}]}", "b": "evaluate: {temperatures: [-1.0]}"},
            [],
            "a.yaml: sft.phases.0.steps: must be greater than 0 (got 0); {folder}/b.yaml: evaluate.temper",
        ),
        ({"a": "base: none.yaml"}, [], "none.yaml: no such config file (base of {folder}/a.yaml)"),
        ({"a": "base: [b.yaml]"}, [], "a.yaml: base is ['b.yaml'], but must be the name of"),
        (
            {"a": "base: b.yaml", "b": "base: a.yaml"},
            [],
            "a.yaml: builds upon itself (base of {folder}/b.y",
        ),
        ({"a": "{}"}, ["base=b.yaml"], "command line: unknown key 'base'"),
    ],
)
def test_a_mistake_names_the_file_it_is_in(files, texts, overrides, message, tmp_path):
    with pytest.raises(UserError) as error:
        load_config(files(**texts), overrides)
    assert str(error.value).startswith(
        f"{tmp_path}/{message.format(folder=tmp_path)}".replace(f"{tmp_path}/command line", "command line")
    )
    assert "\n" not in str(error.value)


def test_a_replaced_value_is_checked_and_a_section_cannot_be_changed():
    config = Config()
    assert dataclasses.replace(config.learner, steps=3).steps == 3
    with pytest.raises(ValueError, match="greater than 0"):
        dataclasses.replace(config.learner, steps=0)
    with pytest.raises(ValueError, match="raise the first or lower the second"):
        dataclasses.replace(config, learner=dataclasses.replace(config.learner, row_length=100))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.learner.steps = 3


def test_known_keys_are_dotted():
    keys = known_keys()
    assert {"learner", "learner.steps", "learner.optimizer.lr", "policy.init"} <= keys.keys()
