"""The trainer's programs compile for GPUs, by XLA's own compiler for them: no GPU and no driver is needed.

In a process of its own, with the compiler from a folder of its own: its packages of CUDA must not stand
beside those that a build of torch wants.
"""

import sys
from pathlib import Path

import pytest
from compiler_rig import SQUARE, compile_for, run_with

COMPILER = Path(sys.prefix) / "cuda_compiler"  # where scripts/test.sh puts it


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER.is_dir(), reason="no compiler for CUDA; scripts/test.sh installs it")
def test_update_logprobs_and_sampler_compile_for_a_sharded_mesh_of_gpus():
    run_with(COMPILER, __file__)


def compile_all() -> None:
    lowered, compiled = compile_for("--platform", "cuda", "--gpu", "h100", "--topology", "1x1x8", share=1 / 6)
    for name, program in compiled.items():
        for text in (program.as_text(), lowered[name].as_text() if name in lowered else ""):
            assert not SQUARE.search(text), f"{name} holds an array of T x T"
            assert "__cudnn" not in text, f"{name} wants cuDNN"
        if name in ("update", "log-probabilities"):
            assert "triton" in program.as_text(), f"{name} has another attention"


if __name__ == "__main__":
    compile_all()
