"""The closed vocabulary of the generated encyclopedia (``words.yaml``), and a word-level tokenizer of it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import yaml
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calibadv_jax.core.tags import TAGS, Grammar

WORDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def _pool(text: str) -> list[str]:
    """Return the words of a pool: `a b + c d` stands for ac ad bc bd."""
    alternatives = [part.split() for part in text.split("+")]
    return ["".join(parts) for parts in product(*alternatives)]


# Kind of entity -> the pools of the first and of the second word of its names.
POOLS: dict[str, tuple[list[str], list[str]]] = {
    kind: (_pool(first), _pool(second)) for kind, (first, second) in WORDS["pools"].items()
}
NAMEWORDS = [word for pools in POOLS.values() for pool in pools for word in pool]
ADDRESSES: list[list[str]] = [text.split() for text in WORDS["addresses"]]
PAGEWORDS = ["page", *ADDRESSES[0], *ADDRESSES[1]]
# Years and ages are words only in a world that asks for ages. There are too many pairs of years for a policy
# to learn their differences by heart.
BIRTHS = range(1700, 1810)
AGES = range(20, 90)
YEARS = range(BIRTHS.start, BIRTHS[-1] + AGES[-1] + 1)
AGEWORDS = [
    "how",
    "old",
    "did",
    "become",
    "became",
    "born",
    "died",
    *(str(age) for age in AGES),
    *(str(year) for year in YEARS),
]
FUNCTIONWORDS = WORDS["function_words"].split()
PUNCTUATION = ["(", ")", ":", '"', '")', '("', ".", ",", "?", "!", "'", "-", *"0123456789"]
EOS = "<|endoftext|>"
PAD = "<|pad|>"
UNKNOWN = "<unk>"


def build_word_tokenizer(pages: bool = False, ages: bool = False) -> Any:
    """Return a tokenizer with a token for each word, punctuation mark and protocol tag.

    Unknown words become ``<unk>``. Decoding joins tokens with single spaces, so encoding the result gives the
    same ids again.

    Args:
        pages: Add the words and tags of worlds with pages.
        ages: Add the words and tags of worlds that ask for ages.

    Returns:
        A fast tokenizer of transformers.
    """
    actions = []
    optional_words: list[str] = []
    if pages:
        actions.append("access")
        optional_words.extend(PAGEWORDS)
    if ages:
        actions.append("calculate")
        optional_words.extend(AGEWORDS)
    action_tags = [tag for tag in Grammar(tuple(actions)).tags if tag not in TAGS]
    words = [
        PAD,
        EOS,
        UNKNOWN,
        *TAGS,
        *PUNCTUATION,
        *FUNCTIONWORDS,
        *NAMEWORDS,
        *optional_words,
        *action_tags,
    ]
    distinct_words = dict.fromkeys(words)
    vocabulary = {word: index for index, word in enumerate(distinct_words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tags = [*TAGS, *action_tags]
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
