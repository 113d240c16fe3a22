"""The trainer's programs compile for TPUs, by TPU's own compiler: no chip is needed."""

import argparse

import pytest

pytest.importorskip("libtpu")

pytestmark = pytest.mark.slow


def test_update_logprobs_and_sampler_compile_for_a_sharded_tpu_mesh():
    from benchmarks.ahead_of_time import programs

    arguments = argparse.Namespace(
        topology="v5e:2x4", shape="tiny", fsdp=4, tensor=2, length=256, rows=1, slots=8, remat="full"
    )
    lowered = programs(arguments)
    compiled = {name: program.compile() for name, program in lowered.items()}
    assert sorted(compiled) == ["decode", "log-probabilities", "prefill", "update"]
    for name, program in compiled.items():
        assert "all-reduce" in program.as_text(), f"{name} is not sharded"
    # float32 parameters and two moments, an eighth of them on each device, and what the tiling pads.
    held = compiled["update"].memory_analysis().argument_size_in_bytes
    assert held < 3 * 4 * 508_992 / 4
