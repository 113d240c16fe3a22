"""What the commands do with data.weights and the rows' prompts."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from trainer_rig import ScriptedRollouts, make_config, make_model

from calibadv_jax import doctor, train
from calibadv_jax.data.questions import load_questions, write_questions
from calibadv_jax.errors import UserError
from calibadv_jax.metrics.console import Console
from calibadv_jax.trainer import Trainer
from calibadv_jax.trajectory import Message, Question

QUESTIONS = [
    Question(f"{source}{n}", f"{source} {n}?", ("yes",), source) for source in ("a", "b") for n in range(6)
]


def configured(folder, weights, template="short"):
    config = make_config(folder, data={"weights": weights}, prompt={"template": template})
    write_questions(folder / "mixed.jsonl", QUESTIONS)
    return replace(
        config, data=replace(config.data, train=str(folder / "mixed.jsonl"), eval=str(folder / "mixed.jsonl"))
    )


def test_training_draws_by_the_weights(tmp_path):
    config = configured(tmp_path / "run", {"a": 3.0, "b": 1.0})
    questions = load_questions(config.data.train)
    trainer = Trainer(config, make_model(), questions, ScriptedRollouts(), tmp_path / "run", Console(False))
    drawn = Counter(one.data_source for one in islice(trainer.questions, 80))
    assert drawn == {"a": 60, "b": 20}


@pytest.mark.parametrize(
    ("weights", "template", "message"),
    [
        ({"a": 1.0}, "short", "data.weights names a, but data.train holds a, b"),
        ({}, "from_data", "question 'a0': prompt.template is 'from_data', but its row has no 'prompt'"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(tmp_path, weights, template, message):
    config = configured(tmp_path / "run", weights, template)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        train.run(config)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UserError, match=message):
        doctor.check_questions(config)


def test_the_evaluation_during_training_is_checked_too(tmp_path):
    config = configured(tmp_path / "run", {}, "from_data")
    doctor.check_inputs(config)
    with pytest.raises(UserError, match="question 'a0': prompt.template is 'from_data'"):
        doctor.check_inputs(replace(config, evaluate=replace(config.evaluate, every=1)))


def test_the_doctor_accepts_what_fits(tmp_path):
    config = configured(tmp_path / "run", {"a": 1.0, "b": 1.0}, "from_data")
    carried = [replace(one, prompt=(Message("user", ("Say: ", "")),)) for one in QUESTIONS]
    write_questions(tmp_path / "run/mixed.jsonl", carried)
    assert any("12 questions (a, b)" in line for line in doctor.check_questions(config))
