"""Questions and demonstrations: how files are named and read, what rows must hold, and their order."""

import csv
import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from rows_rig import write_rows

from calibadv_jax.config import ColumnsConfig, DataConfig, load_config
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Document, Message, Question
from calibadv_jax.data.demonstrations import DemoTurn, load_demonstrations
from calibadv_jax.data.golden_answers import undo_pandas_number
from calibadv_jax.data.pipeline import QuestionIterator, check_questions
from calibadv_jax.data.questions import load_questions, read_questions, select_evenly, write_questions
from calibadv_jax.data.row_files import source_of

GOOD = {"id": "1", "question": "who?", "golden_answers": ["me"], "data_source": "nq"}


def make(count, source="nq"):
    return [Question(f"{source}{i}", f"q{i}", ("a",), source) for i in range(count)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{nope", "not valid JSON"),
        ('{"id": ' + "9" * 5000, "not valid JSON .Exceeds the limit"),
        ('{"id": ' + "[" * 200_000, "not valid JSON"),
        ("[1]", "expected a JSON object, got list"),
        (GOOD | {"id": "2", "golden_answers": []}, "key 'golden_answers' holds no answer"),
        (GOOD | {"id": "2", "golden_answers": [""]}, "key 'golden_answers' holds no answer"),
        (GOOD | {"id": "2", "question": " "}, "field 'question' must be a non-empty string"),
        ({"id": "2", "golden_answers": ["me"]}, "field 'question' must be"),
        (GOOD | {"id": "2", "supporting_ids": {"a": 1}}, "key 'supporting_ids' must be text or a"),
        (GOOD, "id '1' was used before, at .*q.jsonl:1"),
    ],
)
def test_malformed_rows_name_file_and_line(tmp_path, row, message):
    with pytest.raises(UserError, match=f"q.jsonl:2: {message}"):
        load_questions(write_rows(tmp_path / "q.jsonl", GOOD, row))


def test_key_with_dot_and_separator_answer_stay(tmp_path):
    path = write_rows(tmp_path / "q.jsonl", {"asked.text": "who?", "right": "|"})
    (question,) = load_questions(str(path), ColumnsConfig("asked.text", "right", "|"))
    assert (question.text, question.golden_answers) == ("who?", ("|",))
    assert undo_pandas_number(float("inf")) is None


def test_row_without_answer_names_its_layouts_source(tmp_path):
    row = {"id": "1", "question": "who?", "paragraphs": [], "answerable": False}
    rows = row, row | {"data_source": "mine"}
    reasons = [reason for _, reason in read_questions(write_rows(tmp_path / "q.jsonl", *rows), "q")]
    assert [reason.source for reason in reasons] == ["musique", "mine"]


def test_questions_survive_writing(tmp_path):
    questions = [Question("1", "wer?", ("ich", "du"), "nq", ("7",))]
    write_questions(tmp_path / "q.jsonl", questions)
    assert load_questions(tmp_path / "q.jsonl") == questions


def test_blank_lines_end_nothing(tmp_path):
    path = tmp_path / "q.jsonl"
    write_questions(path, make(2))
    first, second = path.read_text().splitlines()
    path.write_text(f"\n{first}\n  \n\n{second}\n\n")
    assert load_questions(path) == make(2)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(UserError, match="no such file of questions"):
        load_questions(tmp_path / "none.jsonl")
    empty, good = write_rows(tmp_path / "q.jsonl", ""), write_rows(tmp_path / "good.jsonl", GOOD)
    with pytest.raises(UserError, match="q.jsonl: no questions in it"):
        load_questions([good, empty])


def test_select_evenly_takes_from_every_source():
    chosen = select_evenly(make(50, "a") + make(3, "b"), 10, seed=0)
    assert Counter(question.data_source for question in chosen) == {"a": 7, "b": 3}
    assert select_evenly(make(5), 10, seed=0) == make(5)
    few = select_evenly(make(9, "a") + make(9, "b") + make(9, "c"), 4, seed=0)
    assert {question.data_source for question in few} == {"a", "b", "c"}


