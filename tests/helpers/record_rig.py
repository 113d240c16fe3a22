"""A step with everything a record can hold: two groups, one trajectory that failed, one without a turn."""

from __future__ import annotations

import numpy as np

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import Config
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout_store.writer import RolloutWriter

QUESTIONS = [
    Question("q1", "Who painted it?", ("Ann", "Ann Lee"), "nq", ("d1",)),
    Question("q2", "Où \u2028 « 🙂 »?", ("yes",), "hotpotqa"),
]
INFORMATION = '\n\n<information>Doc 1(Title: "T") text</information>\n\n'


def tokens(*ids):
    return np.array(ids, np.int32)


def search(think, *documents, **more):
    return Turn(
        "search",
        tokens(3, 1, 4),
        np.float32([-0.1, -0.25, -1 / 3]),
        text=f"<think>{think}</think><search>{think}?</search>",
        think=think,
        query=f"{think}?",
        documents=tuple(
            Document(document, f"title {document}", f"text {document}", 0.1) for document in documents
        ),
        observation_ids=tokens(9, 9),
        values=np.float32([0.1, 1 / 3, 0.5]),
        observation_text=INFORMATION,
        policy_versions=(6,),
        golden_logprobs={"current": -2.0 - len(think) / 7, "initial": -2.5},
        **more,
    )


def answer(text):
    return Turn(
        "answer",
        tokens(5, 2),
        np.float32([-0.5, -2.0]),
        text=f"<think>so</think><answer>{text}</answer>",
        think="so",
        answer=text,
        stop_reason="eos",
        policy_versions=(6, 7),
        values=np.float32([0.75, 0.2]),
        golden_logprobs={"current": -1 / 3, "initial": -2.0},
    )


def make_groups():
    """The first group is right once; its second trajectory repeats its first search and finds new silver."""
    best = [search("the old house", "d1", "d2", "d4"), search("a river far away", "d3", "d4"), answer("Ann")]
    wrong = [
        search("the old house", "d1", "x1"),
        search("the old red house", "d2", "x2"),
        search("some quite other words", "d3", "x3", "x4"),
        search("nothing of this kind before", "x3", "x4", "d4"),
        answer("Bob"),
    ]
    first = [best, wrong, [search("no", is_refused=True), answer("Cy")], []]
    second = [[search("a", "e1"), answer("no")], [search("b", "e2"), answer("no")]]
    groups = []
    for question, attempts in zip(QUESTIONS, (first, second), strict=True):
        made = [Trajectory(question, tokens(1, 2), own, n, 0.5 + n) for n, own in enumerate(attempts)]
        for trajectory in made if question is QUESTIONS[0] else ():
            trajectory.error = "retriever: gone" if trajectory.index == 2 else None
        groups.append(Group.from_attempts(question, made))
    return groups


def scored(config):
    """The groups after the reward stage, and their credit."""
    groups = score_groups(make_groups(), config.reward, np.random.default_rng(0))
    return groups, compute_advantages(groups, config.advantage)


def unknown(groups):
    return [[None] * len(group.trajectories) for group in groups]


PLAIN = Config()


def keep(folder, config=PLAIN, step=7, seed=3):
    """Writes the step, and returns what it was made of."""
    groups, result = scored(config)
    learner = unknown(groups)
    learner[0][0] = -np.arange(len(groups[0].trajectories[0].response_ids), dtype=np.float32) / 7
    RolloutWriter(folder, config, step).write(step, groups, result.credits, learner, seed)
    return groups, result, learner
