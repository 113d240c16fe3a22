"""The pages of scale: their rows are the script's points, fit, and agree with what the doctor says."""

import json
import re
import shlex
import subprocess
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from plan_rig import planned

from benchmarks.compiled import plan_table
from benchmarks.compiled.ahead_of_time import expected_bytes, parse
from benchmarks.compiled.scale_table import POINTS, TABLED, compile_point, file_of, table
from benchmarks.compiled.scale_table import row as table_row
from calibadv_jax.config import load_config
from calibadv_jax.contrib.cli import plan
from calibadv_jax.contrib.planning.compiled import compiled_figures
from calibadv_jax.contrib.planning.hardware import FRACTION
from calibadv_jax.contrib.planning.memory import (
    GIB,
    estimate_memory,
    memory_beside,
    peak_memory,
    program_memory,
)
from calibadv_jax.policy.architecture import architecture_from_hf

pytestmark = pytest.mark.medium  # of a benchmark's program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs/scale.md", ROOT / "benchmarks/scale.md"]
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
COMMANDS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|") and line.endswith("` |") and "`--" in line
]
ROWS = [row for row in COMMANDS if "--shape" in row[-1]]
PLANNED = [row for row in COMMANDS if "mesh.fsdp=" in row[-1]]
FIGURE = re.compile(r"(\*\*)?([\d.]+)(?: \(([\d.]+)\))? in (\d+) s(\*\*)?")


def peaks(row):
    """Program -> GiB in use at once, of those that were compiled."""
    figure = {
        name: FIGURE.fullmatch(cell) for name, cell in zip(TABLED, row[3 : 3 + len(TABLED)], strict=True)
    }
    return {name: float(match[3] or match[2]) for name, match in figure.items() if match}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-1].strip("`"))
def test_rows_agree_with_the_doctor(row):
    """The doctor's figures are what it says today, and within 1.15 times what is in use at once."""
    command = row[-1].strip("`")
    assert command in POINTS
    expected = expected_bytes(parse(shlex.split(command)))
    sampling = max(expected["prefill"], expected["decode"])
    counted = {"update": expected["update"], "apply": expected["apply"], "sampler": sampling}
    counted = {name: size / GIB for name, size in counted.items()}
    assert row[-2] == ", ".join(f"{size:.1f}" for size in counted.values())
    planned = peaks(row)
    planned["sampler"] = max(planned["prefill"], planned["decode"])
    off = {name: size / planned[name] for name, size in counted.items()}
    assert all(1 / 1.15 < ratio < 1.15 for ratio in off.values()), off


@pytest.mark.parametrize("row", PLANNED, ids=lambda row: row[-1].strip("`"))
def test_planned_rows_equal_the_command(row, monkeypatch):
    """What the compilers say is within 1.15 times the formula, too."""
    monkeypatch.delenv(FRACTION, raising=False)
    point = row[-1].strip("`")
    assert point in plan_table.POINTS
    _, _, run_plan = planned(f"{plan_table.RUN} {point}")
    shown = [cell.strip() for cell in plan_table.row(point, plan.figures(run_plan, {})).strip("|").split("|")]
    first, end = 2, 2 + len(plan_table.PROGRAMS)
    assert row[:first] + row[end:] == shown[:first] + shown[end:]
    parts = program_memory(run_plan.estimate)
    cells = zip(plan_table.PROGRAMS, row[first:end], strict=True)
    at_once = {name: float(cell.strip("*").rpartition("(")[2].rstrip(")")) for name, cell in cells if cell}
    for programs in (("update",), ("apply",), ("prefill", "decode")):
        if names := at_once.keys() & programs:
            counted = max(parts[name] + memory_beside(run_plan.estimate, name) for name in names) / GIB
            assert 1 / 1.15 < counted / max(at_once[name] for name in names) < 1.15, programs


def test_tables_have_rows_and_mark_what_does_not_fit():
    assert len(ROWS) >= 4 and all(peaks(row) for row in ROWS)
    assert {"8 H100", "64 H100", "256 H100"} <= {row[0] for row in PLANNED}
    for row in ROWS:
        for match in filter(None, map(FIGURE.fullmatch, row[3 : 3 + len(TABLED)])):
            assert bool(match[1]) == (float(match[2]) > float(row[2])), row


def test_plans_are_of_gpus_and_of_a_large_tpu_slice():
    assert any(row[0].startswith("256 v5") for row in PLANNED)


def test_parts_of_a_3b_policy_equal_the_doctors():
    (line,) = re.findall(r"^\| \*\*sum\*\*.*", TEXT, re.MULTILINE)
    shown = [float(number) for number in re.findall(r"[\d.]+", line)]
    for overrides, value in zip((["sampler.name=jax", "sampler.slots=64"], []), shown, strict=True):
        config = load_config(ROOT / "configs/paper/qwen2.5-3b.yaml", overrides)
        mesh = {"data": 1, "fsdp": 8, "tensor": 1}
        estimate = estimate_memory(config, architecture_from_hf(config.policy.init), mesh)
        assert value == round(peak_memory(estimate) / GIB, 2)


POINT = next(point for point in POINTS if "v5e:4x4 --shape qwen2.5-3b" in point)
REFUSED = {"refused": "RESOURCE_EXHAUSTED"}


