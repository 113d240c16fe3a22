"""The experiments of experiments/evidence.md: what is run, skipped and begun again."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from evidence_rig import CONFIG, ROOT

from experiments import runs as evidence
from experiments.arms import Arm, Job

pytestmark = pytest.mark.medium  # of a benchmark's program

COMMANDS = ("train", "evaluate")


# What the harness starts, made small: each writes its name to calls.txt and leaves what the real one would.
COLD = """
(folder / "sft").mkdir(parents=True, exist_ok=True)
(folder / "sft/config.json").write_text("{}")
(folder / "evaluation.json").write_text('{"scores": {}}')
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

    def stand_in(kind, folder_of):
        return lambda output, job, _: command(kind, folder_of(output, job))

    monkeypatch.setattr(evidence, "cold_command", stand_in("cold", evidence.cold_folder))
    for kind in COMMANDS:
        monkeypatch.setattr(evidence, f"{kind}_command", stand_in(kind, evidence.run_folder))
    return programs


def calls(output):
    return (output / "calls.txt").read_text().splitlines()


def jobs_of(*names, seed=3):
    return [Job(Arm(name, "1.9e-3"), seed, seed, 60) for name in names]


def run_all(output, jobs, workers=1):
    harness = evidence.Runs(output, jobs, CONFIG, workers)
    harness.run()
    return harness


def test_finished_run_is_not_run_again(tmp_path, programs, capsys):
    jobs = jobs_of("grpo", "calibadv", "soft")
    assert run_all(tmp_path, jobs[:1]).num_done() == 1
    for _ in range(2):
        run_all(tmp_path, jobs[:2])
    trained = [f"{name} runs/{job.name}" for job in jobs[:2] for name in COMMANDS]
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


@pytest.mark.parametrize("step", [59, 60, 61])
def test_run_is_done_with_an_evaluation_of_its_last_step(tmp_path, step):
    (job,) = jobs_of("grpo")
    folder = evidence.run_folder(tmp_path, job)
    folder.mkdir(parents=True)
    report = {"policy": {"step": 60}, "scores": {"1": {"all": {"f1": 0.5}}}}
    (folder / "evaluation.json").write_text(json.dumps(report))
    assert evidence.is_done(tmp_path, dataclasses.replace(job, steps=step)) == (step <= 60)


def test_evaluation_at_another_temperature_does_not_count(tmp_path):
    (job,) = jobs_of("grpo")
    folder = evidence.run_folder(tmp_path, job)
    folder.mkdir(parents=True)
    report = {"policy": {"step": 60}, "scores": {"0": {"all": {"f1": 0.5}}}}
    (folder / "evaluation.json").write_text(json.dumps(report))
    assert not evidence.is_done(tmp_path, job)


def test_run_with_an_evaluation_of_an_earlier_step_goes_on(tmp_path, programs):
    (job,) = jobs_of("grpo")
    folder = evidence.run_folder(tmp_path, job)
    folder.mkdir(parents=True)
    report = {"policy": {"step": 40}, "scores": {"1": {"all": {"f1": 0.5}}}}
    (folder / "evaluation.json").write_text(json.dumps(report))
    assert run_all(tmp_path, [job]).num_done() == 1
    assert "train runs/grpo-lr1.9e-3/seed-3" in calls(tmp_path)


CUT = '{"policy": {"step": 60}, "scores": {"1": {"all": {"f1"'


def test_job_with_a_cut_off_evaluation_runs_again(tmp_path, programs):
    (job,) = jobs_of("grpo")
    run_all(tmp_path, [job])
    earlier_calls = calls(tmp_path)
    (evidence.run_folder(tmp_path, job) / "evaluation.json").write_text(CUT)
    assert run_all(tmp_path, [job]).num_done() == 1
    names = [f"{name} runs/{job.name}" for name in COMMANDS]
    assert calls(tmp_path) == earlier_calls + names


def test_cold_start_with_a_cut_off_evaluation_runs_again(tmp_path, programs):
    (job,) = jobs_of("grpo")
    folder = evidence.cold_folder(tmp_path, job.cold_seed)
    (folder / "sft").mkdir(parents=True)
    (folder / "sft/config.json").write_text("{}")
    (folder / "evaluation.json").write_text(CUT)
    assert run_all(tmp_path, [job]).num_done() == 1
    assert calls(tmp_path)[0] == "cold cold/seed-3"


def test_two_workers_do_every_run_once(tmp_path, programs):
    jobs = [job for seed in (3, 4) for job in jobs_of("grpo", "soft", "calibadv", seed=seed)]
    assert run_all(tmp_path, jobs, workers=2).num_done() == 6
    assert set(Counter(calls(tmp_path)).values()) == {1}


def test_no_second_command_of_a_run_begins_after_the_end(tmp_path):
    ended = evidence.Runs(tmp_path, [], "")
    ended._end_children()
    touch = [sys.executable, "-c", f"open({str(tmp_path / 'begun')!r}, 'w')"]
    assert not ended._try("a run", tmp_path / "run", 1, touch)
    assert not (tmp_path / "begun").exists()
    assert not ended.failures


def test_script_parses():
    subprocess.run(["bash", "-n", str(ROOT / "experiments/evidence.sh")], check=True, timeout=250)


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
