"""A rollout worker: ``python -m calibadv_jax.sampler.vllm_worker --model FOLDER``.

Starts vLLM's own server with the weight-transfer engine ``orbax``, waits until it answers, warms it up,
watches it, and starts it again on the same port when it crashes. The routes that swap weights have no
authentication: keep the worker on loopback or on a network that only the trainer can reach.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from calibadv_jax.core.errors import EnvironmentFailure, UserError, exit_status
from calibadv_jax.core.files import write_text
from calibadv_jax.sampler.vllm_command import require_vllm, server_command

POLL_PAUSE = 0.2  # seconds between two checks of the server
HEALTH_TIMEOUT = 5.0  # seconds that a starting server may take to answer a question about its health
END_SECONDS = 10.0  # seconds that the server may take to end after each signal
FREE_PORTS = range(20_000, 32_000)  # below the ports of outgoing connections
PORT_ATTEMPTS = 100  # number of ports that are tried
# Address at which this machine reaches a server that listens on all addresses.
LOOPBACK_OF_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of a rollout worker.

    Args:
        argv: its words; None: those of this process.

    Returns:
        The options. `extra` holds the words after ``--``, which are passed to vLLM's server.

    Raises:
        SystemExit: the words are invalid (status 2), or ask for help (status 0).
    """
    parser = argparse.ArgumentParser(
        prog="python -m calibadv_jax.sampler.vllm_worker",
        description=__doc__,
        epilog="Arguments after -- are passed to vLLM's server unchanged.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="HuggingFace folder with config and tokenizer")
    add(
        "--flavour",
        choices=["auto", "gpu", "cpu", "tpu"],
        default="auto",
        help="which build of vLLM is installed; auto: as its package says",
    )
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
    """Run a rollout worker.

    It writes a UserError to the standard error output.

    Args:
        argv: words of the command line; None: those of this process.

    Returns:
        The exit status.

    Raises:
        SystemExit: as `parse` and `serve`.
    """
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
    """Run the server until a signal, the parent's end or too many deaths.

    Args:
        arguments: the options, from `parse`.

    Returns:
        The exit status 1, after the last restart.

    Raises:
        UserError: the server is not ready after its first start, or no port is free.
        SystemExit: SIGTERM has come (status 143), or the parent has ended (status 0).
    """
    arguments.host = arguments.host.removeprefix("[").removesuffix("]")  # brackets belong to URLs
    port = arguments.port or _free_port(arguments.host)
    command, environment = server_command(arguments, port)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for restarts_left in range(arguments.restarts, -1, -1):
        try:
            status = _run_server(command, environment, arguments, port)
            message = f"error: vLLM's server ended with status {status}"
        except UserError as error:
            is_first_start = restarts_left == arguments.restarts
            if is_first_start:
                raise
            message = f"error: {error}"
        if restarts_left:
            message += f"; starting it again ({restarts_left - 1} restarts left after this one)"
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
    return 1


def _run_server(
    command: list[str], environment: dict[str, str], arguments: argparse.Namespace, port: int
) -> int:
    """Start the server, and return its exit status when it has died; raises as `_get_ready`."""
    # vLLM leaves its sockets behind.
    with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as scratch:
        variables = os.environ | environment | {"VLLM_RPC_BASE_PATH": scratch}
        server = subprocess.Popen(command, env=variables, start_new_session=True)
        try:
            with _guarded(server):
                _watch(server, arguments, port)
            return server.returncode
        finally:
            _stop(server)  # if the guard could not start


def _watch(server: subprocess.Popen[bytes], arguments: argparse.Namespace, port: int) -> None:
    """Return when the server has died; SystemExit when the parent has ended."""
    host = LOOPBACK_OF_ANY.get(arguments.host, arguments.host)
    _get_ready(server, _url(host, port), arguments)
    if arguments.port_file:
        write_text(arguments.port_file, str(port))
    sys.stdout.write(f"ready on {_url(arguments.host, port)}\n")
    sys.stdout.flush()
    while server.poll() is None:
        _leave_with_parent(arguments)
        time.sleep(POLL_PAUSE)


def _url(host: str, port: int) -> str:
    """Return the address of a server; an IPv6 address stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _leave_with_parent(arguments: argparse.Namespace) -> None:
    if arguments.parent_pid and os.getppid() != arguments.parent_pid:
        sys.exit(0)


def _get_ready(server: subprocess.Popen[bytes], url: str, arguments: argparse.Namespace) -> None:
    """Raise EnvironmentFailure if the server ends, is not ready in time, or fails the warm-up."""
    # Without verify=False every client loads certificates, which a plain address never needs.
    with httpx.Client(base_url=url, timeout=HEALTH_TIMEOUT, trust_env=False, verify=False) as http:
        _wait_until_healthy(server, http, arguments)
        _warm_up(http, arguments.start_timeout)


def _wait_until_healthy(
    server: subprocess.Popen[bytes], http: httpx.Client, arguments: argparse.Namespace
) -> None:
    timeout = arguments.start_timeout
    deadline = time.monotonic() + timeout
    while True:
        if server.poll() is not None:
            raise EnvironmentFailure(
                f"vLLM's server ended with status {server.returncode}; its output is above"
            )
        _leave_with_parent(arguments)  # a server may load for many minutes
        if time.monotonic() > deadline:
            raise EnvironmentFailure(
                f"vLLM's server was not ready within {timeout:g} s; raise --start_timeout"
            )
        with suppress(httpx.HTTPError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(POLL_PAUSE)


def _warm_up(http: httpx.Client, timeout: float) -> None:
    """Sample a few tokens, so that the first completion of a run does not wait for compilation."""
    request = {"token_ids": [0] * 16, "sampling_params": {"max_tokens": 4, "logprobs": 0, "seed": 0}}
    try:
        reply = http.post("/inference/v1/generate", json=request, timeout=timeout)
    except httpx.HTTPError as error:
        raise EnvironmentFailure(
            f"vLLM's server did not answer the warm-up ({type(error).__name__})"
        ) from error
    if reply.status_code != 200:
        raise EnvironmentFailure(
            f"vLLM's server answered the warm-up with {reply.status_code}: {reply.text[:300]}"
        )


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
    """Ask the server's process group to end, then kill it."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, signal_number)
            server.wait(END_SECONDS)


def _free_port(host: str) -> int:
    """Return a free port below those of outgoing connections: the server binds it only after its imports."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.SystemRandom().sample(FREE_PORTS, PORT_ATTEMPTS):
        with suppress(OSError), socket.create_server((host, port), family=family):
            return port
    raise UserError(
        f"{host}: none of {PORT_ATTEMPTS} ports between {FREE_PORTS.start} and {FREE_PORTS.stop} is free;"
        " set --port"
    )


if __name__ == "__main__":
    sys.exit(main())
