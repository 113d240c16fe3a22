"""The experiments of experiments/evidence.md: what is run, skipped and begun again."""

import os
import signal
import sys
import threading
import time
from collections import Counter

import pytest

from experiments import runs as evidence
from experiments.arms import LONG, Arm, Job

pytestmark = pytest.mark.medium  # of a benchmark's program

CONFIG = str(LONG.config)


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
SCORES = '"scores": {"%s": {"all": {"f1": 0.5}}}}'


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
    return programs


def calls(output):
    path = output / "calls.txt"
    return path.read_text().splitlines() if path.is_file() else []


def jobs_of(*names, seeds=(3,)):
    return [Job(Arm(name, "1.9e-3"), seed, seed, 60) for seed in seeds for name in names]


def run_all(output, jobs, num_workers=1):
    harness = evidence.Runs(output, jobs, CONFIG, num_workers)
    harness.run()
    return harness


def test_finished_run_is_not_run_again(tmp_path, programs, capsys):
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
    output = capsys.readouterr().out
    assert "calibadv-lr1.9e-3/seed-3: held-out F1 0.500" in output and "2 of 2 runs done" in output
    run_all(tmp_path, jobs)
    assert len(calls(tmp_path)) == 5


@pytest.mark.parametrize(
    ("report", "is_done"),
    [
        ('{"policy": {"step": 60}, ' + SCORES % "1", True),
        ('{"policy": {"step": 40}, ' + SCORES % "1", False),
        ('{"policy": {"step": 60}, ' + SCORES % "0", False),  # another temperature
        ('{"pol', False),
    ],
)
def test_only_evaluation_of_last_step_counts(tmp_path, programs, report, is_done):
    (job,) = jobs_of("grpo")
    folder = evidence.run_folder(tmp_path, job)
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text(report)
    assert evidence.is_done(tmp_path, job) == is_done
    assert run_all(tmp_path, [job]).num_done() == 1
    assert ("train runs/grpo-lr1.9e-3/seed-3" in calls(tmp_path)) != is_done


def test_failed_run_does_not_stop_others(tmp_path, programs, capsys):
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
    programs["cold"] = f"sys.exit('5' in sys.argv[2]){COLD}"
    harness = run_all(tmp_path, jobs_of("grpo", seeds=(5,)))
    assert calls(tmp_path)[-1] == "cold cold/seed-5"  # without it nothing is run
    assert harness.failures[0].startswith("cold start of seed 5: ended with status 1")


def test_two_workers_do_every_run_once(tmp_path, programs):
    programs["train"] = "time.sleep(0.05)"
    jobs = jobs_of("grpo", "soft", "rebalance", "calibadv", seeds=(3, 4))
    assert run_all(tmp_path, jobs, num_workers=2).num_done() == 8
    assert set(Counter(calls(tmp_path)).values()) == {1}


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


def test_ended_harness_begins_no_second_command(tmp_path):
    ended = evidence.Runs(tmp_path, [], "")
    ended._end_children()
    touch = [sys.executable, "-c", f"open({str(tmp_path / 'begun')!r}, 'w')"]
    assert not ended._try("a run", tmp_path / "run", 1, touch)
    assert not (tmp_path / "begun").exists() and not ended.failures


def test_list_shows_progress_of_each_run(tmp_path, programs):
    jobs = jobs_of("grpo", "soft", "calibadv")
    run_all(tmp_path, jobs[:1])
    folder = evidence.run_folder(tmp_path, jobs[1])
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    states = [line.split()[3:] for line in evidence.list_runs(tmp_path, jobs).splitlines()[2:]]
    assert states == [["done"], ["2", "steps"], ["-"]]