def test_question_with_lone_surrogate_can_be_written(tmp_path):
    row = {"id": 7, "question": "who\ud800?", "golden_answers": ["a\udc00"], "data_source": "t"}
    (question,) = load_questions(write_rows(tmp_path / "q.jsonl", row))
    assert (question.id, question.text, question.golden_answers) == ("7", "who\ufffd?", ("a\ufffd",))
    write_questions(tmp_path / "again.jsonl", [question])
    assert load_questions(tmp_path / "again.jsonl") == [question]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train=a.jsonl", "a.jsonl"),
        ("data.train=2026_11", "2026_11"),
        ("data.train=[a.jsonl, 7]", ["a.jsonl", "7"]),
        ("data.train={nq: a.jsonl}", {"nq": "a.jsonl"}),
        ("data.train=", ""),
    ],
)
def test_data_train_takes_path_list_or_mapping(tmp_path, override, expected):
    (tmp_path / "c.yaml").write_text("data: {train: {mine: x.jsonl}, weights: {mine: 2}}\n")
    config = load_config(tmp_path / "c.yaml", [override, "data.weights={nq: 0.5, mine: 1}"])
    assert config.data.train == expected and config.data.weights == {"nq": 0.5, "mine": 1.0}
    with pytest.raises(UserError, match="data.weights.nq: must be greater than 0"):
        load_config(tmp_path / "c.yaml", ["data.weights={nq: 0}"])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("['Ada', 'Bo']", ("Ada", "Bo")),
        ('["Ada", "Bo"]', ("Ada", "Bo")),
        ("('Ada', 'Bo')", ("Ada", "Bo")),
        ("array(['Ada', 'Bo'], dtype=object)", ("Ada", "Bo")),
        ('["Ada", null]', ("Ada",)),
        ("Ada<|answer_split|>Bo", ("Ada", "Bo")),
        ("Ada <sep> Bo<SEP>", ("Ada", "Bo")),
        (["Ada[SEP]Bo", "['Cy', 'Ada']"], ("Ada", "Bo", "Cy")),
        (['["Weird Al" Yankovic]'], ('["Weird Al" Yankovic]',)),
        ("Ada<br>Bo", ("Ada", "Bo")),
        ("Ada|Bo", ("Ada|Bo",)),
        ("(1, 2)", ("(1, 2)",)),
        ([True, False], ("yes", "no")),
        (False, ("no",)),
        ([float("nan"), "Ada"], ("Ada",)),
        ([5.0, -3.0, 2.5], ("5", "-3", "2.5")),
        (["", None, " Ada "], ("Ada",)),
    ],
)
@pytest.mark.parametrize("key", ["golden_answers", "answer", "possible_answers", "ground_truth"])
@pytest.mark.parametrize("data_source", [{}, {"data_source": "mine", "id": "1"}])
def test_answers_are_read_equally_in_every_layout(tmp_path, key, data_source, answer, expected):
    row = {"question": "who?", key: answer} | data_source
    verl = {"question": "who?", "reward_model": {"ground_truth": {"target": answer}}} | data_source
    for name, content in (("q.jsonl", row), ("v.jsonl", verl)):
        assert load_questions(write_rows(tmp_path / name, content))[0].golden_answers == expected


def write(path, count, **fields):
    rows = ({"id": n, "question": f"q{n}", "golden_answers": ["a"]} | fields for n in range(count))
    return str(write_rows(path, *rows))


def sources_of(questions):
    return [question.data_source for question in questions]


