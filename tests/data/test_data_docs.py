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
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
QUESTIONS = sorted((ROOT / "examples/questions").iterdir())
EXPECTED = """
2wikimultihopqa_8813: Who is the mother of the director of Polish-Russian War? Małgorzata Braunek
2wikimultihopqa_8814: Which film came out first? Blind Shaft
bamboogle_0: Who was president when superconductivity was discovered? William Howard Taft
bamboogle_1: When was the founder of craigslist born? December 6, 1952
browsecomp_0: Who painted it? Ada
browsecomp_1: Who sang it? Bo
browsecomp_plus_769: Who painted it? Ada
browsecomp_plus_770: Who sang it? Bo
1: Who wrote Silent Garden? Ada Berk
2: Where is it? Rome/Roma
dpr_0: who got the first nobel prize in physics Wilhelm Conrad Röntgen
dpr_1: who sings it Ada/Bo's
flashrag_test_0: who got the first nobel prize in physics Wilhelm Conrad Röntgen
flashrag_test_1: when is the next deadpool movie being released May 18, 2018
frames_0: Who led it when Ada was born? Jane Ballou
frames_1: How tall would it be? 37th
hotpotqa_5a7a: Which magazine was first? Arthur's Magazine
hotpotqa_5a7b: Were both American? yes
musique_2hop__1_2: Who founded it? Ann Berk/A. Berk
musique_2hop__3_4: When? 1999
nq_5: when was it May 1999
nq_6: is it so yes
nq_open_0: where did they film hot tub time machine Fernie Alpine Resort
nq_open_1: who has the right of way in international waters Neither vessel
popqa_4222362: What is George Rankin's occupation? politician/political leader
popqa_3545585: What is John Mayne's occupation? journalist
rlinf_0: who sings it? Ada
rlinf_1: who wrote it? Bo/B.
nq_train_0: who sings it? Ada
nq_train_1: who wrote it? Bo
triviaqa_tc_1: Which Lake? Como/Lake Como
triviaqa_tc_2: Who won? Ann
trl_0: who sings it? Ada
trl_1: who wrote it? Bo/B.
"""


def test_examples_are_read_as_published():
    questions = [question for path in QUESTIONS for question in load_questions(path)]
    rows = (f"{each.id}: {each.text} {'/'.join(each.golden_answers)}" for each in questions)
    assert list(rows) == EXPECTED.strip().splitlines()
    assert all(f"`{path.name}`" in TEXT for path in QUESTIONS)


def test_layout_has_an_example():
    first_rows = [next(read_rows(path)) for path in QUESTIONS]
    assert {layout.name for layout in LAYOUTS} <= {layout_of(row, where).name for where, row in first_rows}


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
