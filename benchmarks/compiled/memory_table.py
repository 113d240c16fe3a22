"""Memory that XLA's compiler plans for GPUs, beside the formula of `doctor` and `plan`: a table.

    python -m benchmarks.compiled.memory_table            # from the kept figures: nothing is compiled
    python -m benchmarks.compiled.memory_table --compile  # those of this JAX that are not kept yet; 10 s each

No GPU is needed, but XLA's compiler for CUDA (`benchmarks.compiled.ahead_of_time`). The figures are kept in
memory_table.jsonl beside this file, a line for each program; a test compares the formula with all of them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from benchmarks.compiled.ahead_of_time import (
    expected_bytes,
    lowered_programs,
    make_topology_mesh,
    parse,
    run_config,
)
from calibadv_jax.contrib.planning.compiled import compiled_figures
from calibadv_jax.contrib.planning.memory import GIB
from calibadv_jax.policy.recomputation import REMATS

KEPT = Path(__file__).with_suffix(".jsonl")
UPDATE = "--only update"
OTHERS = "--only apply prefill decode"
# Model, cards, size of fsdp, of tensor, rows of a card, tokens of a row.
SIZES = (
    ("qwen2.5-0.5b", 1, 1, 1, 4, 8192),
    ("qwen2.5-0.5b", 2, 2, 1, 4, 16384),
    ("qwen2.5-1.5b", 1, 1, 1, 1, 8192),
    ("qwen2.5-1.5b", 4, 4, 1, 2, 8192),
    ("qwen2.5-3b", 1, 1, 1, 1, 8192),
    ("qwen2.5-3b", 8, 8, 1, 1, 16384),
    ("qwen2.5-7b", 8, 8, 1, 2, 8192),
    ("qwen2.5-7b", 8, 4, 2, 1, 8192),
    ("llama-3.1-8b", 4, 4, 1, 1, 4096),
    ("llama-3.1-8b", 8, 8, 1, 1, 8192),
)


@dataclass(frozen=True)
class Figure:
    """A compiled program."""

    arguments: str  # of benchmarks.compiled.ahead_of_time
    program: str
    jax: str  # version
    attention: str  # kernel
    needed: float  # GiB on a device, by the compiler's plan

    @property
    def expected(self) -> float:
        """GiB on a device, by the formula."""
        return expected_bytes(parse(shlex.split(self.arguments)))[self.program] / GIB


def points() -> Iterator[str]:
    """Yield the arguments of each combination."""
    for shape, cards, fsdp, tensor, rows, length in SIZES:
        common = (
            f"--platform cuda --gpu h200 --topology 1x1x{cards} --shape {shape} --fsdp {fsdp}"
            f" --tensor {tensor} --rows {rows} --length {length}"
        )
        for remat in reversed(REMATS):
            yield f"{common} {UPDATE} --remat {remat}"
        if tensor == 1:
            yield f"{common} {OTHERS} --remat full"


def kept_figures(file: Path = KEPT) -> list[Figure]:
    """Return the figures of the file."""
    if not file.exists():
        return []
    return [Figure(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def compile_point(arguments: str) -> Iterator[Figure]:
    """Yield the figures of a combination's programs."""
    options = parse(shlex.split(arguments))
    attention = run_config(options).policy.attention
    for name, program in lowered_programs(options, make_topology_mesh(options)).items():
        needed = round(compiled_figures(program)["needed"], 3)
        yield Figure(arguments, name, jax.__version__, attention, needed)


def table(figures: list[Figure]) -> str:
    """Return the Markdown table, and a line with the largest differences."""
    head = ("model", "cards", "mesh", "rows", "remat", "program", "attention", "compiler", "formula", "ratio")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    ratios = []
    for figure in figures:
        options = parse(shlex.split(figure.arguments))
        expected = figure.expected
        ratios.append(expected / figure.needed)
        cells = (
            options.shape,
            options.topology.rpartition("x")[2],
            f"fsdp {options.fsdp}, tensor {options.tensor}",
            f"{options.rows} x {options.length}",
            options.remat,
            figure.program,
            f"{figure.attention}, JAX {figure.jax}",
            f"{figure.needed:.1f}",
            f"{expected:.1f}",
            f"{ratios[-1]:.2f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    if ratios:
        lines.append(
            f"\n{len(ratios)} programs, formula / compiler from {min(ratios):.2f} to {max(ratios):.2f}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true", help="compile what is not kept for this JAX")
    parser.add_argument("--match", default="", help="compile only combinations with this text")
    options = parser.parse_args()
    figures = kept_figures()
    present = {(figure.arguments, figure.jax) for figure in figures}
    for arguments in points():
        is_asked_for = options.compile and options.match in arguments
        if not is_asked_for or (arguments, jax.__version__) in present:
            continue
        compiled = list(compile_point(arguments))
        figures += compiled
        with KEPT.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(figure)) + "\n" for figure in compiled)
    sys.stdout.write(table(figures))


if __name__ == "__main__":
    main()