def test_several_files_are_read_in_the_order_given(tmp_path):
    nq, popqa = write(tmp_path / "nq/train.jsonl", 2), write(tmp_path / "popqa/train.jsonl", 1)
    assert sources_of(load_questions([popqa, nq])) == ["popqa", "nq", "nq"]
    assert sources_of(load_questions(f"{tmp_path}/*/train.jsonl")) == ["nq", "nq", "popqa"]
    assert [question.id for question in load_questions({"mine": nq})] == ["mine_0", "mine_1"]
    path = write(tmp_path / "nq/train.jsonl", 1, data_source="theirs")
    assert sources_of(load_questions({"mine": path})) == ["theirs"], "that of the row wins"


def test_id_in_two_files_is_named_with_both_places(tmp_path):
    first = write(tmp_path / "a.jsonl", 1, data_source="x")
    second = write(tmp_path / "b.jsonl", 1, data_source="x")
    with pytest.raises(UserError, match=f"{second}:1: id '0' was used before, at {first}:1"):
        load_questions([first, second])


def test_nothing_that_fits_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"\*.jsonl: no file matches"):
        load_questions(f"{tmp_path}/*.jsonl")
    for nothing in ([], {}, "", [""]):
        with pytest.raises(UserError, match="no question file: set data.train and data.eval"):
            load_questions(nothing)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("nq/test.jsonl", "nq"),
        ("hotpot_dev_fullwiki_v1.json", "hotpotqa"),
        ("2wiki/dev.json", "2wikimultihopqa"),
        ("NQ-open.train.jsonl", "nq"),
        ("data/triviaqa-unfiltered.json.gz", "triviaqa"),
        ("mine/train-00000.parquet", "mine"),
        ("data/mine.jsonl", "mine"),
        ("train.jsonl", "train"),
    ],
)
def test_names_tell_the_data_source(path, expected):
    assert source_of(Path(path)) == expected


LISTED = {
    '["Ada", "Bo"]': ("Ada", "Bo"),
    "['Ada']": ("Ada",),
    """['Ada', "Bo's"]""": ("Ada", "Bo's"),
    "['Ada' 'Bo']": ("Ada", "Bo"),  # numpy, as pandas writes a parquet's lists
    "['Ada'\n 'Bo']": ("Ada", "Bo"),
    "[1999, 2000]": ("1999", "2000"),
    "['minus', -1]": ("minus", "-1"),
    "Ada": ("Ada",),
    "[{'text': 'Ada'}, {'text': 'Bo', 'aliases': ['B.']}]": ("Ada", "Bo", "B."),
    "{'text': array(['Ada', 'Bo'], dtype=object), 'answer_start': array([7, 9], dtype=int32)}": ("Ada", "Bo"),
    "[Fe(CN)6]": ("[Fe(CN)6]",),
    "[a] and [b]": ("[a] and [b]",),
    "[__import__('os').getcwd()]": ("[__import__('os').getcwd()]",),
    "[[1], [2]]": ("[[1], [2]]",),
}


def write_table(path, rows, separator=","):
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows(rows)
    return path


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("column", ["answer", "answers", "golden_answers", "possible_answers", "Answer"])
def test_list_in_a_table_cell_is_parsed(tmp_path, column, separator):
    """JSON's, Python's or numpy's; what only looks like one is a text, and is never run."""
    rows = [["Question" if column == "Answer" else "question", column]]
    rows += [[f"['who'] {n}", written] for n, written in enumerate(LISTED)]
    questions = load_questions(write_table(tmp_path / "mine.csv", rows, separator))
    assert [question.golden_answers for question in questions] == list(LISTED.values())
    assert [question.text for question in questions] == [f"['who'] {n}" for n in range(len(LISTED))]


BROKEN = [
    "['Ada', Bo]",
    '["Ada", "Bo"',
    "[{'words': 'Ada'}",
    "{'text': 'Ada'",
    "['Ada', b'Bo']",
    "['A', ['Bo']]",
]


@pytest.mark.parametrize("cell", BROKEN)
def test_broken_list_in_a_table_is_refused(tmp_path, cell):
    path = write_table(tmp_path / "mine.csv", [["question", "answer"], ["who?", "Ada"], ["what?", cell]])
    with pytest.raises(UserError, match="mine.csv:3: key 'answer' begins as a list, but is none: .*write"):
        load_questions(path)


