"""Signals: the first one stops in order, work that is held ends whole, a second one ends at once."""

import asyncio
import contextvars
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from small_run import SMALL

from calibadv_jax import cli
from calibadv_jax.core import signals
from calibadv_jax.core.signals import Stop, await_in_daemon_thread

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_first_signal_raises_with_its_status(number, status):
    before, (ours, others) = signal.getsignal(number), socket.socketpair()
    others.setblocking(False)
    signal.set_wakeup_fd(others.fileno())
    with ours, others:
        with pytest.raises(SystemExit) as stop, Stop():
            os.kill(os.getpid(), number)
            pytest.fail("went on")
        assert signal.getsignal(number) is before and signal.set_wakeup_fd(-1) == others.fileno()
    assert stop.value.code == status


def test_held_work_is_finished_before_the_stop():
    done = []
    with pytest.raises(SystemExit) as end, Stop() as stop:
        with stop.held():
            with stop.held():
                os.kill(os.getpid(), signal.SIGTERM)
            done.append("update")
        done.append("next step")
    assert end.value.code == 143 and done == ["update"]


BLOCKED = """
import ctypes
from calibadv_jax.core.signals import Stop
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(256)
with Stop("the step is finished and saved", "the last step is saved", "it goes on") as stop, stop.held():
    lock(mutex)
    print("held", flush=True)
    lock(mutex)  # as a program of the device: no handler runs before it returns, which is never
"""


def test_signal_is_answered_while_a_device_computes():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", BLOCKED], **pipes) as process:
        assert process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("Ctrl-C: the step is finished and saved; a second Ctrl-C")
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "Ctrl-C: ended at once, without saving\n"
    assert process.returncode == 130


def test_second_signal_of_another_kind_ends_at_once():
    """The process ends with the status of the second signal."""
    program = (
        "import os, signal\nfrom calibadv_jax.core.signals import Stop\n"
        "with Stop() as stop, stop.held():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('held', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    signal.pause()\n    print('went on', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (130, "held\n")


def test_end_after_signal_says_next_step(capfd):
    with pytest.raises(SystemExit), Stop("", "the last step is saved", "the same command goes on"):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            while "SIGTERM: the last step" not in capfd.readouterr().err:  # written by another thread
                pass
    assert capfd.readouterr().err == "stopped; the same command goes on\n"
    broken = pytest.raises(ValueError, match="broken")
    with broken, Stop("", "", "the same command goes on") as stop, stop.held():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("broken")
    assert "goes on" not in capfd.readouterr().err


def test_signal_during_the_end_leaves_no_traceback():
    program = (
        "import atexit, os, signal\nfrom calibadv_jax import cli\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\ncli.run_and_exit(lambda: None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_unwaited_work_returns_value_or_error():
    def divide(number, by=1):
        assert threading.current_thread().daemon and variable.get() == "of the caller"
        return number / by

    variable = contextvars.ContextVar("variable")
    variable.set("of the caller")
    assert asyncio.run(await_in_daemon_thread(divide, 6, by=3)) == 2
    with pytest.raises(ZeroDivisionError):
        asyncio.run(await_in_daemon_thread(divide, 6, by=0))


def test_leave_does_not_wait_for_unwaited_work(monkeypatch, capsys):
    monkeypatch.setattr(signals, "GRACE_SECONDS", 0.1)
    left, go_on = [], threading.Event()
    monkeypatch.setattr(signals.os, "_exit", lambda status: left.append(status))

    async def abandoned():
        task = asyncio.create_task(await_in_daemon_thread(go_on.wait))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(abandoned())
    signals.exit_process(143)
    signals.exit_process("error: gone")
    assert left == [143, 1] and capsys.readouterr().err == "error: gone\n"
    go_on.set()
    monkeypatch.setattr(signals, "GRACE_SECONDS", 60.0)
    with pytest.raises(SystemExit) as end:
        cli.run_and_exit(lambda: sys.exit(143))
    assert end.value.code == 143 and left == [143, 1]


def test_released_work_is_interrupted():
    stop = Stop()
    with pytest.raises(SystemExit) as end, stop.held(), stop.released():
        stop._handle(signal.SIGTERM, None)
        raise AssertionError("it goes on")
    assert end.value.code == 143
    with pytest.raises(SystemExit), stop.held(), stop.released():
        raise AssertionError("it begins")


def test_call_of_another_process_is_no_signal(monkeypatch, capfd):
    """A scheduler's SIGTERM reaches all processes; the call of the quickest is no first of two signals."""
    left = queue.SimpleQueue()
    monkeypatch.setattr(os, "_exit", left.put)
    with pytest.raises(SystemExit) as end, Stop() as stop, stop.held():
        stop.request_stop()
        stop.request_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        while "a second" not in capfd.readouterr().err:
            assert left.empty()
        os.kill(os.getpid(), signal.SIGTERM)
        assert left.get() == 143
    assert end.value.code == 143 and not stop.was_requested
    capfd.readouterr()
    with pytest.raises(SystemExit), Stop() as stop:
        stop.request_stop()
    assert capfd.readouterr().err == "", "it says nothing of its end"


ENDLESS = """
import os, signal, sys
import jax
import jax.numpy as jnp
from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.sampler.engine import CacheEngine

def decode(self, *_):
    os.kill(os.getpid(), signal.SIGTERM)
    return jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 2, jnp.sin, x))(0.0).block_until_ready()

CacheEngine.decode = decode  # a chunk that takes as long as the device likes
write_world(load_config(sys.argv[2], sys.argv[3:]).world)
cli.calibadv(["train", *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_ends_during_a_sampled_chunk(tmp_path):
    pytest.importorskip("faiss")
    words = ["--config", "configs/quickstart.yaml", *SMALL, "mesh.fsdp=-1", f"run.dir={tmp_path}/run"]
    done = subprocess.run([sys.executable, "-c", ENDLESS, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 143, done.stderr
    for line in ("SIGTERM: the last whole step", "stopped; the same command", "checkpoint saved at step 0"):
        assert line in done.stderr
    assert (tmp_path / "run/checkpoints/0").is_dir()
    assert "Traceback" not in done.stderr and "Task was destroyed" not in done.stderr
