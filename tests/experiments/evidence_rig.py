"""Configs and folders of the experiments of experiments/evidence.md, made by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from calibadv_jax import cli
from calibadv_jax.config import dump_config, load_config
from calibadv_jax.run.comparison import differences
from experiments import runs as evidence
from experiments.arms import Arm, Job, parse_name

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/evidence.yaml")
PLACES = ("run.dir", "evaluate.output", "export.output", "export.adapter_output", "sft.output")
STEADY, FALLEN = [0.8] * 40, [0.8] * 20 + [0.32] * 20
SVG = "{http://www.w3.org/2000/svg}"


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


def cells(table):
    """Of a Markdown table: name of the row -> its cells."""
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows}


def words(path):
    return {"".join(element.itertext()).strip() for element in ET.parse(path).iter(f"{SVG}text")}
