"""The teacher of on-policy distillation: it scores the tokens that the policy sampled.

The teacher reads the trajectory's own tokens, behind the policy's prompt or behind a prompt with a hint. Only
the log-probabilities of sampled tokens are used: a longer prompt shifts their places in the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optax

from calibadv_jax.config import Config, LoraConfig
from calibadv_jax.contrib.support_search import read_passages
from calibadv_jax.contrib.teacher_server import TeacherServer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tokens import encode
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from calibadv_jax.learner.batching import Arrays, Sample
from calibadv_jax.learner.distillation import is_guided
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.step import sample_logprobs
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.transformer import Params, Policy
from calibadv_jax.rollout.prompts import shown_question
from calibadv_jax.run.configured_protocol import configured_protocol
from calibadv_jax.run.model import Model, build_model, find_folder
from calibadv_jax.snapshots.huggingface import check_weights, load_params

WIDENING = 128  # Rows that must hold longer prompts are wider by a multiple of so many tokens.
_PLACE = re.compile(r"\{(answer|titles)\}")


class Teacher:
    """The teacher of a run.

    Args:
        config: The run's config, with a teacher.
        model: The run's model.
        questions: The training questions, whose supporting passages a hint may name.
        process_group: The processes of the run.

    Raises:
        UserError: The teacher cannot be loaded or reached, has another vocabulary, or the hint names titles
            that the corpus does not hold.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        questions: Sequence[Question],
        process_group: ProcessGroup = SINGLE_PROCESS,
    ):
        self.config = config
        self.process_group = process_group
        self.prompts = TeacherPrompts(config, model.tokenizer, questions)
        self.vocab_size = model.policy.architecture.vocab_size
        self.server: TeacherServer | None = None
        # The learner that computes a teacher with weights of its own, and these weights.
        self.learner: Learner | None = None
        self.params: Params = {}
        if config.teacher.url:
            self.server = TeacherServer(config.teacher, Console(config.log.progress).warn)
        elif config.teacher.has_own_weights:
            teacher = teacher_model(config, model)
            self.vocab_size = teacher.policy.architecture.vocab_size
            self.learner = _forward_only(config, teacher)
            folder, _ = find_folder(config, config.teacher.policy, with_weights=True, resolved=teacher.pins)
            self.params = load_params(folder, teacher.policy, teacher.mesh)

    def with_logprobs(
        self, learner: Learner, params: Params | None, groups: Sequence[Group]
    ) -> tuple[list[Group], dict[str, float]]:
        """Score the sampled tokens of the trajectories that the teacher guides.

        Args:
            learner: The policy's learner.
            params: Trained parameters of the policy that is the teacher; None: the teacher is another one.
            groups: The scored groups of the step.

        Returns:
            Copies of the groups, in which the turns of guided trajectories have `teacher_logprobs`; and
            metrics.

        Raises:
            UserError: The teacher's server cannot be asked.
        """
        chosen = []
        samples = []
        for group in groups:
            for trajectory in group.trajectories:
                if not self._scores(trajectory):
                    continue
                chosen.append(trajectory)
                samples.append(teacher_sample(trajectory, self.prompts.prompt_ids(trajectory)))
        rows = self._logprobs(learner, params, samples)
        by_id: dict[int, np.ndarray] = {}
        for trajectory, sample, row in zip(chosen, samples, rows, strict=True):
            by_id[id(trajectory)] = row[sample.mask]
        scored_groups = []
        for group in groups:
            trajectories = [
                _with_logprobs(trajectory, by_id[id(trajectory)]) if id(trajectory) in by_id else trajectory
                for trajectory in group.trajectories
            ]
            scored_groups.append(replace(group, trajectories=trajectories))
        num_trajectories = sum(len(group.trajectories) for group in groups)
        metrics = {
            "teacher/tokens": float(sum(len(sample.tokens) for sample in samples)),
            "teacher/trajectory_share": len(chosen) / max(1, num_trajectories),
        }
        if by_id:
            logprobs = np.concatenate(list(by_id.values()))  # float32 [scored tokens]
            metrics["teacher/logprob"] = float(logprobs.mean(dtype=np.float64))
        return scored_groups, metrics

    def _scores(self, trajectory: Trajectory) -> bool:
        """Whether the teacher guides a trajectory, and its vocabulary holds all of the tokens."""
        ids = trajectory.response_ids
        is_sampled = bool(trajectory.mask.any())
        return is_sampled and int(ids.max()) < self.vocab_size and is_guided(trajectory, self.config.teacher)

    def _logprobs(self, learner: Learner, params: Params | None, samples: Sequence[Sample]) -> Arrays:
        """Return the teacher's log-probabilities, float32 [T] for each sample."""
        if not samples:
            return []
        if self.server is not None:
            server = self.server
            sequences = [sample.tokens.tolist() for sample in samples]
            return self.process_group.run_on_main_and_broadcast("teacher", lambda: server.logprobs(sequences))
        if self.learner is not None:
            learner = self.learner
            params = self.params
        assert params is not None  # those of `initial` or `current`
        longest = max(len(sample.tokens) for sample in samples)
        settings = self.config.learner
        excess = longest - settings.pack_length
        if excess > 0:
            widening = -(-excess // WIDENING) * WIDENING
            settings = replace(settings, pack_length=settings.pack_length + widening)
        return sample_logprobs(learner, params, samples, settings)


def teacher_sample(trajectory: Trajectory, prompt_ids: np.ndarray) -> Sample:
    """Return a trajectory behind another prompt.

    Args:
        trajectory: Its response has T tokens.
        prompt_ids: int32 [P], the teacher's prompt.

    Returns:
        A sample of P + T tokens, whose mask is True at the sampled tokens.
    """
    tokens = np.concatenate([prompt_ids.astype(np.int32), trajectory.response_ids])
    mask = np.concatenate([np.zeros(len(prompt_ids), bool), trajectory.mask])
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, zeros, zeros, prompt=len(prompt_ids))


