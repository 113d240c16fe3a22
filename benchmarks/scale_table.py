"""Which slice or GPU for which model at 16,384 tokens: compiles every point and prints docs/scale.md's table.

    python -m benchmarks.scale_table --folder runs/scale                   # all that is not there yet
    python -m benchmarks.scale_table --folder runs/scale --match v5p       # only commands with this text
    python -m benchmarks.scale_table --folder runs/scale --print           # only the table of what is there

Every program of every point is compiled by `benchmarks.ahead_of_time` in a process of its own, and its
figures lie in a file of the folder: an interrupted table goes on where it was. No TPU and no GPU is needed.
The compilers lie where scripts/test.sh puts them, or where --libtpu and --cuda say.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.ahead_of_time import GPU_SHARE, PROGRAMS, expected_bytes, mesh_sizes, parse
from benchmarks.gpu_targets import GPUS
from calibadv_jax.memory import GIB

TPUS = {"v5e": 16e9, "v5p": 95e9, "v6e": 32e9}  # bytes of a chip
NO_ROOM = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory|out of memory", re.IGNORECASE)
COMMON = "--length 16384 --tensor 1"
TPU_POINTS = (
    "--topology v5e:4x4 --shape qwen2.5-3b --fsdp 16 --slots 64",
    "--topology v5p:2x2x1 --shape qwen2.5-3b --fsdp 4 --slots 64",
    "--topology v6e:2x4 --shape qwen2.5-3b --fsdp 8 --slots 64",
    "--topology v5e:4x8 --shape qwen2.5-7b --fsdp 32 --slots 64",
    "--topology v5p:2x2x2 --shape qwen2.5-7b --fsdp 8 --slots 64",
    "--topology v6e:4x4 --shape qwen2.5-7b --fsdp 16 --slots 64",
    "--topology v5e:4x8 --shape llama-3.2-3b --fsdp 32 --slots 64",
    "--topology v5p:2x2x1 --shape llama-3.2-3b --fsdp 4 --slots 64",
    "--topology v6e:4x4 --shape llama-3.2-3b --fsdp 16 --slots 64",
)
GPU_POINTS = tuple(
    f"--platform cuda --gpu {gpu} --topology {topology} --shape {shape} --fsdp {devices} --slots {slots}"
    for shape in ("qwen2.5-3b", "qwen2.5-7b", "llama-3.2-3b")
    for topology, devices, slots in (("1x1x8", 8, 64), ("1x2x8", 16, 128), ("1x1x1", 1, 4))
    for gpu in GPUS
)
POINTS = tuple(f"{point} {COMMON}" for point in (*TPU_POINTS, *GPU_POINTS))


def file_of(folder: Path, point: str, program: str) -> Path:
    words = [word for word in shlex.split(point) if not word.startswith("--")]
    return folder / f"{'_'.join([*words, program]).replace(':', '-')}.json"


def compile_one(point: str, program: str, file: Path, compilers: dict[str, Path]) -> None:
    """Leaves the figures in the file, or the compiler's refusal.

    Raises:
        SystemExit: it failed for another reason than memory.
    """
    folder = compilers[parse(shlex.split(point)).platform]
    path = os.pathsep.join([os.getcwd(), str(folder)])
    command = [sys.executable, "-m", "benchmarks.ahead_of_time", *shlex.split(point)]
    done = subprocess.run(
        [*command, "--only", program, "--json", str(file)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if file.exists():  # a GPU's program that is too large is compiled all the same
        return
    refusal = NO_ROOM.search(done.stderr)
    if refusal is None:
        sys.exit(f"{shlex.join(command)} --only {program}:\n{done.stderr[-3000:]}")
    file.write_text(json.dumps({program: {"refused": refusal[0]}}))


def gathered(folder: Path, point: str) -> dict[str, dict[str, Any]]:
    """Figures of the point's programs that are there."""
    found: dict[str, dict[str, Any]] = {}
    for program in PROGRAMS:
        file = file_of(folder, point, program)
        if file.exists():
            found |= json.loads(file.read_text())
    return found


def row(point: str, found: dict[str, dict[str, Any]]) -> str:
    """A line of the Markdown table."""
    a = parse(shlex.split(point))
    if a.platform == "tpu":
        kind = a.topology.partition(":")[0]
        limit = TPUS[kind] / GIB
    else:
        kind = a.gpu.upper()
        limit = GPU_SHARE * GPUS[a.gpu].memory / GIB
    cells = [a.shape, f"{math.prod(mesh_sizes(a).values())} {kind}", f"{limit:.1f}"]
    for program in PROGRAMS:
        figures = found.get(program, {})
        if "peak" in figures:
            text = f"{figures['peak']:.1f} in {figures['compile_s']:.0f} s"
            cells.append(text if figures["peak"] <= limit else f"**{text}**")
        else:
            cells.append("refused" if "refused" in figures else "")
    cells.append(with_sampler(found, limit))
    expected = expected_bytes(a)
    sampling = max(expected["prefill"], expected["decode"])
    cells.append(f"{expected['update'] / GIB:.1f}, {sampling / GIB:.1f}")
    return "| " + " | ".join([*cells, f"`{point}`"]) + " |"


def with_sampler(found: dict[str, dict[str, Any]], limit: float) -> str:
    """The most that a device holds where the embedded sampler stays beside the trainer."""
    if any("peak" not in found.get(program, {}) for program in ("update", "prefill", "decode")):
        return ""
    state, cache = found["update"]["arguments"], found["prefill"]["arguments"]
    sampling = max(found["prefill"]["peak"], found["decode"]["peak"])
    most = max(found["update"]["peak"] + cache, state + sampling)
    return f"{most:.1f}" if most <= limit else f"**{most:.1f}**"


def table(folder: Path, points: list[str]) -> str:
    head = [
        "model",
        "devices",
        "limit GiB",
        *PROGRAMS,
        "with embedded sampler",
        "`doctor`: update, sampler",
        "arguments of `python -m benchmarks.ahead_of_time`",
    ]
    found = {point: gathered(folder, point) for point in points}
    rows = [row(point, figures) for point, figures in found.items() if figures]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the figures lie")
    parser.add_argument("--match", default="", help="only points whose arguments contain this text")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS, metavar="PROGRAM")
    parser.add_argument("--print", action="store_true", help="compile nothing")
    parser.add_argument("--libtpu", type=Path, default=Path(sys.prefix) / "libtpu")
    parser.add_argument("--cuda", type=Path, default=Path(sys.prefix) / "cuda_compiler")
    arguments = parser.parse_args()
    points = [point for point in POINTS if arguments.match in point]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    compilers = {"tpu": arguments.libtpu, "cuda": arguments.cuda}
    for point in [] if arguments.print else points:
        for program in arguments.only:
            file = file_of(arguments.folder, point, program)
            if not file.exists():
                sys.stderr.write(f"{program}: {point}\n")
                compile_one(point, program, file, compilers)
    sys.stdout.write(table(arguments.folder, points))


if __name__ == "__main__":
    main()
