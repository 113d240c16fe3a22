"""docs/data.md and examples/questions: the examples load, and the commands exist."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.commands import prepare_data
from calibadv_jax.data.demonstrations import load_demonstrations
from calibadv_jax.data.files import read_rows
from calibadv_jax.data.layouts import LAYOUTS, layout_of
from calibadv_jax.data.questions import load_questions
from retriever import prepare_corpus

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/data.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```(?:json|text) (\S+)\n(.*?)```", TEXT, re.DOTALL))
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()
]


QUESTIONS = sorted((ROOT / "examples/questions").iterdir())


@pytest.mark.parametrize("path", QUESTIONS, ids=lambda path: path.name)
def test_example_has_two_questions(path):
    questions = load_questions(path)
    assert len(questions) == 2 and all(question.golden_answers for question in questions)
    assert f"`{path.name}`" in TEXT


def test_layout_has_an_example():
    layouts = set()
    for path in QUESTIONS:
        where, row = next(read_rows(path))
        layouts.add(layout_of(row, where).name)
    assert {layout.name for layout in LAYOUTS} - layouts == set()


def test_demonstrations_are_equal_in_both_layouts(tmp_path):
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(EXAMPLES[path.name])
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


def test_lines_wrap_outside_of_code_and_tables():
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    assert not [line for line in prose.splitlines() if len(line) > 110 and not line.startswith("|")]
