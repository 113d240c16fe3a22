"""The most expensive operations of a profile, in words.

    python -m benchmarks.profile_summary FOLDER    # of jax.profiler.trace, or a run's profile

Sums the time of each operation of the compiled programs over all devices. Operations that run at the same
time are counted each, so that the shares are of the devices' busy time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What an operation does, by a part of its name or of its place in the program; the first that matches.
KINDS = (
    ("attention", r"flash_attention|mha_|attention|splash"),
    ("exchange between devices", r"all-reduce|all-gather|reduce-scatter|all-to-all|collective|nccl"),
    ("copy", r"copy|memcpy|transpose|bitcast|concatenate|dynamic-(update-)?slice"),
    ("look-up or scatter", r"gather|scatter"),
    ("matrix product", r"gemm|dot|cublas|cutlass|matmul|einsum|convolution|wgmma|nvjet"),
    ("reduction", r"reduce|softmax|logsumexp"),
    ("loop over layers or chunks", r"while|call|conditional"),
)
OTHER = "element by element"
ENCLOSING = ("while", "call", "conditional")  # Their time is that of the operations inside.


@dataclass(frozen=True)
class Operation:
    """An operation of a compiled program, over all of its calls."""

    name: str
    kind: str
    place: str  # in the traced program, such as jit(accumulate)/transpose(jvp())/while/body/dot_general
    seconds: float
    calls: int
    share: float  # of the time of all operations


def events_of(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the newest trace below a folder.

    Raises:
        SystemExit: There is none.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda file: file.stat().st_mtime)
    if not files:
        sys.exit(f"{folder}: no *.trace.json.gz below it; give the folder of jax.profiler.trace")
    with gzip.open(files[-1], "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def operations(events: Iterable[dict[str, Any]]) -> list[Operation]:
    """Return the operations of a trace, the most expensive first.

    Args:
        events: of a trace in Chrome's format. Those of compiled programs name their operation in `hlo_op`.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: defaultdict[str, int] = defaultdict(int)
    places: dict[str, str] = {}
    for event in events:
        arguments = event.get("args", {})
        name = arguments.get("hlo_op")
        if event.get("ph") != "X" or not name or name.startswith(ENCLOSING):
            continue
        seconds[name] += event["dur"] / 1e6  # microseconds
        calls[name] += 1
        places[name] = arguments.get("tf_op") or arguments.get("long_name") or ""
    total = sum(seconds.values())
    result = []
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True):
        kind = kind_of(f"{name} {places[name]}")
        result.append(Operation(name, kind, places[name], seconds[name], calls[name], seconds[name] / total))
    return result


def kind_of(text: str) -> str:
    """Return in words what an operation with this name does."""
    for kind, pattern in KINDS:
        if re.search(pattern, text, re.IGNORECASE):
            return kind
    return OTHER


def report(profile: list[Operation], count: int) -> str:
    """Return the share of each kind, and a line for each of the `count` most expensive operations."""
    kinds: defaultdict[str, float] = defaultdict(float)
    for operation in profile:
        kinds[operation.kind] += operation.share
    shares = sorted(kinds.items(), key=lambda item: -item[1])
    lines = [", ".join(f"{kind} {share:.0%}" for kind, share in shares)]
    for operation in profile[:count]:
        lines.append(
            f"{operation.share:6.1%} {operation.seconds * 1e3:10.2f} ms {operation.calls:6} calls"
            f"  {operation.kind}: {operation.name} {operation.place}".rstrip()
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=10, help="operations to show")
    arguments = parser.parse_args()
    sys.stdout.write(report(operations(events_of(arguments.folder)), arguments.count))


if __name__ == "__main__":
    main()
