"""The shipped configs: each is what its header says, and can be checked on a machine that has nothing."""

import argparse
import dataclasses
import functools
import re
import shlex
import socket
from contextlib import nullcontext
from pathlib import Path

import jax
import pytest

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.config.shipped import headline, shipped_names
from calibadv_jax.contrib.cli import configs, doctor
from calibadv_jax.contrib.planning.memory import GIB, estimate_memory, peak_memory
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.run.comparison import differences
from calibadv_jax.sampler import vllm_worker

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs"
OVERLAYS = sorted((FOLDER / "paper/overlays").glob("*.yaml"))
CONFIGS = sorted({*FOLDER.rglob("*.yaml")} - {*OVERLAYS, FOLDER / "retriever.yaml"})
MODELS = ("qwen2.5-3b", "qwen2.5-7b", "llama-3.2-3b-instruct")
COMMAND = re.compile(r"(?:(?<=^)|(?<=\s))(calibadv \w+|scripts/launch_\w+\.sh)((?: [^\s#…]+)+)")


def name(path):
    return str(path.relative_to(FOLDER))


def paper(model, *overlays, overrides=()):
    names = [model, *(f"overlays/{overlay}" for overlay in overlays)]
    paths = [FOLDER / f"paper/{name}.yaml" for name in names]
    return load_config(paths, overrides) if overrides else loaded(*paths)


@functools.cache
def loaded(*paths):
    """Load a config that several tests read."""
    return load_config(paths)


