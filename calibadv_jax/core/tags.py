"""The turn protocol: its tags, the parsing of turns, and the neutralising of untrusted text.

A turn is ``<think>…</think>`` and then an action such as ``<search>…</search>``, or ``<answer>…</answer>``;
the environment replies to an action with ``<information>…</information>``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from calibadv_jax.core.trajectory import SEARCH_ALONE, Document, StopReason, TurnKind

RESERVED = ("think", "information", "answer", "invalid", "unfinished")  # no action may have such a name
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")  # of an action


@dataclass(frozen=True)
class Grammar:
    """The tags of the protocol with these actions; `may_be_empty`: actions that take an empty body."""

    actions: tuple[str, ...] = SEARCH_ALONE
    may_be_empty: frozenset[str] = frozenset()

    @cached_property
    def tag_names(self) -> tuple[str, ...]:
        return ("think", *self.actions, "information", "answer")

    @cached_property
    def tags(self) -> tuple[str, ...]:
        return tuple(f"<{slash}{name}>" for name in self.tag_names for slash in ("", "/"))

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """Closing tags that end a turn."""
        return tuple(f"</{name}>" for name in (*self.actions, "answer"))

    @cached_property
    def opens_action(self) -> re.Pattern[str]:
        return re.compile(f"<({'|'.join((*self.actions, 'answer'))})>")

    @cached_property
    def tag(self) -> re.Pattern[str]:
        """Pattern of a tag, written exactly."""
        return re.compile(rf"(</?(?:{'|'.join(self.tag_names)})>)")

    @cached_property
    def tag_like(self) -> re.Pattern[str]:
        """Pattern of text that a reader, or a tokenizer that folds case and space, could take for a tag.

        It is possessive, so that hostile text costs linear time.
        """
        names = "|".join(self.tag_names)
        return re.compile(rf"<(\s*+/?+\s*+(?:{names})\b)(?:([^<>]*+)>)?", re.IGNORECASE)


SEARCH_GRAMMAR = Grammar()
TAG_NAMES, TAGS, STOP_STRINGS = SEARCH_GRAMMAR.tag_names, SEARCH_GRAMMAR.tags, SEARCH_GRAMMAR.stop_strings
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
OPEN_INFORMATION, CLOSE_INFORMATION = "\n\n<information>", "</information>\n\n"
FIRST_DOCUMENT = 'Doc 1(Title: "'  # begins a list of documents; no neutralised text holds it
USAGE = " If I want to {purpose}, I should put the {argument} between <{name}> and </{name}>."
ANSWER_USAGE = USAGE.format(purpose="give the final answer", argument="answer", name="answer")
INVALID_TEMPLATE = "\nMy previous action is invalid.{usages} Let me try again.\n"
INVALID_ACTION = INVALID_TEMPLATE.format(
    usages=USAGE.format(purpose="search", argument="query", name="search") + ANSWER_USAGE
)
QUERY_REFUSED = (
    "The search engine does not take this query. It may be too long: a short query of a few words works best."
)
NOTHING_FOUND = "No results found."  # observation of a search without documents

MAX_NESTING = 8  # rounds of `neutralise`; deeper nesting is hostile, and would take quadratic time
# Of JSON: a pair of surrogates, a lone one (group 1), or another escape.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
_OPEN_THINK = re.compile(r"<(think)>")
_DOC_HEADER = re.compile(r"(Doc\s*+\d++)\s*+\(\s*+(Title)\s*+:", re.IGNORECASE)
_INVALID_NOTICE = re.compile(r"My\s+previous\s+action\s+is\s+invalid", re.IGNORECASE)
_REFUSAL = re.compile(r"(search\s+engine\s+does\s+not)\s+take\s+this\s+query", re.IGNORECASE)
_ACTION_REFUSAL = re.compile(r"(action\s+\w++\s+does\s+not)\s+take\s+this", re.IGNORECASE)


@dataclass(frozen=True)
class ParsedTurn:
    """Action or answer of one model segment."""

    kind: TurnKind
    think: str = ""
    query: str = ""
    answer: str = ""


def numbered(documents: Sequence[Document]) -> str:
    """List neutralised documents for an observation; the last one loses the space at its end."""
    lines = (f'Doc {n}(Title: "{shown.title}") {shown.text}' for n, shown in enumerate(documents, 1))
    return "\n".join(lines).strip()


def refusal(name: str, reason: str) -> str:
    """Return the observation of an action that refuses its body, for a neutralised reason."""
    return f"The action {name} does not take this: {reason}"


def neutralise_observation(text: str, extra: Collection[str] = (), grammar: Grammar = SEARCH_GRAMMAR) -> str:
    """Neutralise all but a refusal at the beginning, which the environment itself writes."""
    if text == QUERY_REFUSED:
        return text
    beginnings = (refusal(name, "") for name in grammar.actions)
    beginning = next((start for start in beginnings if text.startswith(start)), "")
    return beginning + neutralise(text[len(beginning) :], extra, grammar)


def leaves_thought_open(opening: str) -> bool:
    """Whether the policy continues a thought behind `opening`."""
    return opening.rfind(OPEN_THINK) > opening.rfind(CLOSE_THINK)


def whole_turn(opening: str, text: str) -> str:
    """Return a turn's text with its opening, which a new thought replaces if the opening closed its own."""
    if CLOSE_THINK in opening and text.lstrip().startswith(OPEN_THINK):
        return text
    return opening + text


