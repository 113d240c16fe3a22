"""Overrides of configs/quickstart.yaml that make a run as small as it can be, and its policy's folder."""

import json
import shutil
from pathlib import Path

from benchmarks.kill import SMALL_WORLD

SMALL = [
    *SMALL_WORLD,
    *("policy.path=", "policy.init.hidden_size=32", "policy.init.intermediate_size=32"),
    *("policy.init.num_hidden_layers=1", "policy.init.head_dim=16", "rollout.questions_per_step=4"),
    *("rollout.group_size=4", "rollout.max_turn_length=8", "rollout.max_length=64", "sampler.slots=16"),
    *("sampler.decode_chunk=8", "learner.pack_length=64", "learner.microbatch_rows=8", "learner.steps=4"),
    *("checkpoint.every=2", "mesh.data=1", "mesh.fsdp=8", "log.backends=[]"),
    # A random policy never answers: reward what it does vary in, so that there is something to learn.
    "reward.format=false",
]


def write_model(folder, config):
    """What a vLLM worker needs of the random policy: config.json, and the tokenizer of the written world."""
    shutil.copytree(Path(config.world.dir) / "tokenizer", folder)
    hf_config = config.policy.init | {"vocab_size": 398, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(hf_config))
    return folder
