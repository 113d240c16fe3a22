"""docs/scale.md: its table is of points that the script has, fits, and stands beside what the doctor says."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.ahead_of_time import PROGRAMS, expected_bytes, parse
from benchmarks.scale_table import POINTS
from calibadv_jax.config import load_config
from calibadv_jax.memory import GIB, estimate_memory, peak_memory
from calibadv_jax.policy.architecture import architecture_from_hf

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|") and "`--" in line
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
