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
    return ["".join(parts) for parts in product(*(part.split() for part in text.split("+")))]


POOLS: dict[str, tuple[list[str], list[str]]] = {
    kind: (_pool(first), _pool(second)) for kind, (first, second) in WORDS["pools"].items()
}
ADDRESSES: list[list[str]] = [text.split() for text in WORDS["addresses"]]
PAGEWORDS = ["page", *ADDRESSES[0], *ADDRESSES[1]]
# Only in a world that asks for ages: too many pairs of years to learn their differences by heart.
BIRTHS, AGES = range(1700, 1810), range(20, 90)
YEARS = range(BIRTHS.start, BIRTHS[-1] + AGES[-1] + 1)
AGEWORDS = ["how", "old", "did", "become", "became", "born", "died", *map(str, AGES), *map(str, YEARS)]
FUNCTIONWORDS = WORDS["function_words"].split()
PUNCTUATION = ["(", ")", ":", '"', '")', '("', ".", ",", "?", "!", "'", "-", *"0123456789"]
EOS, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<unk>"


def build_word_tokenizer(pages: bool = False, ages: bool = False) -> Any:
    """Return a tokenizer with a token for each word, punctuation mark and protocol tag.

    Unknown words become ``<unk>``. Decoding joins tokens with single spaces, so encoding the result
    gives the same ids again. `pages` and `ages` add the words and tags of worlds with pages, and with ages.
    """
    actions = [*(["access"] if pages else []), *(["calculate"] if ages else [])]
    more_tags = [tag for tag in Grammar(tuple(actions)).tags if tag not in TAGS]
    more_words = [*(PAGEWORDS if pages else []), *(AGEWORDS if ages else []), *more_tags]
    pools = [word for pair in POOLS.values() for pool in pair for word in pool]
    words = dict.fromkeys([PAD, EOS, UNKNOWN, *TAGS, *PUNCTUATION, *FUNCTIONWORDS, *pools, *more_words])
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
