"""Whether two checkouts train the same: a short quickstart in each, then every result compared.

    git worktree add ../before COMMIT
    python -m benchmarks.same_results ../before . --output /tmp/same

Where the quickstart was changed on purpose, give the config of the second checkout that is the first one's
quickstart: `--config-after configs/quickstart_long.yaml`.

Both run with this Python and the same settings: cold start, index, six steps with a KL term and checkpoints,
export, evaluation before and after. Compared bit for bit: every metric but times, every column of the
trajectories but seconds, the exported weights, the world and both evaluations. What only the second checkout
logs is new: it is listed, and is no difference. Each replays its last step. Status 1 if anything differs.
One to three minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load_file

SETTINGS = (
    *("world.train_questions=400", "world.eval_questions=60", "learner.steps=6", "checkpoint.every=3"),
    *("rollout.questions_per_step=8", "learner.minibatch_size=4", "loss.kl_coef=0.01"),
    "sft.phases=[{kind: lookups, steps: 9, loss_on: sampled},{kind: imperfect, steps: 9, loss_on: sampled}]",
)
TIMES = ("timing_s/", "perf/")  # metrics that differ from run to run
WEIGHTS = "hf/model.safetensors"
FILES = ("world/corpus.jsonl", "world/train.jsonl", "world/eval.jsonl")


def run(checkout: Path, config: str, output: Path) -> Path:
    """Run the short quickstart of a checkout and replay its last step; returns the run's folder."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_NUM_CPU_DEVICES": "2"}
    folder = output / "run"
    train = ["quickstart", "--config", config, f"run.dir={folder}", *SETTINGS]
    for arguments in (train, ["replay", str(folder)]):
        command = [sys.executable, "-m", "calibadv_jax", *arguments]
        process = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if process.returncode:
            status, errors = process.returncode, process.stderr[-2000:]
            sys.exit(f"{checkout}: calibadv {arguments[0]} ended with {status}: {errors}")
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step, without times."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(TIMES)}
        for line in lines
    ]


def trajectories(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the columns of each step's trajectories, without durations; metrics and turns by field."""
    columns = {}
    for path in sorted((folder / "rollouts").glob("*.parquet")):
        table = pq.read_table(path).drop_columns(["seconds"])
        metrics = [dict(row) for row in table["metrics"].to_pylist()]
        turns = table["turns"].to_pylist()
        columns[path.name] = table.drop_columns(["metrics", "turns"]).to_pydict()
        for name in sorted(set().union(*metrics)):
            columns[path.name][f"metrics/{name}"] = [row.get(name) for row in metrics]
        for field in table["turns"].type.value_type.names:
            columns[path.name][f"turns/{field}"] = [[turn[field] for turn in row] for row in turns]
    return columns


def scores(folder: Path) -> list[Any]:
    """Return the scores before and after the training."""
    return [
        json.loads((folder / f"evaluation_{when}.json").read_text())["scores"] for when in ("before", "after")
    ]


def compare_names(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Return the names whose values differ or are gone, and those that are new."""
    missing = object()
    return sorted(name for name in old if old[name] != new.get(name, missing)), new.keys() - old.keys()


def differences(before: Path, after: Path) -> tuple[list[str], set[str]]:
    """Name everything that differs between two runs, and what only the second one has."""
    results: list[str] = []
    added: set[str] = set()
    for step, (old, new) in enumerate(zip(rows(before), rows(after), strict=True), 1):
        names, new_names = compare_names(old, new)
        results += [f"step {step}: {name}" for name in names if name != "time"]
        added |= new_names
    old_columns, new_columns = trajectories(before), trajectories(after)
    if old_columns.keys() != new_columns.keys():
        results.append("files of trajectories")
    for file in sorted(old_columns.keys() & new_columns.keys()):
        names, new_names = compare_names(old_columns[file], new_columns[file])
        results += [f"{file}: {column}" for column in names]
        added |= new_names
    results += [name for name in FILES if (before / name).read_bytes() != (after / name).read_bytes()]
    # Not the file's bytes: safetensors orders its metadata by chance.
    old_weights, new_weights = (load_file(folder / WEIGHTS) for folder in (before, after))
    results += [
        f"{WEIGHTS}: {name}"
        for name in sorted(old_weights.keys() | new_weights.keys())
        if not np.array_equal(old_weights.get(name, np.nan), new_weights.get(name, np.nan), equal_nan=True)
    ]
    if scores(before) != scores(after):
        results.append("evaluations")
    return results, added


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--output", type=Path, required=True, help="folder of both runs; must not exist")
    parser.add_argument(
        "--config", default="configs/quickstart.yaml", help="config to train, in each checkout (%(default)s)"
    )
    parser.add_argument("--config-after", help="another one for the second checkout")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True)
    output = arguments.output.resolve()
    folders = [
        run(arguments.before.resolve(), arguments.config, output / "before"),
        run(arguments.after.resolve(), arguments.config_after or arguments.config, output / "after"),
    ]
    lines, added = differences(*folders)
    if added:
        sys.stdout.write(f"only in {arguments.after}: {', '.join(sorted(added))}\n")
    sys.stdout.write("\n".join(lines or ["equal bit for bit"]) + "\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