def test_table_has_the_booleans_and_numbers_of_pandas(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "id,question,golden_answers,data_source,supporting_ids\n"
        "1.0,who?,5.0,mine,7.0\n\n2.0,is it?,True,mine,\n3.0,is it not?,FALSE,,8.0\n"
        f"4,{'long ' * 50_000}?,\"['Ada', 'Bo']\",mine,\"['7', '8']\"\n"
    )
    questions = load_questions(tmp_path / "mine.csv")
    assert [question.golden_answers for question in questions] == [("5",), ("yes",), ("no",), ("Ada", "Bo")]
    assert [question.id for question in questions] == ["1", "2", "mine_3", "4"]
    assert [question.supporting_ids for question in questions] == [("7",), (), ("8",), ("7", "8")]


def test_own_layout_may_be_a_table(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "id,question,golden_answers,data_source,supporting_ids\n"
        "1,who?,\"['Ada', 'Bo']\",mine,\"['7', '8']\"\n2,where?,Rome,mine,\n"
    )
    first, second = load_questions(tmp_path / "mine.csv")
    assert (first.golden_answers, first.supporting_ids) == (("Ada", "Bo"), ("7", "8"))
    assert (second.golden_answers, second.supporting_ids) == (("Rome",), ())


@pytest.mark.parametrize("name", ["q.json", "q.jsonl", "q.parquet"])
def test_nan_is_missing_in_every_column(tmp_path, name):
    nan = float("nan")
    rows = [
        {"id": 1.0, "question": "who?", "golden_answers": [5.0], "data_source": "mine"},
        {"id": nan, "question": "where?", "golden_answers": [7.0, nan], "data_source": None},
    ]
    questions = load_questions(write_rows(tmp_path / name, *rows))
    assert [question.golden_answers for question in questions] == [("5",), ("7",)]
    assert [(question.id, question.data_source) for question in questions] == [("1", "mine"), ("q_1", "q")]


@pytest.mark.parametrize("weights", [None, {"a": 3.0, "b": 1.0}])
@pytest.mark.parametrize("shuffle", [True, False])
def test_resumed_pipeline_goes_on_exactly(shuffle, weights):
    questions = make(6, "a") + make(30, "b")
    first, resumed, other = (QuestionIterator(questions, seed, shuffle, weights) for seed in (3, 3, 4))
    begun = list(islice(first, 37))
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    assert list(islice(resumed, 60)) == list(islice(first, 60))
    assert (list(islice(other, 37)) == begun) == (not shuffle)


QUESTIONS = make(20, "q")


def drawn(seed, shuffle, count=40):
    iterator = QuestionIterator(QUESTIONS, seed, shuffle)
    return [int(next(iterator).id[1:]) for _ in range(count)]