def _with_logprobs(trajectory: Trajectory, logprobs: np.ndarray) -> Trajectory:
    """Split log-probabilities, float32 [sampled tokens], among copies of the turns."""
    turns = []
    start = 0
    for turn in trajectory.turns:
        end = start + len(turn.token_ids)
        turns.append(replace(turn, teacher_logprobs=logprobs[start:end]))
        start = end
    return replace(trajectory, turns=turns)


# --- The teacher's prompt ---


class TeacherPrompts:
    """The prompts that the teacher reads: the policy's, or with a hint behind the question.

    Args:
        config: The run's config.
        tokenizer: The policy's tokenizer.
        questions: The training questions.

    Raises:
        UserError: The hint names titles, and no supporting passage is in the corpus.
    """

    def __init__(self, config: Config, tokenizer: Any, questions: Sequence[Question]):
        self.config = config
        self.tokenizer = tokenizer
        # The question mark belongs to the question, not to the hint, and is added before the hint.
        without_mark = replace(config, prompt=replace(config.prompt, question_mark=False))
        self.protocol = configured_protocol(without_mark, tokenizer)
        self.titles: dict[str, str] = {}  # by id of the passage
        if config.teacher.needs_titles:
            self.titles = _read_titles(config, questions)
        self._hinted: dict[str, np.ndarray] = {}  # prompts of the latest questions, by id

    def prompt_ids(self, trajectory: Trajectory) -> np.ndarray:
        """Return the teacher's prompt of a trajectory, int32 [P].

        Args:
            trajectory: Its own prompt is returned if there is no hint, or if its question lacks the
                supporting passages that the hint names.
        """
        question = trajectory.question
        hint = self.hint(question)
        if not hint:
            return trajectory.prompt_ids
        if question.id not in self._hinted:
            if len(self._hinted) >= self.config.rollout.questions_per_step:
                self._hinted.clear()
            self._hinted[question.id] = self._write(question, hint)
        return self._hinted[question.id]

    def hint(self, question: Question) -> str:
        """Return the text behind a question; empty if the question lacks what the hint names."""
        titles = [self.titles[name] for name in question.supporting_ids if name in self.titles]
        if self.config.teacher.needs_titles and not titles:
            return ""
        values = {"answer": question.golden_answers[0], "titles": "; ".join(titles)}
        # One pass, so that no answer or title can fill a place.
        return _PLACE.sub(lambda place: values[place[1]], self.config.teacher.hint)

    def _write(self, question: Question, hint: str) -> np.ndarray:
        """Return the prompt of a question with a hint, int32 [P]; both are neutralised."""
        text = shown_question(question, self.config.prompt)
        prompt, _ = self.protocol.write_prompt(replace(question, text=text + hint))
        return np.asarray(encode(self.tokenizer, prompt), np.int32)


