"""The turn protocol: its tags, and the parsing of turns.

A turn is ``<think>…</think>`` and then an action such as ``<search>…</search>``, or ``<answer>…</answer>``;
the environment replies to an action with ``<information>…</information>``. `core/neutraliser.py` keeps
untrusted text from forging any of it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from calibadv_jax.core.trajectory import DEFAULT_ACTIONS, Document, StopReason, TurnKind

# Names that no action may have.
RESERVED = ("think", "information", "answer", "invalid", "unfinished")
# The form of an action's name.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Grammar:
    """The tags of the protocol with a given set of actions.

    Attributes:
        actions: Names of the actions.
        may_be_empty: Names of the actions whose body may be empty.
    """

    actions: tuple[str, ...] = DEFAULT_ACTIONS
    may_be_empty: frozenset[str] = frozenset()

    @cached_property
    def tag_names(self) -> tuple[str, ...]:
        """Names of all tags."""
        return ("think", *self.actions, "information", "answer")

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """All tags, each opening tag before its closing tag."""
        tags = []
        for name in self.tag_names:
            tags.append(f"<{name}>")
            tags.append(f"</{name}>")
        return tuple(tags)

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """Closing tags that end a turn."""
        return tuple(f"</{name}>" for name in (*self.actions, "answer"))

    @cached_property
    def opens_action(self) -> re.Pattern[str]:
        """Pattern of a tag that opens an action or an answer."""
        names = "|".join((*self.actions, "answer"))
        return re.compile(f"<({names})>")

    @cached_property
    def tag(self) -> re.Pattern[str]:
        """Pattern of a tag, written exactly."""
        names = "|".join(self.tag_names)
        return re.compile(rf"(</?(?:{names})>)")

    @cached_property
    def tag_like(self) -> re.Pattern[str]:
        """Pattern of text that a reader, or a tokenizer that ignores case and space, could take for a tag."""
        return tag_pattern(self.tag_names)


def tag_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of text that could be taken for a tag, whatever its case, space and attributes.

    Its quantifiers are possessive, so that hostile text costs linear time.

    Args:
        names: Names of the tags.

    Returns:
        A pattern whose groups are the name with its slash, and the attributes if the tag is closed.
    """
    alternatives = "|".join(names)
    return re.compile(rf"<(\s*+/?+\s*+(?:{alternatives})\b)(?:([^<>]*+)>)?", re.IGNORECASE)


# The grammar of a policy whose only action is the search.
SEARCH_GRAMMAR = Grammar()
TAG_NAMES = SEARCH_GRAMMAR.tag_names
TAGS = SEARCH_GRAMMAR.tags
STOP_STRINGS = SEARCH_GRAMMAR.stop_strings
OPEN_THINK = "<think>"
CLOSE_THINK = "</think>"
OPEN_INFORMATION = "\n\n<information>"
CLOSE_INFORMATION = "</information>\n\n"
# Beginning of a list of documents, which no neutralised text contains.
FIRST_DOCUMENT = 'Doc 1(Title: "'
USAGE = " If I want to {purpose}, I should put the {argument} between <{name}> and </{name}>."
ANSWER_USAGE = USAGE.format(purpose="give the final answer", argument="answer", name="answer")
INVALID_TEMPLATE = "\nMy previous action is invalid.{usages} Let me try again.\n"
INVALID_ACTION = INVALID_TEMPLATE.format(
    usages=USAGE.format(purpose="search", argument="query", name="search") + ANSWER_USAGE
)
QUERY_REFUSED = (
    "The search engine does not take this query. It may be too long: a short query of a few words works best."
)
# Observation of a search without documents.
NOTHING_FOUND = "No results found."

