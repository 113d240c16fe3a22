"""calibadv_jax.config: reading, overriding, refusing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from calibadv_jax.config import Config, OptimizerConfig, dump_config, hint_for_key, known_keys, load_config
from calibadv_jax.config.kept import newest_start
from calibadv_jax.config.keys import PEER_PAGE, REMOVED, RENAMED, peer_keys
from calibadv_jax.config.load import parse_config
from calibadv_jax.core.errors import UserError
from scripts import document_config, document_peer_keys


@pytest.fixture
def write(tmp_path: Path):
    """Writes config files by name and returns their paths; a text without a name is run.yaml."""

    def write(text: str = "", **texts: str) -> list[Path]:
        paths = {tmp_path / f"{name}.yaml": content for name, content in (texts or {"run": text}).items()}
        for path, content in paths.items():
            path.write_text(content)
        return list(paths)

    return write


def refusal(paths: list[Path], *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load_config(paths, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def value_of(config, key: str):
    value = dataclasses.asdict(config)
    for name in key.replace("[", ".").replace("]", "").split("."):
        value = value[int(name) if isinstance(value, list) else name]
    return value


def test_empty_file_gives_the_defaults(write):
    config = load_config(write(""))
    assert config.learner == Config().learner
    assert config.sft.output == "runs/default/sft"


def test_overrides_win_over_the_file(write):
    path = write("learner: {steps: 3, optimizer: {lr: 1.0e-3}}\nrun: {dir: runs/a}\n")
    config = load_config(path, ["learner.steps=9", "evaluate.temperatures=[0.0,1.0]", "run.dir=runs/b"])
    assert config.learner.steps == 9
    assert config.learner.optimizer.lr == 1e-3
    assert config.evaluate.temperatures == [0.0, 1.0]
    assert config.export.output == "runs/b/hf"


def test_section_on_the_command_line_is_merged(write):
    config = load_config(write("learner: {steps: 4}"), ["learner={epochs: 2}"])
    assert config.learner.steps == 4
    assert config.learner.epochs == 2


def test_resolved_config_reads_back_as_itself(write):
    sections = "sft: {phases: [{steps: 5, loss_on: all}]}\npolicy: {init: {a: qwen2, b: 64}}"
    config = load_config(write(f"run: {{dir: runs/x}}\nlearner: {{steps: 4}}\n{sections}"))
    assert (config.sft.phases[0].steps, config.sft.phases[0].loss_on) == (5, "all")
    assert config.policy.init == {"a": "qwen2", "b": 64}
    assert load_config(write(dump_config(config))) == config
    assert set(yaml.safe_load(dump_config(config))) == {f.name for f in dataclasses.fields(Config)}


OPTIMIZERS = "did you mean 'learner.optimizer{0}' or 'critic.optimizer{0}' or 'sft.optimizer{0}'?"
ON_COMMAND_LINE = [
    (r"run.dir='runs/a\\b'", r"'\\' in its path"),
    ("learner.steps=0", "run.yaml: learner.steps: must be greater than 0 (got 0 on the command line)"),
    ("evaluate.temperatures=[-1]", "evaluate.temperatures.0: must be greater than or equal to 0"),
    ("learner.steps", "not of the form key.path=value"),
    ("=3", "not of the form key.path=value"),
    ("evaluate.temperatures=[1", "command line: evaluate.temperatures=[1: not valid YAML"),
    ("base=b.yaml", "command line: unknown key 'base'"),
    ("learner={step: 3}", "command line: unknown key 'learner.step'; did you mean 'learner.steps'?"),
    ("sft.phases.0.step=1", "sft.phases.0.step: unknown key"),
    ("lr=1", OPTIMIZERS.format(".lr")),
    ("+learner.steps=1", "unknown key '+learner'; did you mean 'learner'?"),
    # of other trainers: the end of the name is enough
    ("reranker.select_num=3", "did you mean 'retriever.topk'?"),
    ("max_completion_length=1", "did you mean 'rollout.max_turn_length'? (it limits one turn"),
    ("actor_rollout_ref.rollout.agent.num_workers=1", "; every key is in docs/configuration.md"),
    ("optim.lr=1", "did you mean 'learner.optimizer.lr' or 'critic.optimizer.lr'?"),
    ("clip_ratio=1", "did you mean 'loss.clip_low' and 'loss.clip_high'?"),
]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("learner: {steps: many}", 'learner.steps: must be a valid integer, without quotes (got "many")'),
        ("learner: {optimizer: {lr: .nan}}", "learner.optimizer.lr: must be a finite number"),
        ("run: {dir: 2026_11_21}", "run.dir: must be a valid string: put the value in quotes (got 20261121)"),
        ("run: {dir: 'runs/lr[1e-3]'}", "runs/lr[1e-3]"),
        ("prompt: {chat: off}", "prompt.chat: must be 'auto', 'on' or 'off', in quotes"),
        ("evaluate: {temperatures: 1.0}", "evaluate.temperatures: must be a list"),
        ("policy: {init: 3}", "policy.init: must be an object"),
        ("policy: {init: {a: !!binary aGk=}}", "values are text, numbers"),
        ("policy: {path: {a: 1}}", "policy.path: must be a valid string"),
        ("learner: 3", "learner: must be a section with keys of its own"),
        ("learner:", "leave it out for the defaults (got null)"),
        ("mesh: {fsdp: 0}", "mesh: fsdp is 0: must be at least 1, or -1"),
        ("mesh: {data: -1}", "mesh: data=-1, fsdp=-1 and tensor=1"),
        ("world: {one_hop: 0, two_hop: 0, comparison: 0}", "world: one_hop, two_hop, comparison, rumour and"),
        ("world: {rumour: 1, cities: 1}", "people, cities and companies must be 2 or more"),
        ("- a\n- b\n", "expected a mapping of sections"),
        ("run: {dir: '${run.folder}'}", "run.folder"),
        (b"run: \xff\xfe\n", "not valid YAML"),
        # unknown keys
        ("learner: {step: 3}", "unknown key 'learner.step'; did you mean 'learner.steps'?"),
        ("rollout: {grop_size: 5}", "did you mean 'rollout.group_size'?"),
        ("sft: {phases: {first: {steps: 5}}}", "unknown key 'sft.phases.first.steps'"),
        ("optimizer: {lr: 1}", OPTIMIZERS.format("")),
        ("reward: {model: judge}", "did you mean 'reward.judge.model'?"),
        ("sft: {phases: [{steps: 5}, {step: 5}]}", "unknown key 'sft.phases.1.step'; did you mean"),
        ("xyzzy: {}", "unknown key 'xyzzy'; every key is in docs/configuration.md"),
        ("policy: {lora: {dropout: 0.1}}", "'policy.lora.dropout'; it has no counterpart (with dropout"),
    ],
)
def test_mistake_in_file_names_key_and_hint(tmp_path, text, part):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert part in refusal([path])


@pytest.mark.parametrize(("override", "part"), ON_COMMAND_LINE)
def test_mistake_on_command_line_names_key_and_hint(write, override, part):
    assert part in refusal(write("sft: {phases: [{steps: 5}]}"), override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner: {steps: true}", "learner.steps: must be a valid integer (got true)"),
        (
            "learner: {optimizer: {lr: '1e-3'}}",
            "learner.optimizer.lr: must be a valid number, without quotes",
        ),
        ("log: {progress: 'no'}", 'log.progress: must be a valid boolean, without quotes (got "no")'),
        (
            "prompt: {chat: off}",
            "prompt.chat: must be 'auto', 'on' or 'off', in quotes: YAML takes on and off",
        ),
        ("evaluate: {temperatures: 1.0}", "evaluate.temperatures: must be a list, such as [a, b] (got 1.0)"),
        ("policy: {init: 3}", "policy.init: must be an object (got 3)"),
        ("advantage: {name: ppo}", "advantage.name: must be one of calibadv, grpo, "),
        (
            "advantage: {adjust: both}",
            """advantage.adjust: must be 'positive', 'negative' or 'clip' (got "both")""",
        ),
        ("learner: [1, 2", "not valid YAML"),
    ],
)
def test_value_of_another_type_is_refused(write, text, message):
    assert message in refusal(write(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner: {steps: 0}", "learner.steps: must be greater than 0 (got 0)"),
        ("rollout: {top_p: 1.5}", "rollout.top_p: must be less than or equal to 1 (got 1.5)"),
        ("data: {eval_limit: -1}", "data.eval_limit: must be greater than or equal to 0 (got -1)"),
        (
            "evaluate: {temperatures: [0, -1]}",
            "evaluate.temperatures.1: must be greater than or equal to 0 (got -1)",
        ),
        ("learner: {optimizer: {beta1: 1}}", "learner.optimizer.beta1: must be less than 1 (got 1)"),
        (
            "learner: {optimizer: {beta2: -0.1}}",
            "learner.optimizer.beta2: must be greater than or equal to 0 (got -0.1)",
        ),
        ("sft: {optimizer: {beta2: 1.0}}", "sft.optimizer.beta2: must be less than 1 (got 1.0)"),
        ("mesh: {fsdp: 0}", "mesh: fsdp is 0: must be at least 1, or -1 for all remaining devices"),
        ("mesh: {tensor: -2}", "mesh: tensor is -2: must be at least 1, or -1 for all remaining devices"),
        ("mesh: {data: -1}", "mesh: data=-1, fsdp=-1 and tensor=1: only one of them can be -1"),
        ("run: {seed: -1}", "run.seed: must be greater than or equal to 0 (got -1)"),
    ],
)
def test_value_beyond_its_limit_is_refused(write, text, message):
    assert message in refusal(write(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner: {pack_length: 100}", "learner.pack_length is 100, but rollout.max_length = 16384"),
        ("rollout: {max_staleness: 1}", "sampler.name=jax samples on the learner's own devices"),
        (
            "{sampler: {name: vllm}, rollout: {max_staleness: 1}}",
            "set loss.importance_cap=2, or rollout.max_staleness=0",
        ),
        (
            "sampler: {name: vllm, workers: 2, worker_devices: ['0']}",
            "worker_devices names 1 workers, but workers is 2",
        ),
        (
            "{sampler: {name: vllm}, rollout: {top_p: 0.9}, loss: {importance_cap: 2}}",
            "set top_p=1 and top_k=0, or loss.importance_* to 0",
        ),
        ("rollout: {max_prompt_length: 20000}", "rollout: max_prompt_length is 20000"),
        ("tools: []", "tools is []: name each action once, and at least one"),
        ("tools: [search, search]", "tools is ['search', 'search']: name each action once"),
    ],
)
def test_keys_that_exclude_each_other_in_a_file_are_refused(write, text, message):
    assert message in refusal(write(text))


@pytest.mark.parametrize("override", ["loss.importance_cap=2", "loss.old_logprobs=sampler"])
def test_stale_rollouts_are_accepted_where_the_loss_corrects_for_them(write, override):
    path = write("{sampler: {name: vllm}, rollout: {max_staleness: 1}}")
    assert load_config(path, [override]).rollout.max_staleness == 1


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learner.step=3", "command line: unknown key 'learner.step'; did you mean 'learner.steps'?"),
        ("learner.lr=1", "did you mean 'learner.optimizer.lr'?"),
        ("seed=1", "did you mean 'run.seed' or 'world.seed'?"),
        ("temperature=1", "did you mean 'rollout.temperature'?"),
        ("learner.group_size=4", "did you mean 'rollout.group_size'?"),
        ("lerner.steps=1", "did you mean 'learner'?"),
        ("xyzzy=3", "unknown key 'xyzzy'; every key is in docs/configuration.md"),
        # of other trainers
        ("advantage.lambda=1", "did you mean 'advantage.target_ratio'?"),
        ("rollout.max_new_tokens=5", "did you mean 'rollout.max_turn_length'?"),
        ("rollout.n=5", "did you mean 'rollout.group_size'?"),
        ("trainer.steps=3", "unknown key 'trainer.steps'; did you mean 'learner.steps'?"),
        ("actor.optim.lr=1", "unknown key 'actor.optim.lr'; did you mean 'learner.optimizer.lr'?"),
        ("retriever.topk_retrieval=20", "did you mean 'retriever.rerank_candidates'?"),
    ],
)
def test_unknown_key_is_refused_with_the_key_that_was_meant(write, override, hint):
    assert hint in refusal(write(""), override)


def test_known_keys_are_dotted():
    assert {"learner", "learner.steps", "learner.optimizer.lr", "policy.init"} <= known_keys().keys()


@pytest.mark.parametrize(
    ("override", "expected"),
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
        ("retriever.url=[http://a:1,http://b:2]", ["http://a:1", "http://b:2"]),
        ("retriever.url=http://c:3", "http://c:3"),
        ('sampler.worker_args=["a,b", --port=1]', ["a,b", "--port=1"]),
        ("learner.steps=1_000", 1000),
        ("learner.optimizer.lr=1e-3", 1e-3),
        ("log.progress=off", False),
        ("policy.init.hidden_size=64", 64),
        ("sft.phases.0.steps=7", 7),
        ("sft.phases[0].kind=drills", "drills"),
        ("sft.optimizer={beta1: 0.5}", dataclasses.asdict(OptimizerConfig(lr=1e-5, beta1=0.5))),
    ],
)
def test_key_type_decides_how_override_is_read(write, override, expected):
    config = load_config(write("sft: {phases: [{steps: 5}]}"), [override])
    value = value_of(config, override.partition("=")[0])
    assert value == expected and type(value) is type(expected)


def test_every_peer_key_has_a_hint():
    for key in peer_keys():
        assert set(key.keys) <= known_keys().keys()
        message = hint_for_key(f"+{key.name}")
        assert ("did you mean" in message) == bool(key.keys) and (key.keys or key.note), key
        assert all(repr(name) in message for name in key.keys) and key.note in message, key
        assert key.trainer in message and (PEER_PAGE in message) == bool(key.trainer), key


def test_removed_key_with_its_fixed_value_is_dropped(write):
    config = load_config(write("{policy: {lora: {dropout: 0.0}}, reward: {judge: {max_answer: 2000}}}"))
    assert config == load_config(write(""))
    assert {key.name for key in peer_keys()} >= REMOVED.keys()


def test_renamed_key_is_read_from_a_run_and_named_in_a_users_file(write, tmp_path):
    old = "{learner: {row_length: 32768, optimizer: {warmup_steps: 7}}, guards: {patience: 5}}"
    with pytest.raises(
        UserError, match=r"unknown key 'learner.row_length'; did you mean 'learner.pack_length'"
    ):
        load_config(write(old))
    kept = tmp_path / "run" / "configs"
    kept.mkdir(parents=True)
    (kept / "0.yaml").write_text(old + "\n")
    (kept / "0.json").write_text("{}")
    config = load_config(kept / "0.yaml")
    assert config.learner.pack_length == 32768
    assert config.learner.optimizer.warmup_updates == 7
    assert config.guards.patience_steps == 5
    start = newest_start(tmp_path / "run")
    assert start is not None and start.config["learner"]["pack_length"] == 32768


@pytest.mark.parametrize(
    ("old", "topk", "candidates"),
    [
        ("{topk: 5, retrieval_topk: 0, rerank_topk: null}", 5, None),
        ("{topk: 5, retrieval_topk: 0, rerank_topk: 0}", 5, 0),
        ("{topk: 5, retrieval_topk: 20, rerank_topk: 4}", 4, 20),
    ],
)
def test_depths_of_reranking_are_read_from_a_run(tmp_path, old, topk, candidates):
    kept = tmp_path / "configs"
    kept.mkdir()
    (kept / "0.yaml").write_text(f"retriever: {old}\n")
    (kept / "0.json").write_text("{}")
    retriever = load_config(kept / "0.yaml").retriever
    assert (retriever.topk, retriever.rerank_candidates) == (topk, candidates)


def test_config_in_kept_trajectories_is_read_under_its_earlier_names():
    text = (
        '{"learner": {"row_length": 32768}, "retriever": {"topk": 5, "retrieval_topk": 0, "rerank_topk": 0}}'
    )
    config = parse_config(text, "step_1.parquet", ["rollout.group_size=7"])
    assert config.learner.pack_length == 32768 and config.rollout.group_size == 7
    assert (config.retriever.topk, config.retriever.rerank_candidates) == (5, 0)


def test_earlier_depths_of_reranking_are_refused_with_a_hint(write):
    for old, new in (("retrieval_topk", "rerank_candidates"), ("rerank_topk", "topk")):
        message = refusal(write(f"retriever: {{{old}: 3}}"))
        assert f"unknown key 'retriever.{old}'; did you mean 'retriever.{new}'?" in message


def test_whole_config_that_version_0_2_0_kept_is_read(tmp_path):
    """Every key of that version is there: a quickstart wrote the file."""
    text = (Path(__file__).parent / "kept_by_0_2_0.yaml").read_text(encoding="utf-8")
    kept = tmp_path / "configs"
    kept.mkdir()
    (kept / "0.yaml").write_text(text)
    (kept / "0.json").write_text("{}")
    config = load_config(kept / "0.yaml")
    assert (config.sft.pack_length, config.learner.pack_length) == (320, 384)
    assert config.retriever.topk == 3 and config.retriever.rerank_candidates is None
    assert parse_config(text, "step_1.parquet").learner == config.learner


def test_every_renamed_key_has_a_hint():
    hints = {key.name: key.keys for key in peer_keys()}
    for old, new in RENAMED.items():
        assert hints[old] == (new,) and new in known_keys()


@pytest.mark.parametrize("script", [document_config, document_peer_keys], ids=lambda script: script.__name__)
def test_generated_page_is_current(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), f"run: python -m {script.__name__}"


@pytest.mark.parametrize(
    "line",
    [
        "| `learner.epochs=1` | integer > 0 | Passes over the step's trajectories. |",
        "| `learner.optimizer.name=adamw` | `adamw`, `muon` |",
        "| `rollout.top_p=1.0` | number > 0, ≤ 1 |",
        "| `sampler.urls=[]` | list of text |",
        "| `policy.init={}` | mapping |",
        "| `sft.phases[].steps=null` | integer > 0 or null |",
    ],
)
def test_page_of_keys_shows_defaults_values_and_limits(line):
    assert line in document_config.page()


def test_every_key_is_described():
    keys = document_config.keys()
    assert len(keys) > 100
    assert not [f"{key.section}.{key.name}" for key in keys if not key.meaning]


def test_later_files_win_key_by_key(write):
    paths = write(
        a="{learner: {steps: 3, optimizer: {lr: 0.5, beta1: 0.8}}, run: {dir: x}, sampler: {urls: [u, v]}}",
        b="{learner: {optimizer: {lr: 0.25}}, run: {dir: 'runs/${advantage.name}'}, sampler: {urls: [w]}}",
        c="advantage: {name: grpo}",
    )
    config = load_config(paths, ["learner.optimizer.beta1=0.7"])
    optimizer = config.learner.optimizer
    assert (config.learner.steps, optimizer.lr, optimizer.beta1) == (3, 0.25, 0.7)
    assert (config.run.dir, config.export.output) == ("runs/grpo", "runs/grpo/hf")
    assert load_config(paths, ["run.dir=b"]).export.output == "b/hf", "an interpolation sees the override"
    assert config.sampler.urls == ["w"], "a list replaces a list"
    assert load_config(paths[::-1]).run.dir == "x"


def test_file_builds_upon_another(write, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/child.yaml").write_text("base: ../middle.yaml\nrun: {seed: 3}\n")
    root = "{run: {seed: 1, dir: r}, learner: {steps: 2}}"
    write(root=root, middle="{base: root.yaml, learner: {steps: 4}}")
    config = load_config(tmp_path / "sub/child.yaml")
    assert (config.run.seed, config.run.dir, config.learner.steps) == (3, "r", 4)
    over = load_config([tmp_path / "sub/child.yaml", tmp_path / "root.yaml"])
    assert (over.run.seed, over.learner.steps) == (1, 2), "an overlay wins over every base"


@pytest.mark.parametrize("base", ["../a.yaml", "../sub/../a.yaml", "link.yaml", "b.yaml", "../sub/b.yaml"])
def test_files_that_build_upon_each_other_are_refused(tmp_path, base):
    """However their names are written."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text("base: sub/b.yaml")
    (tmp_path / "sub/link.yaml").symlink_to(tmp_path / "a.yaml")
    (tmp_path / "sub/b.yaml").write_text(f"base: {base}")
    message = refusal([tmp_path / "a.yaml"])
    repeated = tmp_path / "sub" / base
    assert (
        message == f"{repeated}: builds upon itself (base of {tmp_path}/sub/b.yaml); correct one of the two"
    )


