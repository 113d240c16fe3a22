"""Rows of benchmarks that are published encrypted, so that no crawler of training data reads them."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import unicodedata
from collections.abc import Collection
from typing import Any

from calibadv_jax.data.row_files import DataRow

# Name of the column that holds the password of a row.
CANARY = "canary"
# Bytes of a ciphertext in an unknown column that tell whether a key opens it: in so many bytes a wrong key
# leaves no control character by chance in less than one of 10,000 texts.
MIN_BYTES = 12
# Columns that are never encrypted, though their values may look so.
_PLAIN_COLUMNS = re.compile(r"(.*_)?(id|index|idx|source|canary)", re.IGNORECASE)
# Text that is base64 and no words.
_BASE64 = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*[0-9+/=])[A-Za-z0-9+/]{24,}={0,2}")


def decrypt_row(row: DataRow, question_keys: Collection[str]) -> DataRow:
    """Return a row with its encrypted texts opened; unchanged if it has no canary or is not encrypted.

    The key is the SHA-256 of the canary (BrowseComp, BrowseComp-ZH, BrowseComp-Plus) or the canary itself
    (xbench-DeepSearch), with or without the space around it. It is repeated, and XORed with the bytes that
    the base64 holds. Source: the evaluations of openai/simple-evals and of xbench.

    Args:
        row: Row of a question file.
        question_keys: Keys of questions. A row is encrypted if the key opens its question; without a
            question, if it opens the longest text.
    """
    canary = next((value for name, value in row.items() if str(name).strip().lower() == CANARY), None)
    if not isinstance(canary, str) or not canary.strip():
        return row
    texts = {name: text for name, text in row.items() if not _PLAIN_COLUMNS.fullmatch(str(name))}
    questions = [text for name, text in texts.items() if name in question_keys and isinstance(text, str)]
    if questions:
        evidence = [_decoded(question) for question in questions]
    else:
        ciphertexts = [_decoded(text) for text in texts.values() if isinstance(text, str)]
        evidence = [max(ciphertexts, key=len, default=b"")]
    is_long_enough = bool(questions) or len(evidence[0]) >= MIN_BYTES
    if not is_long_enough or not all(evidence):
        return row
    best_key = None
    best_share = 0.0
    for key in _keys(canary):
        opened = [_opened(ciphertext, key) for ciphertext in evidence]
        share = min(_share_of_words(text) for text in opened)
        if share > best_share:
            best_key = key
            best_share = share
    if best_key is None:
        return row
    return row | {name: _decrypted(text, best_key) for name, text in texts.items()}


def _keys(canary: str) -> list[bytes]:
    """Return the keys that a canary may stand for."""
    keys = []
    for password in dict.fromkeys((canary, canary.strip())):
        secret = password.encode(errors="replace")
        keys += [hashlib.sha256(secret).digest(), secret]
    return keys


def _share_of_words(text: str | None) -> float:
    """Return the share of a text that is letters, digits and space; 0 for None.

    A wrong canary of plain words opens plain words too, but to signs among the letters.
    """
    if not text:
        return 0.0
    return sum(letter.isalnum() or letter.isspace() for letter in text) / len(text)


def looks_encrypted(text: str) -> bool:
    """Return whether a text is a line of base64 that no canary has opened."""
    return len(text) % 4 == 0 and _BASE64.fullmatch(text) is not None


def _decoded(text: str) -> bytes:
    """Return the bytes that a text of base64 stands for; empty for other text."""
    try:
        return base64.b64decode("".join(text.splitlines()).strip(), validate=True)
    except ValueError:
        return b""


def _decrypted(value: Any, key: bytes) -> Any:
    """Return a value with its texts of base64 opened; what the key does not open is unchanged."""
    if isinstance(value, list):
        return [_decrypted(item, key) for item in value]
    if not isinstance(value, str):
        return value
    opened = _opened(_decoded(value), key)
    return opened or value


def _opened(ciphertext: bytes, key: bytes) -> str | None:
    """Return the text of a ciphertext; None if the key does not open it."""
    plain = bytes(byte ^ mask for byte, mask in zip(ciphertext, itertools.cycle(key), strict=False))
    try:
        text = plain.decode()
    except UnicodeDecodeError:
        return None
    for letter in text:
        if letter not in "\n\r\t" and unicodedata.category(letter) in ("Cc", "Cn", "Co", "Cs"):
            return None
    return text
