"""docs/data.md: its examples load, and its commands are ones that exist."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
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


def write(tmp_path, name):
    """The example as the file that its name says."""
    path, text = tmp_path / name, EXAMPLES[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([json.loads(line) for line in text.splitlines()]), path)
    elif path.suffix == ".json":
        path.write_text("[" + ",".join(text.splitlines()) + "]")
    else:
        path.write_text(text)
    return path


DEMONSTRATIONS = "demonstrations.jsonl"
QUESTIONS = [name for name in EXAMPLES if name != DEMONSTRATIONS]


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_example_is_two_questions(tmp_path, name):
    questions = load_questions(write(tmp_path, name))
    assert len(questions) == 2 and all(question.golden_answers for question in questions)


def test_every_layout_has_an_example(tmp_path):
    shown = set()
    for name in QUESTIONS:
        where, row = next(read_rows(write(tmp_path, name)))
        shown.add(layout_of(row, where).name)
    assert {layout.name for layout in LAYOUTS} - shown == set()


def test_its_demonstrations_are_the_same_in_both_layouts(tmp_path):
    ours, chat = load_demonstrations(write(tmp_path, DEMONSTRATIONS))
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
