"""What a start may change of a run that is resumed, and that nothing is written before this is known."""

import json
from dataclasses import replace

import pytest
import yaml
from run_folder_rig import QUESTIONS, StandInModel, contents, make_run, trained, with_checkpoint

from calibadv_jax.config import Config, dump_config, load_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.console import Console
from calibadv_jax.run.folder import check_cold_start, write_policy_folder
from calibadv_jax.snapshots.mirror import open_mirror


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def test_config_of_every_start_is_kept(run):
    run("run.seed=1")
    run("run.seed=2")  # no checkpoint yet: nothing that it could falsify
    seeds = [yaml.safe_load((run.folder / f"configs/{n}.yaml").read_text())["run"]["seed"] for n in (0, 1)]
    assert seeds == [1, 2]
    assert json.loads((run.folder / "policy/config.json").read_text()) == {"model_type": "qwen2"}
    assert (run.folder / "policy/tokenizer.json").is_file()


def test_newest_of_many_starts_is_compared(run):
    """The eleventh start comes after the tenth, and after the third."""
    for number in range(11):
        run(f"run.seed={number}")
    names = {path.stem for path in (run.folder / "configs").glob("*.yaml")}
    assert names == {str(number) for number in range(11)}
    trained(run, 3)
    (run.folder / "checkpoints" / "3").mkdir(parents=True)
    assert run("run.seed=10") == ""
    with pytest.raises(UserError, match="run.seed changed"):
        run("run.seed=9")


def test_foreign_or_missing_config_files_are_ignored(run):
    for _ in range(3):
        run()
    (run.folder / "configs/notes.yaml").write_text("mine")
    (run.folder / "configs/1.yaml").unlink()
    run()
    names = sorted(path.name for path in (run.folder / "configs").glob("*.yaml"))
    assert names == ["0.yaml", "2.yaml", "3.yaml", "notes.yaml"]


@pytest.mark.medium
@pytest.mark.parametrize(
    "override",
    [
        "run.seed=1",
        "advantage.name=grpo",
        "learner.optimizer.lr=0.001",
        "rollout.group_size=7",
        "rollout.questions_per_step=3",
        "rollout.temperature=0.5",
        "prompt.template=short",
        "retriever.topk=5",
        "sampler.name=vllm",
        "loss.clip_low=0.1",
        "learner.steps=11",  # the cosine ends later
        "data.shuffle=false",
        "policy.lora.rank=4",
    ],
)
def test_binding_change_is_refused_before_writing(run, override):
    with_checkpoint(run)
    before = contents(run.folder)
    key, _, value = override.partition("=")
    with pytest.raises(UserError, match=rf"holds another experiment: {key} changed") as caught:
        run(override)
    assert f"choose another folder, such as run.dir={run.folder}-2" in str(caught.value)
    can_go_on = key.startswith(("learner", "rollout", "retriever", "sampler", "loss"))
    assert (f"checkpoint.allow_change=[{key}]" in str(caught.value)) == can_go_on
    assert "\n" not in str(caught.value)
    assert contents(run.folder) == before
    table = run(override, f"checkpoint.allow_change=[{key}]")
    assert any(key in line and value in line and "accepted" in line for line in table.splitlines())


def test_every_binding_key_is_compared(run):
    changes = {
        "sampler.name": "vllm",
        "retriever.encoder": "e5",
        "retriever.topk": 5,
        "retriever.retrieval_topk": 20,
        "retriever.rerank_topk": 4,
        "retriever.reranker": "judge",
        "prompt.template": "short",
        "advantage.name": "grpo",
        "rollout.max_searches": 2,
        "rollout.max_observation_length": 99,
        "loss.clip_high": 0.5,
        "learner.epochs": 2,
        "policy.compute_dtype": "float32",
        "run.seed": 1,
    }
    with_checkpoint(run)
    with pytest.raises(UserError, match="holds another experiment: ") as caught:
        run("sampler.slots=7", "retriever.threads=2", *(f"{key}={value}" for key, value in changes.items()))
    named = str(caught.value).partition("experiment: ")[2].partition(" changed")[0]
    assert set(named.split(", ")) == changes.keys()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"questions": [QUESTIONS[0], replace(QUESTIONS[1], text="Whence?")]}, "data.content"),
        ({"questions": QUESTIONS[:1]}, "data.content"),
        ({"hidden_size": 8}, "policy.config"),
    ],
)
def test_data_and_policy_are_compared_by_content(run, arguments, name):
    with_checkpoint(run)
    before = contents(run.folder)
    with pytest.raises(UserError, match=f"{name} changed"):
        run(**arguments)
    assert contents(run.folder) == before
    assert "accepted" in run(f"checkpoint.allow_change=[{name}]", **arguments)


@pytest.mark.parametrize(
    "override", ["data.train=elsewhere.jsonl", "log.backends=[]", "sampler.slots=3", "checkpoint.every=9"]
)
def test_unlearned_change_is_accepted_and_shown(run, override):
    with_checkpoint(run)
    assert override.partition("=")[0] in run(override)
    assert run(override) == ""


def test_mixture_weights_can_be_allowed_by_key(run):
    with_checkpoint(run)
    with pytest.raises(UserError, match=r"data.weights changed.*checkpoint.allow_change=\[data.weights\]"):
        run("data.weights={nq: 2, popqa: 1}")
    assert "data.weights.nq" in run(
        "data.weights={nq: 2, popqa: 1}", "checkpoint.allow_change=[data.weights]"
    )


def test_more_steps_at_constant_rate_are_accepted(run):
    (run.folder.parent / "config.yaml").write_text("learner: {steps: 10, optimizer: {schedule: constant}}\n")
    with_checkpoint(run)
    assert "learner.steps" in run("learner.steps=20")


