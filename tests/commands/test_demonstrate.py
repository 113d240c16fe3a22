"""Demonstrations from a question file and a retrieval service, and that the cold start takes them."""

from dataclasses import replace
from pathlib import Path

import pytest
from config_rig import changed
from shelf_rig import row, shelf_service, write_corpus, write_rows
from test_doctor import SHAPE

from calibadv_jax.config import ToolConfig
from calibadv_jax.contrib.commands import demonstrate
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import Grammar, parse_turn
from calibadv_jax.data.demonstrations import load_demonstrations
from calibadv_jax.data.questions import parse_question
from calibadv_jax.rollout.prompts import open_prompt
from calibadv_jax.run.model import load_tokenizer

TWO_HOPS = row("1", "Where was the writer of Silent Garden born?", ["Oslo"], ["p0", "p1"], "two")
QUESTIONS = [
    TWO_HOPS,
    row("2", "In which city was Bo Dorn born?", ["Lima"], ["p3"], "one"),
    row("3", "Who knows it?", ["Ada"], [], "one"),
    row("4", "Where do many people go every year?", ["Norway"], ["p2", "p6"], "two"),
    row("5", "In which city was Bo Dorn born? " + "really " * 40, ["Lima"], ["p3"], "one"),
]


@pytest.fixture
def config(tmp_path):
    write_rows(tmp_path / "train.jsonl", QUESTIONS)
    write_corpus(tmp_path / "corpus.jsonl")
    build_word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return changed(
        run={"dir": str(tmp_path / "run")},
        policy={"init": SHAPE, "tokenizer": str(tmp_path / "tokenizer")},
        mesh={"fsdp": -1},
        prompt={"template": "short", "chat": "off"},
        data={"train": str(tmp_path / "train.jsonl")},
        retriever={"corpus": str(tmp_path / "corpus.jsonl"), "topk": 1, "patience": 2.0},
        sft={"demonstrations": str(tmp_path / "made" / "demos.jsonl"), "row_length": 1024},
    )


def run(config):
    with shelf_service() as url:
        demonstrate.run(changed(config, retriever={"url": url}))


def test_what_is_written_is_what_cold_start_reads(config, capsys):
    run(config)
    made = load_demonstrations(config.sft.demonstrations)
    assert [each.question.id for each in made] == ["1", "2", "5"]
    assert [len(each.turns) for each in made] == [3, 2, 2]
    assert made[0].question.supporting_ids == ("p0", "p1")
    assert [[d.id for d in turn.documents] for turn in made[0].turns] == [["p0"], ["p1"], []]
    # The service refuses the fifth question as a query: its passage's title finds it.
    assert parse_turn(made[2].turns[0].text, stop_reason="stop").query == "Bo Dorn"
    output = capsys.readouterr().out
    header, _, *rows = output.splitlines()[:5]
    columns = ["no supporting_ids", "not found", "written, 1 search", "written, 2 search"]
    assert [header.index(name) for name in columns] == sorted(header.index(name) for name in columns)
    assert [line.split() for line in rows] == [
        ["one", "1", "0", "2", "0"],
        ["two", "0", "1", "0", "1"],
        ["all", "1", "1", "2", "1"],
    ]


def test_varied_first_query_is_used(config):
    questions = [row(str(n), "In which city was Bo Dorn born?", ["Lima"], ["p3"]) for n in range(12)]
    write_rows(Path(config.data.train), questions)
    whole = "In which city was Bo Dorn born?"
    for kind, queries in (("best", {whole}), ("varied", {whole, "Bo Dorn"})):
        run(changed(config, sft={"first_query": kind, "row_length": None}))
        made = load_demonstrations(config.sft.demonstrations)
        assert len(made) == 12
        assert {parse_turn(each.turns[0].text, stop_reason="stop").query for each in made} == queries


def test_long_demonstrations_are_left_out(config, capsys):
    run(changed(config, rollout={"max_observation_length": 30}))
    assert "cut off" in capsys.readouterr().out
    for section, changes, cause in [
        ("sft", {"row_length": 60}, "3 longer than sft.row_length"),
        ("rollout", {"max_length": 60, "max_prompt_length": 50}, "3 longer than rollout.max_length"),
        ("rollout", {"max_prompt_length": 5}, "3 longer than rollout.max_prompt_length"),
        ("rollout", {"max_turn_length": 10}, "3 longer than rollout.max_turn_length"),
    ]:
        others = r".*; 1 no supporting_ids \(.*; 1 not found \("
        with pytest.raises(UserError, match=rf"none of 5 questions .*: {cause} \(raise{others}"):
            run(changed(config, **{section: changes}))


def test_prompt_is_measured_with_actions_that_it_lists(config):
    """One that has no room left once a calculator is listed is too long; it does not end the command."""
    listed = changed(config, prompt={"template": "paper"})
    question = parse_question(TWO_HOPS, "a row")
    tokenizer = load_tokenizer(config.policy.tokenizer)
    without = len(open_prompt(question, tokenizer, listed.prompt, 10_000)[0])
    tools = [ToolConfig("search"), ToolConfig("examples.own_tool:Calculator")]
    some = changed(replace(listed, tools=tools), rollout={"max_prompt_length": without})
    with pytest.raises(UserError, match=r"none of 5 questions gives a demonstration: .*max_prompt_length \("):
        run(some)
    run(changed(some, rollout={"max_prompt_length": without + 100}))
    made = load_demonstrations(config.sft.demonstrations, Grammar(("search", "calculate")))
    assert [each.question.id for each in made][0] == "1"


def test_what_is_missing_is_said_in_one_line(config, tmp_path):
    calculator = [ToolConfig("examples.own_tool:Calculator")]
    for unfit, message in [
        (
            changed(config, sft={"demonstrations": "world"}),
            "sft.demonstrations is 'world': set it to the file",
        ),
        (changed(config, retriever={"corpus": ""}), "retriever.corpus is empty: set it to the file"),
        (replace(config, tools=calculator), "tools has no search.*put it into tools"),
    ]:
        with pytest.raises(UserError, match=message):
            run(unfit)
    rows = [row("1", "Who?", ["Ada"], ["p99"]), row("2", "Where?", ["Rome"], [])]
    write_rows(Path(config.data.train), rows)
    with pytest.raises(UserError, match=r"1 passage unknown \(the ids.*; 1 no supporting_ids \("):
        run(config)
    (tmp_path / "made").mkdir(exist_ok=True)
    (tmp_path / "made/sft.yaml").touch()
    with pytest.raises(UserError, match="^sft.demonstrations=.* lies in the folder of another run"):
        demonstrate.run(config)
