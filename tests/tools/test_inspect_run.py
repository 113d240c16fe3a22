"""The command `calibadv inspect`: its arguments, the server it starts."""

from argparse import ArgumentParser
from http.server import ThreadingHTTPServer

import pytest

from benchmarks.generated_run import make_run
from calibadv_jax import cli
from calibadv_jax.contrib.commands import inspect_run
from calibadv_jax.core.errors import UserError


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect") / "run"
    make_run(folder, 160)
    return folder


def call(*arguments):
    parser = ArgumentParser()
    inspect_run.add_arguments(parser)
    inspect_run.run(parser.parse_args([str(each) for each in arguments]))


@pytest.mark.parametrize(("steps", "kept"), [("", 32), ("2", 16), ("-1", 16), ("2-", 16), ("0-9", 32)])
def test_steps_choose_what_is_served(run_folder, monkeypatch, capsys, steps, kept):
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: None)
    call(run_folder, f"--steps={steps}", "--port", 0)
    output = capsys.readouterr()
    assert f"{kept // 16} steps, {kept * 5} trajectories" in output.err
    assert output.out.startswith("http://localhost:")


@pytest.mark.parametrize("steps", ["one", "-", "7-9"])
def test_bad_steps_are_named(run_folder, steps):
    with pytest.raises(UserError, match="--steps"):
        call(run_folder, f"--steps={steps}")


def test_bad_port_is_refused(run_folder, capsys):
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["inspect", str(run_folder), "--port", "70000"])
    assert end.value.code == 2 and "70000: give 0 or more and below 65536" in capsys.readouterr().err
