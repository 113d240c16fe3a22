"""What the console says of a step in which nothing was learned, and the transcripts that it shows."""

import io
import re

import numpy as np
import pytest
from test_console import Terminal

from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.shown_steps import REPEAT_TIED, StepReporter, why_tied

HOSTILE = "\x1b[2Jgone\x07 [bold red]red[/] \u202eleft\r\n[/"


def turn(kind="answer", text="", **fields):
    return Turn(kind, np.zeros(1, np.int32), np.zeros(1, np.float32), text=text, **fields)


def group(name, *scores, kind="answer", valid=True, f1=0.0, error=None):
    """Trajectories of these scores, each of one turn of this kind."""
    question = Question(name, f"who is {name}?", ("ann",), "toy")
    answer = {"answer": "bob"} if kind == "answer" else {}
    made = [
        Trajectory(question, np.zeros(1, np.int32), [turn(kind, **answer)], index, error=error)
        for index in range(len(scores))
    ]
    for sample, score in zip(made, scores, strict=True):
        sample.answer_score, sample.format_valid, sample.metrics = score, valid, {"f1": f1}
    return Group.from_attempts(question, made)


def show_steps(*steps, stream=None, transcripts=0, progress=True):
    stream = stream or io.StringIO()
    shown = StepReporter(Console(progress, stream), len(steps), transcripts)
    for number, groups in enumerate(steps, 1):
        shown.show(number, {}, groups)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (
            [group("a", 0, 0, kind="unfinished", valid=False)],
            "its last turn was cut: raise rollout.max_turn_length",
        ),
        ([group("a", 0, 0, kind="invalid", valid=False)], "teach the format first (calibadv sft)"),
        ([group("a", 0, 0, kind="search", valid=False)], "raise rollout.max_searches"),
        ([group("a", 0, 0, valid=False, f1=1.0)], "all of those in the wrong format"),
        ([group("a", 0, 0), group("b", 0, 0)], "all answers are wrong"),
        ([group("a", 1.0, 1.0)], "all answers are right"),
        ([group("a", 1.0, 1.0), group("b", 0, 0)], "raise rollout.group_size or rollout.temperature"),
        ([group("a", 1.0), group("b", 0)], "a group of one trajectory has nothing to compare"),
    ],
)
def test_tied_step_warns_with_its_reason(groups, reason):
    text = show_steps(groups)
    assert "warning: step 1: all groups tied: nothing was learned" in text
    assert reason in text and "log.transcripts=1 shows one" in text


def test_ties_follow_largest_reward_and_signal():
    for max_score, words in ((1.0, "these questions are too easy"), (2.0, "the scores differ between")):
        tied = group("a", 1.0, 1.0)
        for trajectory in tied.trajectories:
            trajectory.max_score = max_score
        assert words in why_tied([tied])
    assert why_tied([group("a", 0, 0), group("b", 0, 1.0)]) == ""
    assert why_tied([group("a", 0, 0, error="retriever: gone")]) == ""  # failures have words of their own


def test_tied_warning_is_repeated_after_many_steps():
    tied, free, right = [group("a", 0, 0)], [group("a", 0, 1.0)], [group("a", 1.0, 1.0)]
    text = show_steps(*[tied] * REPEAT_TIED, free, tied, right)
    warned = re.findall(r"warning: step (\d+): all groups tied(?: for (\d+) steps)?:", text)
    many = str(REPEAT_TIED)
    assert warned == [("1", ""), (many, many), (str(REPEAT_TIED + 2), ""), (str(REPEAT_TIED + 3), "2")]


def test_transcripts_are_shown_without_progress():
    groups = [group(name, 0, 1.0) for name in "abcd"]
    for sample in groups:
        documents = (Document("1", "Ann", "wrote it"),)
        sample.trajectories[0].turns.insert(0, turn("search", think="look", query="ann", documents=documents))
    assert "transcript" not in show_steps(groups)
    lines = show_steps(groups, transcripts=2, progress=False).splitlines()
    parts = ["who is a?", "look", "ann", "Ann: wrote it", "bob"]
    assert lines[0] == "transcript: score 0.000, format valid"
    assert [line.split(maxsplit=1)[1] for line in lines[1:6]] == parts
    assert [line[-2] for line in lines if line.startswith("question")] == ["a", "c"]
    assert show_steps(groups, transcripts=9, progress=False).count("question ") == 4
    groups[0].trajectories[0].turns.insert(0, turn("invalid", text="word " * 10_000))
    assert max(map(len, show_steps(groups, transcripts=1).splitlines())) == 1000


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_transcripts_do_not_command_the_terminal(stream):
    question = Question("a", HOSTILE, ("ann",), "toy")
    documents = (Document("1", HOSTILE, HOSTILE),)
    search = turn("search", think=HOSTILE, query=HOSTILE, documents=documents)
    turns = [search, turn("invalid", text=HOSTILE), turn("answer", answer=HOSTILE)]
    failed = Trajectory(question, np.zeros(1, np.int32), turns[:1], error=f"retriever: {HOSTILE}")
    finished = Trajectory(question, np.zeros(1, np.int32), turns)
    groups = [Group(question, [finished]), Group(question, [], [failed])]
    text = show_steps(groups, stream=stream(), transcripts=2, progress=False)
    assert "\x07" not in text and "\u202e" not in text and "\r" not in text and "\x1b[2J" not in text
    assert text.count("[bold red]red[/] left [/") == 13  # shown as it stands, without a style
    assert "\x1b[1;31m" not in text and "\x1b[31m" not in text


def test_step_with_different_scores_warns_of_nothing():
    assert "warning" not in show_steps([group("a", 0, 1.0)])


def test_transcript_has_a_line_for_each_part():
    groups = [group("a", 0, 1.0)]
    documents = (Document("1", "Ann", "wrote it"),)
    groups[0].trajectories[0].turns.insert(0, turn("search", think="look", query="ann", documents=documents))
    lines = show_steps(groups, transcripts=1, progress=False).splitlines()
    assert lines[:6] == [
        "transcript: score 0.000, format valid",
        "question  who is a?",
        "think   look",
        "search  ann",
        "  [1]   Ann: wrote it",
        "answer  bob",
    ]
