"""Kept rollouts to demonstrations: the best of each question, once."""

from __future__ import annotations

import json

import pytest
from disk_rig import refuses_full_disk

from calibadv_jax import cli
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import load_demonstrations
from calibadv_jax.record.schema import VERSION

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

THINK = "<think> t </think> "
DOCUMENT = {"id": "d1", "title": "Title", "text": "Text.", "score": 0.5}


def trajectory(question, answer, score=1.0, length=5, **fields):
    """A row in the columns that select-rollouts reads, and one that it does not."""
    search = {"text": f"{THINK}<search> {question} </search>", "token_ids": [1] * 3, "documents": [DOCUMENT]}
    search["observation_text"] = '\n\n<information>Doc 1(Title: "Title") Text.</information>\n\n'
    last = {"text": f"{THINK}<answer> {answer} </answer>", "token_ids": [1] * length, "documents": []}
    last["observation_text"] = ""
    return {
        "step": 1,
        "group": 0,
        "index": 0,
        "question_id": question,
        "question": f"Who is {question}?",
        "data_source": "nq",
        "golden_answers": ["Ann"],
        "supporting_ids": ["d1"],
        "error": None,
        "answer_score": score,
        "format_valid": True,
        "seconds": 0.5,
        "turns": [search, last],
    } | fields


def write(folder, step, rows, config=None):
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    for row in rows:
        row["step"] = step
    schema = pa.Table.from_pylist([trajectory("q", "a") | {"error": "e"}]).schema
    kept = {} if config is None else {"config": json.dumps(config)}
    schema = schema.with_metadata({"schema_version": VERSION} | kept)
    pq.write_table(
        pa.Table.from_pylist(rows, schema=schema),
        folder / "rollouts" / f"step_{step}.parquet",
        compression="zstd",
    )


def select(*argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(["select-rollouts", *map(str, argv)])
    return stop.value.code, *capsys.readouterr()


def answers(path):
    return [
        each.turns[-1].text.partition("<answer> ")[2].partition(" <")[0] for each in load_demonstrations(path)
    ]


def test_full_disk_is_refused(tmp_path, small_disk, capsys):
    write(tmp_path, 1, [trajectory("a", "Ann")])
    command = ["select-rollouts", str(tmp_path), "--output", str(small_disk / "d.jsonl")]
    assert refuses_full_disk(small_disk, small_disk / "d.jsonl", lambda: cli.calibadv(command), capsys)


def test_good_ones_become_demonstrations(tmp_path, capsys):
    rows = [
        trajectory("q1", "right"),
        trajectory("q2", "half", score=0.5),
        trajectory("q3", "unformed", format_valid=False),
        trajectory("q4", "gone", error="retriever: gone"),
    ]
    write(tmp_path / "run", 3, rows)
    status, out, _ = select(tmp_path / "run", "--output", tmp_path / "d.jsonl", capsys=capsys)
    assert status == 0
    (each,) = load_demonstrations(tmp_path / "d.jsonl")
    assert each.question == Question("q1", "Who is q1?", ("Ann",), "nq", ("d1",))
    assert [turn.text for turn in each.turns] == [
        "<think> t </think> <search> q1 </search>",
        "<think> t </think> <answer> right </answer>",
    ]
    assert each.turns[0].documents == (Document("d1", "Title", "Text."),)
    result = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[2:])
    assert {name.strip(): int(count) for name, count in result.items()} == {
        "all": 4,
        "score too low": 1,
        "format invalid": 1,
        "failed": 1,
        "written": 1,
        "questions": 1,
    }


def test_best_shortest_earliest_trajectory_is_chosen(tmp_path, capsys):
    write(
        tmp_path / "a", 2, [trajectory("q", "long", length=9), trajectory("q", "worse", score=0.9, length=1)]
    )
    write(tmp_path / "a", 10, [trajectory("q", "late"), trajectory("q", "short", length=4)])
    write(tmp_path / "b", 1, [trajectory("q", "other run")])
    options = ["--output", tmp_path / "d.jsonl", "--min-score", "0.8", "--per-question"]
    order = ["short", "late", "other run", "long", "worse"]
    for count in (1, 3, 9):
        assert select(tmp_path / "a", tmp_path / "b", *options, count, capsys=capsys)[0] == 0
        assert answers(tmp_path / "d.jsonl") == order[:count]