def test_more_steps_with_decay_updates_are_accepted(run):
    text = "learner: {steps: 10, optimizer: {schedule: cosine, decay_updates: 20}}\n"
    (run.folder.parent / "config.yaml").write_text(text)
    with_checkpoint(run)
    assert "learner.steps" in run("learner.steps=20")
    with pytest.raises(UserError, match="decay_updates changed"):
        run("learner.optimizer.decay_updates=30")


def test_used_folder_without_resume_is_refused(run):
    with_checkpoint(run)
    before = contents(run.folder)
    with pytest.raises(UserError, match="holds checkpoints, and checkpoint.resume is false"):
        run("checkpoint.resume=false")
    assert contents(run.folder) == before


@pytest.mark.parametrize(
    ("overrides", "changes", "message"),
    [
        ([], {"questions": QUESTIONS[:1]}, "holds another experiment: data.content changed"),
        ([], {"hidden_size": 8}, "holds another experiment: policy.config changed"),
        (["run.seed=1"], {}, "holds another experiment: run.seed changed"),
        (["checkpoint.resume=false"], {}, "holds checkpoints, and checkpoint.resume is false"),
    ],
)
def test_other_experiment_in_the_mirror_is_not_fetched(run, tmp_path, overrides, changes, message):
    with_checkpoint(run)
    (run.folder / "checkpoints/3/state").write_text("weights")
    (run.folder / "hub.json").write_text("[]")
    mirror, elsewhere = f"run.mirror={tmp_path}/store", tmp_path / "elsewhere"
    run(mirror)
    copied = contents(tmp_path / "store")
    with pytest.raises(UserError, match=message) as refused:
        run(mirror, f"run.dir={elsewhere}", *overrides, **changes)
    assert mirror in str(refused.value)
    assert contents(elsewhere) == {} and contents(tmp_path / "store") == copied
    run(mirror, f"run.dir={elsewhere}")
    assert (elsewhere / "checkpoints/3/state").read_text() == "weights"
    assert (elsewhere / "hub.json").read_text() == "[]"


def test_policy_inside_run_is_fetched_first(run, tmp_path):
    with_checkpoint(run)
    (run.folder / "checkpoints/3/state").write_text("weights")
    (run.folder / "sft").mkdir()
    (run.folder / "sft/config.json").write_text("{}")
    run(f"run.mirror={tmp_path}/store", "policy.path=${run.dir}/sft")
    elsewhere = tmp_path / "elsewhere"
    overrides = [f"run.mirror={tmp_path}/store", f"run.dir={elsewhere}"]
    mirror = open_mirror(load_config([], overrides), Console(progress=False))
    with mirror.inputs(f"{elsewhere}/sft", "") as count:
        assert count == 5  # two starts' configs and hashes beside it
        assert (elsewhere / "sft/config.json").is_file() and not (elsewhere / "checkpoints").exists()


def test_unknown_key_in_allow_change_is_refused(run):
    with_checkpoint(run)
    with pytest.raises(UserError, match="'learner.lr', which is no key"):
        run("checkpoint.allow_change=[learner.lr]")


def test_unwritable_run_dir_is_refused(run):
    run.folder.write_text("a file")
    with pytest.raises(UserError, match="cannot be written") as caught:
        run()
    assert "\n" not in str(caught.value)


def test_cold_start_with_another_seed_is_refused(tmp_path):
    config = Config(run=replace(Config().run, dir=str(tmp_path)))
    check_cold_start(config)
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump({"run": {"seed": 3}, "log": {"progress": False}}))
    with pytest.raises(UserError, match=r"other settings \(run.seed"):
        check_cold_start(config)


def without(path, section, key):
    """As a version wrote it that did not have the key yet."""
    values = yaml.safe_load(path.read_text())
    del values[section][key]
    path.write_text(yaml.safe_dump(values))


def test_older_configs_get_defaults_of_newer_keys(run, tmp_path):
    with_checkpoint(run)
    without(run.folder / "configs/0.yaml", "learner", "epochs")
    with pytest.raises(UserError, match=r"learner.epochs changed"):
        run("learner.epochs=2")
    assert "learner.epochs" not in run("learner.epochs=1")

    cold = Config(run=replace(Config().run, dir=str(tmp_path)))
    (tmp_path / "sft.yaml").write_text(dump_config(cold))
    without(tmp_path / "sft.yaml", "world", "rumour")
    check_cold_start(cold)
    with pytest.raises(UserError, match=r"other settings \(world.rumour"):
        check_cold_start(replace(cold, world=replace(cold.world, rumour=0.5)))


def test_policy_folder_holds_config_and_tokenizer(tmp_path):
    write_policy_folder(tmp_path / "policy", StandInModel(tmp_path / "tokenizer"))
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["config.json", "tokenizer.json"]


@pytest.mark.timeout(10)
def test_removed_section_is_refused_by_name(run):
    with_checkpoint(run)
    path = run.folder / "configs/0.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"pipeline": {"size": 3}}))
    with pytest.raises(UserError, match="holds another experiment: pipeline changed"):
        run()


def test_allowed_change_accepts_no_other_change(run):
    with_checkpoint(run)
    changes = ("learner.epochs=2", "rollout.group_size=7")
    before = contents(run.folder)
    for allowed, refused in (
        ("checkpoint.every", "rollout.group_size, learner.epochs"),
        ("learner.epochs", "rollout.group_size"),
        ("rollout.group_size", "learner.epochs"),
    ):
        with pytest.raises(UserError, match=rf"another experiment: {refused} changed"):
            run(*changes, f"checkpoint.allow_change=[{allowed}]")
        assert contents(run.folder) == before
    assert "refused" not in run(*changes, "checkpoint.allow_change=[learner.epochs, rollout.group_size]")
