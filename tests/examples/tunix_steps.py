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
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.rollout.mock_rollout import MockRollout

from examples.tunix_calibadv import CalibAdvLearner, SearchEnvironment

PROMPT, RESPONSE = 256, 256  # tokens
SIZES = {"num_layers": 1, "embed_dim": 16, "hidden_dim": 32, "num_heads": 2, "head_dim": 8, "num_kv_heads": 1}
TEXT = iter(TEXTS * STEPS)


class ScriptedRollout(MockRollout):
    """Returns the scripted turns one after the other."""

    def generate(self, prompts, rollout_config, **_):
        text, prompt = next(TEXT), self._tokenizer.encode(prompts)
        padded = np.pad(np.array(prompt, np.int32), (PROMPT - len(prompt), 0))
        return RolloutOutput(
            [text], None, [np.array(self._tokenizer.encode(text), np.int32)], padded[None], None
        )


class Recorder(CalibAdvLearner):
    """Keeps the records of each group."""

    groups: list[list] = []

    def _process_results(self, *arguments, **keywords):
        batches = super()._process_results(*arguments, **keywords)
        self.groups.append(self.records)
        return batches


def make_cluster(tokenizer) -> RLCluster:
    model_config = ModelConfig(vocab_size=len(tokenizer), rope_theta=10_000, norm_eps=1e-6, **SIZES)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        rollout_engine=ScriptedRollout,
        training_config=RLTrainingConfig(
            actor_optimizer=optax.adam(1e-2), max_steps=STEPS, eval_every_n_steps=9
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=RESPONSE, max_prompt_length=PROMPT, temperature=1.0
        ),
    )
    return RLCluster(actor=Qwen3(model_config, rngs=nnx.Rngs(0)), tokenizer=tokenizer, cluster_config=config)


def main() -> None:
    tokenizer = make_tokenizer()
    cluster = make_cluster(tokenizer)
    settings = {
        "max_response_length": RESPONSE,
        "max_concurrency": 1,
        "use_rollout_logps": False,
        "beta": 0.0,
    }
    learner = Recorder(
        cluster,
        GRPOConfig(num_generations=GROUP_SIZE, **settings),
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
    before = jax.tree.leaves(jax.tree.map(np.array, nnx.state(cluster.actor_trainer.model)))
    learner.train([{"prompts": ["Who wrote it?"], "answer": ["ada"]}] * STEPS)
    after = jax.tree.leaves(nnx.state(cluster.actor_trainer.model))
    assert any((old != new).any() for old, new in zip(before, after, strict=True))
    assert len(batches) == STEPS
    for batch, records in zip(batches, learner.groups, strict=True):
        check_advantages(np.asarray(batch.advantages), np.asarray(batch.completion_mask) > 0, records)


if __name__ == "__main__":
    main()
