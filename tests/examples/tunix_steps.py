"""Two steps of Tunix's agentic GRPO with CalibAdv; run by test_other_trainers.py with Tunix on the path."""

import jax
import numpy as np
import optax
from flax import nnx
from scripted import GROUP_SIZE, HITS, STEPS, TEXT, check_advantages, make_tokenizer
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig
from tunix.rl.agentic.parser.chat_template_parser.parser import DefaultChatTemplateParser
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.rollout.mock_rollout import MockRollout

from examples.tunix_calibadv import CalibAdvLearner, SearchEnvironment

LENGTH = 256  # tokens of a prompt, and of a response
SIZES = {"num_layers": 1, "embed_dim": 16, "hidden_dim": 32, "num_heads": 2, "head_dim": 8, "num_kv_heads": 1}
SETTINGS = {"num_generations": GROUP_SIZE, "max_concurrency": 1, "use_rollout_logps": False, "beta": 0.0}


class ScriptedRollout(MockRollout):
    def generate(self, prompts, rollout_config, **_):
        text, prompt = next(TEXT), self._tokenizer.encode(prompts)
        padded = np.pad(np.array(prompt, np.int32), (LENGTH - len(prompt), 0))
        return RolloutOutput(
            [text], None, [np.array(self._tokenizer.encode(text), np.int32)], padded[None], None
        )


def make_cluster(tokenizer) -> RLCluster:
    config = ModelConfig(vocab_size=len(tokenizer), rope_theta=10_000, norm_eps=1e-6, **SIZES)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster_config = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        rollout_engine=ScriptedRollout,
        training_config=RLTrainingConfig(
            actor_optimizer=optax.adam(1e-2), max_steps=STEPS, eval_every_n_steps=9
        ),
        rollout_config=RolloutConfig(LENGTH, temperature=1.0, max_prompt_length=LENGTH),
    )
    return RLCluster(
        actor=Qwen3(config, rngs=nnx.Rngs(0)), tokenizer=tokenizer, cluster_config=cluster_config
    )


def main() -> None:
    tokenizer = make_tokenizer()
    cluster = make_cluster(tokenizer)
    learner = CalibAdvLearner(
        cluster,
        GRPOConfig(max_response_length=LENGTH, **SETTINGS),
        chat_parser=DefaultChatTemplateParser(tokenizer),
        env_class=SearchEnvironment,
        env_kwargs={"search": HITS.__getitem__, "score": lambda task, answer: answer == task["answer"][0]},
    )
    update_actor = cluster.update_actor

    def check_and_update(batches, *arguments):
        (batch,) = batches
        check_advantages(np.asarray(batch.advantages), np.asarray(batch.completion_mask) > 0, learner.records)
        update_actor(batches, *arguments)

    cluster.update_actor = check_and_update
    before = jax.tree.leaves(jax.tree.map(np.array, nnx.state(cluster.actor_trainer.model)))
    learner.train([{"prompts": ["Who wrote it?"], "answer": ["ada"]}] * STEPS)
    after = jax.tree.leaves(nnx.state(cluster.actor_trainer.model))
    assert any((old != new).any() for old, new in zip(before, after, strict=True))
    assert cluster.global_steps == STEPS


if __name__ == "__main__":
    main()
