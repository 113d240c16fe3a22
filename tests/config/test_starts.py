"""Leftovers of a full disk among the configs of a run: an older start counts, or one line says what to do."""

import json
from dataclasses import replace

import pytest

from calibadv_jax.commands.export import training_config
from calibadv_jax.config import Config, dump_config, kept
from calibadv_jax.config.kept import add_start, newest_start, start_files
from calibadv_jax.contrib.commands import ask
from calibadv_jax.contrib.report.runs import read_runs
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.model import find_policy

WHOLE = dump_config(Config())
IDENTITY = {"data.content": "a", "policy.config": "b", "policy.vocabulary": "c"}


@pytest.fixture
def run(tmp_path):
    """A run of two starts, with metrics."""
    for seed in (1, 2):
        add_start(tmp_path, WHOLE.replace("seed: 0", f"seed: {seed}", 1), IDENTITY)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return tmp_path


def test_starts_are_numbered_and_kept_with_their_hashes(run):
    assert [path.name for path in start_files(run)] == ["0.yaml", "1.yaml"]
    assert json.loads((run / "configs/1.json").read_text()) == IDENTITY
    start = newest_start(run)
    assert (start.path.name, start.config["run"]["seed"], start.identity) == ("1.yaml", 2, IDENTITY)
    assert start.damaged == () and newest_start(run / "elsewhere") is None


def test_start_without_its_hashes_is_none(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("full")

    monkeypatch.setattr(kept, "write_json", fail)
    with pytest.raises(OSError, match="full"):
        add_start(tmp_path, WHOLE, IDENTITY)
    assert newest_start(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("1.yaml", ""),
        ("1.yaml", WHOLE[:1000]),  # in the middle of a line, which may be YAML
        ("1.yaml", "run:\n"),
        ("1.yaml", "{"),
        ("1.yaml", b"\xff\xfe\n"),
        ("1.json", ""),
        ("1.json", '{"data.con'),
        ("1.json", "[]"),
    ],
)
def test_an_older_start_counts_where_the_newest_was_cut_off(run, name, left):
    path = run / "configs" / name
    path.write_bytes(left if isinstance(left, bytes) else left.encode())
    start = newest_start(run)
    assert (start.path.name, start.config["run"]["seed"]) == ("0.yaml", 1)
    assert start.damaged == (path,)
    (found,) = read_runs([run])
    assert found.setting("run.seed") == 1 and found.identity == IDENTITY
    (run / "checkpoints").mkdir()
    source = find_policy(run / "checkpoints")
    assert ask.run_config(source) == start.path
    assert training_config(Config(), source)["run"]["seed"] == 1


def test_where_all_are_damaged_one_line_says_what_to_do(run):
    for name in ("0.yaml", "1.yaml"):
        (run / "configs" / name).write_text("")
    source = find_policy(run / "checkpoints")
    for read in (
        lambda: newest_start(run),
        lambda: read_runs([run]),
        lambda: ask.run_config(source),
        lambda: training_config(Config(), source),
    ):
        with pytest.raises(UserError, match=r"1.yaml: empty or cut off .*--dry-run > .*1.yaml\)") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_hashes_that_are_lost_everywhere_leave_the_newest_config(run):
    for name in ("0.json", "1.json"):
        (run / "configs" / name).write_text("")
    start = newest_start(run)
    assert (start.path.name, start.identity) == ("1.yaml", {})


def test_keys_that_are_newer_than_the_run_have_their_defaults(run):
    (run / "configs/1.yaml").write_text("run: {seed: 7}\n")
    given = replace(Config(), learner=replace(Config().learner, steps=9))
    found = training_config(given, find_policy(run / "checkpoints"))
    assert found["run"]["seed"] == 7 and found["learner"]["steps"] == Config().learner.steps
