"""The experiments of experiments/evidence.md: arms, the order of runs, measures, tables and figures."""

import dataclasses
import functools
import json
import os
import shutil
import signal
import sys
import threading
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibadv_jax import cli
from calibadv_jax.config import dump_config, load_config
from calibadv_jax.config.sections.credit import ESTIMATORS
from calibadv_jax.config.sections.learner import LOSS_KEYS
from calibadv_jax.contrib.report.runs import read_runs
from calibadv_jax.core.errors import UserError
from calibadv_jax.rollout_store.schema import SCHEMA, VERSION
from calibadv_jax.run.comparison import differences
from experiments import measures
from experiments import report as evidence_report
from experiments import runs as evidence
from experiments import tables as evidence_tables
from experiments.arms import FOUR, Arm, Job, parse_name, plan
from experiments.results import cold_starts, held_out_f1, read_results

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
    changed = dataclasses.asdict(training(arm))
    plain = dataclasses.asdict(training(Arm("grpo", "1.9e-3")))
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
    with pytest.raises(UserError, match="learner.optimizer.lr: must be a valid number"):
        evidence.main(["out", "--lr", "fast"])
    assert not list(tmp_path.iterdir())  # found before the first run


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


def run_all(output, jobs):
    harness = evidence.Runs(output, jobs, CONFIG)
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


STEADY, FALLEN = [0.8] * 40, [0.8] * 20 + [0.32] * 20
AT_1, ENTROPY = "eval__average__f1__temperature_1", "actor__entropy"
SVG = "{http://www.w3.org/2000/svg}"


@functools.cache
def config_text(arm, steps, *overrides):
    command = evidence.train_command(Path("/out"), Job(arm, 3, 3, steps), CONFIG)
    return dump_config(config_of([*command, *overrides]))


