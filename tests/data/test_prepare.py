"""prepare-data: what is kept, what is dropped and why, and that nothing is half-written."""

import json

import pytest
from rows_rig import write_rows

from calibadv_jax import cli
from calibadv_jax.contrib.cli.prepare_data import EXAMPLES, Filters, prepare, question_key
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.questions import load_questions


def row(number, question, source="nq", **changes):
    return {"id": number, "question": question, "golden_answers": ["ada"], "data_source": source} | changes


def call(*arguments):
    """The command's exit status."""
    with pytest.raises(SystemExit) as ended:
        cli.calibadv(["prepare-data", *map(str, arguments)])
    return ended.value.code


@pytest.fixture
def files(tmp_path):
    """A training file with something of everything, and a test file."""
    train = write_rows(
        tmp_path / "train.jsonl",
        row(1, "Who wrote Silent Garden?"),
        row(2, "who  wrote «silent garden»"),  # a duplicate of the first
        row(3, "Who?", golden_answers=[]),
        row(4, "Where is it?", "hotpotqa"),  # of the test file
        row(5, "When " + "very " * 40 + "long ago?", "hotpotqa"),
        row(1, "Another of this id", "hotpotqa"),
    )
    return train, write_rows(tmp_path / "test.jsonl", row(9, "where is it", "hotpotqa"))


def test_dropped_rows_are_counted_by_reason_and_source(files, tmp_path, capsys):
    train, test = files
    filters = ["--exclude", test, "--max_characters", "99"]
    assert call(train, "--output", tmp_path / "out.jsonl", *filters) == 0
    written = [(question.id, question.text) for question in load_questions(tmp_path / "out.jsonl")]
    assert written == [("1", "Who wrote Silent Garden?"), ("1_2", "Another of this id")]
    names = ["data_source", "read", "written", "duplicate", "no answer", "overlap", "too long"]
    rows = [["hotpotqa", 3, 1, 0, 0, 1, 1], ["nq", 3, 1, 1, 1, 0, 0], ["all", 6, 2, 1, 1, 1, 1]]
    saved = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert saved["counts"] == [dict(zip(names, row, strict=True)) for row in rows]
    assert "all 6 2 1 1 1 1 written to" in " ".join(capsys.readouterr().out.split())
    assert saved["examples"]["duplicate"] == [{"row": f"{train}:2", "question": "who  wrote «silent garden»"}]
    (example,) = saved["examples"]["no answer"]
    assert example["row"] == f"{train}:3" and "golden_answers" in example["question"]


def test_command_writes_parquet_of_one_data_source_and_prints_the_counts(files, tmp_path, capsys):
    train, test = files
    filters = ["--exclude", test, "--max_characters", "99", "--only", "hotpotqa"]
    assert call(train, "--output", tmp_path / "out.parquet", *filters) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    reasons = ["no", "answer", "other", "data", "source", "overlap", "too", "long"]
    assert header.split() == ["data", "source", "read", "written", *reasons]
    assert [line.split() for line in rows[:3]] == [
        ["hotpotqa", "3", "1", "0", "0", "1", "1"],
        ["nq", "3", "0", "1", "2", "0", "0"],
        ["all", "6", "1", "1", "2", "1", "1"],
    ]
    assert [question.text for question in load_questions(tmp_path / "out.parquet")] == ["Another of this id"]


def test_report_shows_a_few_duplicates(tmp_path):
    train = write_rows(tmp_path / "train.jsonl", *(row(number, "Same?") for number in range(20)))
    report = prepare(str(train), tmp_path / "out.jsonl")
    assert report.rows()[-1] == ["all", 20, 1, 19]
    assert len(report.examples["duplicate"]) == EXAMPLES


