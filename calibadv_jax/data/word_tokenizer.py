"""A word-level tokenizer for the generated encyclopedia, in HuggingFace's format."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calibadv_jax.core.tags import TAGS, Grammar
from calibadv_jax.data.words import PAGE_WORDS, all_words

EOS, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<unk>"


def build_word_tokenizer(pages: bool = False) -> Any:
    """One token for each word, punctuation mark and protocol tag; `save_pretrained` writes the folder.

    Unknown words become ``<unk>``. Decoding joins tokens with single spaces, so encoding the result
    gives the same ids again.

    Args:
        pages: with the words of a world that has pages, and the tags of the action that reads them.
    """
    more_tags = [tag for tag in Grammar(("access",)).tags if tag not in TAGS] if pages else []
    words = [PAD, EOS, UNKNOWN, *TAGS, *all_words(), *(PAGE_WORDS if pages else []), *more_tags]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in (*TAGS, *more_tags)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
