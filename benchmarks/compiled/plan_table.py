"""`calibadv plan` of the paper's 7B run on 8, 64 and 256 devices: prints benchmarks/scale.md's table.

    python -m benchmarks.compiled.plan_table --folder runs/plan  # all that is not there yet
    python -m benchmarks.compiled.plan_table --folder runs/plan --match v5p  # only commands with this text
    python -m benchmarks.compiled.plan_table --folder runs/plan --print  # only the table of what is there

The compilers lie where scripts/test.sh puts them, or where --libtpu and --cuda say.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from calibadv_jax.contrib.planning.memory import GIB

RUN = "--config configs/paper/qwen2.5-7b.yaml --tokens 4000 --sampled 700"
ROWS = "mesh.fsdp={0} learner.microbatch_rows={0}"
HOSTS = f"sampler.name=jax {ROWS}"  # several processes: the embedded sampler
SPLIT = (
    "sampler.name=jax mesh.fsdp=64 mesh.tensor=4 learner.microbatch_rows=64"  # fewer rows, and fuller ones
)
POINTS = (
    f"--gpu h100 --topology 1x1x8 {ROWS.format(8)}",
    f"--gpu h100 --topology 1x8x8 {HOSTS.format(64)}",
    f"--gpu h100 --topology 1x32x8 {HOSTS.format(256)}",
    f"--gpu h100 --topology 1x32x8 {SPLIT}",
    f"--tpu v5e:16x16 {HOSTS.format(256)}",
    f"--tpu v5p:4x8x8 {HOSTS.format(256)}",
    f"--tpu v5p:2x2x2 {HOSTS.format(8)}",
    f"--tpu v5p:4x4x4 {HOSTS.format(64)}",
)
PROGRAMS = ("update", "apply", "log-probabilities", "prefill", "decode")
HEAD = (
    "devices",
    "limit GiB",
    "update",
    "optimizer's step",
    "log-probabilities",
    "prefill",
    "decode",
    "by the formula",
    "rows filled",
    "operations a step",
    "s a step",
    "tokens/s",
    "device hours",
    "further arguments",
)


def file_of(folder: Path, point: str) -> Path:
    return folder / f"{'_'.join(word for word in point.split() if not word.startswith('--'))}.json".replace(
        ":", "-"
    )


def compile_point(point: str, file: Path, compiler: Path) -> None:
    """Write the plan's figures into the file.

    Raises:
        SystemExit: it failed for another reason than memory.
    """
    command = [
        sys.executable,
        "-m",
        "calibadv_jax",
        "plan",
        *shlex.split(f"{RUN} {point}"),
        "--json",
        str(file),
    ]
    path = os.pathsep.join([os.getcwd(), str(compiler)])
    process = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    if process.returncode not in (0, 1) or not file.exists():  # 1: it does not fit, and the figures are there
        sys.exit(f"{shlex.join(command)}: status {process.returncode}\n{process.stdout}")


def row(point: str, figures: dict[str, Any]) -> str:
    """Return a line of the Markdown table."""
    kind = figures["kind"] if figures["kind"].startswith("v") else figures["kind"].upper()
    cells = [f"{figures['devices']} {kind}", f"{figures['limit'] / GIB:.1f}"]
    for name in PROGRAMS:
        program = figures["programs"].get(name)
        if program is None:
            cells.append("")
            continue
        if "refused" in program:
            cells.append("refused")
            continue
        needed, peak = f"{program['needed']:.1f}", f"{program['peak']:.1f}"
        text = needed if needed == peak else f"{needed} ({peak})"
        cells.append(text if program["needed"] * GIB <= figures["limit"] else f"**{text}**")
    operations = sum(part["flops"] for part in figures["parts"])
    cells += [
        f"{figures['peak'] / GIB:.1f}",
        f"{figures['fill']:.0%}",
        f"{operations:.1e}",
        f"{figures['seconds']:.0f}",
        f"{figures['tokens_per_second']:.0f}",
        f"{figures['device_hours']:.0f}",
    ]
    return "| " + " | ".join([*cells, f"`{point}`"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--match", default="", help="only points whose arguments contain this text")
    parser.add_argument("--print", action="store_true", help="print the table and compile nothing")
    parser.add_argument("--libtpu", type=Path, default=Path(sys.prefix) / "libtpu")
    parser.add_argument("--cuda", type=Path, default=Path(sys.prefix) / "cuda_compiler")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    points = {point: file_of(arguments.folder, point) for point in POINTS if arguments.match in point}
    for point, file in points.items():
        if not arguments.print and not file.exists():
            compile_point(point, file, arguments.libtpu if "--tpu" in point else arguments.cuda)
    lines = [row(point, json.loads(file.read_text())) for point, file in points.items() if file.exists()]
    head = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    sys.stdout.write("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