@pytest.mark.parametrize(
    ("texts", "start"),
    [
        (["{}", "learner: {steps: 0}"], "b.yaml: learner.steps: must be greater than 0 (got 0)"),
        (["learner: {steps: 0}", "learner: {epochs: 2}"], "a.yaml: learner.steps: must be"),
        (["learner: {steps: 0}", "learner: {steps: x}"], "b.yaml: learner.steps: must be a valid integer"),
        (["{}", "lerner: {}"], "b.yaml: unknown key 'lerner'"),
        (["{}", "learner: [1"], "b.yaml: not valid YAML"),
        (["base: b.yaml", "run: {seed: -1}"], "b.yaml: run.seed: must be"),
        (
            ["rollout: {max_length: 9}", "run: {seed: 1}", "rollout: {max_prompt_length: 9}"],
            "a.yaml + FOLDER/c.yaml: rollout: max_prompt_length is 9",
        ),
        (
            ["sft: {phases: [{steps: 0}]}", "evaluate: {temperatures: [-1.0]}"],
            "a.yaml: sft.phases.0.steps: must be greater than 0 (got 0); FOLDER/b.yaml: evaluate.temper",
        ),
        (["base: none.yaml"], "none.yaml: no such config file (base of FOLDER/a.yaml); calibadv configs"),
        (["base: [b.yaml]"], "a.yaml: base is ['b.yaml'], but must be the name of"),
        (["base: b.yaml", "base: a.yaml"], "a.yaml: builds upon itself (base of FOLDER/b.y"),
    ],
)
def test_mistake_names_its_file(write, texts, start, tmp_path):
    message = refusal(write(**dict(zip("abc", texts, strict=False))))
    assert message.startswith(f"{tmp_path}/{start.replace('FOLDER', str(tmp_path))}")