def make_run(output, name, seed, reward, f1, *overrides, step=None, **more):
    """A run as evidence.sh leaves it; `more`: further metrics as step -> value, "/" written "__"."""
    folder = output / "runs" / name / f"seed-{seed}"
    (folder / "configs").mkdir(parents=True)
    text = config_text(parse_name(name), len(reward), *overrides)
    (folder / "configs/0.yaml").write_text(text.replace("\n  seed: 3\n", f"\n  seed: {seed}\n", 1))
    (folder / "configs/0.json").write_text("{}")
    rows = [
        {"step": number, "reward/mean": value, "reward/format_valid": 1.0}
        | {metric.replace("__", "/"): values[number] for metric, values in more.items() if number in values}
        for number, value in enumerate(reward, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_evaluation(folder, f1, len(reward) if step is None else step)
    return folder


def write_evaluation(folder, f1, step):
    folder.mkdir(parents=True, exist_ok=True)
    scores = {"1": {"all": {"f1": 0.99}, "average": {"f1": f1}, "one_hop": {"f1": f1}}}
    report = {"policy": {"step": step}, "scores": scores, "intervals": {}}
    (folder / "evaluation.json").write_text(json.dumps(report))


def entropy(from_step=41, value=0.0, steps=40):
    return {step: value if step >= from_step else 0.5 for step in range(1, steps + 1)}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """GRPO collapses with two of three seeds, CalibAdv with none, lambda 0.5 with its only one."""
    output = tmp_path_factory.mktemp("evidence")
    searches = {"rollout__searches__mean": {step: 1.0 + (step > 35) for step in range(1, 41)}}
    tied = {"group__tied": {step: float(step > 34) for step in range(1, 41)}}  # six of the last ten steps
    softened = "advantage__search__softened_share"
    warned = {ENTROPY: entropy(21, 0.9), softened: entropy(5, 0.0), AT_1: {20: 0.75, 40: 0.1}}
    hardly = {ENTROPY: entropy(31, 0.1), softened: entropy(21, 0.2)}
    for name, seed, reward, f1, metrics in (
        ("grpo", 3, FALLEN, 0.2, warned),
        ("grpo", 4, FALLEN, 0.3, tied | searches),
        ("grpo", 5, STEADY, 0.7, {}),
        ("calibadv", 3, STEADY, 0.8, {ENTROPY: entropy() | {7: 0.4, 8: 0.6}, softened: entropy()}),
        ("calibadv", 4, STEADY, 0.7, {}),
        ("calibadv", 5, STEADY, 0.6, {ENTROPY: entropy(1, 0.95)}),
        ("soft", 3, STEADY, 0.5, {ENTROPY: entropy(38, 0.7)} | searches),
        ("calibadv-lambda0.5", 3, FALLEN, 0.1, hardly | searches),
        ("short-calibadv", 3, STEADY, 0.9, searches),
        ("short-grpo", 3, STEADY, 0.9, searches),
    ):
        make_run(output, f"{name}-lr1.9e-3", seed, reward, f1, **metrics)
    # Not finished: no evaluation, that of an earlier step, and no run at all.
    (make_run(output, "calibadv-lr2.2e-3", 3, STEADY, 0.9) / "evaluation.json").unlink()
    make_run(output, "calibadv-lr2.2e-3", 4, STEADY, 0.9, step=20)
    (output / "runs/notes").mkdir()
    for seed, f1 in ((3, 0.2), (4, 0.3), (5, 0.25)):
        write_evaluation(output / f"cold/seed-{seed}", f1, None)
    return output


def cells(table):
    """Of a Markdown table: name of the row -> its cells."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def test_page_has_the_numbers_of_runs(output):
    results = read_results(output)
    methods = ("grpo", "calibadv", "soft", "calibadv-lambda0.5")
    assert [arm.name for arm in results] == [f"{method}-lr1.9e-3" for method in methods]
    arms = cells(evidence_tables.arms_table(results))
    # collapsed, final F1, best F1, tied, searches, less GRPO's
    grpo = ["2 [0.09, 0.99]", "0.400 [-0.257, 1.057]", "0.583 [-0.029, 1.196]", "0.60", "1.50", "-"]
    assert arms["grpo-lr1.9e-3"] == ["3", *grpo]
    calibadv = ["0 [0.00, 0.71]", *["0.700 [0.452, 0.948]"] * 2, "-", "-", "+0.300 [-0.596, 1.196]"]
    assert arms["calibadv-lr1.9e-3"] == ["3", *calibadv]
    rewards = cells(evidence_tables.reward_table(results))
    assert rewards["grpo-lr1.9e-3"] == ["0.80", "0.80", "0.48", "0.48"]  # (0.32 + 0.32 + 0.8) / 3
    text = evidence_tables.page(results, cold_starts(output))
    assert "8 finished runs of 40 steps, seeds 3, 4, 5." in text
    assert "Cold starts: F1 0.250 [0.126, 0.374]: 0.200 (seed 3), 0.300 (seed 4), 0.250 (seed 5)." in text
    last = ["3", "29", "0.100", "0.100", "0.320", "0.100", "-", "1.500"]
    assert cells(text)["calibadv-lambda0.5-lr1.9e-3"] == last
    assert held_out_f1({"scores": {"1": {"all": {"f1": 0.6}, "one_hop": {"f1": 0.4}}}}) == 0.6


def test_first_warnings_have_step_side_and_lead(output):
    runs = [run for arm_runs in read_results(output).values() for run in arm_runs]
    collapsed, healthy = evidence_tables.warnings(runs), evidence_tables.controls(runs)
    rows = cells(evidence_tables.summary_table(collapsed, healthy))
    assert rows["entropy"] == ["1 of 2", "1 above, 0 below", "6", "1 of 2"]
    # GRPO softens nothing, so that its share of 0 is no warning.
    assert rows["softened share"] == ["1 of 1", "0 above, 1 below", "6", "0 of 0"]
    assert rows["perplexity"] == ["0 of 0", "-", "-", "0 of 0"]
    lines = evidence_tables.warnings_table(collapsed).splitlines()[2:]
    shown = [line.split(" | ")[1:4] for line in lines]  # seed, collapse, entropy
    assert shown == [["3", "29", "23 above (6)"], ["4", "29", "-"], ["3", "29", "33 below"]]


def test_unlike_runs_share_no_table(tmp_path):
    with pytest.raises(UserError, match="no finished run in .*/runs; bash experiments/evidence.sh makes"):
        read_results(tmp_path)
    make_run(tmp_path, "grpo-lr1.9e-3", 3, STEADY, 0.7)
    make_run(tmp_path, "grpo-lr1.9e-3", 4, STEADY, 0.7, "policy.attention_chunk=64")
    text = evidence_tables.page(read_results(tmp_path), {})
    assert "2 finished runs" in text and "No run collapsed." in text and "Cold starts" not in text
    for overrides, steps, key in (
        (["advantage.name=calibadv"], 40, "advantage.name=grpo"),
        (["rollout.group_size=4"], 40, "rollout.group_size"),
        ([], 20, "learner.steps"),
    ):
        folder = make_run(tmp_path, "grpo-lr1.9e-3", 5, STEADY[:steps], 0.7, *overrides)
        with pytest.raises(UserError, match=rf"grpo-lr1.9e-3/seed-5: other settings .*{key}.*; move it"):
            read_results(tmp_path)
        shutil.rmtree(folder)


def test_lengths_are_of_wrong_and_right_trajectories(tmp_path):
    folder = make_run(tmp_path, "grpo-lr1.9e-3", 3, STEADY, 0.7)
    first = [
        (0.0, None, [10, 5]),
        (0.0, None, [3]),
        (1.0, None, [2, 2, 2]),
        (0.5, None, [100]),  # neither
        (0.0, "retriever: gone", [50]),
        (0.0, None, []),
    ]
    (folder / "rollouts").mkdir()
    for step, kept in enumerate((first, [(0.0, None, [4]), (0.0, None, [8])]), 1):
        rows = [
            {"step": step, "answer_score": score, "error": error}
            | {"turns": [{"kind": "search", "token_ids": list(range(tokens))} for tokens in turns]}
            for score, error, turns in kept
        ]
        table = pa.Table.from_pylist(rows, schema=SCHEMA).replace_schema_metadata({"schema_version": VERSION})
        pq.write_table(table, folder / f"rollouts/step_{step}.parquet")
    (run,) = read_runs([folder])
    assert measures.lengths(run) == {"length/wrong": {1: 6.0, 2: 6.0}, "length/right": {1: 6.0}}


def words(path):
    return {"".join(element.itertext()).strip() for element in ET.parse(path).iter(f"{SVG}text")}


def test_report_writes_tables_and_figures(output, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    evidence_report.main([str(output), "--docs", str(tmp_path), "--name", "rumours"])
    figures = [f"rumours_{kind}.svg" for kind in ("frontier", "rewards", "searches", "lambda")]
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / name) for name in ["rumours_tables.md", *figures]
    ]
    assert all("grpo" in words(tmp_path / name) for name in figures)
    assert {"calibadv", "λ", "0.5", "1"} <= words(tmp_path / "rumours_lambda.svg")
    table, picture = evidence_report.write_short(output, ["short-calibadv-lr1.9e-3", "short-grpo-lr1.9e-3"])
    assert list(cells(table)) == ["arm", "short-grpo-lr1.9e-3", "short-calibadv-lr1.9e-3"]
    assert {"grpo", "calibadv", "searches"} <= words(picture)


def by_step(values):
    return dict(enumerate(values, 1))


def fell(high, low, until=20, steps=40):
    """`high` up to a step, and `low` after it."""
    return by_step([high] * until + [low] * (steps - until))


FINE = by_step([1.0] * 40)
OTHERS = [by_step([1.0, 3.0]), by_step([2.0, 2.0])]


@pytest.mark.parametrize(
    ("reward", "format_valid", "step"),
    [
        (fell(0.8, 0.32), FINE, 29),  # nine of ten steps at 0.32: 0.368 < 0.4
        (fell(1.0, 0.5), FINE, None),  # half of the maximum is not below it
        (by_step([0.1] * 20 + [0.9] * 20), FINE, None),  # a later maximum is no earlier one
        (by_step([0.8] * 20 + [0.0] * 4 + [0.8] * 16), FINE, None),  # a few bad steps
        (by_step([0.2] * 10 + [0.9] * 20 + [0.42] * 20), FINE, 40),  # of the largest mean, not of the first
        (FINE, fell(1.0, 0.0), 26),  # six of ten: 0.4
        (FINE, fell(1.0, 0.5), None),
        (fell(1.0, 0.0, until=15), fell(1.0, 0.0), 21),  # whichever comes first
        (FINE, {}, None),
    ],
)
def test_collapse(reward, format_valid, step):
    assert measures.collapse_step(reward, format_valid) == step


def test_intervals_are_students_and_exact():
    """Of means and of shares; t(0.975, 4) = 2.77645, standard deviation sqrt(2.5)."""
    assert measures.mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert measures.mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - 1.96324, 3 + 1.96324), abs=1e-4)
    assert measures.mean_interval([0.4]) is None
    assert measures.running_mean({1: 1.0, 2: 2.0, 3: 6.0, 5: 1.0}, 3) == {3: 3.0, 5: 3.0}
    for count, low, high in ((0, 0.0, 0.5218), (5, 0.4782, 1.0), (2, 0.0527, 0.8534)):
        assert measures.share_interval(count, 5) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("values", "others", "expected"),
    [
        (by_step([1.0, 3.0, 2.0, 1.0, 3.0]), OTHERS, None),  # the ends belong to the range
        (by_step([2, 4, 4, 2, 4, 4, 4, 4]), OTHERS, measures.Departure(7, "above")),
        (by_step([0, 0, 2, 0, 0, 0]), OTHERS, measures.Departure(6, "below")),
        (by_step([4, 0, 4, 0, 4, 0]), OTHERS, None),  # not three on one side
        (by_step([4, 4]), OTHERS, None),
        # Others rise: 20 at step 20 is usual, at step 31 too little, for 21 was at step 21.
        (dict.fromkeys(range(10, 41), 20.0), [by_step(range(1, 41))], measures.Departure(33, "below")),
        (dict.fromkeys(range(52, 61), 20.0), [by_step(range(1, 41))], None),  # nothing to compare with
    ],
)
def test_three_steps_outside_the_range_warn(values, others, expected):
    assert measures.first_departure(values, others) == expected
