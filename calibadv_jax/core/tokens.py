"""Text and tokens: encoding and decoding that change nothing, and the control tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# Characters of which control tokens have one or more.
_MARKUP = frozenset("<>[]{}|｜")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without the special tokens that a tokenizer adds around it.

    Args:
        tokenizer: a tokenizer of transformers.
        text: any text. A control token in it becomes one token.

    Returns:
        Token ids; none for an empty text.
    """
    return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, with every token shown and no space removed.

    Args:
        tokenizer: a tokenizer of transformers.
        ids: token ids; may be empty. Incomplete UTF-8 becomes U+FFFD.

    Returns:
        The text. If it is encoded again, the ids may differ.
    """
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def added_token_strings(tokenizer: Any) -> frozenset[str]:
    """Return the tokenizer's control tokens: strings that become a token of their own wherever they occur.

    Added tokens without markup (a word, a run of spaces) and special tokens of one character do not count.

    Args:
        tokenizer: a tokenizer of transformers.

    Returns:
        The tokens as texts of two or more characters; an empty set if there are none.
    """
    tokens = {str(token) for token in tokenizer.all_special_tokens}
    for added_token in tokenizer.get_added_vocab():
        text = str(added_token)
        if _MARKUP & set(text):
            tokens.add(text)
    return frozenset(token for token in tokens if len(token) > 1)


def normaliser_of(tokenizer: Any) -> Callable[[str], str] | None:
    """Return the tokenizer's normaliser, which changes a text before tokens are looked for, or None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        # A tokenizer in Python has no normaliser of its own to ask: compare what it makes of the text.
        return lambda text: decode(tokenizer, encode(tokenizer, text))
    if backend.normalizer is None:
        return None
    return backend.normalizer.normalize_str
