"""Question files as the field publishes them, loaded as they are; docs/data.md and examples/questions."""

import argparse
import base64
import gzip
import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_rig import write_rows

from calibadv_jax import cli
from calibadv_jax.config import ColumnsConfig, load_config
from calibadv_jax.contrib.cli import prepare_data
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Message, Question
from calibadv_jax.data import containers, row_files
from calibadv_jax.data.demonstrations import load_demonstrations
from calibadv_jax.data.golden_answers import NoAnswer
from calibadv_jax.data.layouts import LAYOUTS, layout_of
from calibadv_jax.data.questions import answer_warnings, load_questions, question_row, write_questions
from calibadv_jax.data.row_files import read_rows
from retriever import prepare_corpus

PROMPT = "Reason inside <think> and </think>. Question: {}\n"


def verl(number, question="who?", **changes):
    """A row of Search-R1's parquet, without the columns that came from FlashRAG."""
    return {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": PROMPT.format(question)}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["me"]}},
        "extra_info": {"split": "train", "index": number},
    } | changes


MAGAZINE = {"question": "Which was first?", "answer": "Arthur's Magazine"}
FACTS = {"id": "5a7a", "supporting_facts": {"title": ["a"], "sent_id": [0]}, "context": {"title": ["a"]}}
COMO = {"Value": "Como", "Aliases": ["Lago", "Como"]}
TRIVIA = {"Question": "Which lake?", "QuestionId": "tc_1", "Answer": COMO}
HUB_TRIVIA = {
    "question": "Which lake?",
    "question_id": "tc_1",
    "question_source": "http://x/",
    "answer": {"aliases": ["Lago"], "value": "Como", "normalized_value": "como"},
}
MUSIQUE = {"id": "2hop__1", "paragraphs": [], "question": "Who?", "answer": "Ann", "answerable": True}
TOKENS = [{"token": t, "html_token": t == "d"} for t in [*"abc", "May", "d", "1999"]]
SPAN = [{"short_answers": [{"start_token": 3, "end_token": 6}], "yes_no_answer": "YES"}]
NATURAL = {"example_id": 55, "question_text": "when was it", "document_tokens": TOKENS, "annotations": SPAN}
NO_SPAN = [{"short_answers": [], "yes_no_answer": "YES"}]
SIMPLIFIED = {
    "example_id": 55,
    "question_text": "when was it",
    "document_text": "It was <P> in May 1999 .",
    "annotations": [{"short_answers": [{"start_token": 4, "end_token": 6}], "yes_no_answer": "NONE"}]
    + NO_SPAN,
}
HUB_NOTES = {"short_answers": [{"text": ["May 1999"]}, {"text": []}], "yes_no_answer": [-1, 0, 1]}
HUB_NATURAL = {"id": "797", "question": {"text": "when was it"}, "annotations": HUB_NOTES}
WHICH = {"index": 3, "question": "which?"}
TARGET = {"ground_truth": {"target": ["me"], "answers": ["you"]}}
ANSWERS = {"ground_truth": {"answers": ["me"], "answer": "you"}}
RLINF = "<|im_start|>user\nReason in <think>. Question: where?<|im_end|>\n<|im_start|>assistant\n<think>"
CONTEXTS = {"dataset": "nq", "question": "Who?", "answers": ["Ann"], "positive_ctxs": []}


