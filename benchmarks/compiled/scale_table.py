"""Which slice or GPU for which model at 16,384 tokens: compiles every point, prints the table of scale.md.

    python -m benchmarks.compiled.scale_table --folder runs/scale  # all that is not there yet
    python -m benchmarks.compiled.scale_table --folder runs/scale --match v5p  # only commands with this text
    python -m benchmarks.compiled.scale_table --folder runs/scale --print  # only the table of what is there

Every point is compiled by `benchmarks.compiled.ahead_of_time` in a process of its own, and its figures lie
in a file of the folder, one program after the other: an interrupted table goes on where it was. No TPU and no
GPU is needed. The compilers lie where scripts/test.sh puts them, or where --libtpu and --cuda say.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compiled.ahead_of_time import (
    PROGRAMS,
    expected_bytes,
    expected_parts,
    parse,
    run_config,
    target_of,
    written,
)
from calibadv_jax.contrib.planning.hardware import GPUS
from calibadv_jax.contrib.planning.memory import GIB, shares_base

HEADINGS = {"apply": "optimizer's step"}  # of programs that have another name in the table
TABLED = tuple(name for name in PROGRAMS if name != "copy")  # which never decides
COMMON = "--length 16384 --tensor"
TPU_POINTS = (
    "--topology v5e:4x4 --shape qwen2.5-3b --fsdp 16 --slots 64",
    "--topology v5p:2x2x1 --shape qwen2.5-3b --fsdp 4 --slots 64",
    "--topology v6e:2x4 --shape qwen2.5-3b --fsdp 8 --slots 64",
    "--topology v5p:2x2x2 --shape qwen2.5-7b --fsdp 8 --slots 64",
    "--topology v6e:4x4 --shape qwen2.5-7b --fsdp 16 --slots 64",
    "--topology v5e:8x8 --shape llama-3.2-3b --fsdp 64 --slots 64",
    "--topology v5p:2x2x1 --shape llama-3.2-3b --fsdp 4 --slots 64",
    "--topology v6e:4x4 --shape llama-3.2-3b --fsdp 16 --slots 64",
)
GPU_POINTS = tuple(
    f"--platform cuda --gpu {gpu} --topology {topology} --shape {shape} --fsdp {devices} --slots {slots}"
    for shape in ("qwen2.5-3b", "qwen2.5-7b", "llama-3.2-3b")
    for topology, devices, slots in (("1x1x8", 8, 64), ("1x2x8", 16, 128), ("1x1x1", 1, 4))
    for gpu in GPUS
)
# What one GPU and a small slice train with adapters, beside the same with every parameter.
ADAPTED = " --lora 16"
LORA_POINTS = (
    *(
        f"--platform cuda --gpu h100 --topology {topology} --shape {shape} --fsdp {devices} --slots {slots}"
        + lora
        for shape in ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b")
        for topology, devices, slots in (("1x1x1", 1, 4), ("1x1x8", 8, 64))
        for lora in ("", ADAPTED)
        if lora or shape == "qwen2.5-1.5b"
    ),
    *(
        f"--topology {topology} --shape {shape} --fsdp 8 --slots 64{ADAPTED}"
        for topology in ("v5e:2x4", "v6e:2x4")
        for shape in ("qwen2.5-3b", "qwen2.5-7b")
    ),
)
POINTS = (
    *(f"{point} {COMMON} 1" for point in (*TPU_POINTS, *GPU_POINTS, *LORA_POINTS)),
    f"--topology v5e:4x8 --shape qwen2.5-7b --fsdp 16 --slots 64 {COMMON} 2",  # too large where tensor is 1
)


def file_of(folder: Path, point: str) -> Path:
    words = [word for word in shlex.split(point) if not word.startswith("--")]
    return folder / f"{'_'.join(words).replace(':', '-')}.json"


def compile_point(point: str, programs: Sequence[str], file: Path, compilers: dict[str, Path]) -> None:
    """Write the programs' figures into the file, with the compiler's refusals.

    Raises:
        SystemExit: it failed for another reason than memory.
    """
    folder = compilers[parse(shlex.split(point)).platform]
    path = os.pathsep.join([os.getcwd(), str(folder)])
    command = [
        sys.executable,
        "-m",
        "benchmarks.compiled.ahead_of_time",
        *shlex.split(point),
        "--only",
        *programs,
    ]
    process = subprocess.run(
        [*command, "--json", str(file)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    # Status 1 is that of a program that does not fit, too; its figures are there.
    if process.returncode not in (0, 1) or not set(programs) <= written(file).keys():
        sys.exit(f"{shlex.join(command)}:\n{process.stderr[-3000:]}")


def row(point: str, programs: dict[str, dict[str, Any]]) -> str:
    """Return a line of the Markdown table."""
    options = parse(shlex.split(point))
    target = target_of(options)
    limit = target.limit / GIB
    kind = target.kind if options.platform == "tpu" else target.kind.upper()
    cells = [
        options.shape + (f", LoRA {options.lora}" if options.lora else ""),
        f"{target.devices} {kind}",
        f"{limit:.1f}",
    ]
    for program in TABLED:
        figures = programs.get(program, {})
        if "needed" in figures:
            needed, peak = (f"{figures[name]:.1f}" for name in ("needed", "peak"))
            gaps = "" if needed == peak else f" ({peak})"
            text = f"{needed}{gaps} in {figures['compile_s']:.0f} s"
            cells.append(text if figures["needed"] <= limit else f"**{text}**")
        else:
            cells.append("refused" if "refused" in figures else "")
    base = expected_parts(options)["base"] if shares_base(run_config(options)) else 0.0
    cells.append(with_sampler(programs, limit, base / GIB))
    expected = expected_bytes(options)
    sampling = max(expected["prefill"], expected["decode"])
    cells.append(", ".join(f"{size / GIB:.1f}" for size in (expected["update"], expected["apply"], sampling)))
    return "| " + " | ".join([*cells, f"`{point}`"]) + " |"


def with_sampler(figures: dict[str, dict[str, Any]], limit: float, shared: float) -> str:
    """Return the peak of a device where the embedded sampler stays beside the trainer.

    Args:
        shared: GiB of parameters that both compute with.
    """
    programs = [figures.get(name, {}) for name in ("update", "apply", "prefill", "decode")]
    if any("refused" in figures for figures in programs):
        return "refused"
    if not all(programs):
        return ""
    state, cache = figures["apply"]["results"], figures["prefill"]["arguments"] - shared
    training = max(figures["update"]["needed"], figures["apply"]["needed"])
    sampling = max(figures["prefill"]["needed"], figures["decode"]["needed"])
    peak = max(training + cache, state + sampling)
    return f"{peak:.1f}" if peak <= limit else f"**{peak:.1f}**"


def table(folder: Path, points: list[str]) -> str:
    head = [
        "model",
        "devices",
        "limit GiB",
        *(HEADINGS.get(name, name) for name in TABLED),
        "with embedded sampler",
        "`doctor`: update, step, sampler",
        "arguments of `python -m benchmarks.compiled.ahead_of_time`",
    ]
    measured = {point: written(file_of(folder, point)) for point in points}
    rows = [row(point, figures) for point, figures in measured.items() if figures]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--match", default="", help="compile only points whose arguments contain this text")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=TABLED, metavar="PROGRAM")
    parser.add_argument("--print", action="store_true", help="print the table and compile nothing")
    parser.add_argument("--libtpu", type=Path, default=Path(sys.prefix) / "libtpu")
    parser.add_argument("--cuda", type=Path, default=Path(sys.prefix) / "cuda_compiler")
    arguments = parser.parse_args()
    points = [point for point in POINTS if arguments.match in point]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    compilers = {"tpu": arguments.libtpu, "cuda": arguments.cuda}
    for point in points:
        if arguments.print:
            break
        file = file_of(arguments.folder, point)
        missing = [name for name in arguments.only if name not in written(file)]
        if missing:
            sys.stderr.write(f"{', '.join(missing)}: {point}\n")
            compile_point(point, missing, file, compilers)
    sys.stdout.write(table(arguments.folder, points))


if __name__ == "__main__":
    main()
