"""A word-level tokenizer for the generated encyclopedia, in HuggingFace's format."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calibadv_jax.contrib.worlds.words import AGE_WORDS, PAGE_WORDS, all_words
from calibadv_jax.core.tags import TAGS, Grammar

EOS, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<unk>"


def build_word_tokenizer(pages: bool = False, ages: bool = False) -> Any:
    """One token for each word, punctuation mark and protocol tag; `save_pretrained` writes the folder.

    Unknown words become ``<unk>``. Decoding joins tokens with single spaces, so encoding the result
    gives the same ids again.

    Args:
        pages: with the words of a world that has pages, and the tags of the action that reads them.
        ages: with the words of one that asks for ages, and the tags of the action that subtracts years.
    """
    actions = [*(["access"] if pages else []), *(["calculate"] if ages else [])]
    more_tags = [tag for tag in Grammar(tuple(actions)).tags if tag not in TAGS]
    more_words = [*(PAGE_WORDS if pages else []), *(AGE_WORDS if ages else []), *more_tags]
    words = dict.fromkeys([PAD, EOS, UNKNOWN, *TAGS, *all_words(), *more_words])
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
