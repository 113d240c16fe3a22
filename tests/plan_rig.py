"""A small run to plan."""

from calibadv_jax.config import load_config

SHAPE = {"model_type": "qwen2", "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408}
SHAPE |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
SHAPE |= {"tie_word_embeddings": True}
KEYS = {"policy.logprob_chunk": 512, "sampler.slots": 16}
KEYS |= {"learner.row_length": 2048, "learner.microbatch_rows": 4, "learner.steps": 10}
KEYS |= {"rollout.questions_per_step": 8, "rollout.group_size": 4, "rollout.max_length": 2048}
KEYS |= {"rollout.max_prompt_length": 512, "rollout.max_turn_length": 256}
KEYS |= {"rollout.max_observation_length": 256}


def overrides(**changed):
    """These keys, and other values by dotted key with "__" for the dot, as words of the command line."""
    keys = KEYS | {name.replace("__", "."): value for name, value in changed.items()}
    return [f"{key}={value}" for key, value in keys.items()]


def small(folder, **changed):
    """A config with this shape and these keys, and other values by dotted key."""
    shape = "".join(f"    {key}: {str(value).lower()}\n" for key, value in SHAPE.items())
    (folder / "small.yaml").write_text(f"policy:\n  init:\n{shape}mesh: {{fsdp: -1}}\n")
    return load_config(folder / "small.yaml", overrides(**changed))