def test_repeated_ids_of_other_peoples_parquet_are_numbered(tmp_path):
    rows = [
        {
            "data_source": "nq",
            "prompt": [{"role": "user", "content": f"Question: q{number}?\n"}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": ["ada"]}},
            "extra_info": {"split": "test", "index": 0},  # repeats, as in merged test files
        }
        for number in range(3)
    ]
    path = write_rows(tmp_path / "test.parquet", *rows)
    with pytest.raises(UserError, match="id 'nq_test_0' was used before"):
        load_questions(path)
    prepare(str(path), tmp_path / "out.jsonl")
    ids = [question.id for question in load_questions(tmp_path / "out.jsonl")]
    assert ids == ["nq_test_0", "nq_test_0_2", "nq_test_0_3"]


def test_no_question_left_writes_nothing(files, tmp_path):
    message = r"no question is left, 6 were dropped \(no answer, other data source\)"
    with pytest.raises(UserError, match=message):
        prepare(str(files[0]), tmp_path / "out.jsonl", Filters(data_sources={"none"}))
    assert not (tmp_path / "out.jsonl").exists()


def test_rows_without_data_source_are_counted_under_the_name_that_is_given(tmp_path):
    rows = [{"id": n, "question": f"q{n}", "golden_answers": ["ada"] * (n > 0)} for n in range(3)]
    report = prepare({"mine": str(write_rows(tmp_path / "x.jsonl", *rows))}, tmp_path / "out.jsonl")
    assert report.rows() == [["mine", 3, 2, 1], ["all", 3, 2, 1]]
    assert {question.data_source for question in load_questions(tmp_path / "out.jsonl")} == {"mine"}


def test_questions_are_compared_by_their_words():
    for question, other in (("Who wrote it?", "who WROTE it"), ("Straße", "STRASSE"), ("ﬁsh", "fish")):
        assert question_key(question) == question_key(other)
    for question, other in (("Who wrote it?", "Who wrote that?"), ("???", "!!!")):
        assert question_key(question) != question_key(other)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_both_output_formats_hold_the_same(tmp_path, suffix):
    system = {"role": "system", "content": "x"}
    prompts = [[system, {"role": "user", "content": f"Say: q{n}?"}] for n in range(5)]
    rows = [row(n, f"q{n}?", prompt=prompt, supporting_ids=["7"]) for n, prompt in enumerate(prompts)]
    train = write_rows(tmp_path / "train.jsonl", *rows, row(9, "no prompt?"))
    prepare(str(train), tmp_path / f"out{suffix}")
    assert load_questions(tmp_path / f"out{suffix}") == load_questions(train)


def test_former_output_stays_after_an_error(files, tmp_path):
    train, _ = files
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(UserError, match="no question is left, 6 .*no answer, other data source, too long"):
        prepare(str(train), output, Filters(data_sources={"nq"}, max_characters=10))
    with train.open("a") as file:
        file.write("{nope\n")
    with pytest.raises(UserError, match="train.jsonl:7: not valid JSON"):
        prepare(str(train), output)
    assert sorted(tmp_path.iterdir()) == [output, tmp_path / "test.jsonl", train]
    assert output.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max_characters", "-1"], "argument --max_characters: -1: give 0 or more"),
        (["--output", "out.txt"], "out.txt: the output must end in .jsonl or .parquet"),
        (["--output", "file/out.jsonl"], "file/out.jsonl: cannot be written"),
    ],
)
def test_bad_arguments_are_one_line(files, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert call(files[0], "--output", "out.jsonl", *arguments) == 2
    output = capsys.readouterr().err
    assert message in output and output.count("\n") == 1


def test_answers_that_normalise_to_nothing_are_dropped(tmp_path):
    rows = [row(number, f"Who is {number}?", golden_answers=["A"]) for number in range(20)]
    train = write_rows(tmp_path / "train.jsonl", *rows, row(20, "Where?", golden_answers=["The", "Rome"]))
    report = prepare(str(train), tmp_path / "out.jsonl")
    assert report.rows()[-1] == ["all", 21, 1, 20] and report.outcomes[2:] == ["empty answer"]
    assert len(report.examples["empty answer"]) == EXAMPLES
    (question,) = load_questions(tmp_path / "out.jsonl")
    assert question.golden_answers == ("Rome",)


@pytest.mark.parametrize(
    ("separator", "answers"), [(["--separator", ";"], ("Ada", "Bo")), ([], ("Ada; Bo",))]
)
def test_named_columns_and_separator_are_read(tmp_path, separator, answers):
    train = write_rows(tmp_path / "mine.jsonl", {"query_id": 7, "text": "who?", "gold": "Ada; Bo"})
    test = write_rows(tmp_path / "test.jsonl", row(9, "where?"))
    columns = ["--question", "text", "--answer", "gold", "--exclude", test, *separator]
    assert call(train, *columns, "--output", tmp_path / "out.jsonl") == 0
    (question,) = load_questions(tmp_path / "out.jsonl")
    assert question.golden_answers == answers