def test_seed_and_epoch_decide_the_order():
    assert drawn(0, False) == list(range(20)) * 2 == drawn(1, False)
    assert drawn(0, True) == drawn(0, True)
    assert len({tuple(drawn(seed, True, 20)) for seed in range(5)} | {tuple(range(20))}) == 6
    order = drawn(0, True, 6 * 20)
    epochs = [order[start : start + 20] for start in range(0, 120, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_too_easy_or_hard_question_is_skipped_once():
    first, resumed = (QuestionIterator(QUESTIONS, 0, False, None, 0.25, 0.75) for _ in range(2))
    assert [next(first).id for _ in range(20)] == [question.id for question in QUESTIONS]
    for name, scores in {
        "q1": [1, 1, 0.5],  # too easy
        "q2": [-1, 0.7, 0],  # too hard: a negative score counts as 0
        "q3": [-1, 1, 0],
        "q4": [0.75, 0.75],
        "q5": [],  # all trajectories failed
        "q6": [0.5, 0],  # as hard as allowed
    }.items():
        first.record_scores(name, scores)
    assert first.num_resting == 2
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    for item in (first, resumed):
        expected = ["q0", *(f"q{number}" for number in range(3, 20)), *(f"q{number}" for number in range(5))]
        assert [next(item).id for _ in expected] == expected
        assert item.get_state() == {"drawn": 45} and item.num_resting == 0


def rest(iterator, name, *means):
    for mean in means:
        iterator.record_scores(name, [mean])


def epochs_with(iterator, name, count):
    """Whether each of the next epochs of the 20 questions asks a question."""
    asked = []
    for _ in range(count):
        end = (iterator.get_state()["drawn"] // 20 + 1) * 20
        names = []
        while iterator.get_state()["drawn"] < end:
            names.append(next(iterator).id)
        asked.append(name in names)
    return asked


def test_question_rests_after_epochs_in_a_row_and_comes_again():
    def fresh():
        return QuestionIterator(QUESTIONS, 0, False, None, 0.25, 0.75, rest_after=2, rest_for=3)

    iterator = fresh()
    rest(iterator, "q1", 1.0, 0.5, 1.0)  # never twice in a row
    assert iterator.num_resting == 0
    rest(iterator, "q1", 0.0)  # too hard after too easy: neither teaches
    assert iterator.num_resting == 1
    resumed = fresh()
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    for each in (iterator, resumed):
        assert epochs_with(each, "q1", 5) == [False, False, False, True, True]
        rest(each, "q1", 0.0)  # a single one is enough now
        assert epochs_with(each, "q1", 4) == [False, False, False, True]
        rest(each, "q1", 0.5, 0.0)  # it has taught something: two in a row again
        assert epochs_with(each, "q1", 1) == [True]
    assert iterator.get_state() == resumed.get_state() == {"drawn": 200, "streaks": {"q1": 1}}


def test_share_of_resting_questions_is_bounded():
    iterator = QuestionIterator(QUESTIONS, 0, False, None, 0.25, 0.75, rest_for=2, rest_share=0.25)
    for question in QUESTIONS:
        rest(iterator, question.id, 0.0)
    assert iterator.num_resting == 5
    assert [next(iterator).id for _ in range(15)] == [f"q{number}" for number in range(5, 20)]
    rest(iterator, "q4", 0.0)  # it rests already: its rest begins again
    rest(iterator, "q9", 0.0)  # no room
    assert iterator.get_state()["resting"] == {"q0": 1, "q1": 1, "q2": 1, "q3": 1, "q4": 2}


def test_resting_questions_of_an_earlier_version_are_skipped_once():
    iterator = QuestionIterator(QUESTIONS, 0, False, None, 0.25, 0.75, rest_for=3)
    iterator.set_state({"drawn": 20, "resting": ["q0", "q2"]})
    assert [next(iterator).id for _ in range(3)] == ["q1", "q3", "q4"] and iterator.num_resting == 0


def test_by_default_no_question_rests():
    iterator = QuestionIterator(QUESTIONS, 0, False)
    for scores in ([1.0] * 3, [0.0] * 3, [-1.0], [2.0] * 3):
        iterator.record_scores("q0", scores)
    assert iterator.get_state() == {"drawn": 0}
    with pytest.raises(ValueError, match="rest_below is 0.5, but must be below rest_above"):
        DataConfig(rest_below=0.5, rest_above=0.5)
    for keys in ({"rest_after": 2}, {"rest_for": 2}, {"rest_share": 0.5}):
        with pytest.raises(ValueError, match="rest_after, rest_for and rest_share do nothing"):
            DataConfig(**keys)
        DataConfig(rest_above=0.9, **keys)


MIXED, WEIGHTS = make(6, "nq") + make(90, "hotpotqa"), {"nq": 3.0, "hotpotqa": 1.0}


@pytest.mark.medium
@pytest.mark.parametrize("shuffle", [True, False])
def test_mixture_has_its_shares_everywhere(shuffle):
    drawn = list(islice(QuestionIterator(MIXED, 0, shuffle, WEIGHTS), 400))
    reordered = dict(reversed(WEIGHTS.items()))
    assert list(islice(QuestionIterator(MIXED, 0, shuffle, reordered), 400)) == drawn
    for start in range(0, 400, 40):
        part = drawn[start : start + 40]
        assert Counter(question.data_source for question in part) == {"nq": 30, "hotpotqa": 10}
    nq = [item.id for item in drawn if item.data_source == "nq"]
    epochs = [nq[start : start + 6] for start in range(0, 300, 6)]
    assert all(len(set(epoch)) == 6 for epoch in epochs), "a source has epochs of its own"
    assert (len({tuple(epoch) for epoch in epochs}) > 10) == shuffle
    hotpot = [item.id for item in drawn if item.data_source == "hotpotqa"]
    assert len(set(hotpot[:90])) == 90


def test_sources_of_one_size_are_not_shuffled_alike():
    iterator = QuestionIterator(make(20, "a") + make(20, "b"), 0, True, {"a": 1, "b": 1})
    drawn = list(islice(iterator, 40))
    orders = [[item.id[1:] for item in drawn if item.data_source == source] for source in "ab"]
    assert orders[0] != orders[1]


def test_question_without_required_prompt_is_refused():
    check_questions(MIXED, {}, "paper")
    carried = [replace(question, prompt=(Message("user", ("x",)),)) for question in MIXED]
    check_questions(carried, WEIGHTS, "from_data")
    with pytest.raises(UserError, match="question 'hotpotqa3': .* is 'from_data', but its row has"):
        check_questions([*carried, MIXED[9]], WEIGHTS, "from_data")


@pytest.mark.parametrize("weights", [{"nq": 1.0}, WEIGHTS | {"popqa": 1.0}])
def test_weights_and_data_must_name_the_same_sources(weights):
    with pytest.raises(UserError, match="data.weights names .*nq.*, but data.train holds hotpotqa, nq"):
        QuestionIterator(MIXED, 0, True, weights)


ANSWER = {"text": "<think> so </think>\n<answer> ada </answer>"}
SEARCH = "<think> find it </think>\n<search> silent garden </search>"


def row(*turns, **changes):
    fields = {"id": "1", "question": "who?", "golden_answers": ["ada", "Ada L."], "data_source": "mine"}
    return fields | {"turns": list(turns)} | changes


def chat(question, *searched, answer=ANSWER["text"]):
    """Messages; `searched` are an assistant's search and the tool's messages."""
    messages = [("user", question), *zip(("assistant", "tool", "tool"), searched, strict=False)]
    return [{"role": role, "content": text} for role, text in (*messages, ("assistant", answer))]


def test_every_field_arrives_in_order(tmp_path):
    fields = [("7", "Garden", "by Ada"), ("Other", "Other", ""), ("x", "Garden", "a second of that title")]
    documents = [{"id": name, "title": title, "text": text} for name, title, text in fields]
    documents[0]["id"] = 7
    del documents[1]["id"]  # known by its title
    path = write_rows(
        tmp_path / "demos.jsonl",
        row({"text": SEARCH, "documents": documents}, ANSWER),
        row(ANSWER, id="2", supporting_ids=[7]),
    )
    first, second = load_demonstrations(path)
    assert first.question == Question("1", "who?", ("ada", "Ada L."), "mine")
    shown = tuple(Document(*values) for values in fields)
    assert first.turns == (DemoTurn(SEARCH, shown), DemoTurn(ANSWER["text"]))
    assert second.question.supporting_ids == ("7",) and len(second.turns) == 1


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"text": "<think> only a thought </think>"}, "a turn must hold <search> query </search> or"),
        ({"text": "<think> t </think> Rome"}, "a turn must hold <search> query </search> or"),
        ({"text": ""}, "every turn needs a non-empty 'text'"),
        ({"text": "<search> </search>"}, "a turn must hold <search> query"),
        ({"text": "<answer> a <search> b </search> </answer>"}, "a turn must hold <search> query"),
        ({"text": "  "}, "every turn needs a non-empty 'text'"),
        ("<answer> ada </answer>", "every turn needs a non-empty 'text'"),
        ({"text": SEARCH, "documents": {"title": "a", "text": "b"}}, "'documents' must be a list"),
        ({"text": SEARCH, "documents": [{"title": "a"}]}, "'documents' must be a list"),
        ({"text": SEARCH, "documents": [{"title": 1, "text": "b"}]}, "'documents' must be a list"),
        ({"text": SEARCH, "observation": 3}, "'observation' must be a text, got 3"),
    ],
)
def test_invalid_turn_is_named_with_its_line(tmp_path, turn, message):
    path = write_rows(tmp_path / "demos.jsonl", row(ANSWER), row(ANSWER, turn))
    with pytest.raises(UserError, match=f"demos.jsonl:2: {message}"):
        load_demonstrations(path)