@pytest.mark.parametrize(
    ("name", "row", "expected"),  # id, question, answers, data source; docs/data.md has the usual rows
    [
        ("q.parquet", verl(7), "nq_train_7 who? me nq"),
        ("q.parquet", verl(7, id="test_0", question="who"), "nq_test_0 who me nq"),
        ("q.jsonl", verl(7, extra_info=WHICH, reward_model=TARGET), "nq_3 which? me nq"),
        ("q.parquet", verl(0, reward_model={"ground_truth": "20 July"}), "nq_train_0 who? 20 July nq"),
        ("q.jsonl", verl(0, reward_model=ANSWERS), "nq_train_0 who? me nq"),
        ("nq/a.jsonl", {"id": "nq4", "question": "who?", "golden_answers": ["me"]}, "nq_nq4 who? me nq"),
        ("nq/a.jsonl", {"id": "a_0", "question": "who?", "golden_answers": ["me"]}, "nq_a_0 who? me nq"),
        ("popqa/a.jsonl", {"id": 4, "question": "?", "golden_answers": ["me", 5]}, "popqa_4 ? me/5 popqa"),
        ("a.parquet", MAGAZINE | FACTS, "hotpotqa_5a7a Which was first? Arthur's Magazine hotpotqa"),
        ("x.parquet", HUB_TRIVIA, "triviaqa_tc_1 Which lake? Como/Lago triviaqa"),
        ("full.jsonl", NATURAL, "nq_55 when was it May 1999/yes nq"),
        ("natural.parquet", HUB_NATURAL, "nq_797 when was it May 1999/no/yes nq"),
        ("mine.jsonl", {"qid": 3, "question": "Who?", "answers": ["Ann"]}, "mine_3 Who? Ann mine"),
        ("biencoder-nq-dev.json", CONTEXTS, "nq_biencoder-nq-dev_0 Who? Ann nq"),
        ("nq/test.jsonl", {"id": "test_0", "question": "?", "golden_answers": ["me"]}, "nq_test_0 ? me nq"),
        (
            "dev.jsonl",
            MUSIQUE | {"answer_aliases": ["A. B.", "Ann"]},
            "musique_2hop__1 Who? Ann/A. B. musique",
        ),
        ("v1.0-simplified.jsonl", SIMPLIFIED, "nq_55 when was it May 1999/yes nq"),
        ("NQ-open.dev.jsonl", {"question": "when?", "answer": ["1999"]}, "nq_NQ-open_0 when? 1999 nq"),
        ("bamboogle.parquet", {"Question": "Who?", "Answer": "Ann"}, "bamboogle_0 Who? Ann bamboogle"),
    ],
)
def test_published_rows_are_questions(tmp_path, name, row, expected):
    (question,) = load_questions(write_rows(tmp_path / name, row))
    answers = "/".join(question.golden_answers)
    assert f"{question.id} {question.text} {answers} {question.data_source}" == expected


def test_rows_below_a_key_are_read(tmp_path):
    web = {"Data": [TRIVIA, TRIVIA | {"QuestionId": "tc_2"}], "Domain": "Web", "Version": 1.0}
    (tmp_path / "web-train.json").write_text(json.dumps(web, indent=4))
    answers = [
        (question.id, question.golden_answers) for question in load_questions(tmp_path / "web-train.json")
    ]
    assert answers == [(f"triviaqa_tc_{n}", ("Como", "Lago")) for n in (1, 2)]


def test_popqa_table_may_quote_its_questions(tmp_path):
    header = "id\tsubj\tquestion\tpossible_answers\n"
    row = '4222362\tGeorge Rankin\t"What is ""Rankin""?"\t"[""politician"", ""pol""]"\n'
    (tmp_path / "popQA.tsv").write_text(header + row)
    (question,) = load_questions(tmp_path / "popQA.tsv")
    assert (question.id, question.text) == ("popqa_4222362", 'What is "Rankin"?')
    assert question.golden_answers == ("politician", "pol")


def test_table_of_dpr_has_no_header_and_its_name_tells_the_source(tmp_path):
    (tmp_path / "nq-test.qa.csv").write_text("who was it\t['Ann', \"B's\"]\nwhere\t['Rome']\n")
    questions = load_questions(tmp_path / "nq-test.qa.csv")
    assert [question.golden_answers for question in questions] == [("Ann", "B's"), ("Rome",)]
    assert {question.data_source for question in questions} == {"nq"}


def test_quoted_comma_belongs_to_the_question(tmp_path):
    (tmp_path / "Bamboogle Prerelease.csv").write_text('Question,Answer\n"Who, then?",Ann\n')
    (question,) = load_questions(tmp_path / "Bamboogle Prerelease.csv")
    assert (question.text, question.golden_answers) == ("Who, then?", ("Ann",))
    assert question.data_source == "bamboogle"


def test_ids_that_repeat_in_other_data_sources_are_told_apart(tmp_path):
    """Search-R1's merged file has FlashRAG's ids: train_0 of NQ and train_0 of HotpotQA."""
    rows = [verl(0, id="train_0"), verl(0, id="train_0", data_source="hotpotqa")]
    questions = load_questions(write_rows(tmp_path / "q.parquet", *rows))
    assert [question.id for question in questions] == ["nq_train_0", "hotpotqa_train_0"]


