"""Measurements for a GPU that is lent for minutes: the most valuable first, each bounded and kept at once.

    python -m benchmarks.lent_gpu OUTPUT_FOLDER                 # all parts that are not there yet
    python -m benchmarks.lent_gpu OUTPUT_FOLDER --seconds 540   # of one call; the next call goes on
    python -m benchmarks.lent_gpu OUTPUT_FOLDER --rehearse      # tiny sizes, on a machine without a GPU

Each part is a program of its own that is ended after its seconds. A line of results.jsonl says how it ended,
with the figures of `benchmarks.device`; a part's output is in NAME.txt. A part that has a result is not run
again; with `--retry` those are that did not succeed. Needs Python 3.12 with JAX for CUDA, tokamax and pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEAST_SECONDS = 20.0  # A part is not begun with less time left.
GRACE = 5.0  # Seconds that a part has after the signal to end.
MEMORY_SHARE = "0.92"  # of the card, for JAX: parameters, moments and gradients of 3B take 46 GiB


@dataclass(frozen=True)
class Part:
    """A program whose result is a line.

    Attributes:
        name: of its files in the output folder.
        seconds: after which it is ended.
        arguments: of Python; {out} is the output folder.
    """

    name: str
    seconds: float
    arguments: tuple[str, ...]


def device_part(name: str, seconds: float, shape: str, arguments: str) -> Part:
    """Return a part that runs `benchmarks.device`."""
    fixed = ("-m", "benchmarks.device", "--shape", shape, "--peak_tflops", "{peak}")
    return Part(name, seconds, (*fixed, "--json", "{out}/" + name + ".json", *arguments.split()))


def parts() -> list[Part]:
    """Return the parts of a lent GPU, by their value."""
    small = "qwen2.5-0.5b"
    update = "--only update --length 8192 --repeats 3"
    result = [
        Part("tests", 150, ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/policy/test_on_gpu.py")),
    ]
    for attention, remat, rows in (
        ("tokamax", "full", 8),
        ("triton", "full", 8),  # the kernel of the figures of 2026-11-26
        ("tokamax", "attention", 8),
        ("tokamax", "dots", 4),
        ("tokamax", "none", 4),
        ("xla", "full", 8),
    ):
        options = f"--attention {attention} --remat {remat} --rows 16 --microbatch {rows}"
        result.append(device_part(f"update-0.5b-{attention}-{remat}", 75, small, f"{update} {options}"))
    profile = "--attention tokamax --remat attention --rows 8 --microbatch 8 --profile {out}/profile"
    result.append(device_part("profile-0.5b", 75, small, f"{update} {profile}"))
    result.append(Part("operations", 30, ("-m", "benchmarks.profile_summary", "{out}/profile")))
    for name, shape, remat, rows in (
        ("1.5b", "qwen2.5-1.5b", "dots", 2),
        ("1.5b", "qwen2.5-1.5b", "attention", 4),
        ("3b", "qwen2.5-3b", "attention", 1),
    ):
        options = f"--attention tokamax --remat {remat} --rows {2 * rows} --microbatch {rows}"
        result.append(device_part(f"update-{name}-{remat}", 90, shape, f"{update} {options}"))
    sampler = "--only log-probabilities sampler --rows 16 --microbatch 8 --length 8192"
    sampler += " --slots 256 --prompt 1024 --new 256 --repeats 3"
    result.append(device_part("sampler-0.5b", 90, small, sampler))
    long = "--only update --length 16384 --rows 4 --microbatch 2 --remat attention --repeats 3"
    result.append(device_part("update-0.5b-16k", 75, small, long))
    return result


def rehearsal() -> list[Part]:
    """Return parts of every kind at sizes that two CPU cores compute in seconds."""
    tiny = "--rows 2 --microbatch 2 --length 64 --repeats 1 --attention xla"
    profile = f"--only update {tiny} --remat attention --profile {{out}}/profile"
    sampler = f"--only log-probabilities sampler {tiny} --slots 4 --prompt 8 --new 4"
    return [
        device_part("update-tiny", 300, "tiny", f"--only update {tiny} --remat dots"),
        device_part("profile-tiny", 300, "tiny", profile),
        Part("operations", 60, ("-m", "benchmarks.profile_summary", "{out}/profile")),
        device_part("sampler-tiny", 300, "tiny", sampler),
    ]


def kept_results(file: Path) -> dict[str, dict[str, Any]]:
    """Return the newest result of each part by its name; a line that was cut off is left out."""
    results = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        results[result["name"]] = result
    return results


def run_part(part: Part, out: Path, seconds: float, peak: float) -> dict[str, Any]:
    """Run a part for at most so many seconds, and return its result."""
    words = [argument.format(out=out, peak=peak) for argument in part.arguments]
    begun = time.monotonic()
    with (out / f"{part.name}.txt").open("wb") as output:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=output, stderr=output)
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    ended = {0: "done", None: f"ended after {seconds:.0f} s"}.get(status, f"failed with status {status}")
    result = {"name": part.name, "ended": ended, "seconds": round(time.monotonic() - begun, 1)}
    figures = out / f"{part.name}.json"
    if status == 0 and figures.exists():
        result["figures"] = json.loads(figures.read_text(encoding="utf-8"))
    return result


def run_parts(chosen: Sequence[Part], out: Path, seconds: float, peak: float, retry: bool) -> bool:
    """Run the parts that have no result yet, until the time is over.

    Args:
        chosen: the parts in their order.
        out: folder for results.jsonl and the parts' own files.
        seconds: of this call.
        peak: TFLOP/s of the device, for the shares.
        retry: whether parts that did not succeed are run again.

    Returns:
        Whether all parts have a result.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.jsonl"
    end = time.monotonic() + seconds
    results = kept_results(file)
    for part in chosen:
        result = results.get(part.name)
        if result and (result["ended"] == "done" or not retry):
            continue
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            sys.stdout.write(f"no time left for {part.name}: give the same command again\n")
            return False
        result = run_part(part, out, min(part.seconds, left), peak)
        with file.open("a", encoding="utf-8") as lines:
            # On a line of its own, though a call that was killed may have left half a line before it.
            lines.write("\n" + json.dumps(result) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
        sys.stdout.write(line_of(result) + "\n")
        sys.stdout.flush()
    return True


def line_of(result: dict[str, Any]) -> str:
    """Return a result as a line."""
    line = f"{result['name']}: {result['ended']} ({result['seconds']} s)"
    for row in result.get("figures", {}).get("results", ()):
        share = "" if row["mfu"] is None else f", {row['mfu']:.1%} of the peak"
        line += f"\n  {row['name']}: {row['median_s']:.3f} s, {row['tokens_per_s']:.0f} tokens/s{share}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=840.0, help="of this call")
    parser.add_argument("--peak_tflops", type=float, default=989.0, help="dense peak; H100 and H200: 989")
    parser.add_argument("--retry", action="store_true", help="run parts that failed once more")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args()
    chosen = rehearsal() if arguments.rehearse else parts()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_SHARE)
    out = arguments.folder.absolute()
    # Compiled programs outlive a call, so that the next one does not compile them again.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "jax_cache"))
    is_complete = run_parts(chosen, out, arguments.seconds, arguments.peak_tflops, arguments.retry)
    results = kept_results(out / "results.jsonl")
    failures = [name for name, result in results.items() if result["ended"] != "done"]
    if failures:
        sys.stdout.write(f"not done: {', '.join(failures)}\n")
    sys.exit(0 if is_complete and not failures else 1)


if __name__ == "__main__":
    main()
