"""The protocol's grammar: what a turn says, and how untrusted text is kept from saying it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from calibadv_jax.trajectory import StopReason, TurnKind

TAG_NAMES = ("think", "search", "information", "answer")
STOP_STRINGS = ("</search>", "</answer>")
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and"
    " </search>. If I want to give the final answer, I should put the answer between <answer> and"
    " </answer>. Let me try again.\n"
)

_NAMES = "|".join(TAG_NAMES)
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_TAG = re.compile(rf"</?(?:{_NAMES})>")
# Anything a reader, or a tokenizer that folds case and space, could take for a tag.
_TAG_LIKE = re.compile(rf"<(\s*/?\s*(?:{_NAMES})\b[^<>]*)>", re.IGNORECASE)
_DOC_HEADER = re.compile(r"\b(Doc\s*\d+)\s*\(\s*(Title)\s*:", re.IGNORECASE)
_REPROACH = re.compile(r"My\s+previous\s+action\s+is\s+invalid", re.IGNORECASE)


@dataclass(frozen=True)
class ParsedTurn:
    """What one model segment asks of the environment."""

    kind: TurnKind
    think: str = ""
    query: str = ""
    answer: str = ""


def parse_turn(text: str, prepend_think: bool, stop_reason: StopReason) -> ParsedTurn:
    """Reads the first closed action of a segment, wherever it stands, as Search-R1 does.

    Whether the segment is well-formed is the reward's business. Text after the closing tag is ignored:
    the last sampled token may carry some. An action with an empty body, or one with a tag inside, is
    invalid.

    Args:
        prepend_think: the environment wrote the segment's opening <think>.
    """
    whole = f"<think>{text}" if prepend_think else text
    thought = _THINK.search(whole)
    think = thought.group(1).strip() if thought else ""
    action = _ACTION.search(whole)
    if action is None:
        return ParsedTurn("unfinished" if stop_reason == "length" else "invalid", think)
    kind, body = action.group(1), action.group(2).strip()
    if _TAG.search(body) or (kind == "search" and not body):
        return ParsedTurn("invalid", think)
    if kind == "search":
        return ParsedTurn("search", think, query=body)
    return ParsedTurn("answer", think, answer=body)


def neutralise(text: str, extra: Collection[str] = ()) -> str:
    """Untrusted text with nothing left in it that could pass for the protocol; idempotent.

    Angle brackets of tags become square ones, the header of a document and the notice of an invalid
    action lose their exact form, and every string of `extra` is broken up.

    Args:
        extra: the tokenizer's special and added tokens, which would be encoded as such.
    """
    while True:
        cleaned = _TAG_LIKE.sub(r"[\1]", text)
        cleaned = _DOC_HEADER.sub(r"\1 [\2]:", cleaned)
        cleaned = _REPROACH.sub("my earlier action was invalid", cleaned)
        for token in extra:
            # A token without a bracket (a word, a space) can not be told from text, and means no harm.
            if token in cleaned and any(mark in token for mark in "<>[]|"):
                cleaned = cleaned.replace(token, _broken(token))
        if cleaned == text:
            return text
        text = cleaned


def _broken(token: str) -> str:
    """The token's letters without its marks."""
    return " ".join(re.findall(r"\w+", token))