def test_prompt_that_is_text_is_the_users(tmp_path):
    ours = {"id": 1, "question": "who?", "golden_answers": ["me"], "data_source": "x", "prompt": "Say: who?"}
    (question,) = load_questions(write_rows(tmp_path / "q.jsonl", ours))
    assert question.prompt == (Message("user", ("Say: ", "")),)


def test_prompt_of_rlinf_may_have_the_marks_of_a_chat(tmp_path):
    plain = {"prompt": "Reason. Question: where?\nAssistant: <think>", "solutions": ["Rome", "Roma"]}
    chat = {"prompt": RLINF, "solutions": "Ann"}
    questions = load_questions(write_rows(tmp_path / "rlinf.jsonl", plain, chat))
    assert [question.text for question in questions] == ["where?", "where?"]
    assert [question.golden_answers for question in questions] == [("Rome", "Roma"), ("Ann",)]
    prompts = [question.text.join(question.prompt[0].parts) for question in questions]
    assert prompts == [plain["prompt"], chat["prompt"]]


def test_content_decides_the_format(tmp_path):
    parquet = write_rows(tmp_path / "q.parquet", verl(1), verl(2)).rename(tmp_path / "q.jsonl")
    packed, lines = tmp_path / "again.parquet", "\n  \n\n".join(json.dumps(verl(n)) for n in (1, 2))
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + lines.encode()))
    assert load_questions(parquet) == load_questions(packed)
    assert len(load_questions(parquet)) == 2


def test_prompt_is_split_at_question_and_survives_writing(tmp_path):
    system = {"role": "system", "content": "You help."}
    rows = [verl(n, f"q{n}?", prompt=[system, *verl(n, f"q{n}?")["prompt"]]) for n in (1, 2)]
    questions = load_questions(write_rows(tmp_path / "q.parquet", *rows))
    before, after = PROMPT.split("{}")
    assert questions[0].prompt == (Message("system", ("You help.",)), Message("user", (before, after)))
    assert questions[0].prompt[1] is questions[1].prompt[1], "the words that all rows share are kept once"
    write_questions(tmp_path / "ours.jsonl", questions)
    assert load_questions(tmp_path / "ours.jsonl") == questions
    assert question_row(questions[0])["prompt"] == rows[0]["prompt"]


ASKED = {"question": "x", "answer": "y"}
POPQA = {"question": "x", "possible_answers": '["y"]'}
TOOL, ASSISTANT = ([{"role": role, "content": "x"}] for role in ("tool", "assistant"))


@pytest.mark.parametrize(
    ("good", "change", "message"),
    [
        (verl(0), {"reward_model": {"ground_truth": {"target": []}}}, "key .*ground_truth.target' holds no"),
        (verl(0), {"reward_model": 3}, "'reward_model' and 'extra_info' must be objects"),
        (verl(0), {"prompt": "Who?"}, "key 'question' is missing.*exactly once; add the key"),
        ({"prompt": RLINF, "solutions": "x"}, {"prompt": "who?"}, "key 'question' is missing.*exactly once"),
        (verl(0), verl(1, "Question: x?"), "key 'question' is missing.*exactly once; add the key"),
        (verl(0), {"question": "x", "prompt": TOOL}, "field 'prompt' must be text or.*'role' .system, user"),
        (verl(0), {"question": "x", "prompt": ASSISTANT}, "the last message of 'prompt' .* 'assistant'"),
        (MUSIQUE, {"answerable": False}, "key 'answerable' is false; remove the row"),
        (ASKED, {"answer": {"a": 1}}, "key 'answer' must be text"),
        (ASKED, {"question": " "}, "field 'question' must be a non-empty string, got ''; correct"),
        (POPQA, {"possible_answers": '["no'}, "key 'possible_answers' begins as a list, but is none"),
    ],
)
@pytest.mark.parametrize(("name", "place"), [("q.jsonl", "q.jsonl:2: "), ("q.json", "q.json row 2: ")])
def test_bad_row_is_named_with_its_key(tmp_path, good, change, message, name, place):
    with pytest.raises(UserError, match=place + message) as caught:
        load_questions(write_rows(tmp_path / name, good, good | change))
    assert "\n" not in str(caught.value)