def _read_titles(config: Config, questions: Sequence[Question]) -> dict[str, str]:
    """Return the titles of the questions' supporting passages, by id."""
    ids = {name for question in questions for name in question.supporting_ids}
    passages = read_passages(config.retriever.corpus, ids) if ids else {}
    if not passages:
        raise UserError(
            "teacher.hint names {titles}, but no question of data.train names supporting passages"
            f" (supporting_ids) that {config.retriever.corpus} holds: leave {{titles}} out"
        )
    return {name: passage.title for name, passage in passages.items()}


# --- A teacher with weights of its own ---


def teacher_model(config: Config, model: Model) -> Model:
    """Return the model of a teacher with weights of its own, without parameters.

    Args:
        config: The run's config.
        model: The run's model.

    Returns:
        The teacher's model, without adapters, on the run's mesh. Its parameters have the precision of the
        forward pass.

    Raises:
        UserError: The folder or repository cannot be used, or has another vocabulary than the policy.
    """
    path = config.teacher.policy
    section = replace(config.policy, tokenizer="", init={}, lora=LoraConfig())
    try:
        teacher = build_model(replace(config, policy=section), path)
    except UserError as error:
        raise UserError(f"teacher.policy={path}: {error}") from error
    _check_vocabulary(path, teacher.tokenizer.get_vocab(), model.tokenizer.get_vocab())
    numerics = replace(teacher.policy.numerics, param_dtype=teacher.policy.numerics.compute_dtype)
    return replace(teacher, policy=Policy(teacher.policy.architecture, numerics), mesh=model.mesh)


def _check_vocabulary(path: str, vocabulary: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """Refuse (UserError) a teacher whose tokens have other ids than the policy's."""
    if vocabulary == expected:
        return
    different = sorted(
        token for token in {*vocabulary, *expected} if vocabulary.get(token) != expected.get(token)
    )
    token = different[0]
    raise UserError(
        f"teacher.policy={path}: its vocabulary differs from the policy's in {len(different)} tokens, such as"
        f" {token!r} ({vocabulary.get(token, 'missing')} there, {expected.get(token, 'missing')} here);"
        " choose a teacher with the policy's tokenizer"
    )


def _forward_only(config: Config, teacher: Model) -> Learner:
    """Return a learner that computes log-probabilities, and has no optimizer."""
    options = replace(LearnerOptions.from_config(config, config.learner.optimizer), offload=False)
    return Learner(teacher.policy, optax.identity(), teacher.mesh, options)


# --- Checks before a run begins ---


def check_teacher(config: Config, model: Model) -> Model:
    """Check the teacher of a run before anything is loaded.

    Args:
        config: The run's config, with a teacher.
        model: The run's model.

    Returns:
        The run's model, with the commit that the teacher comes from among its pins.

    Raises:
        UserError: The teacher's folder, weights or server cannot be used, or it has another vocabulary.
    """
    if config.teacher.url:
        server = TeacherServer(config.teacher, Console(config.log.progress).warn)
        server.identity()
        server.check_vocabulary(model.tokenizer)
        return model
    if not config.teacher.has_own_weights:
        return model
    teacher = teacher_model(config, model)
    folder, _ = find_folder(config, config.teacher.policy, with_weights=True, resolved=teacher.pins)
    check_weights(folder, teacher.policy)
    return replace(model, pins=tuple({*model.pins, *teacher.pins}))


def teacher_identity(config: Config) -> dict[str, Any]:
    """Return the model of the teacher's server, by which starts are compared.

    Args:
        config: The run's config, with a teacher at a server.

    Raises:
        UserError: The server cannot be asked.
    """
    return TeacherServer(config.teacher, Console(config.log.progress).warn).identity()


def describe_teacher(config: Config) -> list[str]:
    """Describe the teacher of a config in lines for the terminal; none without a teacher."""
    teacher = config.teacher
    if not teacher.is_on:
        return []
    name = teacher.policy or f"{teacher.model} at {teacher.url}"
    weight = f"{teacher.coef:g}"
    if teacher.coef_steps:
        weight += f" to {teacher.coef_end:g} in {teacher.coef_steps} steps"
    tokens = {
        "all": "all sampled tokens",
        "failed": f"trajectories with a score below {teacher.failed_below:g}",
        "negative": "turns with a negative advantage",
    }[teacher.guides]
    prompt = "reads a prompt with a hint" if teacher.hint else "reads the policy's prompt"
    return [
        f"teacher {name}: {prompt}; its reverse KL is part of the {teacher.acts_on} of {tokens}, weight"
        f" {weight}; the reward has the weight {teacher.reward_weight:g}"
    ]
