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
    with urllib.request.urlopen(f"{address}data/index.json", timeout=250) as answer:
        assert answer.status == 200 and b'"steps"' in answer.read()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
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


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder, 160)
    return folder


def inspect(*arguments):
    """Runs the command; returns its exit status."""
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["inspect", *map(str, arguments)])
    return end.value.code


def test_groups_are_printed(run_folder, capsys):
    assert inspect(run_folder, "--print") == 0
    newest = capsys.readouterr().out
    assert newest.startswith("step 2 · group ")
    assert inspect(run_folder, "--print", "--group", "1/3", "--group", "2/0/4") == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^step .*group \d+", printed, re.MULTILINE) == ["step 1 · group 3", "step 2 · group 0"]
    assert len(re.findall(r"^. trajectory \d", printed, re.MULTILINE)) == 5 + 1


def test_groups_are_written_as_a_page(run_folder, tmp_path, capsys):
    page = tmp_path / "new" / "groups.html"
    assert inspect(run_folder, "--page", page, "--group", "1/3", "--group", "2/0/4") == 0
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text(encoding="utf-8")
    assert text.count("<article") == 5 + 1 and "step 1 · group 3" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--group 1/3", "--group chooses what --print and --page show; add one of them"),
        ("--print --group 7/0", "--group 7/0: step 7 is not kept; the steps that are kept go from 1 to 2"),
        ("--print --group 1/99", "--group 1/99: step 1 has no group 99; choose one of the page's list"),
        ("--print --group 1/3/9", "--group 1/3/9: the group has no such trajectory; it has 0, 1, 2, 3, 4"),
        ("--print --group 1", "argument --group: 1: give STEP/GROUP or STEP/GROUP/TRAJECTORY, such as 30/2"),
    ],
)
def test_groups_that_do_not_exist_are_one_line(run_folder, capsys, arguments, words):
    assert inspect(run_folder, *arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {words}") and error.count("\n") == 1
