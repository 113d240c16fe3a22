"""docs/scale.md: its table is of points that the script has, fits, and stands beside what the doctor says."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.ahead_of_time import PROGRAMS, expected_bytes, parse
from benchmarks.scale_table import POINTS, compile_one, file_of, table
from calibadv_jax.config import load_config
from calibadv_jax.memory import GIB, estimate_memory, peak_memory
from calibadv_jax.policy.architecture import architecture_from_hf

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|") and line.endswith("` |") and "`--" in line
]
FIGURE = re.compile(r"(\*\*)?([\d.]+) in (\d+) s(\*\*)?")


def peaks(row):
    """Program -> GiB at its peak, of those that were compiled."""
    found = {
        name: FIGURE.fullmatch(cell) for name, cell in zip(PROGRAMS, row[3 : 3 + len(PROGRAMS)], strict=True)
    }
    return {name: float(match[2]) for name, match in found.items() if match}


def test_the_table_is_found():
    assert len(ROWS) >= 4
    assert all(peaks(row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-1].strip("`"))
def test_a_row_is_a_point_whose_memory_the_doctor_knows(row):
    """The doctor's figures are what it says today, and within 1.3 times the compiler's plan."""
    command = row[-1].strip("`")
    assert command in POINTS
    expected = expected_bytes(parse(shlex.split(command)))
    sampling = max(expected["prefill"], expected["decode"])
    assert row[-2] == f"{expected['update'] / GIB:.1f}, {sampling / GIB:.1f}"
    planned = peaks(row)
    if "update" in planned:
        assert 1 / 1.3 < expected["update"] / GIB / planned["update"] < 1.3
    if {"prefill", "decode"} <= planned.keys():
        assert 1 / 1.3 < sampling / GIB / max(planned["prefill"], planned["decode"]) < 1.3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-1].strip("`"))
def test_what_does_not_fit_is_marked(row):
    limit = float(row[2])
    for cell in row[3 : 3 + len(PROGRAMS)]:
        match = FIGURE.fullmatch(cell)
        if match:
            assert bool(match[1]) == (float(match[2]) > limit)


def test_every_file_it_links_to_exists():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXT)
    assert links and not [link for link in links if not (ROOT / "docs" / link).exists()]


def test_the_readme_has_the_doctors_figures():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\| \*\*sum\*\*.*", readme, re.MULTILINE)
    said = [float(number) for number in re.findall(r"[\d.]+", line)]
    for overrides, value in zip((["sampler.name=jax", "sampler.slots=64"], []), said, strict=True):
        config = load_config(ROOT / "configs/paper/qwen2.5-3b.yaml", overrides)
        estimate = estimate_memory(
            config, architecture_from_hf(config.policy.init), {"data": 1, "fsdp": 8, "tensor": 1}
        )
        assert value == round(peak_memory(estimate) / GIB, 2)


POINT = next(point for point in POINTS if "v5e:4x4 --shape qwen2.5-3b" in point)
FIGURES = {
    "update": {"compile_s": 61.4, "arguments": 2.2, "peak": 9.0},
    "log-probabilities": {"compile_s": 20.0, "arguments": 0.7, "peak": 3.0},
    "prefill": {"compile_s": 5.0, "arguments": 2.6, "peak": 3.5},
    "decode": {"compile_s": 4.0, "arguments": 2.6, "peak": 3.25},
}


def written(folder, **changed):
    for name, figures in FIGURES.items():
        file_of(folder, POINT, name).write_text(json.dumps({name: changed.get(name, figures)}))
    return [cell.strip() for cell in table(folder, list(POINTS)).splitlines()[-1].strip("|").split("|")]


def test_a_row_says_what_a_device_holds(tmp_path):
    """16 GB are 14.9 GiB. With the sampler: an update and the cache, or a call and the trainer's state."""
    row = written(tmp_path)
    assert row[:7] == [
        "qwen2.5-3b",
        "16 v5e",
        "14.9",
        "9.0 in 61 s",
        "3.0 in 20 s",
        "3.5 in 5 s",
        "3.2 in 4 s",
    ]
    assert row[7] == "11.6" and row[-1] == f"`{POINT}`"
    assert written(tmp_path, prefill=FIGURES["prefill"] | {"peak": 11.0})[7] == "13.2"
    assert len(table(tmp_path, list(POINTS)).splitlines()) == 3  # head, rule, the point


def test_a_row_marks_what_does_not_fit(tmp_path):
    row = written(
        tmp_path, update=FIGURES["update"] | {"peak": 15.5}, decode={"refused": "RESOURCE_EXHAUSTED"}
    )
    assert row[3] == "**15.5 in 61 s**" and row[6] == "refused" and row[7] == ""
    assert written(tmp_path, update=FIGURES["update"] | {"peak": 14.0})[7] == "**16.6**"
    file_of(tmp_path, POINT, "log-probabilities").unlink()
    assert "| 14.0 in 61 s |  | 3.5 in 5 s | 3.2 in 4 s | **16.6** |" in table(tmp_path, list(POINTS))


def test_points_have_files_of_their_own(tmp_path):
    files = {file_of(tmp_path, point, name) for point in POINTS for name in PROGRAMS}
    assert len(files) == len(POINTS) * len(PROGRAMS)


def test_a_refusal_is_kept_and_another_failure_is_not(tmp_path, monkeypatch):
    said = ["RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"]

    def fails(command, **_):
        assert command[-3:-1] == ["update", "--json"]
        return subprocess.CompletedProcess(command, 1, "", said[0])

    monkeypatch.setattr(subprocess, "run", fails)
    file = tmp_path / "update.json"
    compile_one(POINT, "update", file, {"tpu": tmp_path})
    assert json.loads(file.read_text()) == {"update": {"refused": "RESOURCE_EXHAUSTED"}}
    file.unlink()
    said[0] = "ModuleNotFoundError: No module named 'libtpu'"
    with pytest.raises(SystemExit, match="libtpu"):
        compile_one(POINT, "update", file, {"tpu": tmp_path})
    assert not file.exists()