# Unicode categories of control, format and surrogate characters.
_CONTROL_CATEGORIES = ("Cc", "Cf", "Cs")
# What could move the cursor, or hide or reorder what a terminal shows: control characters but tabs and ends
# of lines, and those that turn the direction of text.
_TERMINAL_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# An escape in JSON: a pair of surrogates, a lone surrogate (group 1), or another escape.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
_OPENS_THINK = re.compile(r"<(think)>")


@dataclass(frozen=True)
class ParsedTurn:
    """Action or answer of a turn.

    Attributes:
        kind: Name of the action, "answer", "invalid" or "unfinished".
        think: Text of the thought.
        query: Body of the action; empty for other kinds.
        answer: Text of the answer; empty for other kinds.
    """

    kind: TurnKind
    think: str = ""
    query: str = ""
    answer: str = ""


def format_documents(documents: Sequence[Document]) -> str:
    """Return the list of documents of an observation, numbered from 1.

    Args:
        documents: Neutralised documents, best first.

    Returns:
        A line or more for each document; space at the end of the last document is removed.
    """
    entries = []
    for number, document in enumerate(documents, 1):
        entries.append(f'Doc {number}(Title: "{document.title}") {document.text}')
    return "\n".join(entries).strip()


def refusal_text(name: str, reason: str) -> str:
    """Return the observation of an action that refuses its body.

    Args:
        name: Name of the action.
        reason: Neutralised reason of the refusal.
    """
    return f"The action {name} does not take this: {reason}"


def leaves_thought_open(opening: str) -> bool:
    """Return whether the policy continues a thought after the opening of a turn."""
    return opening.rfind(OPEN_THINK) > opening.rfind(CLOSE_THINK)


def text_with_opening(opening: str, text: str) -> str:
    """Return the text of a turn together with its opening.

    If the opening holds a closed thought and the policy begins a new thought, the opening is left out.

    Args:
        opening: The environment's text before the turn.
        text: The policy's text.
    """
    if CLOSE_THINK in opening and text.lstrip().startswith(OPEN_THINK):
        return text
    return opening + text


def text_after_opening(opening: str, text: str) -> str:
    """Return the policy's part of the text of a turn, without the tag <think> if the opening holds it."""
    return text.removeprefix(OPEN_THINK) if leaves_thought_open(opening) else text


def with_opening_tag(text: str) -> str:
    """Return a turn's text with the tag <think> that the opening held, if only the closing tag is there."""
    thought, closing_tag, _ = text.partition(CLOSE_THINK)
    lacks_opening_tag = closing_tag and OPEN_THINK not in thought
    return OPEN_THINK + text if lacks_opening_tag else text


def parse_turn(text: str, stop_reason: StopReason, grammar: Grammar = SEARCH_GRAMMAR) -> ParsedTurn:
    """Return the first closed action or answer of a turn, as Search-R1 does.

    An action inside the thought is executed too: sampling stops at its closing tag, and the reward judges
    the format. Text after the closing tag is ignored, since the last sampled token may contain some. An
    action with a protocol tag in its body is invalid. An action with an empty body is invalid unless the
    grammar allows it; an empty answer is an answer.

    Args:
        text: A turn with its opening (see `text_with_opening`), without the end-of-text token.
        stop_reason: Why sampling ended. A turn without an action is "unfinished" after "length" and "abort",
            otherwise "invalid".
        grammar: Tags of the actions.
    """
    thought = _first_closed(_OPENS_THINK, text)
    think = thought[1] if thought else ""
    action = _first_closed(grammar.opens_action, text)
    if action is None:
        was_cut_off = stop_reason in ("length", "abort")
        return ParsedTurn("unfinished" if was_cut_off else "invalid", think)
    kind, body = action
    if grammar.tag.search(body):
        return ParsedTurn("invalid", think)
    if kind == "answer":
        return ParsedTurn("answer", think, answer=body)
    if not body and kind not in grammar.may_be_empty:
        return ParsedTurn("invalid", think)
    return ParsedTurn(kind, think, query=body)


