"""Two steps of verl with CalibAdv; run by test_other_trainers.py with verl on the path.

Real: agent loop, estimator, the trainer's advantages, policy loss. Not run: Ray's workers, FSDP, vLLM. A
dictionary stands in for TransferQueue (by hand, the script ran with 0.1.8 and Ray 2.60 too).
"""

import asyncio

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from scripted import GROUP_SIZE, HITS, STEPS, TEXT, check_advantages, make_model, make_tokenizer, score
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import ActorConfig
from verl.workers.rollout.replica import TokenOutput

from calibadv_jax.advantages.external import TrajectoryRecord, TurnRecord
from examples.verl_calibadv import SearchAgentLoop


class ScriptedLoop(SearchAgentLoop):
    search = staticmethod(HITS.__getitem__)

    def __init__(self, config, tokenizer):
        data = OmegaConf.create({"continuous_token": {"enable": False}})
        super().__init__(DictConfigWrap(config), self, tokenizer, None, None, DictConfigWrap(data))

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        return TokenOutput(token_ids=self.tokenizer.encode(next(TEXT)))


class Queue(dict):  # rows by key
    def kv_batch_get(self, keys, partition_id, select_fields):
        rows = [{name: self[key][name] for name in select_fields if name in self[key]} for key in keys]
        return list_of_dict_to_tensordict(rows)

    def kv_batch_put(self, keys, partition_id, fields):
        for index, key in enumerate(keys):
            self[key] |= {name: values[index] for name, values in fields.items()}


async def roll_out(loop: ScriptedLoop, step: int) -> Queue:
    queue = Queue()
    for session in range(GROUP_SIZE):
        output = await loop.run({}, raw_prompt=[{"role": "user", "content": "Who wrote it?"}])
        output.reward_score = score(loop.tokenizer.decode(output.response_ids))
        queue[f"q{step}_{session}_0"] = output.as_dict() | {"uid": f"q{step}"}
    return queue


def check_row_advantages(rows: list[dict]) -> None:
    records = []
    for row in rows:
        turns = [TurnRecord(**turn) for turn in row["extra_fields"]["turns"]]
        records.append(TrajectoryRecord(row["rm_scores"].sum().item(), turns[-1].kind == "answer", turns))
    masks = [row["response_mask"].bool().numpy() for row in rows]
    check_advantages([row["advantages"].numpy() for row in rows], masks, records)


def policy_loss(model, row: dict) -> torch.Tensor:
    prompt, response = row["prompts"], row["responses"]
    logits = model(torch.cat([prompt, response])[None]).logits[:, len(prompt) - 1 : -1]
    new = torch.log_softmax(logits, -1).gather(-1, response[None, :, None])[..., 0]  # [1, T]
    config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=GROUP_SIZE)
    advantages, mask = row["advantages"][None], row["response_mask"][None]
    return get_policy_loss_fn("vanilla")(new.detach(), new, advantages, mask, "token-mean", config)[0]


async def main() -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    rollout = {"n": GROUP_SIZE, "prompt_length": 64, "response_length": 512}
    algorithm = AlgoConfig(adv_estimator="calibadv")
    config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": rollout}})
    loop, model = ScriptedLoop(config, tokenizer), make_model(len(tokenizer))
    before = model.model.embed_tokens.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = object.__new__(get_trainer_cls("sync"))  # its constructor starts workers
    trainer.config = config
    for step in range(STEPS):
        queue = await roll_out(loop, step)
        tq.kv_batch_get, tq.kv_batch_put = queue.kv_batch_get, queue.kv_batch_put
        trainer._compute_advantage(tq.KVBatchMeta(list(queue), [{} for _ in queue], "train"), {})
        check_row_advantages(list(queue.values()))
        model.zero_grad()
        sum(policy_loss(model, row) for row in queue.values()).backward()
        optimizer.step()
    after = model.model.embed_tokens.weight
    assert after.isfinite().all() and not torch.equal(before, after)


if __name__ == "__main__":
    asyncio.run(main())