@pytest.mark.parametrize("turns", [[], None, "x"])
def test_demonstration_without_turns_is_refused(tmp_path, turns):
    path = write_rows(tmp_path / "demos.jsonl", row(turns=turns))
    with pytest.raises(UserError, match="demos.jsonl:1: field 'turns' must be a non-empty list"):
        load_demonstrations(path)


def test_lone_surrogate_is_replaced_in_turns_and_messages(tmp_path):
    output = "<think> so \ud83d </think>\n<answer> ada </answer>"
    rows = row({"text": output}, supporting_ids=["\ud83d"]), {"messages": chat("who?", answer=output)}
    ours, other = load_demonstrations(write_rows(tmp_path / "demos.jsonl", *rows))
    assert ours.turns[0].text == other.turns[0].text == output.replace("\ud83d", "\ufffd")
    assert ours.question.supporting_ids == ("\ufffd",)
    build_word_tokenizer().encode(ours.turns[0].text)


def test_empty_or_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="none.jsonl: no such file of demonstrations"):
        load_demonstrations(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="'messages' must be a non-empty list, got 'x'"):
        load_demonstrations(write_rows(tmp_path / "demos.jsonl", {"messages": "x"}))
    with pytest.raises(UserError, match="no demonstrations in it"):
        load_demonstrations(write_rows(tmp_path / "demos.jsonl"))


