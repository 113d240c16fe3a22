"""A small run to plan, and plans of the repository's configs."""

import shlex
from pathlib import Path

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.cli.plan import make_plan
from calibadv_jax.contrib.planning.hardware import find_target

ROOT = Path(__file__).resolve().parents[2]

SHAPE = {"model_type": "qwen2", "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408}
SHAPE |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
SHAPE |= {"tie_word_embeddings": True}
KEYS = {"policy.logprob_chunk": 512, "sampler.slots": 16}
KEYS |= {"learner.pack_length": 2048, "learner.microbatch_rows": 4, "learner.steps": 10}
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


def planned(words):
    """(config, target, plan) of `calibadv plan` with these words."""
    parsed = cli.parse("calibadv plan", "", shlex.split(words), cli.OPTIONS["plan"])
    options = parsed.options
    target = find_target(options["tpu"], options["gpu"], options["topology"])
    config = load_config([ROOT / path for path in parsed.configs], parsed.overrides)
    return config, target, make_plan(config, target, *map(options.get, ("efficiency", "tokens", "sampled")))