def test_large_parquet_columns_are_not_read(tmp_path):
    unread = {"supporting_facts": ["a"], "evidences": ["b"], "context": ["c"]}
    row = {"id": "1", "question": "x", "answer": "y"}
    path = write_rows(tmp_path / "q.parquet", row | unread)
    ((_, result),) = row_files.read_rows(path)
    assert result == row | dict.fromkeys(unread)
    assert load_questions(path)[0].data_source == "2wikimultihopqa", "their names tell the layout"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["target", "value", "aliases", "text", "content", "role"]), inner)
    ),
    max_leaves=4,
)


@pytest.mark.medium
@settings(max_examples=150)
@given(layout=st.sampled_from(LAYOUTS), values=st.lists(VALUES, min_size=14, max_size=14))
def test_any_row_is_a_question_or_refused(tmp_path_factory, layout, values):
    optional = ("id", "prompt", "answer", "answer_aliases", "extra_info", "supporting_ids", "answerable")
    row = dict(zip(sorted({*layout.keys, *optional}), values, strict=False))
    path = tmp_path_factory.getbasetemp() / "hostile.jsonl"
    path.write_text(json.dumps(row) + "\n")
    try:
        (question,) = load_questions(path)
    except UserError as error:
        assert str(error).startswith(f"{path}:1: ") and "\n" not in str(error)
    else:
        assert question.text.strip() and all(answer.strip() for answer in question.golden_answers)


def test_parquet_rows_are_counted_over_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(containers, "BATCH_ROWS", 2)
    with pytest.raises(UserError, match="q.parquet row 4: key 'answer' holds no answer"):
        load_questions(write_rows(tmp_path / "q.parquet", ASKED, ASKED, ASKED, ASKED | {"answer": ""}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PAR1 broken", "broken parquet file"),
        (b"\x1f\x8bbroken", "broken gzip file"),
        (b'{"a": "\xff"}\n', "not UTF-8 text"),
        (b'[{"question": "x", "answer": "y"}, {"quest', "not valid JSON"),
        (b'[{"question": "x", "answer": NaN}, ' + b"[" * 3000, "not valid JSON"),
        (b"question,answer\na,b\nc\n", r":3: expected 2 columns \(question, answer\), got 1"),
        (b"who\t['a']\nwhere\t[a\n", ":2: expected a list of answers"),
        (b"who\t['a']\nwhere\t{[1]}\n", ":2: expected a list of answers"),
        (b'{"text": 1, "n": 2}\n', r":1: no known layout: the keys are text, n; name the columns \("),
    ],
)
def test_broken_file_is_refused(tmp_path, content, message):
    (tmp_path / "q").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_questions(tmp_path / "q")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Question: Who wrote Emma?\nThink first.\nGive the result inside <answer>.", "Who wrote Emma?"),
        ("Answer it.\nQuestion:\n  Who wrote Emma\n\nThink first.", "Who wrote Emma"),
        ("Question: Who? Or what?<|im_end|>\n<|im_start|>assistant\n<think>", "Who? Or what?"),
        ("Question: Who wrote Emma? Give the result inside <answer> and </answer>.", None),
        ("Question: Who wrote Emma? Think step by step.", None),
        ("Question: Read this.\nEmma is a book.\nWho wrote it?\nThink first.", None),
        ("Question: \n", None),
    ],
)
@pytest.mark.parametrize("key", ["reward_model", "reward_spec", "solutions", "ground_truth"])
def test_question_is_cut_from_its_prompt_or_refused(tmp_path, key, prompt, expected):
    answers = {"ground_truth": {"target": ["Jane Austen"]}} if key.startswith("reward") else ["Jane Austen"]
    path = write_rows(tmp_path / "q.jsonl", {"prompt": [{"role": "user", "content": prompt}], key: answers})
    if expected is None:
        with pytest.raises(UserError, match="q.jsonl:1: .*(cannot be separated from|non-empty string)"):
            load_questions(path)
    else:
        assert load_questions(path)[0].text == expected


@pytest.mark.parametrize("content", ["who wrote Emma?", "Question: who wrote Emma?\nThink."])
@pytest.mark.parametrize("is_chat", [True, False])
def test_trl_prompt_holds_the_question(tmp_path, content, is_chat):
    chat = [{"role": "system", "content": "Help."}, {"role": "user", "content": content}]
    row = {"prompt": chat if is_chat else content, "ground_truth": "Jane Austen"}
    (question,) = load_questions(write_rows(tmp_path / "trl.jsonl", row))
    assert (question.text, question.golden_answers) == ("who wrote Emma?", ("Jane Austen",))
    assert question.text.join(question.prompt[-1].parts) == content and question.prompt[-1].role == "user"


