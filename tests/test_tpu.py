"""The trainer's programs compile for TPUs, by TPU's own compiler: no chip is needed.

In a process of its own, with libtpu from a folder of its own: where vLLM can import libtpu, it takes the
machine for a TPU's.
"""

import re
import sys
from pathlib import Path

import pytest
from compiler_rig import SQUARE, compile_for, run_with

LIBTPU = Path(sys.prefix) / "libtpu"  # where scripts/test.sh puts it


@pytest.mark.slow
@pytest.mark.skipif(not LIBTPU.is_dir(), reason="no libtpu; scripts/test.sh installs it")
def test_update_logprobs_and_sampler_compile_for_a_sharded_tpu_mesh():
    run_with(LIBTPU, __file__)


def compile_all() -> None:
    _, compiled = compile_for("--topology", "v5e:2x4", share=1 / 4)
    for name in ("update", "log-probabilities", "update with shared prefixes"):
        text = compiled[name].as_text()
        assert not SQUARE.search(text), f"{name} holds an array of T x T"
        assert ("splash" in text) == (name in ("update", "log-probabilities"))
    # Prefill gathers weights over fsdp; what it sums, over pairs of the tensor axis, is a device's own rows.
    text = compiled["prefill"].as_text()
    sums = [line for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    pairs = r"replica_groups=(\[4,2\]<=\[8\]|\{\{0,1\},|mesh\['data'=1,'fsdp'=4,'tensor'=2\] \{'tensor'\})"
    assert sums and all(re.search(pairs, line) for line in sums), sums
    assert "all-gather" in text and all("all-reduce" in program.as_text() for program in compiled.values())


if __name__ == "__main__":
    compile_all()
