"""Two steps with CalibAdv in verl; run by test_other_trainers.py with verl on the path.

verl's agent loop, data, registry of estimators, the trainer's advantages and the policy loss are real. A
dictionary stands in for TransferQueue; Ray's workers, FSDP and vLLM do not run.
"""

import asyncio

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from scripted import GROUP_SIZE, HITS, STEPS, TEXTS, check_advantages, make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import ActorConfig
from verl.workers.rollout.replica import TokenOutput

from calibadv_jax.advantages.external import TrajectoryRecord, TurnRecord
from examples.verl_calibadv import SearchAgentLoop

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Loop(SearchAgentLoop):
    search = staticmethod(HITS.__getitem__)


class ScriptedServer:
    """Returns the scripted turns one after the other."""

    def __init__(self, tokenizer):
        self.tokenizer, self.texts = tokenizer, iter(TEXTS * STEPS)

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        return TokenOutput(token_ids=self.tokenizer.encode(next(self.texts)))


class Queue(dict):
    """Rows by key, with TransferQueue's functions."""

    def kv_batch_get(self, keys, partition_id, select_fields):
        rows = [self[key] for key in keys]
        return list_of_dict_to_tensordict(
            [{name: row[name] for name in select_fields if name in row} for row in rows]
        )

    def kv_batch_put(self, keys, partition_id, fields):
        for index, key in enumerate(keys):
            self[key] |= {name: values[index] for name, values in fields.items()}
        return self.batch(keys)

    def batch(self, keys):
        return tq.KVBatchMeta(keys=list(keys), tags=[{} for _ in keys], partition_id="train")


async def roll_out(loop: Loop, step: int) -> dict[str, dict]:
    """Return the rows of a step by key."""
    rows = {}
    for session in range(GROUP_SIZE):
        output = await loop.run({}, raw_prompt=[{"role": "user", "content": "Who wrote it?"}])
        output.reward_score = float(
            loop.tokenizer.decode(output.response_ids).endswith("<answer>ada</answer>")
        )
        rows[f"q{step}_{session}_0"] = output.as_dict() | {"uid": f"q{step}"}
    return rows


def record(row: dict) -> TrajectoryRecord:
    turns = [TurnRecord(**turn) for turn in row["extra_fields"]["turns"]]
    return TrajectoryRecord(float(row["rm_scores"].sum()), turns[-1].kind == "answer", turns)


def log_probabilities(model: Qwen2ForCausalLM, row: dict) -> torch.Tensor:
    """Return float32 [1, T]: of each token of the response."""
    ids = torch.cat([row["prompts"], row["responses"]])[None]
    logits = model(ids).logits[:, len(row["prompts"]) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, row["responses"][None, :, None])[..., 0]


async def main() -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = OmegaConf.create(
        {
            "algorithm": AlgoConfig(adv_estimator="calibadv"),
            "actor_rollout_ref": {"rollout": {"n": GROUP_SIZE, "response_length": 512}},
        }
    )
    data_config = OmegaConf.create({"continuous_token": {"enable": False}})
    loop = Loop(
        DictConfigWrap(config), ScriptedServer(tokenizer), tokenizer, None, None, DictConfigWrap(data_config)
    )
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )
    before = model.model.embed_tokens.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = object.__new__(get_trainer_cls("sync"))  # its constructor starts workers on GPUs
    trainer.config = config
    loss_of = get_policy_loss_fn("vanilla")
    actor_config = ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, rollout_n=GROUP_SIZE)
    for step in range(STEPS):
        queue = Queue(await roll_out(loop, step))
        tq.kv_batch_get, tq.kv_batch_put = queue.kv_batch_get, queue.kv_batch_put
        trainer._compute_advantage(queue.batch(queue), {})
        rows = list(queue.values())
        masks = [row["response_mask"].bool().numpy() for row in rows]
        check_advantages([row["advantages"].numpy() for row in rows], masks, [record(row) for row in rows])
        losses = []
        for row in rows:
            new = log_probabilities(model, row)
            advantages, mask = row["advantages"][None], row["response_mask"][None]
            losses.append(loss_of(new.detach(), new, advantages, mask, "token-mean", actor_config)[0])
        loss = torch.stack(losses).mean()
        assert loss.isfinite()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert not torch.equal(before, model.model.embed_tokens.weight)


if __name__ == "__main__":
    asyncio.run(main())
