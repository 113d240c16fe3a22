"""A trainer's neighbours, small enough to train in seconds: one layer, scripted trajectories, no services."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
import pytest
from config_rig import changed
from hosts_rig import UNTIMED, rows  # noqa: F401
from tiny_policy import NARROW, Letters, single_device, tiny

from calibadv_jax.commands.train import train
from calibadv_jax.core.signals import Stop
from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.data.questions import write_questions
from calibadv_jax.learner import learner, objective, optimizer
from calibadv_jax.metrics.console import Console
from calibadv_jax.run.model import Model
from calibadv_jax.run.state import RunState

HF_CONFIG = NARROW | {"vocab_size": 24, "num_key_value_heads": 1, "tie_word_embeddings": True}
QUESTIONS = [Question(f"q{number}", f"question {number}?", ("yes",), "toy") for number in range(7)]


class Vocabulary(Letters):
    """A tokenizer of as many letters as the policy has tokens."""

    def __len__(self):
        return HF_CONFIG["vocab_size"]

    def encode(self, text, add_special_tokens):
        return [ord(letter) % len(self) for letter in text]

    def get_vocab(self):
        return {chr(97 + number): number for number in range(len(self))}


def _schedule_of(config, total):
    """A constant rate does not depend on the number of updates."""
    return _make_schedule(config, 0 if config.schedule == "constant" else total)


# Of all modules of a process: trainers of equal settings have one learner, whose programs are compiled once.
_make_schedule = functools.cache(optimizer.make_schedule)
SHARED = (
    (optimizer, "make_schedule", _schedule_of),
    (learner, "make_optimizer", functools.cache(learner.make_optimizer)),
    (objective, "policy_gradient", functools.cache(objective.policy_gradient)),
    (learner, "Learner", functools.cache(learner.Learner)),
)


@pytest.fixture(scope="module")
def shared_programs():
    """Trainers of equal settings have one learner, whose programs are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, shared in SHARED:
            patch.setattr(module, name, shared)
        yield


def make_config(folder, **sections):
    """A run of four steps with two questions of three trajectories; `sections` change keys by section."""
    folder.mkdir(parents=True, exist_ok=True)
    write_questions(folder / "train.jsonl", QUESTIONS)
    small = changed(
        run={"dir": str(folder)},
        data={"train": str(folder / "train.jsonl")},
        rollout={"questions_per_step": 2, "group_size": 3, "max_prompt_length": 8, "max_length": 16},
        learner={"steps": 4, "pack_length": 16, "microbatch_rows": 8},
        checkpoint={"every": 2},
        log={"backends": [], "progress": False},
    )
    return changed(small, **sections)


def write_group(number, question, size=3):
    """Trajectories that depend on the number alone; the first of them is right."""
    rng = np.random.default_rng(number)
    return Group(question, [write_trajectory(rng, question, index) for index in range(size)])


def write_trajectory(rng, question, index):
    def turn(kind, text, observed, **fields):
        ids = rng.integers(0, HF_CONFIG["vocab_size"], 3).astype(np.int32)
        observation = rng.integers(0, HF_CONFIG["vocab_size"], observed).astype(np.int32)
        logprobs = -rng.random(3).astype(np.float32) - 2
        return Turn(kind, ids, logprobs, text=text, observation_ids=observation, **fields)

    answer = "yes" if index == 0 else "no"
    turns = [
        turn("search", f"<think>t{index}</think><search>q</search>", 2, query="q"),
        turn("answer", f"<think>t</think><answer>{answer}</answer>", 0, answer=answer),
    ]
    prompt = rng.integers(0, HF_CONFIG["vocab_size"], 4).astype(np.int32)
    return Trajectory(question, prompt, turns, index=index)


class ScriptedRollouts:
    """Completes every group at once, and notes what it was asked; `fails_at` is a group's number."""

    def __init__(self, fails_at=None):
        self.fails_at, self.begun, self.loaded, self.logprobs = fails_at, [], [], {}
        self.seed = 0

    def progress(self, of_evaluation=False):
        return lambda: (0, 0, "")

    def begin(self, number, question):
        self.begun.append((number, question.id))
        future = Future()
        if number == self.fails_at:
            future.set_exception(RuntimeError("the machine is gone"))
        else:
            group = write_group(number, question)
            for trajectory in group.trajectories:
                self.alter(number, trajectory)
            future.set_result(group)
        return future

    def alter(self, number, trajectory):
        """Subclasses may change a trajectory of the group of this number."""

    def publish(self, version, params):
        return params

    def load(self, version, params):
        self.loaded.append((version, jax.device_get(params)))

    def metrics(self):
        return {}

    def prompt_logprobs(self, token_ids):
        return self.logprobs


class Collapsing(ScriptedRollouts):
    """From group 7 on the policy babbles, unless other numbers are drawn than at first."""

    def alter(self, number, trajectory):
        if number >= 7 and self.seed == 0:
            for turn in trajectory.turns:
                turn.logprobs = turn.logprobs - 20


GUARDED = {"max_sampled_perplexity": 1000.0, "patience_steps": 1}
MODEL = Model(tiny(HF_CONFIG), HF_CONFIG, Vocabulary(), Path("none"), single_device())


def run(config, rollouts, tmp_path, console=None):
    with Stop() as stop, make_state(config, tmp_path, rollouts, console) as state:
        train(state, stop)
    return rollouts


def resumed(config, folder, fails_at, kind=ScriptedRollouts):
    """The rollouts of a second start, after one that ended where the group `fails_at` was waited for."""
    with pytest.raises(RuntimeError, match="the machine is gone"):
        run(config, kind(fails_at=fails_at), folder)
    return run(config, kind(), folder)


def make_state(config, folder, rollouts=None, console=None):
    console = console or Console(progress=False)
    return RunState(config, MODEL, QUESTIONS, rollouts or ScriptedRollouts(), folder, console)


def checkpoints(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("[0-9]"))
