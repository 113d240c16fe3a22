"""CalibAdv in verl (tried with 0.9.0): the estimator `calibadv`, with an advantage for every turn.

    VERL_USE_EXTERNAL_MODULES=examples.verl_calibadv python -m verl.trainer.main_ppo ... \\
        algorithm.adv_estimator=calibadv

verl gives estimators no turns: `PPOTrainer._compute_advantage` (verl/trainer/ppo/v1/trainer_base.py) fetches
no `extra_fields`; `compute_advantage` (verl/trainer/ppo/ray_trainer.py) keeps `non_tensor_batch` for `gdpo`.
So `CalibAdvTrainer` fetches the turns. Not run, for want of a GPU: Ray's workers, FSDP, vLLM.
"""

import asyncio
import re
from collections import defaultdict
from uuid import uuid4

import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from calibadv_jax.advantages import external

TURN = re.compile(r"\s*<think>(.*?)</think>\s*<(search|answer)>(.*?)</\2>\s*", re.DOTALL)
SETTINGS = external.AdvantageSettings()
TURNS = []  # of each row of the batch


class SearchAgentLoop(AgentLoopBase):
    """A loop to subclass with `search(query)`, which returns [(document id, text), …], and to `register`."""

    async def run(self, sampling_params, **sample):
        prompt = await self.apply_chat_template(list(sample["raw_prompt"]))
        budget = self.rollout_config.response_length
        response_ids = []
        response_mask = []
        turns = []
        while len(response_ids) < budget and len(turns) < 4 and (not turns or turns[-1]["kind"] == "search"):
            request = {"prompt_ids": prompt + response_ids, "sampling_params": sampling_params}
            output = await self.server_manager.generate(uuid4().hex, **request)
            sampled = output.token_ids[: budget - len(response_ids)]
            match = TURN.fullmatch(self.tokenizer.decode(sampled, skip_special_tokens=True))
            thought, kind, content = match.groups() if match else ("", "invalid", "")
            hits = []
            observation = []
            if kind == "search":
                hits = await asyncio.to_thread(self.search, content.strip())
                shown = "".join(text.replace("<", "&lt;") + "\n" for _, text in hits)
                block = f"\n<information>{shown}</information>\n"
                observation = self.tokenizer.encode(block, add_special_tokens=False)
            response_ids += sampled + observation
            response_mask += [1] * len(sampled) + [0] * len(observation)
            documents = [name for name, _ in hits]
            turns.append(
                {"kind": kind, "num_tokens": len(sampled), "thought": thought, "documents": documents}
            )
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response_ids[:budget],
            response_mask=response_mask[:budget],
            metrics={},
            extra_fields=output.extra_fields | {"turns": turns},
        )


@register_adv_est("calibadv")
def compute_calibadv_advantage(token_level_rewards, response_mask, index, **_):
    """Return advantages and returns, both float32 [rows, T], of the rows that `TURNS` describes."""
    scores = token_level_rewards.sum(dim=-1).tolist()
    masks = response_mask.bool().cpu().numpy()
    result = torch.zeros_like(token_level_rewards)
    groups = defaultdict(list)
    for row, (score, turns, group) in enumerate(zip(scores, TURNS, index, strict=True)):
        valid = turns[-1]["kind"] == "answer"  # all before it are searches
        turns = [external.TurnRecord(**turn) for turn in turns]
        groups[group].append((row, external.TrajectoryRecord(score * valid, valid, turns)))
    for group in groups.values():
        values = external.turn_advantages([record for _, record in group], SETTINGS)
        for (row, record), by_turn in zip(group, values, strict=True):
            counts = [turn.num_tokens for turn in record.turns]
            if masks[row].any():  # else verl added the row to fill the batch
                result[row] = torch.from_numpy(external.token_advantages(by_turn, counts, masks[row]))
    return result, result


class CalibAdvTrainer(PPOTrainerSync):
    def _compute_advantage(self, batch, metrics):
        fields = tq.kv_batch_get(batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        TURNS[:] = [extra["turns"] for extra in fields.pop("extra_fields").tolist()]
        return super()._compute_advantage(batch, metrics)


TRAINER_REGISTRY["sync"] = CalibAdvTrainer  # `register_trainer` replaces none