def header(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    return re.sub(r"\\\n", " ", "\n".join(comments))


COMMANDS = [
    pytest.param(program, arguments, id=f"{name(path)}-{program}")
    for path in sorted(FOLDER.rglob("*.yaml"))
    for program, arguments in COMMAND.findall(header(path))
]
assert len(COMMANDS) > 30


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_configs_pass_the_offline_doctor(path, tmp_path, monkeypatch, capsys):

    def refuse(*_):
        raise AssertionError("a connection was opened")

    config = loaded(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    doctor.run(config, offline=True)
    assert "every offline check passed" in capsys.readouterr().out.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.medium
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
@pytest.mark.parametrize("model", MODELS)
def test_overlays_change_their_one_key(model, overlay):
    config, plain = paper(model, overlay.stem), paper(model)
    changed = [key for key, _, _ in differences(dataclasses.asdict(plain), dataclasses.asdict(config))]
    (key,) = [key for key in changed if not key.startswith(("run.", "sft.output", "export.", "evaluate."))]
    kind, _, value = overlay.stem.rpartition("-")
    expected = {
        "lambda": ("advantage.target_ratio", value),
        "correctness": ("advantage.correctness", value),
        "no-soft": ("advantage.soft_penalty", "False"),
        "no": ("advantage.rebalance", "False"),
    }[kind]
    assert (key, str(getattr(config.advantage, key.partition(".")[2]))) == expected
    assert (config.run.dir != plain.run.dir) == (kind in ("lambda", "correctness"))


@pytest.mark.parametrize("model", MODELS)
def test_plain_grpo_differs_in_one_key(model):
    plain = paper(model)
    assert load_config(FOLDER / f"paper/{model}-grpo.yaml").run.dir != plain.run.dir
    same_folder = load_config(FOLDER / f"paper/{model}-grpo.yaml", [f"run.dir={plain.run.dir}"])
    changes = list(differences(dataclasses.asdict(plain), dataclasses.asdict(same_folder)))
    assert changes == [("advantage.name", "calibadv", "grpo")]


@pytest.mark.medium
@pytest.mark.parametrize(("program", "arguments"), COMMANDS)
def test_commands_of_headers_parse(program, arguments, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    argv = shlex.split(arguments.removesuffix("&"))
    if program == "calibadv retriever":
        options = pytest.importorskip("retriever.options").parse(argv)
        if options.retriever_name == "bm25":  # own_data.yaml
            assert options.build_if_missing and not options.reranker_model
            return
        assert (options.retriever_name, options.retrieval_topk, options.reranking_topk) == ("e5", 20, 3)
        assert options.reranker_model == "cross-encoder/ms-marco-MiniLM-L12-v2"
    elif program == "scripts/launch_vllm_worker.sh":
        assert vllm_worker.parse(argv).max_model_len == paper("qwen2.5-3b").rollout.max_length
    else:
        with pytest.raises(SystemExit) as end:
            cli.calibadv([program.split()[1], *argv, "--dry-run"])
        assert end.value.code == 0
        assert capsys.readouterr().out.startswith("run:\n")


def test_headers_show_every_program_of_a_run():
    assert {param.values[0] for param in COMMANDS} >= {
        "calibadv train",
        "calibadv evaluate",
        "calibadv export",
        "calibadv doctor",
        "calibadv retriever",
        "scripts/launch_vllm_worker.sh",
    }


# Settings that each project's scripts and the defaults of its YAML files have, at a commit.
FACTS = {
    "paper": [  # the authors' script at 6ae1c4e
        ("rollout", dict(questions_per_step=512, group_size=5, max_searches=4, max_prompt_length=2048)),
        ("rollout", dict(max_turn_length=1024, max_observation_length=2048, max_length=16384, top_p=0.95)),
        ("rollout", dict(temperature=1.0, on_invalid="end")),
        ("prompt", dict(template="paper", question_mark=True, prepend_think=False)),
        ("retriever", dict(topk=3, rerank_candidates=20)),
        ("reward", dict(answer="f1", format=True)),
        ("advantage", dict(soft_penalty=True, silver_threshold=0.7, correctness="fraction", rebalance=True)),
        ("advantage", dict(target_ratio=1.0, adjust="positive")),
        ("loss", dict(clip_low=0.2, clip_high=0.2, kl_coef=0.0, entropy_coef=0.0)),
        ("loss", dict(aggregation="token_mean")),
        ("learner", dict(minibatch_size=256, epochs=1, steps=205)),
        ("learner.optimizer", dict(decay_updates=4100, lr=5e-7, schedule="cosine", warmup_updates=0)),
        ("learner.optimizer", dict(weight_decay=0.01, beta1=0.9, beta2=0.999, max_grad_norm=1.0)),
    ],
    "search_r1": [  # scripts/nq_hotpotqa/v0.2/train_grpo.sh at a14dc3a
        ("reward", dict(answer="em", format=False)),
        ("advantage", dict(name="grpo")),
        ("loss", dict(kl_coef=0.001, entropy_coef=0.001, clip_high=0.2)),
        ("rollout", dict(group_size=5, max_searches=4, max_turn_length=500, top_p=0.95)),
        ("retriever", dict(topk=3, rerank_candidates=0)),
        ("learner", dict(steps=1005, minibatch_size=256)),
        ("learner.optimizer", dict(lr=1e-6, schedule="constant", weight_decay=0.01, eps=1e-8)),
        ("evaluate", dict(every=100)),
    ],
    "rlinf": [  # examples/agent/searchr1/config/train_qwen2.5.yaml at a3816b5
        ("reward", dict(answer="em", format=False)),
        ("advantage", dict(name="grpo")),
        ("loss", dict(kl_coef=0.001, entropy_coef=0.0)),
        ("rollout", dict(group_size=4, max_searches=1, max_length=7096, top_p=1.0)),
        ("learner", dict(minibatch_size=1024, pack_length=11008)),
        ("learner.optimizer", dict(lr=1e-6, schedule="constant", weight_decay=0.01, eps=1e-5)),
        ("evaluate", dict(every=25)),
        ("data", dict(overlong_prompts="leave_out")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", [*(f"paper/{model}" for model in MODELS), "search_r1", "rlinf"])
def test_settings_of_the_projects(name):
    config = loaded(FOLDER / f"{name}.yaml")
    for section, values in FACTS[name.partition("/")[0]]:
        settings = config
        for part in section.split("."):
            settings = getattr(settings, part)
        assert {key: getattr(settings, key) for key in values} == values
    if not name.startswith("paper"):
        updates = -(-512 * config.rollout.group_size // config.learner.minibatch_size) * config.learner.steps
        assert config.learner.optimizer.warmup_updates == int(0.285 * updates)


# Parameters of the published checkpoints: the sum over the shapes in their safetensors files.
PUBLISHED = {
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.2-3b-instruct": 3_212_749_824,
}


@pytest.mark.parametrize("model", MODELS)
def test_policy_has_the_parameters_of_the_published_checkpoint(model):
    assert architecture_from_hf(paper(model).policy.init).num_parameters == PUBLISHED[model]


@pytest.mark.parametrize("model", MODELS)
def test_memory_is_estimated_for_the_mesh(model):
    """AdamW in float32: 4 bytes a parameter, 8 for its moments, 8 for gradients, over eight devices.

    Norms and biases are not split.
    """
    config = paper(model)
    architecture = architecture_from_hf(config.policy.init)
    mesh = config.mesh.sizes_on(8)
    assert mesh == {"data": 1, "fsdp": 8, "tensor": 1}
    estimate = estimate_memory(config, architecture, mesh)
    share = pytest.approx(PUBLISHED[model] / 8, rel=2e-3)
    assert estimate["parameters"] / 4 == share
    assert estimate["optimizer"] == estimate["gradients"] == 2 * estimate["parameters"]
    assert "kv cache" not in estimate
    assert "reference policy" not in estimate
    assert peak_memory(estimate) < 0.45 * 80 * GIB  # what the header leaves to the trainer


def test_memory_of_a_reference_policy_is_that_of_the_parameters():
    config = paper("qwen2.5-3b", overrides=["loss.kl_coef=0.001"])
    architecture = architecture_from_hf(config.policy.init)
    estimate = estimate_memory(config, architecture, config.mesh.sizes_on(8))
    assert estimate["reference policy"] == estimate["parameters"]


def test_tensor_axis_divides_parameters_and_not_activations():
    config = paper("qwen2.5-3b")
    architecture = architecture_from_hf(config.policy.init)
    plain = estimate_memory(config, architecture, {"data": 1, "fsdp": 8, "tensor": 1})
    tensor = estimate_memory(config, architecture, {"data": 2, "fsdp": 2, "tensor": 2})
    assert tensor["parameters"] / 8 == pytest.approx(PUBLISHED["qwen2.5-3b"] / 8, rel=2e-3)
    assert tensor["activations"] == 2 * plain["activations"]


def test_memory_fractions_leave_room_for_the_retriever():
    """All three share the GPUs: a tenth of 80 GB is the index, its encoder and the reranker."""
    checked = []
    for path in CONFIGS:
        config = loaded(path)
        if "--gpu_memory" not in str(config.sampler.worker_args) or config.sampler.name == "jax":
            continue
        workers = vllm_worker.parse(["--model", "x", *config.sampler.worker_args])
        (fraction,) = {float(number) for number in re.findall(r"MEM_FRACTION=([\d.]+)", header(path))}
        assert workers.gpu_memory_utilization + fraction <= 0.9, path
        architecture = architecture_from_hf(config.policy.init)
        sizes = config.mesh.sizes_on(jax.device_count())
        trainer = peak_memory(estimate_memory(config, architecture, sizes))
        assert 1.15 * trainer < fraction * 80e9, path  # the estimate is within 15 % of the compiler's
        checked.append(path)
    assert len(checked) >= 10


@pytest.mark.parametrize(
    ("override", "status", "words"),
    [
        (
            "prompt.template=papr",
            1,
            ["FAIL prompt: prompt.template is 'papr'", "1 of 3 offline checks failed"],
        ),
        ("learner.microbatch_rows=12", 1, ["set learner.microbatch_rows=16"]),
        ("policy={path: '', init: {model_type: gpt2}}", 1, ["policy.init: model_type is 'gpt2'"]),
        ("mesh.fsdp=-1", 0, ["as many as there are here"]),
        ("policy.path=", 0, ["3085.94M parameters"]),
        ("sampler.name=jax", 0, ["kv cache"]),
    ],
)
def test_offline_doctor_names_the_mistake(tmp_path, monkeypatch, capsys, override, status, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1") if status else nullcontext():
        doctor.run(paper("qwen2.5-3b", overrides=[override, "policy.init.vocab_size=151936"]), offline=True)
    printed = capsys.readouterr().out
    assert all(part in printed for part in words)


def test_shipped_names_load_and_files_win(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy_config([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == shipped_names() and all(len(line) < 130 for line in lines)
    assert "retriever" not in shipped_names() and "paper/qwen2.5-3b" in shipped_names()
    for name in shipped_names():
        assert headline(name) and load_config(name)
    Path("quickstart").write_text("run: {seed: 7}")
    assert load_config("quickstart").run.seed == 7


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_generated_demonstrations_show_as_many_documents_as_a_search_returns(path):
    config = loaded(path)
    if config.sft.demonstrations == "world" and config.world.dir:
        assert config.world.documents == config.retriever.topk


STUDIES = ("actions", "rumours", "evidence", "quickstart_ppo", "quickstart_vllm", "quickstart_teacher")


@pytest.mark.parametrize("study", STUDIES)
def test_studies_stay_with_the_world_and_the_cold_start_of_their_figures(study):
    config = load_config(FOLDER / f"{study}.yaml")
    assert config.world.documents == config.retriever.topk == 3
    assert (config.world.detour, config.world.hasty) == (0.1, 0.4)
    assert not config.learner.share_prefixes
    assert sum(phase.steps for phase in config.sft.phases) >= 1180


def test_quickstarts_and_configs_of_peers_are_shipped():
    names = {"quickstart", "quickstart_grpo", "quickstart_vllm", "search_r1", "wiki_sample"}
    assert names <= set(shipped_names())


def test_copied_config_builds_upon_the_shipped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy_config(["copy", "paper/qwen2.5-7b-grpo"])
    assert load_config("qwen2.5-7b-grpo.yaml") == load_config("paper/qwen2.5-7b-grpo")
    assert "--config qwen2.5-7b-grpo.yaml" in capsys.readouterr().out
    with pytest.raises(UserError, match="qwen2.5-7b-grpo.yaml: exists"):
        copy_config(["copy", "paper/qwen2.5-7b-grpo"])
    copy_config(["copy", "quickstart", "mine/own.yaml"])
    assert load_config("mine/own.yaml") == load_config("quickstart")
    for words in (["copy"], ["copy", "nothing"], ["copy", "cpu", "a", "b"], ["show", "cpu"]):
        with pytest.raises(UserError, match="give copy NAME"):
            copy_config(words)


def copy_config(words):
    configs.run(argparse.Namespace(words=words))
