"""The experiments of experiments/evidence.md: what each arm changes, what is run and in which order."""

from dataclasses import replace
from pathlib import Path

import pytest
from evidence_rig import CONFIG, ROOT, changes, config_of, training

from calibadv_jax.config import dump_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import ESTIMATORS, LOSSES
from experiments import cold as evidence_cold
from experiments import runs as evidence
from experiments.arms import FOUR, Arm, Job, parse_name, plan

pytestmark = pytest.mark.medium  # of a benchmark's program

CALIBADV = {"advantage.name": "calibadv"}


def test_arms_change_their_named_keys():
    for name, expected in (
        ("soft-lr1.9e-3", {**CALIBADV, "advantage.rebalance": False}),
        ("rebalance-lr1.9e-3", {**CALIBADV, "advantage.soft_penalty": False}),
        ("calibadv-lambda0.5-lr1.9e-3", {**CALIBADV, "advantage.target_ratio": 0.5}),
        ("grpo-cliphigh-lr1.9e-3", {"loss.clip_high": 0.28}),
        ("drgrpo-lr1.9e-3", {"advantage.normalize_std": False}),
        ("grpo-1update-lr3e-3", {"learner.minibatch_size": 0, "learner.optimizer.lr": 0.003}),
    ):
        assert changes(parse_name(name)) == expected
    for arm in (*(job.arm for job in plan("all", [0])), Arm("calibadv", "2.2e-3", is_short=True)):
        assert parse_name(arm.name) == arm
    assert [parse_name(name) for name in ("notes", "grpo", "sarsa-lr1e-3", "grpo-lr")] == [None] * 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("calibadv-lr1.9e-3", CALIBADV),
        ("calibadv-lambda0.75-lr1.9e-3", {**CALIBADV, "advantage.target_ratio": 0.75}),
        ("calibadv-lambda1.5-lr1.9e-3", {**CALIBADV, "advantage.target_ratio": 1.5}),
        ("calibadv-lambda2-lr1.9e-3", {**CALIBADV, "advantage.target_ratio": 2.0}),
        ("grpo-kl0.001-lr1.9e-3", {"loss.kl_coef": 0.001}),
        ("grpo-lr1e-3", {"learner.optimizer.lr": 0.001}),
    ],
)
def test_arm_changes_what_its_name_says(name, expected):
    assert changes(parse_name(name)) == expected


def test_other_number_of_updates_is_no_arm():
    assert parse_name("grpo-2updates-lr1e-3") is None


def test_grpo_has_five_updates_a_step():
    config = training(Arm("grpo", "1.9e-3"))
    assert (config.advantage.name, config.learner.optimizer.lr) == ("grpo", 0.0019)
    trajectories = config.rollout.questions_per_step * config.rollout.group_size
    assert trajectories / config.learner.minibatch_size == 5


def test_policy_in_training_is_evaluated_on_a_sample():
    evaluate = training(Arm("grpo", "1.9e-3")).evaluate
    assert (evaluate.every, evaluate.sample_size) == (20, 100)


def test_training_starts_from_its_seeds_cold_start(tmp_path):
    job = Job(Arm("grpo", "1.9e-3"), 5, 4, 40)
    config = config_of(evidence.train_command(tmp_path, job, CONFIG))
    assert config_of(evidence.evaluate_command(tmp_path, job, CONFIG)) == config
    assert config.run.dir == str(tmp_path / "runs/grpo-lr1.9e-3/seed-5-from-4")
    assert (config.run.seed, config.learner.steps, config.world.dir) == (5, 40, "")
    assert (config.advantage.name, config.learner.optimizer.schedule) == ("grpo", "constant")
    assert (config.evaluate.every, training(job.arm, steps=20).evaluate.every) == (20, 0)
    cold = tmp_path / "cold/seed-4"
    made = config_of(evidence.cold_command(tmp_path, 4, CONFIG))
    assert (made.run.dir, made.run.seed, made.world.seed) == (str(cold), 4, 4)
    assert config.policy.path == made.sft.output == str(cold / "sft")
    assert config.policy.tokenizer == f"{made.world.dir}/tokenizer"
    assert (config.data, config.retriever) == (made.data, made.retriever)
    assert config.evaluate.temperatures == made.evaluate.temperatures == [1.0]


def test_each_estimator_and_loss_is_an_arm():
    configs = [training(job.arm) for job in plan("each", [9])]
    assert {config.advantage.name for config in configs} == {"calibadv", *ESTIMATORS} - {"dr_grpo"}
    assert {config.loss.name for config in configs} == set(LOSSES)
    assert any(not config.advantage.normalize_std for config in configs)  # which is dr_grpo
    moved = [len(changes(Arm(job.arm.method, "1.9e-3"))) for job in plan("each", [9])]
    different = {dump_config(replace(config, run=configs[0].run)) for config in configs}
    assert moved.count(0) == 1 and len(moved) == len(different)


def kind_of(arm):
    """The block of the part `all` that an arm belongs to."""
    if "lambda" in arm.method:
        return "lambda"
    if arm.updates:
        return "single"
    return "five" if arm.method in FOUR else "remedy"


def test_every_job_of_all_has_a_cold_start_of_its_seed():
    assert all(job.cold_seed == job.seed for job in plan("all", [3, 4]))


def test_remedies_and_other_rates_come_after_the_most_telling_runs():
    kinds = [kind_of(job.arm) for job in plan("all", [3, 4])[16:]]
    assert list(dict.fromkeys(kinds)) == ["lambda", "remedy", "five", "single"]