@pytest.mark.parametrize(
    ("program", "needed", "expected"),
    [
        ("update", 14.0, "**16.6**"),
        ("apply", 9.5, "12.1"),  # an optimizer's step and the cache
        ("prefill", 11.0, "13.2"),  # a call and the state without gradients
        ("decode", None, "refused"),
    ],
)
def test_sampler_row_is_the_largest_of_three(program, needed, expected):
    """16 GB are 14.9 GiB."""
    sizes = {"update": 9.0, "apply": 2.9, "log-probabilities": 3.0, "prefill": 3.5, "decode": 3.25}
    figures = {
        name: {"compile_s": 1.0, "arguments": 2.6, "results": 2.2, "needed": size, "peak": size}
        for name, size in (sizes | {program: needed or 0.0}).items()
    }
    row = table_row(POINT, figures if needed else figures | {program: REFUSED}).split(" | ")
    assert row[:3] == ["| qwen2.5-3b", "16 v5e", "14.9"] and row[-1] == f"`{POINT}` |"
    assert row[8] == expected and row[5] == "3.0 in 1 s"


FIGURES = {
    "update": {"compile_s": 61.4, "arguments": 2.9, "results": 0.7, "needed": 9.0, "peak": 9.0},
    "apply": {"compile_s": 2.0, "arguments": 2.9, "results": 2.2, "needed": 2.9, "peak": 2.9},
    "log-probabilities": {"compile_s": 20.0, "arguments": 0.7, "results": 0.1, "needed": 3.0, "peak": 3.0},
    "prefill": {"compile_s": 5.0, "arguments": 2.6, "results": 2.0, "needed": 3.5, "peak": 3.5},
    "decode": {"compile_s": 4.0, "arguments": 2.6, "results": 2.0, "needed": 3.25, "peak": 3.25},
}


def cells(figures):
    """Cells of the point's row, of which these programs are compiled."""
    return [cell.strip() for cell in table_row(POINT, figures).strip("|").split("|")]


def changed_figures(program, **figures):
    return FIGURES | {program: FIGURES[program] | figures}


def test_row_has_memory_and_seconds_of_every_program():
    """16 GB are 14.9 GiB."""
    row = cells(FIGURES)
    assert row[:3] == ["qwen2.5-3b", "16 v5e", "14.9"]
    assert row[3:8] == ["9.0 in 61 s", "2.9 in 2 s", "3.0 in 20 s", "3.5 in 5 s", "3.2 in 4 s"]
    assert row[8] == "11.6"
    assert row[-1] == f"`{POINT}`"


def test_sampler_with_a_large_decode_holds_the_state_without_gradients():
    assert cells(changed_figures("decode", needed=12.0))[8] == "14.2"


def test_program_that_does_not_fit_is_marked_with_its_peak():
    assert cells(changed_figures("update", needed=15.5, peak=12.0))[3] == "**15.5 (12.0) in 61 s**"


def test_refused_program_is_named_in_its_cell():
    row = cells(FIGURES | {"decode": REFUSED})
    assert row[7] == row[8] == "refused"


def test_program_that_is_not_compiled_has_an_empty_cell():
    figures = {name: program for name, program in FIGURES.items() if name != "log-probabilities"}
    assert cells(figures)[3:9] == ["9.0 in 61 s", "2.9 in 2 s", "", "3.5 in 5 s", "3.2 in 4 s", "11.6"]
    del figures["decode"]
    assert cells(figures)[6:9] == ["3.5 in 5 s", "", ""]


def test_table_has_rows_of_compiled_points_only(tmp_path):
    file_of(tmp_path, POINT).write_text(json.dumps(FIGURES))
    lines = table(tmp_path, list(POINTS)).splitlines()
    assert len(lines) == 3  # head, rule, the point
    assert lines[-1] == table_row(POINT, FIGURES)


def test_points_have_files_of_their_own(tmp_path):
    assert len({file_of(tmp_path, point) for point in POINTS}) == len(POINTS)


PROGRAMS = ("update", "apply")


@pytest.mark.parametrize(
    ("status", "written", "is_accepted"),
    [
        (0, PROGRAMS, True),
        (1, PROGRAMS, True),  # programs that do not fit: their figures say so
        (1, (), False),
        (1, ("update",), False),
        (-9, PROGRAMS, False),
    ],
)
def test_failed_compilation_is_told_from_a_refusal_for_memory(
    tmp_path, monkeypatch, status, written, is_accepted
):
    file = tmp_path / "point.json"
    commands = []

    def compile_programs(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, status, "", "ModuleNotFoundError: No module 'libtpu'")

    monkeypatch.setattr(subprocess, "run", compile_programs)
    if written:
        file.write_text(json.dumps(dict.fromkeys(written, REFUSED)))
    with nullcontext() if is_accepted else pytest.raises(SystemExit, match="libtpu"):
        compile_point(POINT, PROGRAMS, file, {"tpu": tmp_path})
    (command,) = commands
    assert command[-5:] == ["--only", "update", "apply", "--json", str(file)]
    assert POINT in " ".join(command)


def test_only_memory_refusals_are_figures():
    def refused(message):
        return compiled_figures(Mock(compile=Mock(side_effect=jax.errors.JaxRuntimeError(message))))

    assert refused("RESOURCE_EXHAUSTED: Ran out of memory in hbm") == {"refused": "RESOURCE_EXHAUSTED"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID"):
        refused("INVALID_ARGUMENT: no such kernel")


def test_program_memory_adds_up():
    x = jax.ShapeDtypeStruct((1024, 256), "float32")
    plain = compiled_figures(jax.jit(lambda x: x.sum(0)).lower(x))
    assert plain["arguments"] * GIB == 2**20 and plain["results"] * GIB == 1024
    assert plain["needed"] == plain["arguments"] + plain["results"] + plain["temporary"]
    donated = compiled_figures(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x), 2.0**30)
    assert donated["results"] * GIB == 2**20
    assert donated["needed"] == donated["arguments"] + donated["temporary"] + 1  # and what lies beside
