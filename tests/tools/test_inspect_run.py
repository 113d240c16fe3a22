"""The command `calibadv inspect`: its arguments, the server it starts."""

import re
import signal
import subprocess
import sys
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.generated_run import make_run
from calibadv_jax import cli

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "calibadv_jax/contrib/pages/static"


def test_kept_steps_are_served(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "run", 160)
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: None)
    for port, status, output in (
        ("0", 0, "2 steps, 160 trajectories"),
        ("70000", 2, "argument --port: 70000: give 0 or more and below 65536"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.calibadv(["inspect", str(tmp_path / "run"), "--port", port])
        printed = capsys.readouterr()
        assert end.value.code == status and output in printed.err
        assert printed.out.startswith("http://localhost:") == (status == 0)


def test_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["inspect", str(tmp_path)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}: no rollouts") and error.count("\n") == 1


@pytest.mark.slow
def test_server_says_its_address_and_ends_with_ctrl_c(tmp_path):
    make_run(tmp_path / "run", 160)
    # The tests may run as a background job, whose children ignore SIGINT from their start.
    take_sigint = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = f"{take_sigint}; from calibadv_jax import cli; cli.calibadv()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "inspect", str(tmp_path / "run"), "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    address = process.stdout.readline().strip()
    with urllib.request.urlopen(f"{address}data/index.json", timeout=60) as answer:
        assert answer.status == 200 and b'"steps"' in answer.read()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors


def test_files_of_the_page_lie_beside_the_code():
    names = {path.name for path in STATIC.iterdir()}
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= names
    texts = [path.read_text() for path in STATIC.glob("*.js")]
    used = re.findall(r'(?:href|src)="([^"]+)"', (STATIC / "index.html").read_text())
    for text in texts:
        used += re.findall(r'from "\./([^"]+)"', text)
    assert set(used) <= names


@pytest.mark.parametrize("call", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("])
def test_scripts_of_the_page_make_no_markup_of_text(call):
    assert [path.name for path in STATIC.glob("*.js") if call in path.read_text()] == []