def encrypted(text, canary):
    key = hashlib.sha256(canary.encode()).digest() * 9
    return base64.b64encode(bytes(a ^ b for a, b in zip(text.encode(), key, strict=False))).decode()


def test_browsecomp_is_decrypted_with_its_canary(tmp_path):
    row = {"problem": encrypted("Who painted it?", "x"), "answer": encrypted("Ada", "x"), "canary": "x"}
    plus = {"query_id": "7", "query": "who?", "answer": "Ada", "gold_docs": [{"docid": "1", "text": "."}]}
    secret = plus | {"query": encrypted("who?", "y"), "answer": encrypted("Ada", "y"), "canary": "y"}
    rows = [row, row | {"problem": "Who painted it?", "answer": "Ada, later"}]
    questions = load_questions(write_rows(tmp_path / "bc.parquet", *rows))
    assert [question.golden_answers for question in questions] == [("Ada",), ("Ada, later",)]
    assert {(each.text, each.data_source) for each in questions} == {("Who painted it?", "browsecomp")}
    expected = Question("browsecomp_plus_7", "who?", ("Ada",), "browsecomp_plus", ("1",))
    for name, item in (("plain.jsonl", plus), ("secret.jsonl", secret)):
        assert load_questions(write_rows(tmp_path / name, item)) == [expected]


def test_columns_of_an_unknown_layout_are_named(tmp_path):
    row = {"request": [{"role": "user", "content": "who?"}], "gold": {"text": "Ada|Bo"}, "qid": 3}
    path = write_rows(tmp_path / "mine.jsonl", row)
    (question,) = load_questions(path, ColumnsConfig("request", "gold.text", "|"))
    assert (question.id, question.text, question.golden_answers) == ("mine_3", "who?", ("Ada", "Bo"))
    with pytest.raises(UserError, match="mine.jsonl:1: no key 'gold.words': the keys are request, gold, qid"):
        load_questions(path, ColumnsConfig("request", "gold.words"))
    write_rows(path, row, {"request": "where?", "qid": 4})
    with pytest.raises(NoAnswer, match="mine.jsonl:2: key 'gold.text' holds no answer"):
        load_questions(path, ColumnsConfig("request", "gold.text"))
    write_rows(path, row, {"gold": {"text": "Ada"}, "qid": 4})
    with pytest.raises(UserError, match="mine.jsonl:2: field 'question' must be .*, got None; correct"):
        load_questions(path, ColumnsConfig("request", "gold.text"))
    short = write_rows(tmp_path / "short.jsonl", {"question": "who?", "gold": ["Ada"]})
    assert load_questions(short, ColumnsConfig(answer="gold"))[0].golden_answers == ("Ada",)


