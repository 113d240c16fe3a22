"""The launcher around a server that dies, hangs up and does not come back at first."""

import asyncio
import gzip
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import httpx
import pytest
from http_rig import replying

from calibadv_jax.core.errors import UserError
from calibadv_jax.sampler import rollout_workers, vllm_command, vllm_worker
from calibadv_jax.sampler.vllm_command import server_command
from calibadv_jax.sampler.vllm_messages import error_message
from calibadv_jax.sampler.vllm_worker import parse
from calibadv_jax.services.http_client import Unreachable, open_session

ROOT = Path(vllm_worker.__file__).parents[2]
# What the server does at each of its starts; a start beyond the last does as the last.
SERVER = """
import os, signal, socket, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
host, port, book, *acts = sys.argv[1:]
with open(book, "a") as file:
    file.write("x")
act = acts[min(os.path.getsize(book), len(acts)) - 1]
if act == "ends":
    sys.exit(7)
if act == "stays":  # as vLLM's server with a completion under way, and its engine
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = subprocess.Popen(["sleep", "600"])
    with open(book + ".pids", "w") as file:
        file.write(f"{os.getpid()} {engine.pid}")
if act == "loads":
    with open(book + ".pids", "w") as file:
        file.write(f"{os.getpid()}")
    signal.pause()

class Handler(BaseHTTPRequestHandler):
    def answer(self):
        # Read to its end: a connection closed before that may be reset, which is another error.
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if act == "hangs up" and self.command == "POST":
            self.connection.close()
            return
        status = 500 if act == "refuses" and self.command == "POST" else 200
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        if act == "dies" and self.command == "POST":
            threading.Timer(0.2, os._exit, [9]).start()
    do_GET = do_POST = answer
    def log_message(self, *_): pass

class Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

Server((host, int(port)), Handler).serve_forever()
"""
LAUNCHER = """
import sys
from calibadv_jax.sampler import vllm_worker
server, book, acts, *arguments = sys.argv[1:]
vllm_worker.require_vllm = lambda: None
vllm_worker.END_SECONDS = 2.0
vllm_worker.server_command = lambda arguments, port: (
    [sys.executable, server, arguments.host, str(port), book, *acts.split(",")], {}
)
sys.exit(vllm_worker.main(arguments))
"""


@pytest.fixture
def launch(tmp_path):
    """Starts the launcher; ended at the end of the test."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []

    def start(*acts, restarts=10, more=(), through=()):
        files = [str(tmp_path / "server.py"), str(tmp_path / "book"), ",".join(acts)]
        options = ["--model", str(tmp_path), "--port", str(port), "--restarts", str(restarts)]
        options += ["--port_file", str(tmp_path / "port"), *more]
        command = [*through, sys.executable, "-c", LAUNCHER, *files, *options]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process, f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stderr.close()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("acts", "signals"),
    [
        (["dies", "hangs up", "refuses", "ends", "stays"], [signal.SIGKILL]),
        (["stays"], [signal.SIGTERM] * 2),  # a scheduler's, and the trainer's own stop
    ],
    ids=["killed", "twice"],
)
def test_ended_launcher_leaves_no_server_or_engine(launch, tmp_path, acts, signals):
    """Also after new starts that failed in every way; the last one served."""
    process, url = launch(*acts)
    is_healthy, pids = False, tmp_path / "book.pids"
    while not is_healthy:
        assert process.poll() is None
        time.sleep(0.05)
        with suppress(httpx.TransportError):
            is_healthy = pids.is_file() and httpx.get(f"{url}/health", trust_env=False).is_success
    server_and_engine = [int(pid) for pid in pids.read_text().split()]
    assert all(map(is_running, server_and_engine))
    for number in signals:
        process.send_signal(number)
        time.sleep(0.5)  # of two seconds in which the server may end by itself
    process.wait()
    while any(map(is_running, server_and_engine)):
        time.sleep(0.05)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("acts", "status", "problems"),
    [
        (["ends", "stays"], 75, ["ended with status 7"]),
        (["dies", "hangs up", "ends"], 1, ["ended with status 9", "did not answer", "ended with status 7"]),
    ],
    ids=["first start", "restarts"],
)
def test_launcher_ends_with_its_last_start(launch, tmp_path, acts, status, problems):
    process, _ = launch(*acts, restarts=2)
    assert process.wait() == status
    lines = process.stderr.read().splitlines()
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith(f"error: vLLM's server {problem}")
    assert "restart" not in lines[-1] and (tmp_path / "port").exists() == (status == 1)


@pytest.mark.medium
def test_failed_first_start_points_to_the_output(launch, tmp_path):
    process, _ = launch("ends", "serves")
    assert process.wait() == 75
    assert process.stderr.read() == "error: vLLM's server ended with status 7; its output is above\n"
    assert not (tmp_path / "port").exists()


@pytest.mark.medium
@pytest.mark.parametrize("host", ["::1", "::", "[::1]"])
def test_server_of_ipv6_is_found_and_named(launch, tmp_path, host):
    """The port is free on the same host, and the address has brackets."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    process, _ = launch("serves", more=["--host", host, "--port", "0"])
    while not (tmp_path / "port").exists():
        assert process.poll() is None
        time.sleep(0.05)
    port = int((tmp_path / "port").read_text())
    socket.create_connection(("::1", port)).close()
    assert vllm_worker._url(host.strip("[]"), port) == f"http://[{host.strip('[]')}]:{port}"


