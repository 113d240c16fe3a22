"""Losses by name: functions of the user's own, descriptions, keys, and refused combinations."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pydantic
import pytest
from loss_cases import columns, packed, sample

from calibadv_jax.config import LossConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import LOSSES
from calibadv_jax.learner.batch_factors import TrainedTokens
from calibadv_jax.learner.losses import Tokens, check_loss, find_loss

SOURCE = """
def doubled(tokens, config):
    return -2 * tokens.ratio * tokens.advantages, tokens.ratio > 1 + config.clip_high

def short(tokens):
    return tokens.advantages

def scaled(tokens, config, *, scale):
    return -scale * tokens.ratio * tokens.advantages, tokens.trained

number = 3

def one_array(tokens, config):
    return tokens.advantages

def summed(tokens, config):
    return tokens.advantages.sum(), tokens.trained

def failing(tokens, config):
    return tokens.advantage, tokens.trained
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_losses_of_tests.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "my_broken_of_tests.py").write_text("raise RuntimeError('half\\nwritten')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return "my_losses_of_tests:"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "has no function absent"),
        ("one_array", "must return"),
        ("summed", "must return"),
        ("failing", "my_losses_of_tests.py:"),
    ],
)
def test_unusable_own_loss_is_refused(own, name, message):
    with pytest.raises(UserError) as caught:
        check_loss(LossConfig(name=own + name))
    error = str(caught.value)
    assert message in error and error.startswith("loss.name is ") and "\n" not in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nowhere_of_tests:loss",
            "importing nowhere_of_tests failed: ModuleNotFoundError: No module named 'nowhere_of_tests'; ",
        ),
        ("my_broken_of_tests:loss", "importing my_broken_of_tests failed: RuntimeError: half written"),
    ],
)
def test_own_loss_that_cannot_be_imported_is_refused(own, name, message):
    with pytest.raises(UserError) as caught:
        check_loss(LossConfig(name=name))
    error = str(caught.value)
    assert error.startswith(f"loss.name is {name}, but {message}") and "\n" not in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "my_losses_of_tests has no function absent"),
        ("number", "my_losses_of_tests has no function number"),
        ("short", "it cannot be called with (tokens, config)"),
        ("one_array", "it must return the terms to minimise"),
        ("summed", "it must return the terms to minimise"),
        ("failing", "calling it raised AttributeError"),
    ],
)
def test_refusal_of_an_own_loss_shows_the_signature(own, name, message):
    with pytest.raises(UserError) as caught:
        check_loss(LossConfig(name=own + name))
    error = str(caught.value)
    assert error.startswith(f"loss.name is {own}{name}, but {message}") and "\n" not in error
    assert "; expected: def my_loss(tokens: Tokens, config: LossConfig)" in error


def test_own_loss_is_minimised(own):
    row = sample([-1.0, -1.5], [-1.5, -1.5], [2.0, -1.0], [1, 1])
    config = LossConfig(name=own + "doubled")
    assert check_loss(config) == [f"loss {own}doubled: your own: {own}doubled"]
    loss, (gradient,), metrics = packed([row], config)
    unclipped_loss, (unclipped_gradient,), _ = packed([row], LossConfig(clip_low=9.0, clip_high=9.0))
    assert loss == pytest.approx(2 * unclipped_loss)
    assert gradient == pytest.approx(2 * unclipped_gradient)
    assert metrics["actor/pg_clipfrac"] == 1
    assert find_loss(config.name).every_sample  # it may move tokens without advantage


def test_own_loss_gets_its_arguments(own):
    row = sample([-1.0, -1.5], [-1.5, -1.5], [2.0, -1.0], [1, 1])
    once, twice = (LossConfig(name=f"{own}scaled", args={"scale": scale}) for scale in (1.0, 2.0))
    check_loss(once)
    loss, (gradient,), _ = packed([row], once)
    double_loss, (double_gradient,), _ = packed([row], twice)
    assert double_loss == pytest.approx(2 * loss) and loss != 0
    assert double_gradient == pytest.approx(2 * gradient)
    assert len({once: 1, twice: 2}) == 2  # as keys of a cache


@pytest.mark.parametrize("arguments", [{}, {"scale": 1.0, "other": 1}])
def test_arguments_that_an_own_loss_does_not_take_are_refused(own, arguments):
    with pytest.raises(UserError, match=f"loss.name is {own}scaled, but it cannot be called with"):
        check_loss(LossConfig(name=f"{own}scaled", args=arguments))