def test_answers_that_cannot_be_right_are_named():
    answers = [("A",), ("The The", "Matt"), ("Ada|Bo",), ("Ada|Bo", "Cy"), ("—",)]
    questions = [Question(str(n), f"q{n}", golden, "x") for n, golden in enumerate(answers)]
    empty, joined = answer_warnings(questions, "data.train")
    assert empty.startswith("data.train: 2 of 5 questions have a golden answer that normalises to nothing")
    assert "('A',) of '0'; calibadv prepare-data" in empty
    assert joined.startswith("data.train: 1 of 5 questions have a golden answer with a separator in it")
    assert answer_warnings(questions[4:], "data.train") == []


ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/data.md").read_text(encoding="utf-8")
(DEMONSTRATIONS,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
QUESTIONS = sorted((ROOT / "examples/questions").iterdir())
EXPECTED = """
2wikimultihopqa_8813: Who is the mother of the director of Polish-Russian War? Małgorzata Braunek
2wikimultihopqa_8814: Which film came out first? Blind Shaft
alpaca_0: Who wrote it? Ada
alpaca_1: Who sang it?
The song is Quill. Bo
bamboogle_0: Who was president when superconductivity was discovered? William Howard Taft
bamboogle_1: When was the founder of craigslist born? December 6, 1952
browsecomp_0: Who painted it? Ada
browsecomp_1: Who sang it? Bo
browsecomp_plus_769: Who painted it? Ada
browsecomp_plus_770: Who sang it? Bo
browsecomp_zh_0: Who painted it? Ada
browsecomp_zh_1: Who sang it? Bo
1: Who wrote Silent Garden? Ada Berk
2: Where is it? Rome/Roma
dpr_0: who got the first nobel prize in physics Wilhelm Conrad Röntgen
dpr_1: who sings it Ada/Bo's
drop_a1: How many more points did the Harbour Men win by than they led by? 7
drop_b2: Which towns signed first? Ulm/Rye
flashrag_test_0: who got the first nobel prize in physics Wilhelm Conrad Röntgen
flashrag_test_1: when is the next deadpool movie being released May 18, 2018
frames_0: Who led it when Ada was born? Jane Ballou
frames_1: How tall would it be? 37th
hotpotqa_5a7a: Which magazine was first? Arthur's Magazine
hotpotqa_5a7b: Were both American? yes
kilt_k1: Who wrote it? Ada/A. Berk
kilt_k2: Who sang it? Bo
mmlu_0: Which town? Choices: Ulm; Rye Rye
mmlu_1: Which river? Choices: Rhine; Rother Rother
musique_2hop__1_2: Who founded it? Ann Berk/A. Berk
musique_2hop__3_4: When? 1999
nq_5: when was it May 1999
nq_6: is it so yes
nemo_gym_0: Who wrote it? Ada
nemo_gym_1: Who sang it? Bo
nq_open_0: where did they film hot tub time machine Fernie Alpine Resort
nq_open_1: who has the right of way in international waters Neither vessel
openrlhf_0: Who wrote it? Ada
openrlhf_1: Who sang it? Bo/B.
popqa_4222362: What is George Rankin's occupation? politician/political leader
popqa_3545585: What is John Mayne's occupation? journalist
rlinf_0: who sings it? Ada
rlinf_1: who wrote it? Bo/B.
nq_train_0: who sings it? Ada
nq_train_1: who wrote it? Bo
sharegpt_0: Who wrote it? Ada
sharegpt_1: Who sang it? Bo/B.
slime_0: Who wrote it? Ada
slime_1: Who sang it? Bo
triviaqa_tc_1: Which Lake? Como/Lake Como
triviaqa_tc_2: Who won? Ann
trl_0: who sings it? Ada
trl_1: who wrote it? Bo/B.
xbench_1: Who painted it? Ada
xbench_2: Who sang it? Bo
"""


def test_examples_are_read_as_published():
    questions = [question for path in QUESTIONS for question in load_questions(path)]
    rows = [f"{each.id}: {each.text} {'/'.join(each.golden_answers)}" for each in questions]
    assert "\n".join(rows) == EXPECTED.strip()
    assert all(f"`{path.name}`" in TEXT for path in QUESTIONS)


def test_layout_has_an_example():
    first_rows = [next(read_rows(path)) for path in QUESTIONS]
    assert {layout.name for layout in LAYOUTS} <= {layout_of(row, where).name for where, row in first_rows}


def test_demonstrations_are_equal_in_both_layouts(tmp_path):
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(DEMONSTRATIONS)
    ours, chat = load_demonstrations(path)
    assert [turn.text for turn in chat.turns] == ["<search> it </search>", "<answer> Ada </answer>"]
    assert chat.turns[0].documents == ours.turns[0].documents
    assert chat.question.text == ours.question.text == "Who wrote it?"


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one(line):
    words = shlex.split(line)
    if words[:3] == ["python", "-m", "retriever.prepare_corpus"]:
        prepare_corpus.parse(words[3:])
    elif words[:2] == ["calibadv", "prepare-data"]:
        parser = argparse.ArgumentParser(exit_on_error=False)
        prepare_data.add_arguments(parser)
        assert parser.parse_args(words[2:]).inputs
    else:
        assert words[0] == "calibadv" and words[1] in cli.COMMANDS
        parsed = cli.parse(f"calibadv {words[1]}", "", words[2:])
        assert load_config([ROOT / file for file in parsed.configs], parsed.overrides).data.eval


def test_lines_of_the_data_page_wrap_outside_of_code_and_tables():
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    assert not [line for line in prose.splitlines() if len(line) > 110 and not line.startswith("|")]
