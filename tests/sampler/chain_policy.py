"""A policy whose next token is a function of the last one: a long count-down, then a tag letter by letter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

COUNT = 200  # numbers that the policy can write before the tag
LETTERS = sorted(set("</>searchnw"))
EOS = 1
FIRST_LETTER = 2  # token id of LETTERS[0]
FIRST_NUMBER = 16  # token id of the number 0
WIDTH, VOCABULARY = 256, 224


def build_tokenizer() -> Any:
    """Return a tokenizer of one token a letter and one a number; a text is their concatenation."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<|eos|>": EOS}
    vocabulary |= {letter: FIRST_LETTER + place for place, letter in enumerate(LETTERS)}
    vocabulary |= {f"{number}.": FIRST_NUMBER + number for number in range(COUNT)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<pad>")


def ids_of(tag: str) -> list[int]:
    return [FIRST_LETTER + LETTERS.index(letter) for letter in tag]


def completion_from(number: int, tag: str) -> list[int]:
    """Return the tokens that follow the token of a number."""
    numbers = [FIRST_NUMBER + smaller for smaller in reversed(range(number))]
    return [*numbers, *ids_of(tag)]


def chain_params(params: Any, tag: str) -> Any:
    """Return `params` of an untied policy without attention and MLP; after the tag it counts down again."""
    numbers = [FIRST_NUMBER + number for number in reversed(range(COUNT))]
    cycle = [*numbers, *ids_of(tag)]
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
        if "norm" in name:
            return jnp.ones_like(leaf)
        return leaf

    return jax.tree_util.tree_map_with_path(edited, params)
