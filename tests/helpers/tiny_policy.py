"""Shapes of tiny policies, the policies themselves, meshes, and a tokenizer of letters."""

from functools import partial

import jax
import jax.numpy as jnp

from calibadv_jax.config import MeshConfig
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy

SHAPE = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 398}
SHAPE |= {"tie_word_embeddings": True}
# Two layers, and several heads for a key-value head.
WIDER = SHAPE | {"intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
WIDER |= {"num_attention_heads": 4, "num_key_value_heads": 2}
# The same of another type; vocab_size is the test's.
GROUPED = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
GROUPED |= {"num_attention_heads": 4, "num_key_value_heads": 2}
NARROW = {"model_type": "qwen2", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 16}
NARROW |= {"num_hidden_layers": 1, "num_attention_heads": 2}
# Rotary frequencies that are scaled, as in Llama 3.1 and later.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def tiny(config, adapters=None, **numerics):
    return Policy(architecture_from_hf(config), Numerics(**numerics), adapters)


@partial(jax.jit, static_argnums=0)
def row_logits(policy, params, tokens):
    """Return the logits float32 [B, T, V] of whole rows, int32 [B, T]."""
    decoder, positions = policy.merge(params), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, positions, jnp.ones_like(tokens)))


def mesh_of(devices=8, **sizes):
    return make_mesh(MeshConfig(**(sizes or {"fsdp": 1})), devices=jax.devices()[:devices])


def single_device():
    return mesh_of(1)


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id, all_special_tokens, chat_template = -1, (), None

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def __call__(self, texts, add_special_tokens, verbose):
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def decode(self, ids, **_):
        return "".join(map(chr, ids))

    def get_added_vocab(self):
        return {}
