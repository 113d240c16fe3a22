"""The turn protocol: its tags, what a turn says, and how untrusted text is kept from saying it.

A turn is ``<think>…</think>`` and then ``<search>…</search>`` or ``<answer>…</answer>``; the environment
replies to a search with ``<information>…</information>``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from calibadv_jax.core.trajectory import StopReason, TurnKind

TAG_NAMES = ("think", "search", "information", "answer")
TAGS = tuple(f"<{slash}{name}>" for name in TAG_NAMES for slash in ("", "/"))
STOP_STRINGS = ("</search>", "</answer>")
OPEN_THINK = "<think>"
OPEN_INFORMATION, CLOSE_INFORMATION = "\n\n<information>", "</information>\n\n"
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and"
    " </search>. If I want to give the final answer, I should put the answer between <answer> and"
    " </answer>. Let me try again.\n"
)
QUERY_REFUSED = (
    "The search engine does not take this query. It may be too long: a short query of a few words works best."
)

_NAMES = "|".join(TAG_NAMES)
_OPEN_ACTION, _OPEN_THINK = re.compile(r"<(search|answer)>"), re.compile(r"<(think)>")
_TAG = re.compile(rf"(</?(?:{_NAMES})>)")
# Anything a reader, or a tokenizer that folds case and space, could take for a tag, and the open beginning
# of one. Nothing is matched twice (possessive), so that hostile text costs linear time.
_TAG_LIKE = re.compile(rf"<(\s*+/?+\s*+(?:{_NAMES})\b)(?:([^<>]*+)>)?", re.IGNORECASE)
_DOC_HEADER = re.compile(r"(Doc\s*+\d++)\s*+\(\s*+(Title)\s*+:", re.IGNORECASE)
_INVALID_NOTICE = re.compile(r"My\s+previous\s+action\s+is\s+invalid", re.IGNORECASE)
_REFUSAL = re.compile(r"(search\s+engine\s+does\s+not)\s+take\s+this\s+query", re.IGNORECASE)


@dataclass(frozen=True)
class ParsedTurn:
    """What one model segment asks of the environment."""

    kind: TurnKind
    think: str = ""
    query: str = ""
    answer: str = ""


def parse_turn(text: str, stop_reason: StopReason) -> ParsedTurn:
    """Reads the first closed action of a segment, wherever it stands, as Search-R1 does.

    An action inside the thought is executed too: sampling stops at its closing tag, so no other one can
    follow, and whether the segment is well-formed is the reward's business. Text after the closing tag
    is ignored: the last sampled token may carry some. A search for nothing and an action with a protocol
    tag in its body are invalid; an empty answer is an answer.

    Args:
        text: the decoded segment behind `Trajectory.opening`, without its end-of-text token.
        stop_reason: a segment without action that was cut from outside ("length", "abort") is unfinished
            rather than invalid.
    """
    _, think = _first_closed(_OPEN_THINK, text) or ("", "")
    action = _first_closed(_OPEN_ACTION, text)
    if action is None:
        return ParsedTurn("unfinished" if stop_reason in ("length", "abort") else "invalid", think)
    kind, body = action
    if _TAG.search(body) or (kind == "search" and not body):
        return ParsedTurn("invalid", think)
    if kind == "search":
        return ParsedTurn("search", think, query=body)
    return ParsedTurn("answer", think, answer=body)


def _first_closed(opening: re.Pattern[str], text: str) -> tuple[str, str] | None:
    """Name and stripped body of the first element that is closed; in linear time, unlike a lazy pattern."""
    last_close: dict[str, int] = {}
    for found in opening.finditer(text):
        name, start = found.group(1), found.end()
        close = f"</{name}>"
        if name not in last_close:
            last_close[name] = text.rfind(close)
        if start <= last_close[name]:
            return name, text[start : text.index(close, start)].strip()
    return None


def split_at_tags(text: str) -> list[str]:
    """Text, tag, text, tag, …, text: the pieces at odd places are protocol tags, written exactly."""
    return _TAG.split(text)


def neutralise(text: str, extra: Collection[str] = ()) -> str:
    """Untrusted text without anything that could be taken for the protocol; idempotent.

    Angle brackets of tags become square ones, the header of a document and the notices of an invalid
    action and of a refused query lose their exact form, and every string of `extra` but blank ones is
    broken up.

    Args:
        extra: the tokenizer's control tokens, which would be encoded as such; see
            `rollout.observation.added_token_strings`.
    """
    text = well_formed(text)
    while True:  # a replacement can create a new match: repeat until nothing changes
        cleaned = _TAG_LIKE.sub(_defused, text)
        cleaned = _DOC_HEADER.sub(r"\1 [\2]:", cleaned)
        cleaned = _INVALID_NOTICE.sub("my earlier action was invalid", cleaned)
        cleaned = _REFUSAL.sub(r"\1 accept a query", cleaned)
        present = [token for token in extra if token in cleaned and token.strip()]
        for token in sorted(present, key=lambda token: (-len(token), token)):
            cleaned = cleaned.replace(token, _broken(token))
        if cleaned == text:
            return text
        text = cleaned


def well_formed(text: str) -> str:
    """Text without lone surrogates, which JSON may hold and which no tokenizer and no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _defused(tag: re.Match[str]) -> str:
    name, rest = tag.groups()
    return f"[{name}" if rest is None else f"[{name}{rest}]"


def _broken(token: str) -> str:
    """The token's words without its marks, or its letters with spaces between if it is only words."""
    words = " ".join(re.findall(r"\w+", token)) or " "
    if token not in words:
        return words
    return " ".join(token) if len(token) > 1 else " "
