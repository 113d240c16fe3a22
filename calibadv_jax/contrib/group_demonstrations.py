"""Demonstrations as trajectories of the groups of the first steps.

Mixed groups are those of LUFFY (arXiv 2504.14945) and of the warm start of David-GRPO (arXiv 2601.21699).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import content_hash
from calibadv_jax.core.interfaces import Action, Reply
from calibadv_jax.core.tags import parse_turn, text_after_opening, text_with_opening
from calibadv_jax.core.tokens import encode
from calibadv_jax.core.trajectory import Question, Trajectory, Turn
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn, load_demonstrations
from calibadv_jax.rollout.actions import AccessAction, SearchAction, grammar_of
from calibadv_jax.rollout.observation import Observations, make_neutraliser
from calibadv_jax.rollout.prompts import drop_overlong, open_prompt
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
        writer = DemonstrationWriter(config, tokenizer)
        trajectories = []
        for demonstration, question in _matched(config, questions):
            trajectories.append(writer.trajectory(demonstration, question))
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


def _matched(config: Config, questions: Sequence[Question]) -> list[tuple[Demonstration, Question]]:
    """Return the demonstrations of training questions, each with every question of its text."""
    by_text: dict[str, list[Question]] = {}
    for question in questions:
        by_text.setdefault(question.text.strip(), []).append(question)
    matched = []
    path = config.demonstrations.file
    for demonstration in _load(config):
        for question in by_text.get(demonstration.question.text.strip(), []):
            matched.append((demonstration, question))
    if not matched:
        raise UserError(
            f"demonstrations.file={path}: none of its questions is one of data.train, word for word; give"
            " demonstrations of training questions, such as those that calibadv demonstrate writes"
        )
    return matched


def _load(config: Config) -> list[Demonstration]:
    return load_demonstrations(Path(config.demonstrations.file), grammar_of(make_actions(config)))


def demonstrations_hash(config: Config) -> str:
    """Return the hash of the demonstrations, by which starts and processes are compared.

    Args:
        config: The run's config, with demonstrations.

    Raises:
        UserError: The file is missing or damaged.
    """
    return content_hash([dataclasses.asdict(demonstration) for demonstration in _load(config)])


class DemonstrationWriter:
    """Writes demonstrations in the tokens of the agent loop, as the cold start does.

    Args:
        config: The config; its actions and its prompt decide the text around the turns.
        tokenizer: The policy's tokenizer.
    """

    def __init__(self, config: Config, tokenizer: Any):
        self.config = config
        self.tokenizer = tokenizer
        self.actions = make_actions(config)
        self.neutraliser = make_neutraliser(tokenizer, self.actions)
        self.by_name: dict[str, Action] = {
            action.name: action for action in self.actions or (SearchAction(),)
        }
        self.observations = Observations(
            tokenizer, config.rollout.max_observation_length, config.prompt.opening
        )

    def trajectory(self, demonstration: Demonstration, question: Question) -> Trajectory:
        """Return the trajectory of a demonstration.

        Args:
            demonstration: The turns.
            question: The training question, whose prompt and answers count.

        Returns:
            An unscored trajectory with the index 0, whose log-probabilities are 0. Turns without a loss are
            context.

        Raises:
            UserError: As `open_prompt`, or rollout.max_observation_length is too small for the tags.
        """
        prompt_ids, first_opening = open_prompt(
            question,
            self.tokenizer,
            self.config.prompt,
            self.config.rollout.max_prompt_length,
            self.actions,
            self.neutraliser,
        )
        opening = self.config.prompt.opening
        trajectory = Trajectory(
            question,
            prompt_ids,
            opening=opening,
            first_opening=None if first_opening == opening else first_opening,
            actions=self.neutraliser.grammar.actions,
            is_demonstration=True,
        )
        last = len(demonstration.turns) - 1
        for number, turn in enumerate(demonstration.turns):
            written = self._turn(turn, trajectory.opening_of(number), goes_on=number < last)
            trajectory.turns.append(written)
        return trajectory

    def _turn(self, turn: DemoTurn, opening: str, goes_on: bool) -> Turn:
        """Return a turn behind its opening; an action has an observation if the demonstration goes on."""
        text = text_after_opening(opening, turn.text)
        parsed = parse_turn(text_with_opening(opening, text), "stop", self.neutraliser.grammar)
        ids = np.asarray(encode(self.tokenizer, text), np.int32)
        written = Turn(
            kind=parsed.kind,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            text=text,
            think=parsed.think,
            query=parsed.query,
            answer=parsed.answer,
            is_context=not turn.trained,
        )
        action = self.by_name.get(parsed.kind)
        is_observed = action is not None and goes_on
        if is_observed or turn.documents or turn.observation:
            documents = self.neutraliser.neutralise_documents(turn.documents)
            observation = self.neutraliser.neutralise_observation(turn.observation)
            # A built-in action renders the reply: no code of the user's own runs here.
            renderer = SearchAction() if isinstance(action, SearchAction) else AccessAction()
            body = renderer.render(Reply(tuple(documents), observation))
            writer = self.observations.for_action(action or SearchAction())
            written.observation_ids, written.observation_text = writer.information(body)
            written.documents = tuple(documents)
        return written


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
