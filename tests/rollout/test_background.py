"""Rollouts in the background: what a group's number decides, what evaluation may change, how it all ends."""

import time
from dataclasses import replace

import numpy as np
import pytest
from loop_fakes import DOCUMENT, QUESTION, DictRetriever, ScriptedSampler, context_of

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.rollout.actions import OwnAction
from calibadv_jax.rollout.runner import Rollouts

ANSWER = "<think>t</think><answer>Ann</answer>"


class Sampler(ScriptedSampler):
    """With the calls that are the run's and not a trajectory's."""

    def __init__(self, tokenizer, delay=None):
        super().__init__(tokenizer, lambda *_: ANSWER, delay)
        self.loaded, self.closed = [], 0

    async def load(self, version, params):
        self.loaded.append((version, params))

    async def prompt_logprobs(self, token_ids):
        return {"worker": np.float32(token_ids)}

    def metrics(self):
        return {"sampler/tokens": 3.0}

    async def close(self):
        self.closed += 1


class Library(DictRetriever):
    """Also a judge, of whom nobody's answer is asked here."""

    closed = 0

    async def score(self, trajectory):
        return {}

    async def close(self):
        self.closed += 1


@pytest.fixture
def open_rollouts(byte_tokenizer):
    def open_rollouts(seed=0, delay=None):
        sampler, library = Sampler(byte_tokenizer, delay), Library({"ann": [DOCUMENT]})
        return Rollouts(context_of(sampler, byte_tokenizer, library, judge=Library({}), group_size=2), seed)

    return open_rollouts


def seeds(rollouts, *numbers):
    with rollouts:
        for future in [rollouts.begin(number, QUESTION) for number in numbers]:
            assert [trajectory.answer for trajectory in future.result(30).trajectories] == ["Ann", "Ann"]
    return sorted(sampling.seed for *_, sampling in rollouts.context.sampler.calls)


def test_group_number_and_run_seed_decide_draws(open_rollouts):
    first = seeds(open_rollouts(), 3, 4)
    assert len(set(first)) == 4  # a question that comes twice gets other trajectories
    assert seeds(open_rollouts(), 4, 3) == first
    assert not set(seeds(open_rollouts(1), 3, 4)) & set(first)
    assert set(seeds(open_rollouts(), 4)) < set(first)


def test_evaluation_changes_settings_of_its_own_rollouts(open_rollouts):
    rollouts = open_rollouts()
    progress, of_collect = rollouts.progress(), rollouts.progress(of_collect=True)
    with rollouts:
        groups = rollouts.collect([QUESTION] * 3, "eval", 0, temperature=0.25, group_size=1)
        rollouts.begin(0, QUESTION).result(30)
    assert [len(group.trajectories) for group in groups] == [1, 1, 1]
    temperatures = [sampling.temperature for *_, sampling in rollouts.context.sampler.calls]
    assert temperatures == [0.25] * 3 + [1.0] * 2
    assert rollouts.context.sampler.calls[0][0] == "eval/0/0"
    assert progress()[:2] == (2, 2) and of_collect()[:2] == (3, 3)
    assert of_collect()[2].startswith("0.0 searches/s, ") and " 0 sampled" not in of_collect()[2]
    assert rollouts.progress()()[:2] == (0, 0)


def test_sampler_gets_weights_and_services_close_once(open_rollouts):
    rollouts = open_rollouts()
    with rollouts:
        rollouts.load(7, {"w": 1})
        assert rollouts.prompt_logprobs([1, 2])["worker"].tolist() == [1, 2]
        assert rollouts.metrics() == {"sampler/tokens": 3.0}
    sampler = rollouts.context.sampler
    assert sampler.loaded == [(7, {"w": 1})]
    assert sampler.closed == rollouts.context.retriever.closed == rollouts.context.judge.closed == 1


class Stuck(Action):
    name, purpose = "tool", "use the tool"

    async def call(self, argument):
        return Reply(text="x")

    async def close(self):
        raise OSError("gone")


@pytest.mark.parametrize("ending", [None, SystemExit(143)])
def test_failing_close_keeps_nothing_else_open(open_rollouts, ending):
    rollouts = open_rollouts()
    rollouts.context = replace(rollouts.context, actions=(OwnAction(Stuck(), 9),))
    with pytest.raises(SystemExit if ending else UserError) as caught, rollouts:
        if ending:
            raise ending
    assert caught.value is ending or str(caught.value).startswith("action tool: close failed: OSError: gone")
    assert rollouts.context.sampler.closed == rollouts.context.retriever.closed == 1
    assert not rollouts._thread.is_alive()


def test_end_cancels_what_is_running(open_rollouts):
    begun = time.monotonic()
    rollouts = open_rollouts(delay=lambda *_: 60.0)
    with rollouts:
        future = rollouts.begin(0, QUESTION)
        while not rollouts.context.sampler.calls:
            time.sleep(0.01)
    assert future.cancelled() and time.monotonic() - begun < 30
    assert len(rollouts.context.sampler.released) == 2
