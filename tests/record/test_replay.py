"""``calibadv replay``: the same settings give the same numbers, others are compared with them."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from record_rig import keep, make_config, make_groups, unknown
from rows_rig import write_rows

from calibadv_jax import cli
from calibadv_jax.advantages.estimators import ESTIMATORS, compute_advantages
from calibadv_jax.contrib.commands.replay import comparison_rows, equal_turns, kept_config
from calibadv_jax.contrib.commands.replay import replay as replay_step
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.seeds import random_state
from calibadv_jax.record.reader import find_step, read_step
from calibadv_jax.record.writer import RolloutWriter
from calibadv_jax.rewards.score import score_groups


def call(folder, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(["replay", str(folder), *arguments])
    return stop.value.code


def scores(groups):
    return [trajectory.answer_score for group in groups for trajectory in group.trajectories]


def shown(out):
    """Metric -> its cells, of the table that was printed."""
    cells = [line.split() for line in out.splitlines() if "/" in line]
    return {name: values for name, *values in cells}


def test_same_settings_give_the_kept_advantages(tmp_path, capsys):
    _, result, _ = keep(tmp_path, make_config())
    ratio = result.metrics["advantage/answer/ratio_after"]
    write_rows(tmp_path / "metrics.jsonl", {"step": 6}, {"step": 7, "advantage/answer/ratio_after": ratio})
    assert call(tmp_path, "--step", "7") == 0
    out = capsys.readouterr().out
    assert "replayed: 12 of 12 turns have the advantage that was kept, bit for bit" in out
    assert shown(out)["advantage/answer/ratio_after"] == ["1", "1"]
    assert "≠" not in out.replace("(≠)", "") and "0 of " in out
    assert shown(out)["reward/mean"][0] == "-"  # the run's row does not have it
    # Another lambda changes the replayed step.
    assert call(tmp_path, "advantage.target_ratio=2", "--step", "7") == 0
    out = capsys.readouterr().out
    assert shown(out)["advantage/answer/ratio_after"] == ["1", "1", "2", "≠"]
    assert shown(out)["reward/mean"][1:] == [shown(out)["reward/mean"][1]] * 2  # not marked
    marked = [line.split()[0] for line in out.splitlines() if line.endswith("≠")]
    assert re.search(rf"^{len(marked)} of \d+ metrics differ \(≠\) between replayed and changed$", out, re.M)
    assert all(name.startswith(("advantage/", "actor/")) for name in marked)
    # Only the answer turn of the group's one winner is rescaled.
    assert "advantage.target_ratio=2: 1 of 12 turns get another advantage" in out


MEDIUM = [pytest.param(name, marks=pytest.mark.medium) for name in ESTIMATORS if name != "grpo"]


@pytest.mark.parametrize("name", ["grpo", *MEDIUM, "examples.own_advantage:by_rank"])
def test_step_is_kept_and_replayed_under_every_estimator(tmp_path, capsys, name):
    plain = make_config()
    config = replace(plain, advantage=replace(plain.advantage, name=name))
    _, result, _ = keep(tmp_path, config)
    kept = read_step(find_step(tmp_path, 7))
    for credit, before in zip(kept.credits, result.credits, strict=True):
        assert [turns.tolist() for turns in credit.before] == [turns.tolist() for turns in before.before]
    assert call(tmp_path, "advantage.name=calibadv", f"advantage.base={name}") == 0
    assert "replayed: 12 of 12 turns have the advantage that was kept, bit for bit" in capsys.readouterr().out


def test_kept_step_stays_as_it_is(tmp_path):
    keep(tmp_path, make_config())
    kept = read_step(find_step(tmp_path, 7))
    other = kept_config(kept, Path("step"), ["reward.format=false", "reward.answer=cover_em"])
    replayed = replay_step(kept, other)
    replayed.groups[0].trajectories[0].answer_score = 0.5
    assert scores(kept.groups) == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("factor", "status", "words"),
    [
        (1 + 1e-6, 1, "replayed: 11 of 12 turns have the advantage that was kept"),
        (1 + 2**-52, 0, "that was kept, 11 of them bit for bit, the other turns within 1e-09"),
    ],
    ids=["changed", "rounded"],
)
def test_changed_advantage_exits_1(tmp_path, capsys, factor, status, words):
    config = make_config()
    groups, result, learner = keep(tmp_path, config)
    result.credits[0].turns[1][0] *= factor
    RolloutWriter(tmp_path, config, 7).write(7, groups, result.credits, learner, 3)
    assert call(tmp_path) == status
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "is_changed", "mark"),
    [
        (1.0, 1.0 + 1e-6, True, "≠"),  # however little of it the four digits show
        (1.0, 1.0 + 1e-12, True, ""),
        (1.0, 1.0 + 1e-6, False, ""),  # a logged sum of float32
        (1.0, 1.001, False, "≠"),
        (1.0, None, True, "≠"),
        (None, 1.0, True, "≠"),
        (None, 1.0, False, ""),
        (float("nan"), float("nan"), True, ""),
    ],
)
def test_rows_that_differ_are_marked(before, after, is_changed, mark):
    columns = {"run": {}, "replayed": {"reward/em": 1.0}, "changed": {"reward/em": 1.0}}
    for name, value in (("replayed", before), ("changed", after)):
        columns[name] |= {} if value is None else {"reward/f1": value}
    rows = {name: cells for name, *cells in comparison_rows(columns, is_changed)}
    assert (rows["reward/f1"][-1], rows["reward/em"][-1]) == (mark, "")


def test_rewards_are_shuffled_as_they_were(tmp_path):
    config = make_config()
    config = replace(config, reward=replace(config.reward, shuffle=True))
    groups, of_seed_0 = (
        score_groups(make_groups(), config.reward, random_state(seed, 6, "reward")) for seed in (14, 0)
    )
    assert scores(groups) != scores(of_seed_0)
    result = compute_advantages(groups, config.advantage)
    RolloutWriter(tmp_path, config, 7).write(7, groups, result.credits, unknown(groups), 14)
    kept = read_step(find_step(tmp_path, 7))
    replayed = replay_step(kept, kept_config(kept, Path("step")))
    assert scores(replayed.groups) == scores(groups)
    assert equal_turns(kept.credits, replayed.advantages.credits) == (12, 12)


def test_newest_step_is_default_and_mistakes_are_refused(tmp_path, capsys):
    keep(tmp_path, make_config(), step=3)
    keep(tmp_path, make_config(), step=5)
    assert call(tmp_path) == 0
    assert capsys.readouterr().out.startswith("step 5 of")
    for arguments, words in (
        (["--step", "4"], "step 4 is not kept; the nearest kept one is 3"),
        (["advantage.lambda=2"], "unknown key"),
    ):
        assert call(tmp_path, *arguments) == 2
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1
        assert tempfile.gettempdir() not in message.replace(str(tmp_path), "RUN")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"loss": {"clip_both": 0.2}}', "unknown key 'loss.clip_both'"),
        ("[1, 2", "not valid YAML"),
        ("[1, 2]", "expected a mapping of sections"),
    ],
)
def test_bad_kept_config_names_the_file(tmp_path, config, words):
    keep(tmp_path, make_config(), step=3)
    path = find_step(tmp_path, 3)
    kept = read_step(path)
    kept.metadata["config"] = config
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}: {words}"):
        kept_config(kept, path)