def behind_opening(opening: str, text: str) -> str:
    """Return the policy's part of a whole turn's text behind `opening`."""
    return text.removeprefix(OPEN_THINK) if leaves_thought_open(opening) else text


def with_open_tag(text: str) -> str:
    """Return a turn's text with the tag <think> where only the closing one is there: the opening held it."""
    before, closing, _ = text.partition(CLOSE_THINK)
    return OPEN_THINK + text if closing and OPEN_THINK not in before else text


def parse_turn(text: str, stop_reason: StopReason, grammar: Grammar = SEARCH_GRAMMAR) -> ParsedTurn:
    """Return the first closed action of a `whole_turn` without its end-of-text token, as Search-R1 does.

    An action inside the thought is executed too: sampling stops at its closing tag, and the reward judges
    the format. Text after the closing tag is ignored: the last sampled token may carry some. An action with
    a protocol tag in its body is invalid, and so is an empty one unless it may be empty; an empty answer is
    one. Without an action, a segment is unfinished after "length" and "abort", else invalid.
    """
    _, think = _first_closed(_OPEN_THINK, text) or ("", "")
    action = _first_closed(grammar.opens_action, text)
    if action is None:
        return ParsedTurn("unfinished" if stop_reason in ("length", "abort") else "invalid", think)
    kind, body = action
    if grammar.tag.search(body):
        return ParsedTurn("invalid", think)
    if kind == "answer":
        return ParsedTurn("answer", think, answer=body)
    if not body and kind not in grammar.may_be_empty:
        return ParsedTurn("invalid", think)
    return ParsedTurn(kind, think, query=body)


def _first_closed(opening: re.Pattern[str], text: str) -> tuple[str, str] | None:
    """Return name and stripped body of the first closed element; in linear time, unlike a lazy pattern."""
    unclosed: set[str] = set()
    for tag in opening.finditer(text):
        name, start = tag.group(1), tag.end()
        end = -1 if name in unclosed else text.find(f"</{name}>", start)
        if end >= 0:
            return name, text[start:end].strip()
        unclosed.add(name)
    return None


def split_at_tags(text: str, grammar: Grammar = SEARCH_GRAMMAR) -> list[str]:
    """Split into text, tag, text, …, text: the pieces at odd places are protocol tags, written exactly."""
    return grammar.tag.split(text)


