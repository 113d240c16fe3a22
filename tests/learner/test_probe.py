"""The golden answer's probability after every turn, against one forward pass for each prefix by itself."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from tiny_policy import GROUPED, Letters, row_logits, single_device, tiny

from calibadv_jax.config import LearnerConfig
from calibadv_jax.contrib import probe
from calibadv_jax.contrib.probe import PROBE_TOKENS, prefixes, with_golden_logprobs
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.learner.learner import Learner, LearnerOptions, init_params
from calibadv_jax.rollout.tag_protocol import ANSWER_BEGINNING

VOCAB = 128
TEMPERATURE = 0.5
LONGEST = 80  # tokens of a prefix with a probe


@pytest.fixture(scope="module")
def learner():
    policy = tiny(GROUPED | {"vocab_size": VOCAB})
    mesh = single_device()
    return Learner(policy, optax.sgd(0.1), mesh, LearnerOptions(2, TEMPERATURE))


@pytest.fixture(scope="module")
def policies(learner):
    return {name: init_params(learner.policy, learner.mesh, seed) for seed, name in enumerate("ab")}


def make_group(number, golden=("Ann", "Bo"), searches=(2, 1, 0), **openings):
    """Trajectories of one prompt with so many searches and an answer; a turn without tokens comes last."""
    rng = np.random.default_rng(number)
    question, trajectories = Question(f"q{number}", "?", golden, "toy"), []

    def ids(count):
        return rng.integers(0, VOCAB, count).astype(np.int32)

    prompt = ids(5)
    for index, count in enumerate(searches):
        turns = [Turn("search", ids(3), np.zeros(3), observation_ids=ids(4)) for _ in range(count)]
        turns += [Turn("answer", ids(2), np.zeros(2)), Turn("unfinished", ids(0), np.zeros(0))]
        trajectories.append(Trajectory(question, prompt, turns, index, **openings))
    return Group(question, trajectories)


def alone(learner, params, prefix, answer, beginning=ANSWER_BEGINNING):
    """Mean log-probability of the answer's tokens, computed by itself.

    Tokens behind it, which it does not see, make all rows equally long: one program computes them.
    """
    tokens = np.array([*prefix, *map(ord, beginning + answer)], np.int32)
    row = np.zeros((1, LONGEST), np.int32)
    row[0, : len(tokens)] = tokens
    table = np.asarray(jax.nn.log_softmax(row_logits(learner.policy, params, row) / TEMPERATURE))[0]
    places = np.arange(len(tokens) - len(answer), len(tokens))
    return float(np.mean(table[places - 1, tokens[places]], dtype=np.float64))


def golden_logprobs(group, policy):
    every = [trajectory.turns for trajectory in group.trajectories]
    return [[turn.golden_logprobs.get(policy) for turn in turns] for turns in every]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("pack_length", "openings", "opened", "shares"),
    [
        (128, {}, ("", ""), False),
        (40, {"opening": "<think>"}, ("<think>", "<think>"), False),
        (128, {}, ("", ""), True),
        (128, {"first_opening": "<think>\n"}, ("<think>", ""), True),
    ],
)
def test_probe_equals_separate_forward_passes(learner, policies, pack_length, openings, opened, shares):
    """Rows that hold several prefixes, rows that are too short for the longest ones, and shared prefixes.

    What the prompt opened, in the first and in later turns, is not repeated.
    """
    groups = [make_group(0, **openings), make_group(1, golden=("Cy",), searches=(1,), **openings)]
    config = LearnerConfig(pack_length=pack_length, row_widths=2, share_prefixes=shares)
    probed, metrics = with_golden_logprobs(learner, policies, groups, config, Letters())
    first, later = (ANSWER_BEGINNING.removeprefix(tag) for tag in opened)
    for policy, params in policies.items():
        values = []
        for group, answer in zip(probed, (" Ann", " Cy"), strict=True):
            every = golden_logprobs(group, policy)
            for trajectory, (*probes, last) in zip(group.trajectories, every, strict=True):
                pieces = prefixes(trajectory)
                beginnings = [first, *[later] * (len(pieces) - 1)]
                pairs = zip(pieces, beginnings, strict=True)
                expected = [alone(learner, params, prefix, answer, beginning) for prefix, beginning in pairs]
                np.testing.assert_allclose(probes, expected, rtol=1e-4)
                assert last is None  # nothing was sampled in it
                values.append(np.exp(probes))
        for name, index in (("first", 0), ("last", -1)):
            mean = np.mean([probes[index] for probes in values])
            assert metrics[f"advantage/golden/{policy}/{name}"] == pytest.approx(mean)
    # Of the first group 1 prompt, 3 longer prefixes; of the second a prompt and one more.
    tokens = sum((5 + 4, 12 + 4, 19 + 4, 12 + 4, 5 + 3, 12 + 3)) + 2 * len(first) + 4 * len(later)
    assert metrics["advantage/golden/tokens"] == tokens
    for group in groups:  # of the copies only
        assert not any(turn.golden_logprobs for trajectory in group.trajectories for turn in trajectory.turns)


@pytest.mark.medium
def test_long_golden_answer_is_cut(learner, policies):
    class Deaf(Letters):
        def encode(self, text, add_special_tokens):
            return [] if "mute" in text else super().encode(text, add_special_tokens)

    group, params = make_group(0, ("mute", "x" * 200), (0,)), policies["a"]
    config = LearnerConfig(pack_length=80)
    (probed,), metrics = with_golden_logprobs(learner, {"a": params}, [group], config, Deaf())
    count = PROBE_TOKENS - len(ANSWER_BEGINNING)
    expected = alone(learner, params, group.trajectories[0].prompt_ids, " " + "x" * (count - 1))
    assert golden_logprobs(probed, "a")[0] == [pytest.approx(expected, rel=1e-4), None]
    assert metrics["advantage/golden/tokens"] == 5 + PROBE_TOKENS
    with pytest.raises(UserError, match="question 'q0': the tokenizer makes no token of its golden answers"):
        with_golden_logprobs(learner, {}, [make_group(0, ("mute",))], config, Deaf())


def test_probe_of_step_without_samples(learner, policies):
    group, config = make_group(0, searches=(0,)), LearnerConfig(pack_length=80)
    group.trajectories[0].turns = []
    (probed,), metrics = with_golden_logprobs(learner, policies, [group], config, Letters())
    assert probed.trajectories[0].turns == [] and metrics == {"advantage/golden/tokens": 0}


@pytest.mark.parametrize(("pack_length", "used"), [(128, 128), (47, 47), (46, 46 + PROBE_TOKENS)])
def test_rows_grow_where_probes_do_not_fit(monkeypatch, pack_length, used):
    """The longest probe has 47 tokens: 19 before the last turn, 24 of the beginning, and " Ann"."""
    calls = []

    def noted(learner, params, samples, config):
        calls.append((max(len(sample.tokens) for sample in samples), config.pack_length))
        return [np.zeros(len(sample.tokens), np.float32) for sample in samples]

    monkeypatch.setattr(probe, "sample_logprobs", noted)
    config = LearnerConfig(pack_length=pack_length)
    probe.with_golden_logprobs(None, {"a": {}}, [make_group(0)], config, Letters())
    assert calls == [(47, used)]


def test_later_turns_continue_what_their_opening_began(monkeypatch):
    """The prompt's own opening counts in the first turn alone; a failed group has no turns."""
    texts = []

    def noted(learner, params, samples, config):
        texts.extend("".join(map(chr, sample.tokens[-40:])) for sample in samples)
        return [np.full(len(sample.tokens), -1.0, np.float32) for sample in samples]

    monkeypatch.setattr(probe, "sample_logprobs", noted)
    failed = Group(Question("f", "?", ("Ann",), "toy"), [], [Trajectory(None, np.zeros(0), error="sampler")])
    groups = [failed, make_group(0, searches=(2,), first_opening="<think>\n")]
    probed, metrics = with_golden_logprobs(None, {"a": {}}, groups, LearnerConfig(pack_length=80), Letters())
    assert probed[0] == failed
    assert golden_logprobs(probed[1], "a") == [[-1.0, -1.0, -1.0, None]]
    later = f"{ANSWER_BEGINNING} Ann"
    first = later.removeprefix("<think>")
    assert texts[0].endswith(first) and not texts[0].endswith(later)
    assert [text.endswith(later) for text in texts[1:]] == [True, True]
    assert metrics["advantage/golden/a/first"] == pytest.approx(np.exp(-1.0))
