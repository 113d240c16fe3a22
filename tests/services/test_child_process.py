"""A child service from its start to its end, and why it ended before it was ready."""

import os
import signal
import sys
import time

import pytest

from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.services import child_process
from calibadv_jax.services.child_process import ChildService


def child(log, code, *arguments, timeout=250.0, **options):
    command = [sys.executable, "-c", code, *arguments]
    return ChildService("the child", command, log, timeout, "some.start_timeout", **options)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import sys; sys.exit('error: none.jsonl: no such corpus')", "none.jsonl: no such corpus"),
        ("import sys; print('bad key'); sys.exit(2)", "bad key"),
        ("raise SystemExit(3)", "no output"),
        ("try: {}['rope']\nexcept KeyError as e: raise RuntimeError('see above') from e", "KeyError: 'rope'"),
        (
            "print('(APIServer pid=5) WARNING 11-21 [utils.py:5] can cause `OSError: [Errno 24]`')\n"
            "print('(EngineCore pid=7) ERROR 11-21 [core.py:9] ValueError: No memory for cache blocks.')\n"
            "print('RuntimeError: Engine core initialization failed. See root cause above.')\n"
            'raise SystemExit("error: vLLM\'s server ended with status 1; its output is above")',
            "ValueError: No memory for cache blocks.",
        ),
        ("print('torch.OutOfMemoryError: ' + 'x' * 900); raise SystemExit(1)", "torch.OutOfMemoryError: xxx"),
        ("print('INFO: 0 errors'); print('Errors: none'); raise SystemExit('gone')", "gone"),
        ("import time; time.sleep(60)", ""),  # not ready in time
    ],
)
def test_cause_is_named_and_the_log(tmp_path, monkeypatch, code, cause):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # the child's output is in order all the same
    log = tmp_path / "logs" / "child.log"
    service = child(log, code, timeout=250.0 if cause else 0.3)
    with pytest.raises(UserError) as caught:
        service.__enter__()
    message = str(caught.value)
    assert type(caught.value) is (UserError if "status 2" in message else EnvironmentFailure)
    assert "\n" not in message and len(message) < 400 + len(str(log))
    assert service.process.returncode is not None and not service._port_file.parent.exists()
    if cause:
        assert message.startswith("the child ended with status ") and f": {cause}" in message
        assert message.endswith(f"; see {log}")
    else:
        assert message.endswith(f"was not ready within 0.3 s; see {log} or raise some.start_timeout")


def test_long_log_is_set_aside_at_a_start(tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "LONGEST_LOG", 100)
    log, old = tmp_path / "child.log", tmp_path / "child.log.old"
    for text, kept in (("x" * 100, ""), ("y" * 101, "y" * 101), ("z" * 101, "z" * 101)):
        log.write_text(text)
        with pytest.raises(EnvironmentFailure):
            child(log, "raise SystemExit('gone')").__enter__()
        assert (old.read_text() if old.exists() else "") == kept
        assert log.read_text() == ("" if kept else text) + "gone\n"


def test_log_that_another_child_writes_is_not_cut(tmp_path):
    """Two commands may work in the folder of a run; the cause is looked for in the child's own lines."""
    log, go_on = tmp_path / "child.log", tmp_path / "go on"
    wait = "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
    code = f"import pathlib, sys, time; print('ValueError: theirs')\n{wait}\nprint('end')"
    first = child(log, code, str(go_on))
    first.start()
    while not log.read_text():
        time.sleep(0.02)
    with pytest.raises(UserError, match="the child ended with status 1: gone; see"):
        child(log, "raise SystemExit('gone')").__enter__()
    go_on.touch()
    assert first.process.wait() is not None
    first.stop()
    assert log.read_text().splitlines() == ["ValueError: theirs", "gone", "end"]


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