def test_arguments_without_an_own_loss_are_refused():
    with pytest.raises(
        pydantic.ValidationError, match="loss.name=gpg is no function of your own: leave it out"
    ):
        LossConfig(name="gpg", args={"scale": 1.0})


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_described_in_one_line(name):
    loss, lines = LOSSES[name], check_loss(LossConfig(name=name, aggregation="sequence_mean"))
    cost = "; one more forward pass an update" if loss.needs_logprobs else ""
    assert lines == ([] if name == "vanilla" else [f"loss {name}: {loss.summary}{cost}"])


def test_documented_loss_runs(tmp_path, monkeypatch):
    page = Path(__file__).resolve().parents[2] / "docs" / "losses.md"
    (source,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "documented_loss_of_tests.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = LossConfig(name="documented_loss_of_tests:my_loss")
    assert check_loss(config) == [f"loss {config.name}: your own: {config.name}"]
    assert find_loss(config.name).every_sample  # it may move tokens without advantage
    loss, _, metrics = packed([sample([0.0, 0.0], [-1.0, 0.0], [1.0, 1.0], [1, 1])], config)
    assert loss == pytest.approx(-(1.2 * (2 - np.log(1.2)) + 1) / 2, rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == 1


@pytest.mark.parametrize("name", LOSSES)
def test_loss_reads_its_own_keys_only(name):
    """Except `dual_clip`, which the losses that scale vanilla read at its default of 0."""
    config, read = LossConfig(name=name, aggregation="sequence_mean"), set()

    class Recorder:
        def __getattr__(self, key):
            read.add(key)
            return getattr(config, key)

    loss, row = find_loss(name), columns([-1.0, -2.0])
    assert check_loss(config) == [] if name == "vanilla" else loss.summary in check_loss(config)[0]
    factors = None
    if loss.batch_factor:
        trained = TrainedTokens(*np.array([[1.0, -1.0], [0.5, 0.5], [-1.0, -2.0], [-1.0, -2.0]]))
        factors = columns(loss.batch_factor(trained, Recorder(), np.random.default_rng(0)))
    loss.terms(Tokens(row, row, row, row, row < 0, (row < 0).astype(int), factors), Recorder())
    assert set(LOSSES[name].keys) <= read <= {*LOSSES[name].keys, "dual_clip"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "ppo"}, "must be one of vanilla, cispo"),
        ({"name": "my.module:"}, "must be one of vanilla, cispo"),
        *(({"name": name}, "set loss.aggregation=sequence_mean") for name in ("gspo", "gmpo", "sapo")),
        ({"name": "gmpo", "aggregation": "sequence_sum"}, "set loss.aggregation=sequence_mean"),
        ({"dual_clip": 1.0}, "must be above 1"),
        ({"name": "gpg", "clip_high": 0.28}, "loss.name=gpg does not read it"),
        ({"name": "dro", "clip_high": 0.28}, "loss.name=dro does not read it"),
        ({"lld_coef": 0.2}, "loss.name=vanilla does not read it"),
        ({"name": "cispo", "drop_above": 1.1}, "below the clip at 1.2"),
        ({"name": "clip_cov", "cov_low": 5.0}, "must be below loss.cov_high"),
        ({"name": "clip_cov", "cov_share": 0.0}, "greater than 0"),
        ({"aggregation": "sequence_sum_norm"}, "sequence_sum_norm, and loss.length_norm is 0"),
        ({"length_norm": 4096}, "loss.length_norm is 4096: set"),
        ({"length_norm": 4096}, "set loss.length_norm, in tokens, with aggregation=sequence_sum_norm only"),
        ({"importance_high": 1.0}, "must be above 1"),
        ({"importance_low": 0.5, "old_logprobs": "sampler"}, "set loss.old_logprobs=recompute"),
        ({"importance_level": "sequence"}, "but none is set"),
        ({"importance_level": "sequence_geometric", "reject_by": "k2", "reject_above": 1.0}, "none is set"),
        *((keys, "set both, or leave both out") for keys in ({"reject_by": "k3"}, {"reject_above": 0.5})),
        ({"reject_over": "sequence_sum"}, "which is none: set it"),
        ({"reject_by": "k2", "reject_above": 1.0, "old_logprobs": "sampler"}, "loss.old_logprobs=recompute"),
    ],
)
def test_combinations_that_cannot_work_are_refused(keys, message):
    with pytest.raises(pydantic.ValidationError, match=message):
        LossConfig(**keys)


@pytest.mark.parametrize(("name", "corrects"), [("vanilla", True), ("gpg", False)])
def test_sampler_logprobs_correct_ratios_only(name, corrects):
    assert LossConfig(name=name, old_logprobs="sampler").corrects_for_sampler is corrects
    assert LossConfig(name=name, importance_cap=2.0).corrects_for_sampler
    assert not LossConfig(name=name).corrects_for_sampler
