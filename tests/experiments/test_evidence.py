"""The experiments of experiments/evidence.md: what each arm changes, and what is run in which order."""

import dataclasses
import functools
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from calibadv_jax import cli
from calibadv_jax.config import dump_config, load_config
from calibadv_jax.config.sections.credit import ESTIMATORS
from calibadv_jax.config.sections.learner import LOSS_KEYS
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.folder import differences
from experiments import cold as evidence_cold
from experiments import runs as evidence
from experiments.arms import FOUR, Arm, Job, parse_name, plan

pytestmark = pytest.mark.medium  # of a benchmark's program

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/evidence.yaml")
PLACES = ("run.dir", "evaluate.output", "export.output", "export.adapter_output", "sft.output")
COMMANDS = ("train", "evaluate")
CALIBADV = {"advantage.name": "calibadv"}


def config_of(command):
    """What the program would read of its command line."""
    assert command[:2] == [sys.executable, "-m"]
    parsed = cli.parse("calibadv", "", command[command.index("--config") :])
    return load_config(parsed.configs, parsed.overrides)


@functools.cache
def training(arm, steps=60):
    return config_of(evidence.train_command(Path("/out"), Job(arm, 3, 3, steps), CONFIG))


def changes(arm):
    """What an arm has different from GRPO at 1.9e-3."""
    changed, plain = (dataclasses.asdict(training(each)) for each in (arm, Arm("grpo", "1.9e-3")))
    return {key: value for key, _, value in differences(plain, changed) if key not in PLACES}


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
    """Of one seed, and none of them needs a key that it does not have."""
    configs = [training(job.arm) for job in plan("each", [9])]
    assert {config.advantage.name for config in configs} == {"calibadv", *ESTIMATORS} - {"dr_grpo"}
    assert {config.loss.name for config in configs} == set(LOSS_KEYS)
    assert any(not config.advantage.normalize_std for config in configs)  # which is dr_grpo
    moved = [len(changes(Arm(job.arm.method, "1.9e-3"))) for job in plan("each", [9])]
    different = {dump_config(replace(config, run=configs[0].run)) for config in configs}
    assert moved.count(0) == 1 and len(moved) == len(different)


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
    with pytest.raises(UserError, match="learner.optimizer.lr: must be a number"):
        evidence.main(["out", "--lr", "fast"])
    assert not list(tmp_path.iterdir())  # found before the first run


def test_moved_cold_start_is_taken_but_no_other(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(evidence_cold, "write_world", lambda world: None)
    for name in ("sft", "evaluate"):
        monkeypatch.setattr(getattr(evidence_cold, name), "run", lambda config, name=name: done.append(name))
    (tmp_path / "now/cold/seed-3/sft").mkdir(parents=True)
    (tmp_path / "now/cold/seed-3/sft/config.json").write_text("{}")
    then = config_of(evidence.cold_command(tmp_path / "then", 3, CONFIG))
    (tmp_path / "now/cold/seed-3/sft.yaml").write_text(dump_config(then))
    command = evidence.cold_command(tmp_path / "now", 3, CONFIG)
    evidence_cold.run(config_of(command))
    with pytest.raises(UserError, match=r"other settings \(sft.optimizer.lr\); "):
        evidence_cold.run(config_of([*command, "sft.optimizer.lr=0.02", "learner.steps=7"]))
    assert done == ["evaluate"]


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

    folders = {"cold": evidence.cold_folder} | dict.fromkeys(COMMANDS, evidence.run_folder)
    for kind in programs:

        def make(output, job, _, kind=kind):
            return command(kind, folders[kind](output, job))

        monkeypatch.setattr(evidence, f"{kind}_command", make)
    return programs


def calls(output):
    return (output / "calls.txt").read_text().splitlines()


def jobs_of(*names, seed=3):
    return [Job(Arm(name, "1.9e-3"), seed, seed, 60) for name in names]


def run_all(output, jobs):
    harness = evidence.Runs(output, jobs, CONFIG)
    harness.run()
    return harness


def test_finished_run_is_not_run_again(tmp_path, programs, capsys):
    jobs = jobs_of("grpo", "calibadv", "soft")
    assert run_all(tmp_path, jobs[:1]).num_done() == 1
    for _ in range(2):
        run_all(tmp_path, jobs[:2])
    trained = [
        f"{name} runs/{method}-lr1.9e-3/seed-3" for method in ("grpo", "calibadv") for name in COMMANDS
    ]
    assert calls(tmp_path) == ["cold cold/seed-3", *trained]
    output = capsys.readouterr().out
    assert "calibadv-lr1.9e-3/seed-3: held-out F1 0.500" in output and "2 of 2 runs done" in output
    folder = evidence.run_folder(tmp_path, jobs[1])
    for report in ('{"policy": {"step": 40}, "scores": {"1": {}}}', '{"policy": {"step": 60}, "scores": {}}'):
        (folder / "evaluation.json").write_text(report)
        assert not evidence.is_done(tmp_path, jobs[1])
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    states = [line.split()[3:] for line in evidence.list_runs(tmp_path, jobs).splitlines()[2:]]
    assert states == [["done"], ["2", "steps"], ["-"]]


def test_failed_run_does_not_stop_others(tmp_path, programs, capsys):
    programs["train"] = "sys.exit(3 if 'grpo' in sys.argv[2] else 0)"
    harness = run_all(tmp_path, jobs_of("grpo", "soft"))
    names = ("train runs/grpo", "train runs/soft", "evaluate runs/soft")
    assert calls(tmp_path)[1:] == [f"{name}-lr1.9e-3/seed-3" for name in names]
    log = tmp_path / "runs/grpo-lr1.9e-3/seed-3/evidence.log"
    assert harness.failures == [f"grpo-lr1.9e-3/seed-3: ended with status 3; see {log}"]
    assert log.is_file() and harness.num_done() == 1
    programs["cold"] = f"sys.exit('5' in sys.argv[2]){COLD}"
    harness = run_all(tmp_path, jobs_of("grpo", seed=5))
    assert calls(tmp_path)[-1] == "cold cold/seed-5"  # without it nothing is run
    assert harness.failures[0].startswith("cold start of seed 5: ended with status 1")


def test_signal_ends_training_and_begins_nothing_more(tmp_path, programs, monkeypatch):
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
