"""The experiments of docs/evidence.md: what each arm changes, what is run, skipped and begun again."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import evidence, evidence_cold
from benchmarks.evidence_arms import Arm, Job, parse_name, plan
from calibadv_jax import cli
from calibadv_jax.config import dump_config, load_config
from calibadv_jax.errors import UserError
from calibadv_jax.run_folder import differences

ROOT = Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / "configs/quickstart.yaml")
ARMS = list(dict.fromkeys(job.arm for job in plan("all", [0])))
PLACES = ("run.dir", "evaluate.output", "export.output", "sft.output")
CALIBADV = {"advantage.name": "calibadv"}


def config_of(command):
    """What the program would read of its command line."""
    assert command[:2] == [sys.executable, "-m"]
    parsed = cli.parse("calibadv", "", command[3:])
    return load_config(parsed.configs, parsed.overrides)


def training(arm, output=Path("/out"), seed=3, cold_seed=3, steps=60):
    return config_of(evidence.train_command(output, Job(arm, seed, cold_seed, steps), CONFIG))


def changes(arm):
    """What an arm has different from GRPO at 1.9e-3."""
    one, plain = (dataclasses.asdict(training(each)) for each in (arm, Arm("grpo", "1.9e-3")))
    return {key: value for key, _, value in differences(plain, one) if key not in PLACES}


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "soft-lr1.9e-3": {**CALIBADV, "advantage.rebalance": False},
        "rebalance-lr1.9e-3": {**CALIBADV, "advantage.soft_penalty": False},
        "calibadv-lr1.9e-3": CALIBADV,
        "calibadv-lambda0.5-lr1.9e-3": {**CALIBADV, "advantage.target_ratio": 0.5},
        "calibadv-lambda0.75-lr1.9e-3": {**CALIBADV, "advantage.target_ratio": 0.75},
        "calibadv-lambda1.5-lr1.9e-3": {**CALIBADV, "advantage.target_ratio": 1.5},
        "calibadv-lambda2-lr1.9e-3": {**CALIBADV, "advantage.target_ratio": 2.0},
        "grpo-cliphigh-lr1.9e-3": {"loss.clip_high": 0.28},
        "grpo-kl0.001-lr1.9e-3": {"loss.kl_coef": 0.001},
        "drgrpo-lr1.9e-3": {"advantage.normalize_std": False},
        "grpo-lr1e-3": {"learner.optimizer.lr": 0.001},
        "grpo-1update-lr3e-3": {"learner.minibatch_size": 0, "learner.optimizer.lr": 0.003},
    }.items(),
)
def test_an_arm_changes_what_its_name_says(name, expected):
    assert changes(parse_name(name)) == expected


def test_grpo_is_grpo_with_five_updates_a_step():
    config = training(Arm("grpo", "1.9e-3"))
    assert (config.advantage.name, config.learner.optimizer.lr) == ("grpo", 0.0019)
    assert config.learner.optimizer.schedule == "constant"
    trajectories = config.rollout.questions_per_step * config.rollout.group_size
    assert trajectories / config.learner.minibatch_size == 5


def test_a_training_starts_from_the_cold_start_of_its_seed(tmp_path):
    cold = tmp_path / "cold/seed-4"
    config = training(Arm("grpo", "1.9e-3"), tmp_path, seed=5, cold_seed=4, steps=40)
    assert config.run.dir == str(tmp_path / "runs/grpo-lr1.9e-3/seed-5")
    assert (config.run.seed, config.learner.steps, config.world.dir) == (5, 40, "")
    made = config_of(evidence.cold_command(tmp_path, 4, CONFIG))
    assert (made.run.dir, made.run.seed, made.world.seed) == (str(cold), 4, 4)
    assert config.policy.path == made.sft.output == str(cold / "sft")
    assert config.policy.tokenizer == f"{made.world.dir}/tokenizer"
    assert (config.data, config.retriever) == (made.data, made.retriever)
    # Evaluated alike: the cold start, the policy in training, and the last one.
    assert config.evaluate.temperatures == made.evaluate.temperatures == [1.0]
    assert (config.evaluate.every, config.evaluate.sample_size) == (20, 100)
    job = Job(Arm("grpo", "1.9e-3"), 5, 4, 40)
    assert config_of(evidence.evaluate_command(tmp_path, job, CONFIG)) == config


@pytest.mark.parametrize("arm", [*ARMS, Arm("calibadv", "2.2e-3", is_short=True)], ids=lambda arm: arm.name)
def test_a_name_says_which_arm_it_is(arm):
    assert parse_name(arm.name) == arm


@pytest.mark.parametrize("name", ["notes", "grpo", "sarsa-lr1e-3", "grpo-lr", "grpo-2updates-lr1e-3"])
def test_other_names_are_no_arms(name):
    assert parse_name(name) is None


def test_the_most_telling_runs_come_first():
    jobs = plan("all", [3, 4])
    assert len({job.name for job in jobs}) == len(jobs)
    assert all(job.cold_seed == job.seed for job in jobs)
    near = [
        f"{method}-lr{lr}"
        for lr in ("1.9e-3", "2.2e-3")
        for method in ("grpo", "calibadv", "soft", "rebalance")
    ]
    assert [job.name for job in jobs[:16]] == [f"{name}/seed-{seed}" for seed in (3, 4) for name in near]
    kinds = [
        "lambda" if "lambda" in job.arm.method
        else "single" if job.arm.updates
        else "remedy" if job.arm.method not in ("grpo", "calibadv", "soft", "rebalance")
        else "five"
        for job in jobs[16:]
    ]  # fmt: skip
    assert list(dict.fromkeys(kinds)) == ["lambda", "remedy", "five", "single"]
    rates = {(job.arm.updates, job.arm.lr) for job in plan("frontier", [3])}
    assert rates == {
        (u, lr) for u in ("", "-1update") for lr in ("1e-3", "1.5e-3", "1.9e-3", "2.2e-3", "3e-3")
    }
    assert [job.arm.name for job in plan("remedies", [3], "2.2e-3")] == [
        "grpo-cliphigh-lr2.2e-3", "grpo-kl0.001-lr2.2e-3", "drgrpo-lr2.2e-3"
    ]  # fmt: skip


def test_the_short_version_has_one_cold_start():
    arguments = evidence.parse(["out", "--part", "short"])
    assert (arguments.seeds, arguments.steps, arguments.workers) == ([3, 4], 40, 2)
    jobs = plan("short", arguments.seeds, "2.2e-3", arguments.steps)
    assert [(job.name, job.cold_seed, job.steps) for job in jobs] == [
        ("short-grpo-lr2.2e-3/seed-3", 3, 40),
        ("short-calibadv-lr2.2e-3/seed-3", 3, 40),
        ("short-grpo-lr2.2e-3/seed-4", 3, 40),
        ("short-calibadv-lr2.2e-3/seed-4", 3, 40),
    ]


def test_the_long_version_has_five_seeds_and_one_worker(capsys):
    arguments = evidence.parse(["out"])
    assert (arguments.seeds, arguments.steps, arguments.workers) == ([3, 4, 5, 6, 7], 60, 1)
    assert evidence.parse(["out", "--seeds", "8 11"]).seeds == [8, 11]
    with pytest.raises(SystemExit):
        evidence.parse(["out", "--seeds", "8,11"])
    assert "--seeds '8,11': must be numbers with spaces between them" in capsys.readouterr().err


# What the harness starts, made small: each writes its name to calls.txt and leaves what the real one would.
COLD = """
(folder / "sft").mkdir(parents=True, exist_ok=True)
(folder / "sft/config.json").write_text("{}")
(folder / "evaluation.json").write_text("{}")
"""
TRAIN = "(folder / 'trained').write_text('')"
EVALUATE = """
report = {"policy": {"step": 60}, "scores": {"1": {"all": {"f1": 0.5}}}}
(folder / "evaluation.json").write_text(json.dumps(report))
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Kind -> its program; a test may put another in its place."""
    programs = {"cold": COLD, "train": TRAIN, "evaluate": EVALUATE}

    def command(kind, folder):
        start = "import json, os, signal, sys, time, pathlib; folder = pathlib.Path(sys.argv[1])\n"
        start += "folder.mkdir(parents=True, exist_ok=True)\n"
        start += f"open({str(tmp_path / 'calls.txt')!r}, 'a').write('{kind} ' + sys.argv[2] + '\\n')\n"
        name = str(folder.relative_to(tmp_path))
        return [sys.executable, "-S", "-c", start + programs[kind], str(folder), name]

    for kind in ("train", "evaluate"):
        monkeypatch.setattr(
            evidence,
            f"{kind}_command",
            lambda output, job, _, kind=kind: command(kind, evidence.run_folder(output, job)),
        )
    monkeypatch.setattr(
        evidence, "cold_command", lambda output, seed, _: command("cold", evidence.cold_folder(output, seed))
    )
    monkeypatch.setattr(evidence, "WAIT_SECONDS", 0.05)
    return programs


def calls(output):
    path = output / "calls.txt"
    return path.read_text().splitlines() if path.is_file() else []


def jobs_of(*names, seeds=(3,)):
    return [Job(Arm(name, "1.9e-3"), seed, seed, 60) for seed in seeds for name in names]


def run_all(output, jobs, num_workers=1):
    harness = evidence.Harness(output, jobs, CONFIG, num_workers)
    harness.run()
    return harness


def test_what_is_finished_is_not_run_again(tmp_path, programs, capsys):
    jobs = jobs_of("grpo", "calibadv")
    harness = run_all(tmp_path, jobs[:1])
    assert calls(tmp_path) == [
        "cold cold/seed-3", "train runs/grpo-lr1.9e-3/seed-3", "evaluate runs/grpo-lr1.9e-3/seed-3"
    ]  # fmt: skip
    assert harness.num_done() == 1
    run_all(tmp_path, jobs)
    assert calls(tmp_path)[3:] == [
        "train runs/calibadv-lr1.9e-3/seed-3", "evaluate runs/calibadv-lr1.9e-3/seed-3"
    ]  # fmt: skip
    assert "calibadv-lr1.9e-3/seed-3: held-out F1 0.500" in capsys.readouterr().out
    run_all(tmp_path, jobs)
    assert len(calls(tmp_path)) == 5


@pytest.mark.parametrize(
    "report", ['{"policy": {"step": 40}, "scores": {"1": {"all": {"f1": 0.5}}}}', '{"pol']
)
def test_an_evaluation_of_an_earlier_step_does_not_count(tmp_path, programs, report):
    (job,) = jobs_of("grpo")
    folder = evidence.run_folder(tmp_path, job)
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text(report)
    assert run_all(tmp_path, [job]).num_done() == 1
    assert "train runs/grpo-lr1.9e-3/seed-3" in calls(tmp_path)


def test_the_hours_left_are_those_of_the_runs_that_are_left(tmp_path, programs, capsys):
    run_all(tmp_path, jobs_of("grpo"))
    (tmp_path / "times.jsonl").write_text('{"run": "a", "seconds": 5400}\n' * 2)
    harness = evidence.Harness(tmp_path, jobs_of("grpo", "soft", "calibadv"), CONFIG)
    assert harness.progress() == "1 of 3 runs done, 3.0 h of computing; 3.0 h left"
    harness.num_workers = 2
    assert harness.progress().endswith("1.5 h left")


def test_a_run_that_fails_does_not_keep_the_others_from_running(tmp_path, programs, capsys):
    programs["train"] = "sys.exit(3 if 'grpo' in sys.argv[2] else 0)"
    harness = run_all(tmp_path, jobs_of("grpo", "soft"))
    assert [line for line in calls(tmp_path) if "seed-3" in line][1:] == [
        "train runs/grpo-lr1.9e-3/seed-3",
        "train runs/soft-lr1.9e-3/seed-3",
        "evaluate runs/soft-lr1.9e-3/seed-3",
    ]
    log = tmp_path / "runs/grpo-lr1.9e-3/seed-3/evidence.log"
    assert harness.failures == [f"grpo-lr1.9e-3/seed-3: ended with status 3; see {log}"]
    assert log.is_file() and harness.num_done() == 1


def test_without_its_cold_start_nothing_is_run(tmp_path, programs, capsys):
    programs["cold"] = "sys.exit('3' in sys.argv[2])"
    programs["cold"] += COLD
    harness = run_all(tmp_path, jobs_of("grpo", seeds=(3,)))
    assert calls(tmp_path) == ["cold cold/seed-3"]
    assert harness.failures[0].startswith("cold start of seed 3: ended with status 1")


def test_a_run_that_another_process_has_is_left_to_it(tmp_path, programs):
    jobs = jobs_of("grpo", "soft")
    with evidence.lock(tmp_path, f"runs/{jobs[0].name}") as held:
        assert held is not None
        run_all(tmp_path, jobs)
    assert not [line for line in calls(tmp_path) if "grpo" in line]
    assert run_all(tmp_path, jobs).num_done() == 2


def test_a_lock_lasts_until_the_last_process_that_holds_it_has_ended(tmp_path):
    with evidence.lock(tmp_path, "runs/a/seed-1") as held:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(held,))
    with evidence.lock(tmp_path, "runs/a/seed-1") as again, evidence.lock(tmp_path, "runs/a/seed-2") as other:
        assert again is None and other is not None
    child.kill()
    child.wait()
    with evidence.lock(tmp_path, "runs/a/seed-1") as again:
        assert again is not None


def test_it_waits_for_a_cold_start_that_somebody_else_makes(tmp_path, programs):
    (job,) = jobs_of("grpo")
    harness = evidence.Harness(tmp_path, [job], CONFIG)
    with evidence.lock(tmp_path, "cold/seed-3"):
        thread = threading.Thread(target=harness.run)
        thread.start()
        time.sleep(0.3)
        assert not calls(tmp_path) and thread.is_alive()
        subprocess.run(evidence.cold_command(tmp_path, 3, CONFIG), check=True)
    thread.join(30)
    assert harness.num_done() == 1


def test_it_makes_the_cold_start_that_somebody_else_gave_up(tmp_path, programs):
    (job,) = jobs_of("grpo")
    harness = evidence.Harness(tmp_path, [job], CONFIG)
    with evidence.lock(tmp_path, "cold/seed-3"):
        thread = threading.Thread(target=harness.run)
        thread.start()
        time.sleep(0.2)
    thread.join(30)
    assert harness.num_done() == 1


def test_two_workers_do_every_run_once(tmp_path, programs):
    programs["train"] = "time.sleep(0.05)"
    jobs = jobs_of("grpo", "soft", "rebalance", "calibadv", seeds=(3, 4))
    assert run_all(tmp_path, jobs, num_workers=2).num_done() == 8
    assert set(Counter(calls(tmp_path)).values()) == {1}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
def test_workers_share_out_the_cores(tmp_path, programs):
    mine = sorted(os.sched_getaffinity(0))
    programs["train"] = (
        "(folder / 'cores').write_text(json.dumps(sorted(os.sched_getaffinity(0)))); time.sleep(0.5)"
    )
    jobs = jobs_of("grpo", "soft")
    run_all(tmp_path, jobs, num_workers=2)
    cores = [json.loads((evidence.run_folder(tmp_path, job) / "cores").read_text()) for job in jobs]
    if len(mine) > 1:
        assert sorted(cores) == sorted([mine[::2], mine[1::2]])
    assert sorted(os.sched_getaffinity(0)) == mine


def test_a_signal_ends_the_training_in_order_and_begins_nothing_more(tmp_path, programs, monkeypatch):
    programs["train"] = """
