"""calibadv_jax.cli: what the command line accepts and how an entry point ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from calibadv_jax import cli
from calibadv_jax.config import Config, load_config, parse_config
from calibadv_jax.core.errors import EnvironmentFailure, RequestFailed, UserError

PROGRAM = "calibadv train"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("learner: {steps: 7}\n")
    return path


def status_of(run, argv: list[str], command: str = "train") -> int | None:
    with pytest.raises(SystemExit) as stop:
        cli.main(command, run, argv)
    return stop.value.code


def raising(error: BaseException):
    def run(*_: Config) -> None:
        raise error

    return run


def test_options_and_overrides_in_any_order(config_file, tmp_path, capsys):
    arguments = cli.parse(PROGRAM, "", ["a.b=1", "--config", "f.yaml", "c=-2", "--dry-run", "d=x y"])
    assert arguments == cli.Arguments([Path("f.yaml")], ["a.b=1", "c=-2", "d=x y"], True)
    over = tmp_path / "over.yaml"
    over.write_text("learner: {steps: 8}\nrun: {seed: 1}\n")
    configs: list[Config] = []
    assert status_of(configs.append, ["--config", str(config_file), "run.seed=5", "--config", str(over)]) == 0
    assert status_of(configs.append, ["--config", str(over), "--config", str(config_file)]) == 0
    assert [(config.learner.steps, config.run.seed) for config in configs] == [(8, 5), (7, 1)]
    calls: list[dict[str, bool]] = []
    for argv in (["--offline"], []):
        run = lambda config, **options: calls.append(options)  # noqa: E731
        assert status_of(run, ["--config", str(config_file), *argv], "doctor") == 0
    assert calls == [{"offline": True}, {"offline": False}]
    assert status_of(run, ["--config", str(config_file), "--offline"]) == 2
    assert "unknown option '--offline'" in capsys.readouterr().err, "the flag belongs to another command"


def test_parsed_arguments_without_overrides():
    assert cli.parse(PROGRAM, "", ["--config", "f.yaml"]) == cli.Arguments([Path("f.yaml")], [], False)


def test_several_configs_keep_their_order():
    arguments = cli.parse(PROGRAM, "", ["--config", "b.yaml", "x.y=1", "--config", "a.yaml"])
    assert arguments.configs == [Path("b.yaml"), Path("a.yaml")]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "--config"),
        (["--config"], "--config"),
        (["--config", "f.yaml", "--learner.steps=3"], "'--learner.steps=3'"),
        (["--conf", "f.yaml"], "--config"),
        (["--config", "f.yaml", "--dry-run=yes"], "--dry-run"),
        (["--config", "f.yaml", "--num-generations", "8"], "did you mean 'rollout.group_size'?"),
    ],
)
def test_mistake_is_one_line(argv, part, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.parse(PROGRAM, "", argv)
    message = capsys.readouterr().err
    assert stop.value.code == 2
    assert message.startswith("error: ") and message.count("\n") == 1
    assert part in message and f"{PROGRAM} --help" in message


def test_dry_run_prints_every_key(config_file, capsys):
    run = raising(AssertionError("ran"))
    assert status_of(run, ["--config", str(config_file), "--dry-run", "run.dir=elsewhere"]) == 0
    expected = load_config(config_file, ["run.dir=elsewhere"])
    assert parse_config(capsys.readouterr().out, "printed") == expected and expected.learner.steps == 7


def test_dry_run_prints_resolved_values(config_file, capsys):
    run = raising(AssertionError("ran"))
    assert status_of(run, ["--config", str(config_file), "--dry-run", "run.dir=elsewhere"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["learner"]["steps"] == 7
    assert printed["sft"]["output"] == "elsewhere/sft"
    assert printed["advantage"]["name"] == "calibadv"


def disk_error(number: int):
    return raising(OSError(number, os.strerror(number), "a/metrics.jsonl"))


@pytest.mark.parametrize(
    ("run", "status", "message"),
    [
        (lambda config: Path("runs/a/hf"), 0, ""),
        (raising(SystemExit(1)), 1, ""),
        (raising(KeyboardInterrupt()), 130, "interrupted\n"),
        (raising(UserError("q.jsonl:3: no answers; add one")), 2, "error: q.jsonl:3: no answers; add one\n"),
        (raising(EnvironmentFailure("a lock is held")), 75, "error: a lock is held\n"),
        (raising(RequestFailed("retriever", "is away")), 75, "error: is away\n"),
        (disk_error(errno.ENOSPC), 75, "error: a/metrics.jsonl: No space left on device; fix that"),
        (disk_error(errno.EROFS), 2, "error: a/metrics.jsonl: Read-only file system; fix that"),
        (disk_error(errno.EACCES), 2, "error: a/metrics.jsonl: Permission denied; fix that"),
    ],
)
def test_exit_status_tells_input_from_environment(config_file, run, status, message, capsys):
    assert status_of(run, ["--config", str(config_file)]) == status
    printed = capsys.readouterr().err
    assert printed.startswith(message) and printed.count("\n") == bool(message)


def test_defect_keeps_its_traceback(config_file):
    for defect in (ZeroDivisionError(), FileNotFoundError(errno.ENOENT, "No such file", "a")):
        with pytest.raises(type(defect)):
            cli.main("train", raising(defect), ["--config", str(config_file)])


@pytest.mark.medium
def test_config_is_checked_before_imports(config_file):
    """In a process of its own: what it has imported after a mistake, and that a command does run."""
    program = (
        "import sys\nfrom calibadv_jax.cli import calibadv\ntry:\n    calibadv(sys.argv[1:])\n"
        "except SystemExit as stop:\n    print(stop.code, 'jax' in sys.modules)"
    )

    def run(*arguments):
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=250)

    bad = run("train", "--config", str(config_file), "learner.step=3")
    assert "did you mean 'learner.steps'?" in bad.stderr
    assert bad.stdout == "2 False\n"
    listing = run("--help")
    assert all(f"  {name} " in listing.stdout for name in cli.COMMANDS)
    assert listing.stdout.endswith("0 False\n")
    ran = run("export", "--config", str(config_file), "run.dir=nowhere")
    assert "no complete checkpoint there" in ran.stderr
    assert ran.stdout == "2 True\n"


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["fly"], 2, "the commands are quickstart, sft"),
        (["--version"], 0, f"calibadv {version('calibadv-jax')}\n"),
        (["help"], 0, "commands without a config:"),
        (["help", "train"], 0, "usage: calibadv train [-h] --config FILE"),
        (["help", "compare"], 0, "usage: calibadv compare [-h]"),
    ],
)
def test_commands_help_and_version(argv, status, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(argv)
    printed = capsys.readouterr()
    assert stop.value.code == status and printed.err.count("\n") == bool(status)
    assert words in (printed.err if status else printed.out)


@pytest.mark.medium
@pytest.mark.parametrize("program", [["calibadv_jax", "train"], ["calibadv_jax.train"]])
def test_packages_are_programs(program):
    command = [sys.executable, "-m", *program, "--config", "nowhere.yaml"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("error: nowhere.yaml: no such config file")


@pytest.mark.medium
def test_command_without_a_config_is_run_by_the_package(tmp_path):
    command = [sys.executable, "-m", "calibadv_jax", "audit", str(tmp_path / "nowhere")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1
    assert "nowhere" in ran.stderr


@pytest.mark.parametrize(
    "words", [["configs"], ["train", "--config", "configs/quickstart.yaml", "--dry-run"]]
)
def test_reader_that_ends_early_is_no_defect(words):
    """As `head`; the pipe is closed before the program writes."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "calibadv_jax", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=250)
    os.close(writing)
    assert (done.returncode, done.stderr) == (cli.PIPE_CLOSED, "")


def test_bad_override_is_a_user_error(config_file, capsys):
    run = raising(AssertionError("ran"))
    assert status_of(run, ["--config", str(config_file), "learner.step=3"]) == 2
    message = capsys.readouterr().err
    assert message == "error: command line: unknown key 'learner.step'; did you mean 'learner.steps'?\n"


@pytest.mark.medium
def test_missing_torch_is_no_warning():
    """Nothing here needs it."""
    code = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
from calibadv_jax import cli
try:
    cli.calibadv(["train", "--help"])
except SystemExit:
    import transformers
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0 and "PyTorch" not in ended.stderr


def test_error_shows_no_controls_of_a_terminal(config_file, capsys):
    run = raising(UserError("tools: \x1b[2J\x1b]0;x\x07é is unknown"))
    assert status_of(run, ["--config", str(config_file)]) == 2
    assert capsys.readouterr().err == "error: tools: [2J]0;xé is unknown\n"
