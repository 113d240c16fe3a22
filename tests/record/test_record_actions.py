"""What record, page, report and terminal say of actions beside search."""

import json
from dataclasses import replace

import numpy as np
import pytest
from record_rig import INFORMATION, answer, search, tokens

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import Config, ToolConfig
from calibadv_jax.contrib.commands.replay import equal_turns, kept_config, score_again
from calibadv_jax.contrib.pages.site import tabulate
from calibadv_jax.contrib.pages.transcript import turn_words
from calibadv_jax.contrib.report.gather import _advantages
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.metrics.shown_steps import ending, transcript
from calibadv_jax.metrics.summary import trajectory_metrics
from calibadv_jax.record.reader import find_step, read_columns, read_metadata, read_step
from calibadv_jax.record.schema import VERSION
from calibadv_jax.record.writer import RolloutWriter
from calibadv_jax.rewards.score import score_groups

QUESTION = Question("q", "Who?", ("Ann",), "nq")
CONFIG = Config(tools=[ToolConfig("search"), ToolConfig("access")])


def access(think, *documents):
    text = f"<think>{think}</think><access>{think}?</access>"
    return replace(search(think, *documents), kind="access", text=text)


@pytest.fixture
def kept(tmp_path):
    """A group of two that read a page, on disk, and its credit."""
    turns = [[search("a b c", "d1"), access("e f", "page x"), answer("Ann")]]
    turns += [[access("g h i", "page x"), answer("Bob")]]
    many = [
        Trajectory(QUESTION, tokens(1), turn, number, actions=("search", "access"))
        for number, turn in enumerate(turns)
    ]
    groups = score_groups([Group(QUESTION, many)], CONFIG.reward, np.random.default_rng(0))
    result = compute_advantages(groups, CONFIG.advantage)
    RolloutWriter(tmp_path, CONFIG, 1).write(1, groups, result.credits, [[None, None]], 0)
    return find_step(tmp_path, 1), groups, result


def test_record_keeps_the_actions(kept):
    path, groups, result = kept
    assert read_metadata(path)["schema_version"] == VERSION == "1"  # no column is new
    assert json.loads(read_metadata(path)["actions"]) == ["search", "access"]
    step = read_step(path)
    assert {trajectory.actions for trajectory in step.groups[0].trajectories} == {("search", "access")}
    again = score_again(step, kept_config(step, path), np.random.default_rng(0))
    assert [trajectory.format_valid for trajectory in again[0][0].trajectories] == [True, True]
    assert equal_turns(step.credits, again[1].credits, rounding=0) == (5, 5)


def test_page_report_and_terminal_name_the_action(kept):
    path, groups, result = kept
    rows = read_columns(path).to_pylist(maps_as_pydicts="strict")
    assert tabulate(rows, [9, 5])["rows"]["queries"] == ["a b c?\ne f?", "g h i?"]
    words = turn_words(rows[1], {"name": "calibadv", "base": "grpo"})
    assert words[0].startswith("Softened. Correctness 1: it found 1 new silver document")
    turns = read_columns(path)["turns"].combine_chunks().flatten()
    assert _advantages(turns)["turn_advantage/search before"] == pytest.approx(
        np.mean([*result.credits[0].before[0][:2], result.credits[0].before[1][0]])
    )
    output = list(transcript(groups[0].trajectories[0]))
    assert "access  e f?" in output
    unanswered = replace(groups[0].trajectories[0], turns=groups[0].trajectories[0].turns[:2])
    assert ending(unanswered).startswith("no answer: its last access came after the last one allowed")
    metrics = trajectory_metrics(groups)
    assert metrics["rollout/actions/access"] == 1 and metrics["rollout/searches/mean"] == 0.5
    assert metrics["rollout/valid_action_ratio"] == 1
    assert INFORMATION in rows[0]["turns"][0]["observation_text"]