def _first_closed(opening: re.Pattern[str], text: str) -> tuple[str, str] | None:
    """Return the name and the stripped body of the first closed element; None if there is none.

    `opening` matches an opening tag, with its name as group 1. The search takes linear time, in contrast to a
    pattern of the whole element.
    """
    unclosed: set[str] = set()
    for tag in opening.finditer(text):
        name = tag.group(1)
        if name in unclosed:
            continue
        start = tag.end()
        end = text.find(f"</{name}>", start)
        if end >= 0:
            return name, text[start:end].strip()
        unclosed.add(name)
    return None


def split_at_tags(text: str, grammar: Grammar = SEARCH_GRAMMAR) -> list[str]:
    """Split a text at its protocol tags into text, tag, text, …, text: the pieces of odd index are tags."""
    return grammar.tag.split(text)


def turn_flaw(text: str, kind: TurnKind, grammar: Grammar = SEARCH_GRAMMAR) -> str:
    """Return why a turn is not exactly a thought and then the element of its kind; "" if it is.

    Args:
        text: A turn with its opening; see `text_with_opening`.
        kind: Kind of the turn, from `parse_turn`. Kinds "invalid" and "unfinished" always have a flaw.
        grammar: Tags of the actions.
    """
    # Names of the elements, in order, and the name of the element that is open.
    names: list[str] = []
    opened = ""
    has_action = grammar.opens_action.search(text) is not None
    *pieces, text_after = split_at_tags(text, grammar)
    for text_before, tag in zip(pieces[::2], pieces[1::2], strict=True):
        if opened:
            if tag != f"</{opened}>":
                return f"<{opened}> is not closed before {tag}"
            opened = ""
            continue
        if tag.startswith("</"):
            return f"{tag} closes nothing"
        if text_before.strip():
            return f"text before {tag}" if has_action else _no_action(grammar)
        opened = tag.strip("<>")
        names.append(opened)
    if opened:
        return f"<{opened}> is not closed"
    if text_after.strip():
        return f"text after </{names[-1]}>" if has_action else _no_action(grammar)
    return _flaw_of_elements(names, kind, grammar)


def _flaw_of_elements(names: Sequence[str], kind: TurnKind, grammar: Grammar) -> str:
    """Return why the elements of a turn, by their names, are not a thought and its action; "" if they are."""
    actions = [f"<{name}>" for name in names if name != "think"]
    if names == ["think", kind]:
        return ""
    if "information" in names:
        return "<information> is for the environment alone"
    if not actions:
        return _no_action(grammar)
    if len(actions) > 1:
        return f"{len(actions)} actions: {', '.join(actions)}"
    if names[0] != "think" or len(names) > 2:
        return f"not exactly one <think> before {actions[0]}"
    if kind == "invalid":
        return f"{actions[0]} is empty"
    return f"{actions[0]} in a turn of kind {kind}"


def _no_action(grammar: Grammar) -> str:
    tags = [f"<{name}>" for name in (*grammar.actions, "answer")]
    return f"no action: none of {', '.join(tags)}"


def well_formed(text: str) -> str:
    """Replace lone surrogates, which JSON may contain and which tokenizers and files refuse, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def well_formed_json(body: bytes) -> bytes:
    """Replace lone surrogates and bytes that are not UTF-8 in JSON, which parsers refuse, by U+FFFD."""
    utf8_body = body.decode(errors="replace").encode()
    return _ESCAPE.sub(_without_lone_surrogate, utf8_body)


def _without_lone_surrogate(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape[1] else escape[0]


def without_controls(text: str) -> str:
    """Return a text of any number of lines without what a terminal would obey instead of showing it."""
    return _TERMINAL_CONTROLS.sub("", text)


def to_printable_line(text: str) -> str:
    """Return a text as one line without control characters."""
    line = " ".join(text.split())
    letters = [letter for letter in line if unicodedata.category(letter) not in _CONTROL_CATEGORIES]
    return "".join(letters)
