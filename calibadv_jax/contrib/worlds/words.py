"""The closed vocabulary of the generated encyclopedia (``words.yaml``), and a word-level tokenizer of it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import yaml
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
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
# What a tokenizer for tool calls has in addition: the chat template, its control tokens, and the words and
# marks of calls. A run of marks is one token.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
START_OF_MESSAGE = "<|im_start|>"
END_OF_MESSAGE = "<|im_end|>"
CALL_TOKENS = [
    START_OF_MESSAGE,
    END_OF_MESSAGE,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
CALL_WORDS = [
    *("system", "user", "assistant", "tool", "tools", "call", "tool_call", "name", "arguments"),
    *("url", "input", "There", "argument", "lacks", "was", "called", "Call", "message", "JSON"),
    *("{", "}", "{}", "}}", '{"', '"}', '"}}', '":', '",', "):", "),"),
]
# White space behind a quotation mark that opens, and before one that closes.
_BEHIND_OPENING = Regex(r'(?<=[ ({]")\ ')
_BEFORE_CLOSING = Regex(r'\ (?="[:,)}])')


def build_word_tokenizer(pages: bool = False, ages: bool = False, has_tool_calls: bool = False) -> Any:
    """Return a tokenizer with a token for each word, punctuation mark and protocol tag.

    Unknown words become ``<unk>``. Decoding joins tokens with single spaces, so encoding the result gives the
    same ids again. With tool calls no space stands inside of quotation marks, so that names and values in the
    JSON of a call are exact.

    Args:
        pages: Add the words and tags of worlds with pages.
        ages: Add the words and tags of worlds that ask for ages.
        has_tool_calls: Add the chat template, its control tokens, and the words of tool calls.

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
    if has_tool_calls:
        words.extend([*CALL_WORDS, *actions, *CALL_TOKENS])
    distinct_words = dict.fromkeys(words)
    vocabulary = {word: index for index, word in enumerate(distinct_words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tags = [*TAGS, *action_tags]
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    if has_tool_calls:
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in CALL_TOKENS])
        tokenizer.decoder = _quoting_decoder()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_MESSAGE if has_tool_calls else EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    if has_tool_calls:
        wrapped.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return wrapped


def _quoting_decoder() -> decoders.Decoder:
    """Return a decoder that joins tokens with single spaces, but not inside of quotation marks."""
    return decoders.Sequence(
        [
            decoders.WordPiece(prefix=UNKNOWN * 2, cleanup=False),  # no token has this prefix
            decoders.Fuse(),
            decoders.Replace(_BEHIND_OPENING, ""),
            decoders.Replace(_BEFORE_CLOSING, ""),
        ]
    )
