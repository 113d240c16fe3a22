"""CalibAdv in Tunix (tried with google-tunix 0.1.7): agentic GRPO with an advantage for every turn.

    learner = CalibAdvLearner(cluster, GRPOConfig(...), chat_parser=parser, env_class=SearchEnvironment,
                              env_kwargs={"search": search, "score": score})

`search(query)` returns [(document id, text), …], `score(task, answer)` the reward of an answer. Leave
`max_seq_token_per_tpu` unset: `unpad_train_example` (tunix/rl/utils.py) cuts responses with observations.
"""

import re

import numpy as np
from tunix.rl.agentic.agentic_grpo_learner import GRPOLearner
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.agentic.trajectory.trajectory_collect_engine import TrajectoryCollectEngine

from calibadv_jax.advantages import external

TURN = re.compile(r"\s*<think>(.*?)</think>\s*<(search|answer)>(.*?)</\2>\s*", re.DOTALL)


class SearchEnvironment(BaseTaskEnv):
    """An environment that searches until the policy answers; its `info` describes the turn."""

    def __init__(self, task, *, search, score, max_steps=4, **identity):
        super().__init__(task, max_steps=max_steps, **identity)
        self.search = search
        self.score = score

    def _initial_observation(self):
        return self.task | {"prompts": self.task["prompts"].item()}

    def _step_impl(self, action):
        match = TURN.fullmatch(action)
        thought, kind, content = match.groups() if match else ("", "invalid", "")
        hits = []
        observation = None
        reward = 0.0
        if kind == "search":
            hits = self.search(content.strip())
            shown = "".join(text.replace("<", "&lt;") + "\n" for _, text in hits)
            observation = f"<information>{shown}</information>"
        elif kind == "answer":
            reward = float(self.score(self.task, content.strip()))
        info = {"kind": kind, "thought": thought, "documents": [name for name, _ in hits]}
        return EnvStepResult(observation, reward, kind != "search", info)


class TurnEngine(TrajectoryCollectEngine):
    """Collects a trajectory's `TurnRecord`s beside its tokens."""

    async def collect(self, mode="Conversation"):
        output = await super().collect(mode)
        turns = []
        for step in self.agent.trajectory.steps:
            num_tokens = 0 if step.assistant_tokens is None else len(step.assistant_tokens)
            fields = {"kind": "unfinished"} | step.info
            turns.append(external.TurnRecord(**fields, num_tokens=num_tokens))
        return output | {"turns": turns} if mode == "Token" else output


class CalibAdvLearner(GRPOLearner):
    """A learner that replaces each trajectory's advantage by those of its turns."""

    settings = external.AdvantageSettings()

    def _build_orchestrator(self):
        orchestrator = super()._build_orchestrator()
        orchestrator.engine_cls = TurnEngine
        return orchestrator

    def _compute_rewards(self, *arguments, **keywords):
        self.scores = super()._compute_rewards(*arguments, **keywords)
        return self.scores

    def _process_results(self, trajectories, *arguments, **keywords):
        [batch] = super()._process_results(trajectories, *arguments, **keywords)
        self.records = []
        for score, trajectory in zip(self.scores.tolist(), trajectories, strict=True):
            turns = trajectory.traj["turns"]
            valid = [turn.kind for turn in turns[-1:]] == ["answer"]  # all before it are searches
            self.records.append(external.TrajectoryRecord(score * valid, valid, turns))
        masks = np.asarray(batch.completion_mask, bool)
        size = self.algo_config.num_generations
        advantages = np.zeros(masks.shape, np.float32)
        for first in range(0, len(self.records), size):
            by_turn = external.turn_advantages(self.records[first : first + size], self.settings)
            for row, values in enumerate(by_turn, first):
                counts = [turn.num_tokens for turn in self.records[row].turns]
                if masks[row].any():  # else Tunix excludes the trajectory
                    advantages[row] = external.token_advantages(values, counts, masks[row])
        return [batch.replace(advantages=advantages)]
