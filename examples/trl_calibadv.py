"""CalibAdv in TRL (tried with 1.16.0): GRPOTrainer with an advantage for every turn.

    trainer = CalibAdvTrainer(model, reward_funcs=score, args=GRPOConfig(...), train_dataset=questions,
                              rollout_func=search_rollout(search))

`search(query)` returns [(document id, text), …]. `num_generations` must divide the batch of each process.
"""

import re

import numpy as np
import torch
from trl import GRPOTrainer

from calibadv_jax.advantages import external

TURN = re.compile(r"\s*<think>(.*?)</think>\s*<(search|answer)>(.*?)</\2>\s*", re.DOTALL)


class CalibAdvTrainer(GRPOTrainer):
    """A trainer whose `rollout_func` also returns `turns`, a list of `TurnRecord` for each completion."""

    settings = external.AdvantageSettings()

    def _calculate_rewards(self, inputs, *arguments):
        rewards = super()._calculate_rewards(inputs, *arguments)
        first = self.accelerator.process_index * len(inputs)
        weighted = rewards * self.reward_weights.to(rewards.device)
        scores = weighted.nansum(dim=1)[first : first + len(inputs)]
        self.records = []
        for score, row in zip(scores.tolist(), inputs, strict=True):
            kinds = [turn.kind for turn in row["turns"]]
            valid = kinds[-1:] == ["answer"] and set(kinds[:-1]) <= {"search"}
            self.records.append(external.TrajectoryRecord(score * valid, valid, row["turns"]))
        return rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        sampled = (output["completion_mask"] * output["tool_mask"]).bool().cpu().numpy()
        rows = []
        for first in range(0, len(self.records), self.num_generations):
            group = self.records[first : first + self.num_generations]
            for record, advantages in zip(group, external.turn_advantages(group, self.settings), strict=True):
                counts = [turn.num_tokens for turn in record.turns]
                rows.append(external.token_advantages(advantages, counts, sampled[len(rows)]))
        return output | {"advantages": torch.tensor(np.stack(rows), device=output["advantages"].device)}


def generate(trainer, ids, max_tokens=128):
    """Sample one turn after these token ids; returns the new ids."""
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    stop = {"stop_strings": ["</search>", "</answer>"], "tokenizer": tokenizer}
    with torch.no_grad():
        inputs = torch.tensor([ids], device=model.device)
        output = model.generate(inputs, do_sample=True, max_new_tokens=max_tokens, **stop)
    return output[0, len(ids) :].tolist()


def search_rollout(search, generate=generate, max_turns=4):
    """Return a `rollout_func` that lets the policy search until it answers."""

    def rollout(prompts, trainer):
        columns = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "turns": []}
        for prompt in prompts:
            prompt_ids = trainer.processing_class.encode(prompt)
            completion_ids, env_mask, turns = run_episode(search, generate, trainer, prompt_ids, max_turns)
            columns["prompt_ids"].append(prompt_ids)
            columns["completion_ids"].append(completion_ids)
            columns["env_mask"].append(env_mask)
            columns["turns"].append(turns)
        return columns | {"logprobs": None}

    return rollout


def run_episode(search, generate, trainer, prompt_ids, max_turns):
    """Return the tokens behind a prompt, 1 for each that was sampled, and the turns."""
    tokenizer = trainer.processing_class
    completion_ids = []
    env_mask = []
    turns = []
    while len(turns) < max_turns and (not turns or turns[-1].kind == "search"):
        sampled = generate(trainer, prompt_ids + completion_ids)
        match = TURN.fullmatch(tokenizer.decode(sampled))
        thought, kind, content = match.groups() if match else ("", "invalid", "")
        hits = []
        observation = []
        if kind == "search":
            hits = search(content.strip())
            shown = "".join(text.replace("<", "&lt;") + "\n" for _, text in hits)
            block = f"\n<information>{shown}</information>\n"
            observation = tokenizer.encode(block, add_special_tokens=False)
        completion_ids += sampled + observation
        env_mask += [1] * len(sampled) + [0] * len(observation)
        documents = [name for name, _ in hits]
        turns.append(external.TurnRecord(kind, len(sampled), documents, thought))
    return completion_ids, env_mask, turns
