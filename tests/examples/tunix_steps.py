"""Two steps of Tunix's agentic GRPO with CalibAdv; run by test_other_trainers.py with Tunix on the path."""

import jax
import numpy as np
import optax
from flax import nnx
from scripted import GROUP_SIZE, HITS, STEPS, TEXTS, check_advantages, make_tokenizer
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig
from tunix.rl.agentic.parser.chat_template_parser.parser import DefaultChatTemplateParser
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from examples.tunix_calibadv import CalibAdvLearner, SearchEnvironment

RESPONSE_LENGTH = 256
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ScriptedRollout(BaseRollout):
    """Returns the scripted turns one after the other."""

    def __init__(self, rollout_actor, tokenizer, rollout_config, **_):
        self.actor, self.tokenizer, self.texts, self.prompts = (
            rollout_actor,
            tokenizer,
            iter(TEXTS * STEPS),
            [],
        )

    def generate(self, prompts, rollout_config, **_):
        text = next(self.texts)
        self.prompts.append(prompts)
        prompt = self.tokenizer.encode(prompts)[: rollout_config.max_prompt_length]
        padding = [self.pad_id()] * (rollout_config.max_prompt_length - len(prompt))
        tokens = np.array(self.tokenizer.encode(text), np.int32)
        return RolloutOutput([text], None, [tokens], np.array([padding + prompt], np.int32), None)

    def get_per_token_logps(self, *_):
        raise NotImplementedError

    def update_params(self, *_):
        raise NotImplementedError

    def pad_id(self):
        return self.tokenizer.pad_id()

    def eos_id(self):
        return self.tokenizer.eos_id()

    def model(self):
        return self.actor


class Recorder(CalibAdvLearner):
    """Keeps the records of each group."""

    def _process_results(self, *arguments, **keywords):
        examples = super()._process_results(*arguments, **keywords)
        self.groups = [*getattr(self, "groups", []), self.records]
        return examples


def main() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = Qwen3(
        ModelConfig(
            num_layers=1,
            vocab_size=len(tokenizer),
            embed_dim=16,
            hidden_dim=32,
            num_heads=2,
            head_dim=8,
            num_kv_heads=1,
            rope_theta=10_000,
            norm_eps=1e-6,
            use_tied_embedding=True,
        ),
        rngs=nnx.Rngs(0),
    )
    before = jax.tree.map(np.array, nnx.state(model))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = RLCluster(
        actor=model,
        tokenizer=tokenizer,
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
            rollout_engine=ScriptedRollout,
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2), max_steps=STEPS, eval_every_n_steps=STEPS + 1
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=RESPONSE_LENGTH, max_prompt_length=64, temperature=1.0
            ),
        ),
    )
    learner = Recorder(
        cluster,
        GRPOConfig(
            num_generations=GROUP_SIZE,
            beta=0.0,
            max_response_length=RESPONSE_LENGTH,
            max_concurrency=1,
            use_rollout_logps=False,
        ),
        chat_parser=DefaultChatTemplateParser(tokenizer),
        env_class=SearchEnvironment,
        env_kwargs={
            "search": HITS.__getitem__,
            "score": lambda task, answer: answer == task["answer"].item(),
        },
    )
    batches, update_actor = [], cluster.update_actor

    def recording_update(train_batches, *arguments):
        batches.extend(train_batches)
        update_actor(train_batches, *arguments)

    cluster.update_actor = recording_update
    learner.train([{"prompts": ["Who wrote it?"], "answer": ["ada"]}] * STEPS)
    assert len(batches) == len(learner.groups) == STEPS
    for batch, records in zip(batches, learner.groups, strict=True):
        check_advantages(np.asarray(batch.advantages), np.asarray(batch.completion_mask) > 0, records)
    after = jax.tree.map(np.array, nnx.state(cluster.actor_trainer.model))
    changed = jax.tree.map(lambda old, new: bool((old != new).any()), before, after)
    assert any(jax.tree.leaves(changed)) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


if __name__ == "__main__":
    main()
