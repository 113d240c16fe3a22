"""calibadv_jax.cli: what the command line accepts and how an entry point ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from calibadv_jax import cli
from calibadv_jax.config import Config
from calibadv_jax.core.errors import EnvironmentFailure, RequestFailed, UserError

PROGRAM = "calibadv train"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("learner: {steps: 7}\n")
    return path


def end(run, argv: list[str]) -> int | None:
    with pytest.raises(SystemExit) as stop:
        cli.main("train", run, argv)
    return stop.value.code


def test_options_and_overrides_may_stand_in_any_order():
    arguments = cli.parse(PROGRAM, "", ["a.b=1", "--config", "f.yaml", "c=-2", "--dry-run", "d=x y"])
    assert arguments == cli.Arguments([Path("f.yaml")], ["a.b=1", "c=-2", "d=x y"], True)


def test_without_overrides():
    assert cli.parse(PROGRAM, "", ["--config", "f.yaml"]) == cli.Arguments([Path("f.yaml")], [], False)


def test_several_configs_keep_their_order(config_file, tmp_path):
    arguments = cli.parse(PROGRAM, "", ["--config", "b.yaml", "x.y=1", "--config", "a.yaml"])
    assert arguments.configs == [Path("b.yaml"), Path("a.yaml")]
    over = tmp_path / "over.yaml"
    over.write_text("learner: {steps: 8}\nrun: {seed: 1}\n")
    seen: list[Config] = []
    assert end(seen.append, ["--config", str(config_file), "--config", str(over), "run.seed=5"]) == 0
    assert end(seen.append, ["--config", str(over), "--config", str(config_file)]) == 0
    assert [(config.learner.steps, config.run.seed) for config in seen] == [(8, 5), (7, 1)]


def test_a_flag_belongs_to_its_command(config_file, capsys):
    seen: list[dict[str, bool]] = []

    def run(config: Config, **options: bool) -> None:
        seen.append(options)

    for argv in (["--offline"], []):
        with pytest.raises(SystemExit):
            cli.main("doctor", run, ["--config", str(config_file), *argv])
    assert seen == [{"offline": True}, {"offline": False}]
    assert end(run, ["--config", str(config_file), "--offline"]) == 2
    assert "unknown option '--offline'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "--config"),
        (["--config"], "--config"),
        (["--config", "f.yaml", "--learner.steps=3"], "'--learner.steps=3'"),
        (["--conf", "f.yaml"], "--config"),
        (["--config", "f.yaml", "--dry-run=yes"], "--dry-run"),
    ],
)
def test_a_mistake_is_one_line(argv, named, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.parse(PROGRAM, "", argv)
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert message.startswith("error: ") and message.count("\n") == 1
    assert named in message and f"{PROGRAM} --help" in message


def test_run_gets_the_config_with_overrides(config_file):
    seen: list[Config] = []
    assert end(seen.append, ["--config", str(config_file), "run.seed=5"]) == 0
    assert (seen[0].learner.steps, seen[0].run.seed) == (7, 5)


def test_what_run_returns_is_not_the_status(config_file):
    assert end(lambda config: Path("runs/a/hf"), ["--config", str(config_file)]) == 0


def test_run_may_end_with_a_status_of_its_own(config_file):
    def run(config: Config) -> None:
        raise SystemExit(1)

    assert end(run, ["--config", str(config_file)]) == 1


def test_dry_run_prints_every_key_and_does_not_run(config_file, capsys):
    def run(config: Config) -> None:
        raise AssertionError("ran")

    assert end(run, ["--config", str(config_file), "--dry-run", "run.dir=elsewhere"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["learner"]["steps"] == 7
    assert printed["sft"]["output"] == "elsewhere/sft"
    assert printed["advantage"]["name"] == "calibadv"


def test_a_user_error_is_one_line_and_status_2(config_file, capsys):
    def run(config: Config) -> None:
        raise UserError("questions.jsonl:3: no golden answers; add one or remove the line")

    assert end(run, ["--config", str(config_file)]) == 2
    assert capsys.readouterr().err == (
        "error: questions.jsonl:3: no golden answers; add one or remove the line\n"
    )


def test_a_bad_config_is_a_user_error(config_file, capsys):
    assert end(lambda config: None, ["--config", str(config_file), "learner.step=3"]) == 2
    assert "did you mean 'learner.steps'?" in capsys.readouterr().err


def test_an_interruption_is_status_130(config_file, capsys):
    def run(config: Config) -> None:
        raise KeyboardInterrupt

    assert end(run, ["--config", str(config_file)]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_more_is_one_line(config_file, capsys, number):
    def run(config: Config) -> None:
        raise OSError(number, os.strerror(number), "runs/a/metrics.jsonl")

    expected = 75 if number == errno.ENOSPC else 2
    assert end(run, ["--config", str(config_file), "run.dir=runs/a"]) == expected
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith(f"error: runs/a/metrics.jsonl: {os.strerror(number)}; fix that")


@pytest.mark.parametrize(
    "defect", [ZeroDivisionError(), FileNotFoundError(errno.ENOENT, "No such file", "a")]
)
def test_a_defect_keeps_its_traceback(config_file, defect):
    def run(config: Config) -> None:
        raise defect

    with pytest.raises(type(defect)):
        cli.main("train", run, ["--config", str(config_file)])


@pytest.mark.medium
def test_the_console_script_checks_the_config_before_it_imports_the_command(config_file):
    """In a process of its own: what it has imported after a mistake, and that a command does run."""
    program = (
        "import sys\nfrom calibadv_jax.cli import calibadv\ntry:\n    calibadv(sys.argv[1:])\n"
        "except SystemExit as stop:\n    print(stop.code, 'jax' in sys.modules)"
    )

    def run(*arguments):
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    bad = run("train", "--config", str(config_file), "learner.step=3")
    assert "did you mean 'learner.steps'?" in bad.stderr
    assert bad.stdout == "2 False\n"
    listing = run("--help")
    assert all(f"  {name} " in listing.stdout for name in cli.COMMANDS)
    assert listing.stdout.endswith("0 False\n")
    ran = run("export", "--config", str(config_file), "run.dir=nowhere")
    assert "no complete checkpoint" in ran.stderr or "no such file" in ran.stderr
    assert ran.stdout == "2 True\n"


@pytest.mark.parametrize(
    ("argv", "words"), [(["trian"], "did you mean 'train'?"), (["fly"], "the commands are quickstart, sft")]
)
def test_an_unknown_command_is_one_line(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(argv)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and words in message and message.count("\n") == 1


def below(cause):
    def work():
        raise UserError("run.dir=runs/x cannot be written") from cause

    return work


def raising(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "status"),
    [
        (raising(UserError("bad key")), 2),
        (raising(PermissionError(errno.EACCES, "Permission denied", "x")), 2),
        (raising(EnvironmentFailure("a lock is held")), 75),
        (raising(RequestFailed("retriever", "is away")), 75),
        (below(OSError(errno.ENOSPC, "No space left on device", "runs/x")), 75),
        (below(EnvironmentFailure("a lock is held")), 75),
        (raising(OSError(errno.ENOSPC, "No space left on device", "x")), 75),
        (raising(OSError(errno.EDQUOT, "Disk quota exceeded", "x")), 75),
    ],
)
def test_exit_status_tells_input_from_environment(work, status, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.end(work)
    assert stop.value.code == status
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1


@pytest.mark.medium
def test_the_package_is_the_console_script(tmp_path):
    command = [sys.executable, "-m", "calibadv_jax", "audit", str(tmp_path / "nowhere")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    line = ran.stderr.splitlines()[-1]  # a slow machine says before that it loads
    assert ran.returncode == 2 and line.startswith("error: ") and "nowhere" in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--version"], f"calibadv {version('calibadv-jax')}\n"),
        (["help"], "commands without a config:"),
        (["help", "train"], "usage: calibadv train [-h] --config FILE"),
        (["help", "compare"], "usage: calibadv compare [-h]"),
    ],
)
def test_help_and_version_end_well(argv, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(argv)
    printed = capsys.readouterr()
    assert (stop.value.code, printed.err) == (0, "") and words in printed.out


def test_option_of_a_peer_names_its_key(capsys):
    with pytest.raises(SystemExit):
        cli.parse(PROGRAM, "", ["--config", "f.yaml", "--num-generations", "8"])
    assert "did you mean 'rollout.group_size'?" in capsys.readouterr().err


def test_a_command_that_loads_for_long_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cli, "SILENCE", 0.01)
    is_said = threading.Event()

    def slow_import(name):
        assert name == "calibadv_jax.contrib.commands.audit"
        monkeypatch.setattr(sys.stderr, "flush", is_said.set)
        assert is_said.wait(60)

    monkeypatch.setattr(cli.importlib, "import_module", slow_import)
    cli._load("audit")
    assert capsys.readouterr().err == "calibadv audit: loading its libraries (JAX and others)\n"
