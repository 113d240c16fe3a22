"""What the commands do with data.weights and the rows' prompts."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_policy import Letters
from trainer_rig import ScriptedRollouts, make_config, make_model

from calibadv_jax.commands import train
from calibadv_jax.contrib.commands import doctor
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Message, Question
from calibadv_jax.data.questions import load_questions, write_questions
from calibadv_jax.metrics.console import Console
from calibadv_jax.run.state import RunState
from calibadv_jax.run.wiring import check_inputs

QUESTIONS = [
    Question(f"{source}{n}", f"{source} {n}?", ("yes",), source) for source in ("a", "b") for n in range(6)
]


def configured(folder, weights, template="short", data=None, **sections):
    data = {"weights": weights} | (data or {})
    config = make_config(folder, data=data, prompt={"template": template}, **sections)
    write_questions(folder / "mixed.jsonl", QUESTIONS)
    return replace(
        config, data=replace(config.data, train=str(folder / "mixed.jsonl"), eval=str(folder / "mixed.jsonl"))
    )


@pytest.mark.medium
def test_training_draws_by_the_weights(tmp_path):
    config = configured(tmp_path / "run", {"a": 3.0, "b": 1.0})
    questions = load_questions(config.data.train)
    state = RunState(config, make_model(), questions, ScriptedRollouts(), tmp_path / "run", Console(False))
    drawn = Counter(question.data_source for question in islice(state.questions, 80))
    assert drawn == {"a": 60, "b": 20}


@pytest.mark.parametrize(
    ("weights", "template", "message"),
    [
        ({"a": 1.0}, "short", "data.weights names a, but data.train holds a, b"),
        ({}, "from_data", "question 'a0': prompt.template is 'from_data', but its row has no 'prompt'"),
    ],
)
def test_unfit_data_is_refused_before_anything_starts(tmp_path, weights, template, message):
    config = configured(tmp_path / "run", weights, template)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        train.run(config)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UserError, match=message):
        doctor.check_questions(config)
    if template == "from_data":
        check_inputs(config)
        with pytest.raises(UserError, match=message):
            check_inputs(replace(config, evaluate=replace(config.evaluate, every=1)))
    carried = [replace(question, prompt=(Message("user", ("Say: ", "")),)) for question in QUESTIONS]
    fitting = configured(tmp_path / "fitting", {"a": 1.0, "b": 1.0}, "from_data")
    write_questions(tmp_path / "fitting/mixed.jsonl", carried)
    assert any("12 questions (a, b)" in line for line in doctor.check_questions(fitting))


def test_answers_that_cannot_be_right_are_reported(tmp_path, capsys):
    config = configured(tmp_path / "run", {"c": 1.0})  # weights that do not fit end the start
    questions = [Question("a0", "which?", ("The",), "a"), Question("a1", "who?", ("Ada|Bo",), "a")]
    write_questions(tmp_path / "run/mixed.jsonl", questions)
    with pytest.raises(UserError, match="data.weights"):
        train.run(config)
    begun = capsys.readouterr().err.splitlines()
    config = replace(config, data=replace(config.data, weights={}))
    warned, offline = doctor.check_questions(config), doctor.check_question_files(config)
    for words in ("have a golden answer that normalises to", "a separator in it, such as 'Ada|Bo"):
        places = [[line.split(": ")[:2] for line in lines if words in line] for lines in (warned, offline)]
        assert places == [[["warning", "data.train"], ["warning", "data.eval"]]] * 2
        assert [line.split(": ")[:2] for line in begun if words in line] == [["warning", "data.train"]]


class Entered(Exception):
    """The run's folder is entered: all that a start checks before it has passed."""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a run up to its folder; returns the questions that it would draw from.

    Prompts are "Question: a 0?" and a newline: 15 letters; the last question's is longer.
    """

    def enter(config, model, questions, say, mirror):
        raise Entered(questions)

    monkeypatch.setattr(train, "build_model", lambda *_: SimpleNamespace(tokenizer=Letters()))
    monkeypatch.setattr(train, "enter_run_folder", enter)

    def run(**sections):
        config = configured(tmp_path / "run", {}, **sections)
        long = replace(QUESTIONS[0], id="long", text="why " * 9)
        write_questions(Path(config.data.train), [*QUESTIONS, long])
        with pytest.raises(Entered) as entered:
            train.run(config)
        return entered.value.args[0]

    return run


def test_overlong_prompts_are_refused_or_left_out(start, capsys):
    words = r"data.train: the prompts of 1 of 13 questions .*=15, .* has 47 tokens \(.*'long'\): raise it"
    with pytest.raises(UserError, match=words):
        start(rollout={"max_prompt_length": 15})
    room = {"max_prompt_length": 47, "max_length": 60}
    assert len(start(rollout=room, learner={"row_length": 60}, evaluate={"every": 5})) == 13
    assert "are left out" not in capsys.readouterr().err
    left_out = {"overlong_prompts": "leave_out"}
    result = start(rollout={"max_prompt_length": 15}, data=left_out, evaluate={"every": 5})
    assert [question.id for question in result] == [question.id for question in QUESTIONS]
    shown = " ".join(capsys.readouterr().err.split())
    for name in ("train", "eval"):
        assert f"data.{name}: the prompts of 1 of 13 questions" in shown
