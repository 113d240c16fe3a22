"""A policy whose next token is a function of the last one: a long count-down, then a tag letter by letter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COUNT = 200  # tokens that the policy can write before the tag
LETTERS = "</>searchnw"
EOS, FIRST_LETTER, FIRST_NUMBER = 1, 2, 16
WIDTH, VOCABULARY = 256, 224


def build_tokenizer() -> Any:
    """One token a letter, one token a number; text is their concatenation."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<|eos|>": EOS}
    vocabulary |= {letter: FIRST_LETTER + place for place, letter in enumerate(sorted(set(LETTERS)))}
    vocabulary |= {f"{number}.": FIRST_NUMBER + number for number in range(COUNT)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<pad>")


def ids_of(tag: str) -> list[int]:
    letters = sorted(set(LETTERS))
    return [FIRST_LETTER + letters.index(letter) for letter in tag]


def completion_from(number: int, tag: str) -> list[int]:
    """What follows the token of `number`."""
    return [FIRST_NUMBER + below for below in range(number - 1, -1, -1)] + ids_of(tag)


def chain_params(params: Any, tag: str) -> Any:
    """`params` without attention and feed-forward, the embeddings not tied; after the tag it counts anew."""
    numbers = [FIRST_NUMBER + number for number in range(COUNT)]
    cycle = [*reversed(numbers), *ids_of(tag)]
    embedding = np.random.default_rng(0).normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
    head = np.zeros((WIDTH, VOCABULARY), np.float32)
    for token, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        head[:, following] = embedding[token] / np.linalg.norm(embedding[token])

    def edited(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "embedding" in name:
            return jnp.asarray(embedding, leaf.dtype)
        if "lm_head" in name:
            return jnp.asarray(head, leaf.dtype)
        if "['o']" in name or "['down']" in name:
            return jnp.zeros_like(leaf)
        return jnp.ones_like(leaf) if "norm" in name else leaf

    return jax.tree_util.tree_map_with_path(edited, params)
