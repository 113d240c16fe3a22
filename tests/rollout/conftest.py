"""Tokenizers made on the spot, and a turn loop among small fakes."""

from __future__ import annotations

import pytest
from loop_fakes import CONTROL, EOS, Loop

from calibadv_jax.core.tags import TAG_NAMES


@pytest.fixture(scope="session")
def byte_tokenizer():
    """One token a byte, one merge, an end-of-text and a chat token; encodes any text exactly."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, ">Ċ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(">", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, extra_special_tokens=[CONTROL])


@pytest.fixture(scope="session")
def word_tokenizer():
    """One token a word, an unknown one for the rest; the protocol's tags are added tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*("Question", "Who", "is", "Ann", "a", "painter", "Doc", "Title"), *'123:?()."']
    tags = [f"<{slash}{name}>" for name in TAG_NAMES for slash in ("", "/")]
    vocabulary = {word: index for index, word in enumerate([EOS, "<unk>", *tags, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token="<unk>")


@pytest.fixture
def loop(byte_tokenizer) -> Loop:
    return Loop(byte_tokenizer)