@pytest.mark.medium
def test_restarts_that_are_left_are_counted(launch):
    process, _ = launch("dies", "hangs up", "ends", restarts=3)
    assert process.wait() == 1
    lines = process.stderr.read().splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "error: vLLM's server ended with status 9",
        "error: vLLM's server did not answer the warm-up (RemoteProtocolError)",
        "error: vLLM's server ended with status 7",
        "error: vLLM's server ended with status 7",
    ]
    for left, line in zip((2, 1, 0), lines[:3], strict=True):
        assert line.endswith(f"; starting it again ({left} restarts left after this one)")
    assert "restart" not in lines[3]


# A parent of the launcher, which only waits for it.
PARENT = ("sh", "-c", '"$@" --parent_pid=$$ & wait', "sh")


@pytest.mark.medium
@pytest.mark.parametrize("act", ["loads", "stays"])
def test_launcher_and_server_leave_with_the_parent(launch, tmp_path, act):
    """Before the server is ready, and after it."""
    parent, _ = launch(act, through=PARENT)
    expected = tmp_path / ("port" if act == "stays" else "book.pids")
    while not (expected.is_file() and expected.read_text()):
        assert parent.poll() is None
        time.sleep(0.05)
    pids = [int(pid) for pid in (tmp_path / "book.pids").read_text().split()]
    assert all(map(is_running, pids))
    parent.kill()
    assert parent.stderr.read() == ""  # until the launcher, which has it too, has ended
    while any(map(is_running, pids)):
        time.sleep(0.05)
    assert (tmp_path / "port").exists() == (act == "stays")


def is_running(pid):
    """Whether the process exists and is no zombie, which nobody may be there to collect."""
    listing = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return listing.stdout.strip()[:1] not in ("", "Z")


@pytest.mark.parametrize("body", [b" " * (2**26 + 1), b"[" * 100_000], ids=["long", "brackets"])
def test_odd_reply_is_from_no_worker(body):
    async def ask(question, url):
        async with open_session(20) as http:
            await question(http, url)

    with replying((200, gzip.compress(body, 1), {"Content-Encoding": "gzip"})) as (url, _):
        with pytest.raises(UserError, match="no /weight_info"):
            asyncio.run(ask(rollout_workers.ask_label, url))
        if body[:1] == b" ":
            with pytest.raises(Unreachable, match="/health: the reply is longer than 64 MiB"):
                asyncio.run(ask(rollout_workers.ask_alive, url))


def test_message_of_a_worker_is_printable():
    assert error_message(b'{"error": {"message": "a \\ud83d\\u001b[31m b"}}') == "a [31m b"
    assert error_message(b"[" * 100_000).startswith("[[[")


def command(*arguments, port=8123):
    return server_command(parse(["--model", "folder", *arguments]), port)


def test_options_reach_the_server():
    """Log-probabilities at the sampling temperature, no defaults of the folder, weights from swaps."""
    words, environment = command("--flavour", "tpu")
    fixed = "--served-model-name policy --host 127.0.0.1 --port 8123 --dtype bfloat16"
    fixed += " --weight-transfer-config {backend} --enable-scale-out"
    fixed += " --logprobs-mode processed_logprobs --generation-config vllm --max-num-seqs 256"
    fixed += " --disable-uvicorn-access-log --load-format dummy --tensor-parallel-size 1"
    expected = ["--model", "folder", *fixed.split()]
    assert [word.replace('{"backend": "orbax"}', "{backend}") for word in words[3:]] == expected
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"  # without it there are no routes to swap by
    chosen = "--dtype float32 --max_num_seqs 7 --tensor_parallel_size 2 --max_model_len 512"
    words, environment = command("--flavour", "gpu", *chosen.split(), "--", "--enable-x", "1")
    line = " ".join(words)
    for option in ("dtype float32", "max-num-seqs 7", "tensor-parallel-size 2"):
        assert f" --{option} " in line
    assert line.endswith(" --max-model-len 512 --gpu-memory-utilization 0.9 --enable-x 1")
    assert not {"--enforce-eager", "VLLM_CPU_KVCACHE_SPACE"} & {*words, *environment}


def test_share_of_the_gpu_memory_is_that_of_the_option():
    words, environment = command("--flavour", "gpu", "--gpu_memory_utilization", "0.5")
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.5"
    assert "--enforce-eager" not in words
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert "--gpu-memory-utilization" not in command("--flavour", "tpu")[0]


@pytest.mark.parametrize(
    ("package", "version", "flavour"),
    [
        ("vllm-cpu", "0.32.0", "cpu"),
        ("vllm", "0.32.0+cpu", "cpu"),
        ("vllm-tpu", "0.32.0", "tpu"),
        ("vllm", "0.32.0", "gpu"),
        ("vllm", "0.32.0+cu130", "gpu"),
    ],
)
def test_installed_build_is_used(package, version, flavour, monkeypatch):
    def version_of(name):
        if name != package:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr(vllm_command, "version", version_of)
    assert vllm_command.installed_flavour() == flavour
    _, environment = command()
    assert ("VLLM_CPU_KVCACHE_SPACE" in environment) == (flavour == "cpu")
    assert "VLLM_CPU_KVCACHE_SPACE" not in command("--flavour", "gpu")[1]


@pytest.mark.parametrize(("length", "whole"), [(512, "2048"), (20000, "20000")])
def test_cpu_prefills_a_prompt_in_one_part(length, whole, monkeypatch):
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    arguments = ("--flavour", "cpu", "--max_model_len", str(length))
    words, environment = command(*arguments)
    assert "--no-enable-chunked-prefill" in words
    assert words[-2:] == ["--max-num-batched-tokens", whole]
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"])
def test_variable_of_the_user_wins_on_the_cpu(name, monkeypatch):
    monkeypatch.setenv(name, "17")
    _, environment = command("--flavour", "cpu", "--max_model_len", "512")
    assert environment[name] == "17"