def test_frontier_has_all_rates_with_one_and_five_updates():
    arms = {(job.arm.updates, job.arm.lr) for job in plan("frontier", [3])}
    rates = ("1e-3", "1.5e-3", "1.9e-3", "2.2e-3", "3e-3")
    assert arms == {(updates, rate) for updates in ("", "-1update") for rate in rates}


def test_remedies_and_halves_have_the_given_rate():
    remedies = [job.arm.name for job in plan("remedies", [3], "2.2e-3")]
    assert remedies == ["grpo-cliphigh-lr2.2e-3", "grpo-kl0.001-lr2.2e-3", "drgrpo-lr2.2e-3"]
    halves = [job.name for job in plan("halves", [3, 4], "1e-3")]
    assert halves == [f"{method}-lr1e-3/seed-{seed}" for seed in (3, 4) for method in FOUR]


def test_rivals_share_the_cold_start_of_the_first_seed():
    arguments = evidence.parse(["out", "--part", "rivals"])
    jobs = plan("rivals", arguments.seeds, arguments.lr, arguments.steps)
    assert len(jobs) == 45
    assert {job.cold_seed for job in jobs} == {9}
    assert [job.name for job in jobs[7:11]] == [
        "a2tgpo-lr1e-3/seed-9",
        "tips-lr1e-3/seed-9",
        "grpo-lr1e-3/seed-10-from-9",
        "calibadv-lr1e-3/seed-10-from-9",
    ]


def test_defaults_of_the_long_version():
    arguments = evidence.parse(["out"])
    assert (arguments.seeds, arguments.steps, arguments.workers) == ([3, 4, 5, 6, 7], 60, 1)
    assert arguments.config == CONFIG


def test_defaults_of_the_short_version():
    arguments = evidence.parse(["out", "--part", "short"])
    assert (arguments.seeds, arguments.steps, arguments.workers) == ([9, 10], 20, 2)
    assert Path(arguments.config) == ROOT / "configs/rumours.yaml"


def test_seeds_are_numbers_with_spaces_between_them():
    assert evidence.parse(["out", "--seeds", "8 11"]).seeds == [8, 11]


@pytest.mark.parametrize("seeds", ["8,11", ""])
def test_other_seeds_are_refused(capsys, seeds):
    with pytest.raises(SystemExit):
        evidence.parse(["out", f"--seeds={seeds}"])
    assert f"--seeds {seeds!r}: must be numbers with spaces between them" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--steps", "--workers"])
@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_numbers_are_above_0(capsys, option, value):
    with pytest.raises(SystemExit):
        evidence.parse(["out", f"{option}={value}"])
    assert f"{value!r}: must be a whole number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr", "fast"], "learner.optimizer.lr: must be a valid number"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such config file"),
    ],
)
def test_mistake_is_found_before_the_first_run(tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        evidence.main([str(tmp_path), "--part", "short", *arguments])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def moved_cold_start(tmp_path, monkeypatch):
    """The config of a cold start that was made in another folder, and the parts that are made anew."""
    made = []
    monkeypatch.setattr(evidence_cold, "write_world", lambda world, protocol: None)
    for name in ("sft", "evaluate"):
        monkeypatch.setattr(getattr(evidence_cold, name), "run", lambda config, name=name: made.append(name))
    before = config_of(evidence.cold_command(tmp_path / "before", 3, CONFIG))
    folder = tmp_path / "now/cold/seed-3"
    (folder / "sft").mkdir(parents=True)
    (folder / "sft/config.json").write_text("{}")
    (folder / "sft.yaml").write_text(dump_config(before))
    return evidence.cold_command(tmp_path / "now", 3, CONFIG), made


def test_moved_cold_start_is_only_evaluated(moved_cold_start):
    command, made = moved_cold_start
    evidence_cold.run(config_of(command))
    assert made == ["evaluate"]


def test_cold_start_with_other_settings_is_refused(moved_cold_start):
    command, made = moved_cold_start
    changed = config_of([*command, "sft.optimizer.lr=0.02", "learner.steps=7"])
    with pytest.raises(UserError, match=r"other settings \(sft.optimizer.lr\); "):
        evidence_cold.run(changed)
    assert made == []


def test_each_part_has_its_seeds_and_cold_starts(tmp_path, monkeypatch):
    jobs = plan("all", [3, 4])
    near = [f"{method}-lr{lr}" for lr in ("1.9e-3", "2.2e-3") for method in FOUR]  # the most telling
    assert [job.name for job in jobs[:16]] == [f"{name}/seed-{seed}" for seed in (3, 4) for name in near]
    assert len({job.name for job in jobs}) == len(jobs)
    monkeypatch.chdir(tmp_path)
    arguments = evidence.parse(["out", "--part", "short", "--config", "mine.yaml"])
    assert (arguments.output, arguments.config) == (tmp_path / "out", str(tmp_path / "mine.yaml"))
    jobs = plan("short", arguments.seeds, arguments.lr, arguments.steps)
    arms = [f"short-{method}-lr1e-3/seed-{n}" for n in (9, 10) for method in ("calibadv-lambda2", "grpo")]
    assert [(job.name, job.cold_seed, job.steps) for job in jobs] == [(name, 9, 20) for name in arms]
    for option in ("--seeds=8,11", "--seeds=", "--steps=0", "--workers=-1"):
        with pytest.raises(SystemExit):
            evidence.parse(["out", option])
    with pytest.raises(UserError, match="learner.optimizer.lr: must be a valid number"):
        evidence.main(["out", "--lr", "fast"])
    assert not list(tmp_path.iterdir())  # found before the first run