@pytest.mark.parametrize(("argument", "status"), [("mine", -15), ("ignore", -9)])
def test_child_gets_its_arguments_and_is_ended(tmp_path, monkeypatch, argument, status):
    monkeypatch.setattr(child_process, "STOP_SECONDS", 0.3 if argument == "ignore" else 20.0)
    monkeypatch.setenv("KEPT", "yes")
    monkeypatch.setenv("WHAT", "ours")
    service = child(tmp_path / "log", READY, argument, environment={"WHAT": "its own"})
    with pytest.raises(ZeroDivisionError), service:
        process, file = service.process, service._port_file
        assert service.url == "http://127.0.0.1:8123" and process.poll() is None
        expected = [argument, "--port", "0", "--port_file", str(file), "--parent_pid", str(os.getpid())]
        assert (tmp_path / "log").read_text() == f"{expected} its own yes\n"
        raise ZeroDivisionError
    assert process.returncode == status and not file.parent.exists()
    assert os.environ["WHAT"] == "ours"
    service.stop()  # harmless


def test_children_start_side_by_side(tmp_path):
    """Both are started before either is waited for, and each has a port file of its own."""
    services = [child(tmp_path / name, READY) for name in ("first", "second")]
    for service in services:
        service.start()
    port_files = {service._port_file for service in services}
    for service in services:
        service.wait()
        assert service.process.poll() is None
    assert len(port_files) == 2
    for service in services:
        service.stop()


@pytest.mark.parametrize("has_own_modules", [False, True])
def test_modules_of_the_current_folder_are_only_for_those_who_name_them(
    tmp_path, monkeypatch, has_own_modules
):
    (tmp_path / "planted.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    service = child(tmp_path / "log", "import planted", has_own_modules=has_own_modules)
    expected = "ended with status 0" if has_own_modules else "No module named 'planted'"
    with pytest.raises(EnvironmentFailure, match=expected):
        service.__enter__()


# A child that is ready at once, and notes its port; with the file "broken" beside it, it ends.
RESTARTED = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
with (folder / "starts").open("a") as starts:
    starts.write(options["--port"] + "\\n")
if (folder / "broken").exists():
    sys.exit("error: the disk is full")
port = options["--port"] if options["--port"] != "0" else "4321"
pathlib.Path(options["--port_file"]).write_text(port)
time.sleep(60)
"""


class Lines(list):
    """Warnings, with a wait for one."""

    def wait_for(self, words):
        while not any(words in line for line in self):  # bounded by pytest's limit
            time.sleep(0.01)


@pytest.mark.medium
def test_child_that_dies_is_started_again_on_its_port(tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(child_process, "FIRST_RESTART_PAUSE", 0.01)
    warnings, log = Lines(), tmp_path / "log"
    with child(log, RESTARTED, str(tmp_path)) as service, service.kept_alive(warnings.append):
        first = service.process
        first.kill()
        warnings.wait_for("the child answers again")
        assert warnings[0] == f"the child ended with status -9: no output; starting it again; see {log}"
        assert service.process is not first and service.url == "http://127.0.0.1:4321"
        (tmp_path / "broken").touch()
        service.process.kill()
        warnings.wait_for("ended with status 1: the disk is full; see")  # and again, and again
        (tmp_path / "broken").unlink()
        del warnings[:]
        warnings.wait_for("the child answers again")
    starts = (tmp_path / "starts").read_text().split()
    assert starts[0] == "0" and set(starts[1:]) == {"4321"} and len(starts) >= 4
    assert service.process.returncode is not None


@pytest.mark.medium
def test_child_that_ends_with_its_block_is_not_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(child_process, "WATCH_SECONDS", 0.01)
    warnings = Lines()
    with child(tmp_path / "log", RESTARTED, str(tmp_path)) as service:
        with service.kept_alive(warnings.append):
            service.process.send_signal(signal.SIGINT)  # Ctrl-C reaches both
            service.process.wait()
        assert service.process.returncode in child_process.INTERRUPT_STATUSES
    assert warnings == [] and (tmp_path / "starts").read_text() == "0\n"