def test_files_that_build_on_each_other_by_relative_paths_are_refused(tmp_path):
    """Each path to them is another text."""
    for own, other in ("ab", "ba"):
        (tmp_path / own).mkdir()
        (tmp_path / own / "run.yaml").write_text(f"base: ../{other}/run.yaml\n")
    message = refusal([tmp_path / "a/run.yaml"])
    assert "a/run.yaml: builds upon itself (base of " in message and "correct one of the two" in message


def test_mistake_on_the_command_line_names_all_files(write, tmp_path):
    paths = write(a="learner: {steps: 1}", b="run: {seed: 1}")
    message = refusal(paths, "learner.steps=0")
    key = "learner.steps: must be greater than 0 (got 0 on the command line)"
    assert message == f"{tmp_path}/a.yaml + {tmp_path}/b.yaml: {key}"


def test_missing_file_is_refused_with_the_command_that_lists_configs(tmp_path):
    path = tmp_path / "none.yaml"
    assert refusal([path]) == f"{path}: no such config file; calibadv configs lists the shipped ones"


def test_replaced_values_are_checked_and_sections_frozen():
    config = Config()
    assert dataclasses.replace(config.learner, steps=3).steps == 3
    with pytest.raises(ValueError, match="greater than 0"):
        dataclasses.replace(config.learner, steps=0)
    with pytest.raises(ValueError, match="raise the first or lower the second"):
        dataclasses.replace(config, learner=dataclasses.replace(config.learner, pack_length=100))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.learner.steps = 3