def turn_flaw(text: str, kind: TurnKind, grammar: Grammar = SEARCH_GRAMMAR) -> str:
    """Return why a segment, with its opening, is not exactly a thought and the element of its kind, if so.

    `kind` is as `parse_turn` gives it; "invalid" and "unfinished" always have a flaw.
    """
    names: list[str] = []
    opened = ""
    *pieces, ending = split_at_tags(text, grammar)
    for before, tag in zip(pieces[::2], pieces[1::2], strict=True):
        if opened and tag != f"</{opened}>":
            return f"<{opened}> is not closed before {tag}"
        if not opened and tag.startswith("</"):
            return f"{tag} closes nothing"
        if not opened and before.strip():
            return f"text before {tag}" if grammar.opens_action.search(text) else _no_action(grammar)
        if not opened:
            names.append(tag.strip("<>"))
        opened = "" if opened else names[-1]
    if opened:
        return f"<{opened}> is not closed"
    if ending.strip():
        has_action = grammar.opens_action.search(text)
        return f"text after </{names[-1]}>" if has_action else _no_action(grammar)
    actions = [f"<{name}>" for name in names if name != "think"]
    if names == ["think", kind]:
        return ""
    if "information" in names:
        return "<information> is for the environment alone"
    if len(actions) != 1:
        return f"{len(actions)} actions: {', '.join(actions)}" if actions else _no_action(grammar)
    if names[0] != "think" or len(names) > 2:
        return f"not exactly one <think> before {actions[0]}"
    return f"{actions[0]} is empty" if kind == "invalid" else f"{actions[0]} in a turn of kind {kind}"


def _no_action(grammar: Grammar) -> str:
    tags = (f"<{name}>" for name in (*grammar.actions, "answer"))
    return f"no action: none of {', '.join(tags)}"


def neutralise(text: str, extra: Collection[str] = (), grammar: Grammar = SEARCH_GRAMMAR) -> str:
    """Return untrusted text without anything that could be taken for the protocol; idempotent.

    Angle brackets of tags become square brackets; headers of documents and notices of invalid or refused
    actions lose their exact form; every string of `extra`, the tokenizer's control tokens
    (`rollout.observation.added_token_strings`), but blank ones is broken up. Text that is nested
    deeper than MAX_NESTING loses all punctuation.
    """
    text, rounds = well_formed(text), 0
    while True:  # a replacement can create a new match: repeat until nothing changes
        cleaned = grammar.tag_like.sub(_defused, text)
        cleaned = _DOC_HEADER.sub(r"\1 [\2]:", cleaned)
        cleaned = _INVALID_NOTICE.sub("my earlier action was invalid", cleaned)
        cleaned = _REFUSAL.sub(r"\1 accept a query", cleaned)
        if grammar.actions != SEARCH_ALONE:
            cleaned = _ACTION_REFUSAL.sub(r"\1 accept this", cleaned)
        present = [token for token in extra if token in cleaned and token.strip()]
        for token in sorted(present, key=lambda token: (-len(token), token)):
            cleaned = cleaned.replace(token, _broken(token))
        if cleaned == text:
            return text
        rounds += 1
        text = cleaned if rounds < MAX_NESTING else re.sub(r"[^\w\s]+", " ", cleaned)


def well_formed(text: str) -> str:
    """Replace lone surrogates, which JSON may hold and which tokenizers and files refuse."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def well_formed_json(body: bytes) -> bytes:
    """Replace lone surrogates and bytes that are not UTF-8 in JSON, which parsers refuse, by U+FFFD."""
    return _ESCAPE.sub(
        lambda escape: rb"\ufffd" if escape[1] else escape[0], body.decode(errors="replace").encode()
    )


def printable(text: str) -> str:
    """Return one line without control characters."""
    line = " ".join(text.split())
    return "".join(letter for letter in line if unicodedata.category(letter) not in ("Cc", "Cf", "Cs"))


def _defused(tag: re.Match[str]) -> str:
    name, attributes = tag.groups()
    return f"[{name}" if attributes is None else f"[{name}{attributes}]"


def _broken(token: str) -> str:
    """Return the token's words without its marks, or its letters with spaces between if it is only words."""
    words = " ".join(re.findall(r"\w+", token)) or " "
    if token not in words:
        return words
    return " ".join(token) if len(token) > 1 else " "
