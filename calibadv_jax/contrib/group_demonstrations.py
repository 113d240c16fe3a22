"""Demonstrations as trajectories of the groups of the first steps.

Mixed groups are those of LUFFY (arXiv 2504.14945) and of the warm start of David-GRPO (arXiv 2601.21699).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.commands.demonstration_encoder import make_encoder
from calibadv_jax.commands.demonstration_tokens import DemonstrationEncoder
from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import content_hash
from calibadv_jax.core.trajectory import Question, Trajectory
from calibadv_jax.data.demonstrations import Demonstration, load_demonstrations
from calibadv_jax.rollout.actions import grammar_of
from calibadv_jax.rollout.prompts import drop_overlong
from calibadv_jax.run.configured_actions import make_actions


class GroupDemonstrations:
    """The demonstrations of the training questions, as trajectories.

    Args:
        config: The run's config, with demonstrations.
        tokenizer: The policy's tokenizer.
        questions: The training questions whose prompts fit.
        warn: Gets a line on the demonstrations that do not fit.

    Attributes:
        by_question: The trajectories by the question's id, in the order of the file; not scored, and with
            the index 0.

    Raises:
        UserError: The file is missing or damaged, no demonstration is one of a training question, or none
            fits in rollout.max_length.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        questions: Sequence[Question],
        warn: Callable[[str], object],
    ):
        self.settings = config.demonstrations
        encoder = make_encoder(config, tokenizer)
        trajectories = []
        for demonstration, question in _matched(config, questions, encoder):
            trajectories.append(encoder.trajectory(demonstration, question))
        longest = config.rollout.max_length
        lengths = [len(trajectory.prompt_ids) + len(trajectory.mask) for trajectory in trajectories]
        overlong = {place: length for place, length in enumerate(lengths) if length > longest}
        _, warning = drop_overlong(
            [trajectory.question for trajectory in trajectories],
            overlong,
            longest,
            config.data.overlong_prompts,
            "demonstrations.file",
            "demonstrations",
            "rollout.max_length",
        )
        if warning:
            warn(warning)
        self.by_question: dict[str, list[Trajectory]] = {}
        for place, trajectory in enumerate(trajectories):
            if place not in overlong:
                self.by_question.setdefault(trajectory.question.id, []).append(trajectory)

    def choose(self, question: Question, version: int, rng: np.random.Generator) -> list[Trajectory]:
        """Return the demonstrations in a group.

        Args:
            question: The question of the group.
            version: Version of the policy that begins the group.
            rng: Chooses among the question's demonstrations if there are more than `per_group`.

        Returns:
            At most `per_group` of them; none for versions from `first_steps` on.
        """
        available = self.by_question.get(question.id, [])
        if version >= self.settings.first_steps:
            return []
        chosen = rng.permutation(len(available))[: self.settings.per_group]
        return [available[place] for place in sorted(chosen.tolist())]


def _matched(
    config: Config, questions: Sequence[Question], encoder: DemonstrationEncoder
) -> list[tuple[Demonstration, Question]]:
    """Return the demonstrations of training questions, each with every question of its text."""
    by_text: dict[str, list[Question]] = {}
    for question in questions:
        by_text.setdefault(question.text.strip(), []).append(question)
    matched = []
    path = config.demonstrations.file
    for demonstration in _load(config, encoder):
        for question in by_text.get(demonstration.question.text.strip(), []):
            matched.append((demonstration, question))
    if not matched:
        raise UserError(
            f"demonstrations.file={path}: none of its questions is one of data.train, word for word; give"
            " demonstrations of training questions, such as those that calibadv demonstrate writes"
        )
    return matched


def _load(config: Config, encoder: DemonstrationEncoder) -> list[Demonstration]:
    grammar = grammar_of(make_actions(config))
    return load_demonstrations(Path(config.demonstrations.file), grammar, encoder.message_reader)


def demonstrations_hash(config: Config, tokenizer: Any) -> str:
    """Return the hash of the demonstrations, by which starts and processes are compared.

    Args:
        config: The run's config, with demonstrations.
        tokenizer: The policy's tokenizer, whose chat template reads messages with tool calls.

    Raises:
        UserError: The file is missing or damaged.
    """
    demonstrations = _load(config, make_encoder(config, tokenizer))
    return content_hash([dataclasses.asdict(demonstration) for demonstration in demonstrations])


def describe_demonstrations(config: Config) -> list[str]:
    """Describe the demonstrations in a config's groups for the terminal; no line without any."""
    settings = config.demonstrations
    if not settings.is_on:
        return []
    weight = "the loss's own ratio, from 1 on"
    if settings.importance == "shaped":
        weight = f"p / (p + {settings.gamma:g})"
    return [
        f"demonstrations {settings.file}: up to {settings.per_group} of {config.rollout.group_size}"
        f" trajectories of a group, in the first {settings.first_steps} steps; weight of a token: {weight}"
    ]
