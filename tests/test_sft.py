"""The cold start's data: what is trained in a demonstration, and in which order they come."""

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from calibadv_jax import sft
from calibadv_jax.config import Config, PromptConfig, SftPhase
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn
from calibadv_jax.data.word_tokenizer import build_word_tokenizer
from calibadv_jax.errors import UserError
from calibadv_jax.trajectory import Document, Question

QUESTION = Question("1", "who wrote silent garden ?", ("ada",), "test")


@pytest.fixture(scope="module")
def tokenizer():
    return build_word_tokenizer()


def config_with(**changes):
    config = Config(prompt=PromptConfig(template="short"))
    return replace(config, sft=replace(config.sft, **changes))


def test_a_files_demonstrations_are_shuffled_again_in_every_epoch(tmp_path):
    path = tmp_path / "demos.jsonl"
    row = {
        "question": "?",
        "golden_answers": ["x"],
        "data_source": "t",
        "turns": [{"text": "<answer> x </answer>"}],
    }
    path.write_text("".join(json.dumps(row | {"id": number}) + "\n" for number in range(20)))
    config = config_with(demonstrations=str(path))

    def epochs(seed):
        drawn = [d.question.id for d in islice(sft._demonstrations(config, SftPhase(), seed), 60)]
        return [drawn[start : start + 20] for start in (0, 20, 40)]

    names = [str(number) for number in range(20)]
    assert all(sorted(epoch, key=int) == names and epoch != names for epoch in epochs(0))
    assert len({tuple(epoch) for epoch in epochs(0)}) == 3
    assert epochs(0) == epochs(0) != epochs(1)


@pytest.mark.parametrize("loss_on", ["sampled", "all"])
def test_only_what_the_policy_writes_is_trained(tokenizer, loss_on):
    turns = (
        DemoTurn(
            "<think> find silent garden </think>\n<search> silent garden </search>",
            (Document("1", "a", "b"),),
        ),
        DemoTurn("<answer> ada </answer>"),
    )
    sample = sft.encode_demonstration(Demonstration(QUESTION, turns), config_with(), tokenizer, loss_on)
    text = tokenizer.decode(sample.tokens)
    assert "<information>" in text and "<answer>" in text
    trained = tokenizer.decode(sample.tokens[sample.mask])
    assert ("<information>" in trained) == (loss_on == "all")
    assert "<search>" in trained and "<answer>" in trained
    assert not sample.mask[0]  # nothing precedes it


def test_context_turns_are_not_trained(tokenizer):
    turns = (DemoTurn("<search> silent garden </search>", trained=False), DemoTurn("<answer> ada </answer>"))
    sample = sft.encode_demonstration(Demonstration(QUESTION, turns), config_with(), tokenizer, "sampled")
    assert "<search>" not in tokenizer.decode(sample.tokens[sample.mask])


def test_batches_have_the_rows_that_were_asked_for(tokenizer):
    config = config_with(demonstrations="world", rows=3, row_length=128)
    for batch in islice(sft._batches(config, SftPhase(kind="drills"), tokenizer, seed=0), 5):
        assert batch.tokens.shape == (3, 128)
        assert np.isclose(batch.weights.sum(), 1.0)


def test_a_demonstration_too_long_for_a_row_is_named(tokenizer):
    turns = (DemoTurn(f"<answer> {'ada ' * 50}</answer>"),)
    with pytest.raises(UserError, match="question '1' has .* tokens, but sft.row_length is 16"):
        sft.encode_demonstration(
            Demonstration(QUESTION, turns), config_with(row_length=16), tokenizer, "sampled"
        )


def test_no_phases_is_an_error_and_writes_nothing(tmp_path):
    config = Config()
    config = replace(config, run=replace(config.run, dir=str(tmp_path / "run")))
    with pytest.raises(UserError, match="sft.phases is empty"):
        sft.run(config)
    assert not (tmp_path / "run").exists()