def test_lowest_score_defaults_to_the_largest_reward(tmp_path, capsys):
    rows = [trajectory("q1", "half", score=1.0), trajectory("q2", "right", score=2.0)]
    write(tmp_path / "run", 1, rows, {"reward": {"answer": {"f1": 1, "em": 1}}})
    select(tmp_path / "run", "--output", tmp_path / "d.jsonl", capsys=capsys)
    assert answers(tmp_path / "d.jsonl") == ["right"]
    write(tmp_path / "run", 1, rows[:1], {"reward": {"answer": {"f1": 1, "em": 1}}})
    status, _, error = select(tmp_path / "run", "--output", tmp_path / "e.jsonl", capsys=capsys)
    assert status == 2 and "no trajectory with a score of the largest reward among 1; lower" in error


def test_equal_texts_come_once_per_question(tmp_path, capsys):
    texts = ("Ann", 9), ("ANN ", 3), ("Ann", 4)
    rows = [trajectory("q", answer, length=length) for answer, length in texts]
    write(tmp_path / "run", 1, [*rows, trajectory("q", "Ann", data_source="hotpotqa")])
    options = ["--output", tmp_path / "d.jsonl", "--per-question", "5"]
    _, out, _ = select(tmp_path / "run", *options, capsys=capsys)
    assert answers(tmp_path / "d.jsonl") == ["Ann", "ANN "]
    assert next(line.split()[1] for line in out.splitlines() if line.startswith("duplicate")) == "2"


def test_opened_thought_is_whole_and_lines_are_rows(tmp_path, capsys):
    row = trajectory("q", "Ann")
    for turn in row["turns"]:
        turn["text"] = turn["text"].removeprefix("<think>")
    write(tmp_path / "run", 1, [row, trajectory("q2", "Ann\u2028Bob")])
    select(tmp_path / "run", "--output", tmp_path / "new/d.jsonl", capsys=capsys)
    first, _ = load_demonstrations(tmp_path / "new/d.jsonl")
    assert first.turns[0].text == "<think> t </think> <search> q </search>"
    lines = (tmp_path / "new/d.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert [json.loads(line)["id"] for line in lines] == ["q", "q2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["{run}", "--output", "{out}", "--min-score", "2"],
            "no trajectory with a score of 2 or more among 1",
        ),
        (["{run}", "--output", "{out}", "--per-question", "0"], "argument --per-question: 0: give 1 or more"),
        (["{run}/none", "--output", "{out}"], "none: no rollouts/step_N.parquet"),
        (["{run}"], "required: --output"),
        (["{damaged}", "--output", "{out}"], "step_1.parquet: cannot be read"),
    ],
)
def test_mistake_is_one_line_and_writes_nothing(tmp_path, capsys, argv, words):
    write(tmp_path / "run", 1, [trajectory("q", "Ann")])
    (tmp_path / "damaged/rollouts").mkdir(parents=True)
    (tmp_path / "damaged/rollouts/step_1.parquet").write_bytes(b"PAR1")
    names = {"run": tmp_path / "run", "out": tmp_path / "d.jsonl", "damaged": tmp_path / "damaged"}
    status, _, error = select(*(each.format(**names) for each in argv), capsys=capsys)
    assert status == 2 and error.count("\n") == 1 and words in error
    assert not (tmp_path / "d.jsonl").exists()


def test_scores_that_were_permuted_choose_nothing(tmp_path, capsys):
    """A control experiment gives wrong trajectories the scores of right ones."""
    write(tmp_path / "a", 1, [trajectory("q", "ann")], {"reward": {"shuffle": False}})
    write(tmp_path / "b", 1, [trajectory("q", "bob")], {"reward": {"shuffle": True}})
    output = tmp_path / "demos.jsonl"
    status, _, printed = select(tmp_path / "a", tmp_path / "b", "--output", output, capsys=capsys)
    assert status == 2 and "b/rollouts/step_1.parquet: its scores were permuted" in printed
    assert not output.exists()
    assert select(tmp_path / "a", "--output", output, capsys=capsys)[0] in (0, None)
