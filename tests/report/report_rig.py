"""Run folders as a training run leaves them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from calibadv_jax.config import Config, dump_config, load_config
from calibadv_jax.rollout_store.schema import SCHEMA

ROOT = Path(__file__).resolve().parents[2]
HASHES = {"data.content": "d", "policy.config": "p", "policy.vocabulary": "v"}


def quickstart_config(folder: Path, *overrides: str, name: str = "quickstart") -> Config:
    return load_config(ROOT / f"configs/{name}.yaml", [f"run.dir={folder}", *overrides])


def make_run(
    folder: Path,
    metrics: Mapping[str, Sequence[float | None]],
    config: Config | None = None,
    hashes: Mapping[str, str] = HASHES,
) -> Path:
    """A run folder with the steps 1, 2, …; a value that is NaN is left out of its row."""
    folder.mkdir(parents=True, exist_ok=True)
    length = max(map(len, metrics.values()), default=0)
    rows: list[dict[str, Any]] = []
    for index in range(length):
        values = {name: column[index] for name, column in metrics.items() if index < len(column)}
        row = {"step": index + 1} | {name: each for name, each in values.items() if each == each}
        nonfinite = [name for name, each in row.items() if each is None]
        rows.append(row | ({"nonfinite": nonfinite} if nonfinite else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if config is not None:
        (folder / "configs").mkdir(exist_ok=True)
        (folder / "configs/0.yaml").write_text(dump_config(config))
        (folder / "configs/0.json").write_text(json.dumps(dict(hashes)))
    return folder


def keep_step(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    """rollouts/step_N.parquet with the columns that the report reads, and some that it does not."""
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    path = folder / f"rollouts/step_{step}.parquet"
    blank = {"step": step, "error": None, "advantage_raw": 0.0, "prompt_ids": [1, 2], "turns": []}
    full = [{**blank, **row, "metrics": list(row.get("metrics", {}).items())} for row in rows]
    pq.write_table(pa.Table.from_pylist(full, schema=SCHEMA), path)
    return path


def learning_curve(
    steps: int, seed: int, **more: Sequence[float | None]
) -> dict[str, Sequence[float | None]]:
    """Metrics of a run, as many as the main figures need; deterministic."""
    wave = [((seed + 1) * (step + 1) * 7919 % 97) / 970 for step in range(steps)]
    return {
        "reward/mean": [0.3 + 0.5 * step / steps + wave[step] for step in range(steps)],
        "reward/f1": [0.35 + 0.5 * step / steps + wave[step] for step in range(steps)],
        "reward/format_valid": [min(1.0, 0.7 + step / steps) for step in range(steps)],
        "actor/entropy": [0.4 - 0.3 * step / steps + wave[step] for step in range(steps)],
        "advantage/answer/positive_before": [100 + 100 * each for each in wave],
        "advantage/answer/negative_before": [140 + 100 * each for each in wave],
        "advantage/correctness/zero_share": [0.5 - 0.3 * step / steps for step in range(steps)],
        "advantage/correctness/to_one_share": [0.5 + 0.3 * step / steps for step in range(steps)],
        "rollout/failed": [0.0] * steps,
        "timing_s/rollout": [2.0 + each for each in wave],
        "timing_s/update": [1.0] * steps,
        "timing_s/step": [3.5 + each for each in wave],
        **more,
    }


def two_configs(folder: Path, steps: int) -> list[Path]:
    """Folders of three runs of so many steps: CalibAdv with two seeds, and GRPO."""
    runs = (["run.seed=1"], ["run.seed=2"], ["advantage.name=grpo"])
    folders = [folder / f"run-{index}" for index in range(len(runs))]
    return [
        make_run(run, learning_curve(steps, index), quickstart_config(run, *overrides))
        for index, (run, overrides) in enumerate(zip(folders, runs, strict=True))
    ]
