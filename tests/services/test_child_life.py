"""A child service from its start to its end: what it is told, where it answers, and that nothing is left."""

import os
import sys
from pathlib import Path

import pytest

from calibadv_jax.services import child_process
from calibadv_jax.services.child_process import ChildService

READY = """
import os, signal, sys, time
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(sys.argv[1:], os.environ.get("WHAT"), os.environ.get("KEPT"), flush=True)
file = sys.argv[sys.argv.index("--port_file") + 1]
with open(file + ".unfinished", "w") as out:
    out.write("8123")
os.replace(file + ".unfinished", file)
time.sleep(60)
"""


def make(tmp_path, *arguments, **options):
    command = [sys.executable, "-c", READY, *arguments]
    return ChildService("the child", command, tmp_path / "logs" / "child.log", 30.0, "key", **options)


def test_it_is_told_where_to_write_its_port_and_whose_child_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setenv("WHAT", "ours")
    with make(tmp_path, "mine", environment={"WHAT": "its own"}) as service:
        assert service.url == "http://127.0.0.1:8123"
        file = service._port_file
        output = (tmp_path / "logs/child.log").read_text()
        expected = ["mine", "--port", "0", "--port_file", str(file), "--parent_pid", str(os.getpid())]
        assert output == f"{expected} its own yes\n"
    assert os.environ["WHAT"] == "ours"


def test_nothing_is_left_at_the_end(tmp_path):
    service = make(tmp_path)
    with pytest.raises(ZeroDivisionError), service:
        process, folder = service.process, service._port_file.parent
        assert process.poll() is None and folder.is_dir()
        raise ZeroDivisionError
    assert process.returncode is not None and not folder.exists()
    service.stop()  # harmless


@pytest.mark.timeout(60)  # else it would wait for a child that never ends
def test_a_child_that_does_not_listen_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "STOP_SECONDS", 0.3)
    with make(tmp_path, "ignore") as service:
        process = service.process
    assert process.returncode == -9


def test_several_start_side_by_side(tmp_path):
    services = [make(tmp_path / str(number)) for number in range(2)]
    for service in services:
        service.start()
    files = [service._port_file for service in services]
    for service in services:
        service.wait()
    assert len(set(files)) == 2 and all(isinstance(file, Path) for file in files)
    for service in services:
        service.stop()