def test_chat_question_ends_with_its_line(tmp_path):
    shown = "See <information> a </information>", " <information> b </information>"
    rows = {
        "who wrote it?": {"messages": chat("Answer it.\nQuestion: who wrote it?\nThink first.")},
        "who?\nThink first.": {"messages": chat("who?\nThink first."), "id": 2.0},
        "Question: what is Question:?": {"messages": chat("Question: what is Question:?")},
        "asked?": {"messages": chat("who?", SEARCH, *shown), "question": "asked?"},
    }
    demonstrations = load_demonstrations(write_rows(tmp_path / "demos.jsonl", *rows.values()))
    assert [each.question.text for each in demonstrations] == list(rows)
    assert demonstrations[1].question.id == "2"
    assert demonstrations[3].turns[0].observation == f"{shown[0]}\nb"


def test_name_of_a_data_source_has_no_control_characters(tmp_path):
    """It becomes a name in tables, metrics and on the terminal."""
    rows = [GOOD | {"data_source": "n\x1b[2Jq\n a"}, GOOD | {"golden_answers": [], "data_source": "b\x07"}]
    (_, question), (_, reason) = read_questions(write_rows(tmp_path / "q.jsonl", *rows), "q")
    assert (question.data_source, reason.source) == ("n[2Jq a", "b")
    with pytest.raises(UserError, match="q.jsonl:1: field 'data_source' must be a non-empty string"):
        load_questions(write_rows(tmp_path / "q.jsonl", GOOD | {"data_source": "\x1b"}))