signal.signal(signal.SIGTERM, lambda *_: ((folder / "saved").write_text(""), os._exit(143)))
(folder / "running").write_text("")
time.sleep(60)
"""
    jobs = jobs_of("grpo", "soft")
    monkeypatch.setattr(evidence, "plan", lambda *_: jobs)
    folder = evidence.run_folder(tmp_path, jobs[0])

    def interrupt():
        while not (folder / "running").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(SystemExit) as end:
            evidence.main([str(tmp_path)])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert end.value.code == 143
    assert (folder / "saved").exists()
    assert calls(tmp_path) == ["cold cold/seed-3", "train runs/grpo-lr1.9e-3/seed-3"]


def test_the_list_says_how_far_each_run_is(tmp_path, programs):
    jobs = jobs_of("grpo", "soft", "calibadv")
    run_all(tmp_path, jobs[:1])
    folder = evidence.run_folder(tmp_path, jobs[1])
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    states = [line.split()[3:] for line in evidence.list_runs(tmp_path, jobs).splitlines()[2:]]
    assert states == [["done"], ["2", "steps"], ["-"]]


def test_a_cold_start_may_be_moved_but_not_be_another_one(tmp_path):
    command = evidence.cold_command(tmp_path / "then", 3, CONFIG)
    now = tmp_path / "now/cold/seed-3"
    now.mkdir(parents=True)
    (now / "sft.yaml").write_text(dump_config(config_of(command)))
    evidence_cold.check(config_of(evidence.cold_command(tmp_path / "now", 3, CONFIG)))
    other = [*evidence.cold_command(tmp_path / "now", 3, CONFIG), "sft.optimizer.lr=0.02", "learner.steps=7"]
    with pytest.raises(UserError, match=r"other settings \(sft.optimizer.lr\); remove it"):
        evidence_cold.check(config_of(other))


def test_the_script_parses():
    subprocess.run(["bash", "-n", str(ROOT / "benchmarks/evidence.sh")], check=True, timeout=10)


def test_evaluations_are_json_as_the_harness_reads_them(tmp_path):
    (job,) = jobs_of("grpo")
    folder = evidence.run_folder(tmp_path, job)
    folder.mkdir(parents=True)
    report = {"policy": {"step": 60}, "scores": {"0": {"all": {"f1": 0.5}}}}
    (folder / "evaluation.json").write_text(json.dumps(report))
    assert not evidence.is_done(tmp_path, job)  # another temperature
    report["scores"]["1"] = report["scores"]["0"]
    (folder / "evaluation.json").write_text(json.dumps(report))
    assert evidence.is_done(tmp_path, job)
    assert not evidence.is_done(tmp_path, dataclasses.replace(job, steps=61))
