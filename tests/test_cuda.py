"""The trainer's programs compile for GPUs, by XLA's own compiler for them: no GPU and no driver is needed.

In a process of its own, with the compiler from a folder of its own: its packages of CUDA must not stand
beside those that a build of torch wants.
"""

import re
import sys
from pathlib import Path

import pytest
from compiler_rig import run_with

LENGTH = 384  # of a row; no other size of these programs
COMPILER = Path(sys.prefix) / "cuda_compiler"  # where scripts/test.sh puts it


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER.is_dir(), reason="no compiler for CUDA; scripts/test.sh installs it")
def test_update_logprobs_and_sampler_compile_for_a_sharded_mesh_of_gpus():
    run_with(COMPILER, __file__)


def compile_all() -> None:
    from compiled_rig import check_filter

    from benchmarks.compiled.ahead_of_time import lowered_programs, make_topology_mesh, parse

    options = ["--platform", "cuda", "--gpu", "h100", "--topology", "1x1x8", "--slots", "32"]
    arguments = parse([*options, "--length", str(LENGTH)])
    mesh = make_topology_mesh(arguments)
    check_filter(mesh.devices.flat[0])
    lowered = lowered_programs(arguments, mesh)
    assert sorted(lowered) == ["apply", "copy", "decode", "log-probabilities", "prefill", "update"]
    copied = lowered.pop("copy").compile()  # within a device, and in place
    assert not re.search("all-(reduce|gather|to-all)|collective-permute", copied.as_text())
    assert copied.memory_analysis().temp_size_in_bytes < copied.memory_analysis().argument_size_in_bytes / 2
    square = re.compile(rf"[\[<x,](?:{LENGTH}x{LENGTH}x|{LENGTH},{LENGTH}\])")
    compiled = {name: program.compile() for name, program in lowered.items()}
    for name, program in lowered.items():
        before, after = program.as_text(), compiled[name].as_text()
        for text in (before, after):
            assert not square.search(text), f"{name} holds an array of T x T"
            assert "__cudnn" not in text, f"{name} wants cuDNN"
        assert "all-reduce" in after or "all-gather" in after, f"{name} is not sharded"
        if name in ("update", "log-probabilities"):
            assert "triton" in after, f"{name} has another attention"
    memory = compiled["update"].memory_analysis()
    # float32 parameters, two moments and a sum of gradients, an eighth of them on each device, and what is
    # not split.
    held = memory.argument_size_in_bytes
    assert held < 4 * 4 * 508_992 / 6, f"{held} bytes of arguments on one device"
    shared = ["--attention", "xla", "--share-prefixes", "--only", "update"]
    arguments = parse([*options, "--length", str(LENGTH), *shared])
    (program,) = lowered_programs(arguments, make_topology_mesh(arguments)).values()
    text = program.compile().as_text()
    assert not square.search(text) and ("all-reduce" in text or "all-gather" in text)


if __name__ == "__main__":
    compile_all()
