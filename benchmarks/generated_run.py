"""A run's folder of generated trajectories, credited by CalibAdv and kept by the run's own writer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import Config, LogConfig
from calibadv_jax.core.tags import TAGS
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory, Turn
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout_store.writer import RolloutWriter

WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "haven",
    "inlet",
    "jetty",
    "knoll",
    "ledge",
    "mesa",
    "north",
    "ocean",
]
SOURCES = ("one_hop", "two_hop", "comparison")
GROUP_SIZE, GROUPS_PER_STEP = 5, 16
NUM_DISTINCT = 250  # groups; no multiple of a step's, so that no two steps are equal


def make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer that has seen the words above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return tokenizer


def words(rng: np.random.Generator, number: int) -> str:
    return " ".join(rng.choice(WORDS, number))


def make_turn(tokenizer: Tokenizer, text: str, observation: str = "", **fields: object) -> Turn:
    ids = np.array(tokenizer.encode(text).ids, np.int32)
    seen = np.array(tokenizer.encode(observation).ids, np.int32)
    logprobs = -np.abs(np.sin(np.arange(len(ids), dtype=np.float32)))
    return Turn(
        **{"kind": "search", "policy_versions": (3,), **fields},  # type: ignore[arg-type]
        token_ids=ids,
        logprobs=logprobs,
        text=text,
        observation_ids=seen,
        observation_text=observation,
    )


def search_turn(tokenizer: Tokenizer, think: str, query: str, documents: list[Document]) -> Turn:
    text = f"<think> {think} </think> <search> {query} </search>"
    shown = "\n".join(f'Doc {n}(Title: "{d.title}") {d.text}' for n, d in enumerate(documents, 1))
    observation = f"\n\n<information>{shown}</information>\n\n"
    return make_turn(tokenizer, text, observation, query=query, think=think, documents=tuple(documents))


def answer_turn(tokenizer: Tokenizer, think: str, answer: str) -> Turn:
    text = f"<think> {think} </think> <answer> {answer} </answer>"
    return make_turn(tokenizer, text, kind="answer", think=think, answer=answer)


def make_group(tokenizer: Tokenizer, number: int, rng: np.random.Generator) -> Group:
    """Return a question with searches of three documents each, right and wrong answers, and failures."""
    golden = words(rng, 2)
    question = Question(f"q{number}", f"who keeps {words(rng, 5)}?", (golden,), SOURCES[number % 3])
    corpus = [Document(f"{number}/{n}", words(rng, 2), words(rng, 40), float(n)) for n in range(9)]
    trajectories = []
    for index in range(GROUP_SIZE):
        turns = []
        for _ in range(int(rng.integers(1, 4))):
            documents = [corpus[place] for place in rng.choice(9, 3, replace=False)]
            turns.append(search_turn(tokenizer, words(rng, 12), words(rng, 3), documents))
        answer = golden if rng.random() < 0.5 else words(rng, 2)
        turns.append(answer_turn(tokenizer, words(rng, 10), answer))
        if rng.random() < 0.1:
            turns[-1] = make_turn(tokenizer, f"<think> {words(rng, 30)}", kind="invalid")
        failed = "retriever: no answer for 600 s" if rng.random() < 0.01 else None
        prompt = np.array(tokenizer.encode(f"Question: {question.text}\n").ids, np.int32)
        trajectories.append(Trajectory(question, prompt, turns, index, 1.0, failed))
    return Group.from_attempts(question, trajectories)


def write_run(
    folder: Path, steps: list[list[Group]], config: Config, tokenizer: Tokenizer, planned: int = 0
) -> None:
    """Write the files that the page reads: `steps` as a training would have kept them, and the tokenizer.

    Args:
        planned: steps of the training; 0: those that were kept, so that the run has ended.
    """
    learner = dataclasses.replace(config.learner, steps=planned or len(steps))
    config = dataclasses.replace(config, learner=learner)
    (folder / "policy").mkdir(parents=True)
    tokenizer.save(str(folder / "policy" / "tokenizer.json"))
    writer = RolloutWriter(folder, config, start_step=1)
    for step, groups in enumerate(steps, 1):
        groups = score_groups(groups, config.reward, np.random.default_rng(0))
        credits = compute_advantages(groups, config.advantage).credits
        learned = [[learner_logprobs(trajectory) for trajectory in group.trajectories] for group in groups]
        writer.write(step, groups, credits, learned, seed=0)


def learner_logprobs(trajectory: Trajectory) -> np.ndarray | None:
    """Return float32 [T]: each sampled token is exp(0.07) times as likely as for the sampler."""
    return (trajectory.logprobs + 0.07 * trajectory.mask).astype(np.float32)


def make_run(folder: Path, num_trajectories: int) -> None:
    """Write a run of that many generated trajectories, 80 a step; those of later steps repeat."""
    tokenizer, rng = make_tokenizer(), np.random.default_rng(0)
    numbers = range(num_trajectories // GROUP_SIZE)
    groups = [make_group(tokenizer, number, rng) for number in numbers[:NUM_DISTINCT]]
    groups = [groups[number % NUM_DISTINCT] for number in numbers]
    steps = [groups[start : start + GROUPS_PER_STEP] for start in numbers[::GROUPS_PER_STEP]]
    write_run(folder, steps, Config(log=LogConfig(rollouts="parquet", rollouts_keep=0)), tokenizer)
