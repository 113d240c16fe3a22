"""The trainer's programs compile for TPUs, by TPU's own compiler: no chip is needed.

In a process of its own, with libtpu from a folder of its own: where vLLM can import libtpu, it takes the
machine for a TPU's.
"""

import re
import sys
from pathlib import Path

import pytest
from compiler_rig import run_with

LENGTH = 384  # of a row; no other size of these programs
LIBTPU = Path(sys.prefix) / "libtpu"  # where scripts/test.sh puts it


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU.is_dir(), reason="no libtpu; scripts/test.sh installs it")
def test_update_logprobs_and_sampler_compile_for_a_sharded_tpu_mesh():
    run_with(LIBTPU, __file__)


def compile_all() -> None:
    from compiled_rig import check_filter

    from benchmarks.compiled.ahead_of_time import lowered_programs, make_topology_mesh, parse

    arguments = parse(["--topology", "v5e:2x4", "--length", str(LENGTH), "--slots", "32"])
    mesh = make_topology_mesh(arguments)
    check_filter(mesh.devices.flat[0])
    lowered = lowered_programs(arguments, mesh)
    compiled = {name: program.compile() for name, program in lowered.items()}
    assert sorted(compiled) == ["apply", "copy", "decode", "log-probabilities", "prefill", "update"]
    copied = compiled.pop("copy")  # within a device, and in place
    assert not re.search("all-(reduce|gather|to-all)|collective-permute", copied.as_text())
    assert copied.memory_analysis().temp_size_in_bytes < copied.memory_analysis().argument_size_in_bytes / 2
    for name, program in compiled.items():
        assert "all-reduce" in program.as_text(), f"{name} is not sharded"
    for name in ("update", "log-probabilities"):
        text = compiled[name].as_text()
        assert "splash" in text and not re.search(rf"\[(\d+,)*{LENGTH},{LENGTH}\]", text), name
    # Prefill gathers weights over fsdp; what it sums, over pairs of the tensor axis, is a device's own rows.
    sums = [
        line
        for line in compiled["prefill"].as_text().splitlines()
        if re.search(r" all-reduce(-start)?\(", line)
    ]
    pairs = r"replica_groups=(\[4,2\]<=\[8\]|\{\{0,1\},|mesh\['data'=1,'fsdp'=4,'tensor'=2\] \{'tensor'\})"
    assert sums and all(re.search(pairs, line) for line in sums), sums
    assert "all-gather" in compiled["prefill"].as_text()
    # float32 parameters, two moments and the sum of gradients, an eighth of them on each device, and padding.
    held = compiled["update"].memory_analysis().argument_size_in_bytes
    assert held < 4 * 4 * 508_992 / 4, f"{held} bytes of arguments on one device"
    shared = ["--attention", "xla", "--share-prefixes", "--only", "update"]
    arguments = parse(["--topology", "v5e:2x4", "--length", str(LENGTH), *shared])
    (program,) = lowered_programs(arguments, make_topology_mesh(arguments)).values()
    text = program.compile().as_text()
    assert "all-reduce" in text and not re.search(rf"\[(\d+,)*{LENGTH},{LENGTH}\]", text)


if __name__ == "__main__":
    compile_all()
