"""A test file as a program of its own, with a compiler that must not stand beside the other packages."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 384  # of a row; no other size of these programs
STATE = 4 * 4 * 508_992  # bytes: float32 parameters, two moments and the sum of gradients
SQUARE = re.compile(rf"[\[<x,](?:{LENGTH}x{LENGTH}x|{LENGTH},{LENGTH}\])")  # an array of T x T


def run_with(compiler, file, *arguments):
    """Runs `file` with these arguments and the packages of the folder `compiler`; it must succeed."""
    places = (ROOT, ROOT / "tests/helpers", compiler)
    # Nothing runs on the device of the compiler, whose plugin would look for its libraries.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(file).resolve()), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def compile_for(*options, share):
    """Lowered and compiled programs by name, after checks that every kind of device shares.

    A device holds at most `share` of the state.
    """
    from compiled_rig import check_filter

    from benchmarks.compiled.ahead_of_time import lowered_programs, make_topology_mesh, parse

    arguments = parse([*options, "--length", str(LENGTH), "--slots", "32"])
    mesh = make_topology_mesh(arguments)
    check_filter(mesh.devices.flat[0])
    lowered = lowered_programs(arguments, mesh)
    assert sorted(lowered) == ["apply", "copy", "decode", "log-probabilities", "prefill", "update"]
    compiled = {name: program.compile() for name, program in lowered.items()}
    copied = compiled.pop("copy")  # within a device, and in place
    assert not re.search("all-(reduce|gather|to-all)|collective-permute", copied.as_text())
    assert copied.memory_analysis().temp_size_in_bytes < copied.memory_analysis().argument_size_in_bytes / 2
    held = compiled["update"].memory_analysis().argument_size_in_bytes
    assert held < share * STATE, f"{held} bytes of arguments on one device"
    shared = ["--attention", "xla", "--share-prefixes", "--only", "update"]
    arguments = parse([*options, "--length", str(LENGTH), *shared])
    (program,) = lowered_programs(arguments, make_topology_mesh(arguments)).values()
    compiled["update with shared prefixes"] = program.compile()
    for name, program in compiled.items():
        assert "all-reduce" in program.as_text() or "all-gather" in program.as_text(), (
            f"{name} is not sharded"
        )
    return lowered, compiled
