"""Kept rollouts to demonstrations: the best of each question, once."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from calibadv_jax import cli
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import load_demonstrations
from calibadv_jax.record.schema import VERSION

DOCUMENT = {"id": "d1", "title": "Title", "text": "Text.", "score": 0.5}


def turn(text, length, documents=(), observation=""):
    columns = {"text": f"<think> t </think> {text}", "token_ids": [1] * length, "documents": list(documents)}
    return columns | {"observation_text": observation}


def trajectory(question, answer, score=1.0, length=5, **fields):
    """A row in the columns that select-rollouts reads, and one that it does not."""
    shown = '\n\n<information>Doc 1(Title: "Title") Text.</information>\n\n'
    search = turn(f"<search> {question} </search>", 3, [DOCUMENT], shown)
    return {
        **{"step": 1, "group": 0, "index": 0, "question_id": question, "question": f"Who is {question}?"},
        **{"data_source": "nq", "golden_answers": ["Ann"], "supporting_ids": ["d1"], "error": None},
        **{"answer_score": score, "format_valid": True, "seconds": 0.5},
        "turns": [search, turn(f"<answer> {answer} </answer>", length)],
        **fields,
    }


def write(folder, step, rows, config=None):
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    kept = {} if config is None else {"config": json.dumps(config)}
    schema = pa.Table.from_pylist([trajectory("q", "a") | {"error": "e"}]).schema
    schema = schema.with_metadata({"schema_version": VERSION} | kept)
    table = pa.Table.from_pylist([row | {"step": step} for row in rows], schema=schema)
    pq.write_table(table, folder / f"rollouts/step_{step}.parquet", compression="zstd")


@pytest.fixture
def select(tmp_path, capsys):
    """Runs the command; gives its status, output, errors, and the last texts of the demonstrations."""

    def select(*argv, output="d.jsonl"):
        file = tmp_path / output
        file.unlink(missing_ok=True)
        with pytest.raises(SystemExit) as stop:
            cli.calibadv(["select-rollouts", *map(str, argv), "--output", str(file)])
        last = [each.turns[-1].text for each in load_demonstrations(file)] if file.exists() else []
        answers = [text.partition("<answer> ")[2].partition(" <")[0] for text in last]
        return stop.value.code, *capsys.readouterr(), answers

    return select


def test_good_ones_become_demonstrations(tmp_path, select):
    rows = [
        trajectory("q1", "right"),
        trajectory("q2", "half", score=0.5),
        trajectory("q3", "unformed", format_valid=False),
        trajectory("q4", "gone", error="retriever: gone"),
    ]
    write(tmp_path / "run", 3, rows)
    status, out, *_ = select(tmp_path / "run")
    (each,) = load_demonstrations(tmp_path / "d.jsonl")
    assert status == 0 and each.question == Question("q1", "Who is q1?", ("Ann",), "nq", ("d1",))
    assert [turn.text for turn in each.turns] == [turn["text"] for turn in rows[0]["turns"]]
    assert each.turns[0].documents == (Document("d1", "Title", "Text."),)
    counts = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[2:])
    assert counts.pop("all") == "4" and {*counts.values()} == {"1"}
    assert {*counts} == {"score too low", "format invalid", "failed", "written", "questions"}


def test_best_shortest_earliest_trajectory_is_chosen(tmp_path, select):
    """Of equal texts the better one stays; a data source has questions of its own."""
    rows = [trajectory("q", "long", length=9), trajectory("q", "worse", score=0.9, length=1)]
    write(tmp_path / "a", 2, rows)
    rows = [trajectory("q", "late"), trajectory("q", "short", length=4), trajectory("q", "SHORT ", length=7)]
    write(tmp_path / "a", 10, rows)
    write(tmp_path / "b", 1, [trajectory("q", "other run"), trajectory("q", "Ann", data_source="hotpotqa")])
    order = ["short", "late", "other run", "long", "worse"]
    for count in (1, 3, 9):
        options = ["--min-score", "0.8", "--per-question", count]
        _, out, _, answers = select(tmp_path / "a", tmp_path / "b", *options)
        assert answers == ["Ann", *order[:count]]
        assert next(line.split()[1] for line in out.splitlines() if line.startswith("duplicate")) == "1"


def test_lowest_score_defaults_to_the_largest_reward(tmp_path, select):
    rows = [trajectory("q1", "half", score=1.0), trajectory("q2", "right", score=2.0)]
    config = {"reward": {"answer": {"f1": 1, "em": 1}}}
    write(tmp_path / "run", 1, rows, config)
    assert select(tmp_path / "run")[-1] == ["right"]
    write(tmp_path / "run", 1, rows[:1], config)
    status, _, error, _ = select(tmp_path / "run")
    assert status == 2 and "no trajectory with a score of the largest reward among 1; lower" in error


def test_lines_of_a_new_folders_file_are_rows(tmp_path, select):
    write(tmp_path / "run", 1, [trajectory("q", "Ann"), trajectory("q2", "Ann\u2028Bob")])
    select(tmp_path / "run", output="new/d.jsonl")
    lines = (tmp_path / "new/d.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert [json.loads(line)["id"] for line in lines] == ["q", "q2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("run --min-score 2", "no trajectory with a score of 2 or more among 1"),
        ("run --per-question 0", "argument --per-question: 0: give 1 or more"),
        ("run/none", "none: no rollouts/step_N.parquet"),
        ("damaged", "step_1.parquet: cannot be read"),
        ("run shuffled", "shuffled/rollouts/step_1.parquet: its scores were permuted"),  # those of others
        ("", "required: RUN"),
    ],
)
def test_mistake_is_one_line_and_writes_nothing(tmp_path, monkeypatch, select, argv, words):
    monkeypatch.chdir(tmp_path)
    for name, shuffle in (("run", False), ("damaged", False), ("shuffled", True)):
        write(tmp_path / name, 1, [trajectory("q", "Ann")], {"reward": {"shuffle": shuffle}})
    (tmp_path / "damaged/rollouts/step_1.parquet").write_bytes(b"PAR1")
    status, _, error, _ = select(*argv.split())
    assert status == 2 and error.count("\n") == 1 and words in error
    assert not (tmp_path / "d.jsonl").exists()
