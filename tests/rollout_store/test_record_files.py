"""Kept steps on disk: nothing is lost, others can read it, a bounded number stays, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from config_rig import changed
from record_rig import INFORMATION, answer, keep, scored, search, tokens, unknown

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import Config, ToolConfig, load_config
from calibadv_jax.config.trust import Trust
from calibadv_jax.contrib.cli.replay import equal_turns, kept_config, score_again
from calibadv_jax.contrib.pages.site import tabulate
from calibadv_jax.contrib.pages.transcript import transcript as page_transcript
from calibadv_jax.contrib.report.trajectories import _mean_advantages
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tool_calls import ToolCall
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.metrics.shown_steps import answer_line, transcript
from calibadv_jax.metrics.summary import trajectory_metrics
from calibadv_jax.rewards.score import format_flaw, score_groups
from calibadv_jax.rollout_store.reader import (
    SharedFields,
    find_step,
    read_columns,
    read_metadata,
    read_step,
    shared_fields,
)
from calibadv_jax.rollout_store.schema import BYTE_SPLIT_COLUMNS, SCHEMA, VERSION, kept_steps
from calibadv_jax.rollout_store.writer import RolloutWriter


def comparable(**values):
    """Dataclasses as dictionaries, arrays with their dtypes."""

    def plain(value):
        if dataclasses.is_dataclass(value):
            return jax.tree.map(plain, dataclasses.asdict(value))
        return (value.dtype, value.tolist()) if isinstance(value, np.ndarray) else value

    return jax.tree.map(plain, values)


def rows_of(folder, step=7):
    return read_columns(find_step(folder, step)).to_pylist(maps_as_pydicts="strict")


def test_everything_comes_back_bit_for_bit(tmp_path):
    groups, result, learner = keep(tmp_path)
    step = read_step(find_step(tmp_path, 7))
    learner[0][0][[3, 4, 8, 9]] = 0  # the learner has none of observation tokens
    actual = comparable(
        step=step.step, groups=step.groups, credits=step.credits, learner=step.learner_logprobs
    )
    assert actual == comparable(step=7, groups=groups, credits=result.credits, learner=learner)


def test_config_of_the_file_refers_to_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "hunter2")
    (tmp_path / "run.yaml").write_text("tools: [search, {mcp: {command: 'srv --key ${oc.env:MY_KEY}'}}]")
    tools = load_config(tmp_path / "run.yaml").tools
    keep(tmp_path, Config(tools=tools))
    path = find_step(tmp_path, 7)
    assert "hunter2" not in str(read_metadata(path)) and b"hunter2" not in path.read_bytes()
    step = read_step(path)
    assert kept_config(step, path, trust=Trust(is_given=True)).tools == tools
    # Without trust the command line stays what the file says.
    assert kept_config(step, path).tools[1].mcp.command == "srv --key ${oc.env:MY_KEY}"


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_openings_are_kept(tmp_path, opening):
    config = changed(prompt={"prepend_think": bool(opening)})
    groups, result = scored(config)
    groups[0].trajectories[0].first_opening = "<think>\n"
    RolloutWriter(tmp_path, config, 7).write(7, groups, result.credits, unknown(groups), 3)
    path = find_step(tmp_path, 7)
    first, other, *_ = (trajectory for group in read_step(path).groups for trajectory in group.trajectories)
    assert [first.opening_of(0), first.opening_of(1), other.opening_of(0)] == ["<think>\n", opening, opening]
    pq.write_table(pq.read_table(path).drop_columns(["first_opening"]), path)  # as older files are
    assert read_step(path).groups[0].trajectories[0].opening_of(0) == opening


def test_row_holds_the_credit(tmp_path):
    _, result, _ = keep(tmp_path)
    rows = rows_of(tmp_path)
    places = [(row["step"], row["group"], row["index"]) for row in rows]
    assert places == [(7, 0, 0), (7, 0, 1), (7, 0, 2), (7, 0, 3), (7, 1, 0), (7, 1, 1)]
    best, wrong, failed, empty, *_ = rows
    assert [row["silver"] for row in rows] == [dict.fromkeys(["d1", "d2", "d3", "d4"], 1.0)] * 4 + [{}] * 2
    raw = wrong["advantage_raw"]
    assert raw == result.credits[0].raw[1] < 0
    turns = {name: [turn[name] for turn in wrong["turns"]] for name in wrong["turns"][0]}
    assert turns["repeated"] == [None, "think of turn 1", None, "documents of turn 3", None]
    assert turns["found_silver"] == [["d1"], ["d2"], ["d3"], ["d4"], []]
    assert turns["correctness"] == [1 / 2, 0, 1 / 3, 0, 0]
    assert turns["softened"] == [True, False, True, False, False]
    assert turns["advantage_raw"] == [raw] * 5
    assert turns["advantage"] == [*(raw / 2, raw, raw * (1 - 1 / 3), raw), result.credits[0].turns[1][4]]
    (turn,) = failed["turns"][:1]
    assert (failed["error"], failed["advantage_raw"]) == ("retriever: gone", None)
    assert (turn["advantage_raw"], turn["advantage"], turn["is_refused"]) == (None, 0, True)
    assert empty["turns"] == [] and empty["answer"] is None and best["answer"] == "Ann"
    assert best["golden_answers"] == ["Ann", "Ann Lee"] and best["supporting_ids"] == ["d1"]
    assert best["policy_versions"] == [6, 7] and best["metrics"]["em"] == 1.0
    assert not any(turn["softened"] for turn in best["turns"])
    document = {"id": "d2", "title": "title d2", "text": "text d2", "score": 0.1}
    assert best["turns"][0]["documents"][1] == document


def test_grpo_judges_no_turn(tmp_path):
    keep(tmp_path, changed(advantage={"name": "grpo"}))
    rows = rows_of(tmp_path)
    assert all(row["silver"] == {} for row in rows)
    for turn in (turn for row in rows for turn in row["turns"]):
        assert (turn["repeated"], turn["found_silver"], turn["softened"]) == (None, [], False)
    assert {turn["advantage"] for turn in rows[1]["turns"]} == {rows[1]["advantage_raw"]} != {0.0}


def test_columns_and_metadata_describe_the_file(tmp_path):
    config = Config()
    keep(tmp_path, config, seed=11)
    path = find_step(tmp_path, 7)
    metadata = read_metadata(path)
    fixed = {"schema_version": "1", "tokenizer": "policy", "seed": "11"}
    assert {name: metadata[name] for name in fixed} == fixed
    assert json.loads(metadata["advantage"]) == dataclasses.asdict(config.advantage)
    assert json.loads(metadata["config"]) == dataclasses.asdict(config)
    assert pq.read_schema(path).remove_metadata() == SCHEMA
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = {column.path_in_schema: column for column in map(group.column, range(group.num_columns))}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert all("BYTE_STREAM_SPLIT" in columns[name].encodings for name in BYTE_SPLIT_COLUMNS)
    row = read_columns(path, ["answer_score", "turns.list.element.correctness"]).to_pylist()[0]
    assert row == {"answer_score": 1.0, "turns": [{"correctness": value} for value in (1.0, 0.5, 0.0)]}


def write_steps(writer, numbers):
    groups, result = scored(writer.config)
    return [writer.write(number, groups, result.credits, unknown(groups), 0) for number in numbers]


def names(folder):
    return sorted(path.name for path in (folder / "rollouts").iterdir())


def test_newest_and_every_nth_step_stay(tmp_path):
    for keep_newest, every, steps in ((3, 4, [4, 8, 9, 10]), (2, 0, [9, 10]), (0, 2, [*range(1, 11)])):
        folder = tmp_path / str(every)
        config = changed(log={"rollouts_keep": keep_newest, "rollouts_every": every})
        metrics = write_steps(RolloutWriter(folder, config, 1), range(1, 11))
        assert list(kept_steps(folder)) == steps
        assert metrics[-1] == {"perf/record_bytes": find_step(folder, 10).stat().st_size}
    with pytest.raises(UserError, match="step 7 is not kept; the nearest kept one is 8"):
        find_step(tmp_path / "4", 7)
    with pytest.raises(UserError, match="no trajectories are kept there"):
        find_step(tmp_path, 3)
    writer = RolloutWriter(tmp_path / "none", changed(log={"rollouts": "none"}), 1)
    assert write_steps(writer, [1]) == [{}] and not (tmp_path / "none").exists()


def test_new_start_removes_later_steps(tmp_path):
    write_steps(RolloutWriter(tmp_path, Config(), 1), range(1, 5))
    writer = RolloutWriter(tmp_path, changed(log={"rollouts": "none"}), 4)
    assert names(tmp_path) == ["step_1.parquet", "step_2.parquet", "step_3.parquet"]
    writer.rewind(2)
    assert names(tmp_path) == ["step_1.parquet"]


def test_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    def killed(source, target):
        assert os.path.getsize(source) > 0
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("calibadv_jax.core.files.os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_steps(RolloutWriter(tmp_path, Config(), 1), [1])
    assert kept_steps(tmp_path) == {} and names(tmp_path) == []
    (tmp_path / "rollouts/.step_1.parquet.partial").write_text("cut")  # as kill -9 leaves it
    RolloutWriter(tmp_path, Config(), 1)
    assert names(tmp_path) == []


def test_bad_files_are_one_line(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("calibadv_jax.rollout_store.schema.VERSION", "2")
        keep(tmp_path)
    path = find_step(tmp_path, 7)
    with pytest.raises(UserError, match="its schema_version is 2, this program reads 1"):
        read_step(path)
    whole = path.read_bytes()
    for length in (len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:length])
        with pytest.raises(
            UserError, match=r"step_7\.parquet: cannot be read [^\n]*; remove the file[^\n]*$"
        ):
            read_step(path)
    with pytest.raises(UserError, match="no such file of trajectories"):
        read_metadata(tmp_path / "rollouts/step_8.parquet")


def test_older_file_without_golden_logprobs_is_read(tmp_path):
    keep(tmp_path)
    path = find_step(tmp_path, 7)
    assert read_step(path).groups[0].trajectories[0].turns[0].golden_logprobs
    fields = [field for field in SCHEMA.field("turns").type.value_type if "golden" not in field.name]
    schema = pq.read_schema(path)
    schema = schema.set(schema.get_field_index("turns"), pa.field("turns", pa.list_(pa.struct(fields))))
    pq.write_table(pa.Table.from_pylist(rows_of(tmp_path), schema), path)
    assert read_step(path).groups[0].trajectories[0].turns[0].golden_logprobs == {}


QUESTION = Question("q", "Who?", ("Ann",), "nq")
CONFIG = Config(tools=[ToolConfig("search"), ToolConfig("access")])


def access(think, *documents):
    text = f"<think>{think}</think><access>{think}?</access>"
    return dataclasses.replace(search(think, *documents), kind="access", text=text)


@pytest.fixture
def read_pages(tmp_path):
    """A group of two that read a page, on disk: the file, the group and its credit."""
    best = [search("a b c", "d1"), access("e f", "page x"), answer("Ann")]
    many = [
        Trajectory(QUESTION, tokens(1), turns, number, actions=("search", "access"))
        for number, turns in enumerate((best, [access("g h i", "page x"), answer("Bob")]))
    ]
    groups = score_groups([Group(QUESTION, many)], CONFIG.reward, np.random.default_rng(0))
    result = compute_advantages(groups, CONFIG.advantage)
    RolloutWriter(tmp_path, CONFIG, 1).write(1, groups, result.credits, [[None, None]], 0)
    return find_step(tmp_path, 1), groups[0], result.credits[0]


def test_record_keeps_the_actions(read_pages):
    path, _, _ = read_pages
    assert read_metadata(path)["schema_version"] == VERSION == "1"  # no column is new
    assert json.loads(read_metadata(path)["actions"]) == ["search", "access"]
    step = read_step(path)
    assert {trajectory.actions for trajectory in step.groups[0].trajectories} == {("search", "access")}
    again = score_again(step, kept_config(step, path), np.random.default_rng(0))
    assert [trajectory.format_valid for trajectory in again[0][0].trajectories] == [True, True]
    assert equal_turns(step.credits, again[1].credits, rounding=0) == (5, 5)


def test_page_shows_queries_and_credit_of_other_actions(read_pages):
    path, _, _ = read_pages
    rows = read_columns(path).to_pylist(maps_as_pydicts="strict")
    assert tabulate(rows, [8, 5])["rows"]["queries"] == ["a b c?\ne f?", "g h i?"]
    assert INFORMATION in rows[0]["turns"][0]["observation_text"]
    pieces = SimpleNamespace(text=str, pieces=list)
    shown = page_transcript(rows, pieces, CONFIG.advantage, SharedFields(actions=("search", "access")))
    why = shown["trajectories"][1]["turns"][0]["why"]
    assert why.startswith("Softened. Correctness 1: it found 1 new silver document")


def test_report_counts_other_actions_as_searches(read_pages):
    path, _, credit = read_pages
    turns = read_columns(path)["turns"].combine_chunks().flatten()
    mean = np.mean([*credit.before[0][:2], credit.before[1][0]])
    assert _mean_advantages(turns)["turn_advantage/search before"] == pytest.approx(mean)


def test_metrics_tell_actions_from_searches(read_pages):
    _, group, _ = read_pages
    metrics = trajectory_metrics([group])
    assert metrics["rollout/actions/access"] == 1 and metrics["rollout/searches/mean"] == 0.5
    assert metrics["rollout/valid_action_ratio"] == 1


def test_transcript_names_the_action():
    trajectory = Trajectory(QUESTION, tokens(1), [search("a b c", "d1"), access("e f", "page x")])
    assert "access  e f?" in list(transcript(trajectory))
    assert answer_line(trajectory).startswith("no answer: its last access had no turn or no room left")


CALLS = (ToolCall("search", {"query": "e f?", "n": [1, 2.5]}), ToolCall("weather", {"place": "Zürich"}))
TOOL_REPLY = (
    '\n<tool_response>\nDoc 1(Title: "title d1") text d1\n</tool_response>\n<tool_response>\n'
    'Doc 1(Title: "title d2") te\n</tool_response>\n<|assistant|>\n'
)


@pytest.fixture
def tool_calls(tmp_path):
    """A trajectory with tool calls, on disk: the file, and the group."""
    called = replace(search("a b c", "d1", "d2"), calls=CALLS, observation_text=TOOL_REPLY)
    thought = replace(answer(""), kind="unfinished", stop_reason="length", flaw="The turn was cut.")
    closed = replace(thought, observation_ids=tokens(8), observation_text="\n</think>\n\n")
    flawed = replace(called, flaw="Text stands behind the call: end the turn there.")
    many = [
        Trajectory(QUESTION, tokens(1), turns, number, opening="<think>\n", protocol="tool_calls")
        for number, turns in enumerate(([called, closed, answer("Ann")], [flawed, answer("Bob")]))
    ]
    groups = score_groups([Group(QUESTION, many)], CONFIG.reward, np.random.default_rng(0))
    result = compute_advantages(groups, CONFIG.advantage)
    RolloutWriter(tmp_path, CONFIG, 1).write(1, groups, result.credits, [[None, None]], 0)
    return find_step(tmp_path, 1), groups[0]


def test_record_keeps_tool_calls(tool_calls):
    path, group = tool_calls
    step = read_step(path)
    kept = step.groups[0].trajectories
    for trajectory, original in zip(kept, group.trajectories, strict=True):
        assert (trajectory.protocol, trajectory.opening) == ("tool_calls", "<think>\n")
        assert [turn.calls for turn in trajectory.turns] == [turn.calls for turn in original.turns]
        assert [turn.flaw for turn in trajectory.turns] == [turn.flaw for turn in original.turns]
    assert [kept[0].opening_of(number) for number in range(3)] == ["<think>\n", "<think>\n", ""]
    assert [trajectory.format_valid for trajectory in kept] == [True, False]
    assert format_flaw(kept[1]) == "turn 1: Text stands behind the call: end the turn there"
    again = score_again(step, kept_config(step, path), np.random.default_rng(0))
    assert [trajectory.format_valid for trajectory in again[0][0].trajectories] == [True, False]
    assert equal_turns(step.credits, again[1].credits, rounding=0) == (5, 5)


def test_page_shows_tool_calls_and_the_documents_of_each(tool_calls):
    path, _ = tool_calls
    rows = read_columns(path).to_pylist(maps_as_pydicts="strict")
    pieces = SimpleNamespace(text=str, pieces=list)
    shown = page_transcript(rows, pieces, CONFIG.advantage, shared_fields(read_metadata(path)))
    turn = shown["trajectories"][0]["turns"][0]
    assert turn["calls"] == ['search(query="e f?", n=[1, 2.5])', 'weather(place="Zürich")']
    parts = turn["observation"]
    assert "".join(part["text"] for part in parts) == TOOL_REPLY
    assert [part["document"] for part in parts] == [None, 0, None, 1, None]
    assert parts[3]["text"] == 'Doc 1(Title: "title d2") te'


def test_metrics_count_tool_calls(tool_calls):
    _, group = tool_calls
    metrics = trajectory_metrics([group])
    assert (metrics["rollout/calls"], metrics["rollout/parallel_calls"]) == (2, 1)
    assert (metrics["rollout/closed_thoughts"], metrics["rollout/truncated"]) == (0.5, 0)
