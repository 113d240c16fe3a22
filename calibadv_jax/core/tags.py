"""The turn protocol: its tags, what a turn says, and how untrusted text is kept from saying it.

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
    """The tags that mean something while these actions are on.

    Args:
        actions: their names.
        may_be_empty: those of them that take an empty body.
    """

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
        """A turn ends with one of these."""
        return tuple(f"</{name}>" for name in (*self.actions, "answer"))

    @cached_property
    def opens_action(self) -> re.Pattern[str]:
        return re.compile(f"<({'|'.join((*self.actions, 'answer'))})>")

    @cached_property
    def tag(self) -> re.Pattern[str]:
        """A tag, written exactly."""
        return re.compile(rf"(</?(?:{'|'.join(self.tag_names)})>)")

    @cached_property
    def tag_like(self) -> re.Pattern[str]:
        """What a reader, or a tokenizer that folds case and space, could take for a tag or its beginning.

        Nothing is matched twice (possessive), so that hostile text costs linear time.
        """
        names = "|".join(self.tag_names)
        return re.compile(rf"<(\s*+/?+\s*+(?:{names})\b)(?:([^<>]*+)>)?", re.IGNORECASE)


SEARCH_GRAMMAR = Grammar()
TAG_NAMES, TAGS, STOP_STRINGS = SEARCH_GRAMMAR.tag_names, SEARCH_GRAMMAR.tags, SEARCH_GRAMMAR.stop_strings
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
OPEN_INFORMATION, CLOSE_INFORMATION = "\n\n<information>", "</information>\n\n"
FIRST_DOCUMENT = 'Doc 1(Title: "'  # begins a list of documents; nothing that is neutralised holds it
USAGE = " If I want to {purpose}, I should put the {argument} between <{name}> and </{name}>."
ANSWER_USAGE = USAGE.format(purpose="give the final answer", argument="answer", name="answer")
INVALID_TEMPLATE = "\nMy previous action is invalid.{usages} Let me try again.\n"
INVALID_ACTION = INVALID_TEMPLATE.format(
    usages=USAGE.format(purpose="search", argument="query", name="search") + ANSWER_USAGE
)
QUERY_REFUSED = (
    "The search engine does not take this query. It may be too long: a short query of a few words works best."
)
NOTHING_FOUND = "No results found."  # what a search that finds no documents shows

# Of JSON: a pair of surrogates, a lone one (group 1), or another escape.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
_OPEN_THINK = re.compile(r"<(think)>")
_ANY_TAG = re.compile(r"<\s*+/?+\s*+[A-Za-z]\w*+[^<>]*+>")
_LONGEST_TAG = 40  # letters of an unknown tag in a message
_DOC_HEADER = re.compile(r"(Doc\s*+\d++)\s*+\(\s*+(Title)\s*+:", re.IGNORECASE)
_INVALID_NOTICE = re.compile(r"My\s+previous\s+action\s+is\s+invalid", re.IGNORECASE)
_REFUSAL = re.compile(r"(search\s+engine\s+does\s+not)\s+take\s+this\s+query", re.IGNORECASE)
_ACTION_REFUSAL = re.compile(r"(action\s+\w++\s+does\s+not)\s+take\s+this", re.IGNORECASE)


@dataclass(frozen=True)
class ParsedTurn:
    """What one model segment asks of the environment."""

    kind: TurnKind
    think: str = ""
    query: str = ""
    answer: str = ""


def numbered(documents: Sequence[Document]) -> str:
    """Neutralised documents as an observation lists them; the last one loses the space at its end."""
    return "\n".join(
        f'Doc {number}(Title: "{document.title}") {document.text}'
        for number, document in enumerate(documents, 1)
    ).strip()


def refusal(name: str, reason: str) -> str:
    """What the policy reads where an action does not take its body; `reason` is neutralised already."""
    return f"The action {name} does not take this: {reason}"


def neutralise_observation(text: str, extra: Collection[str] = (), grammar: Grammar = SEARCH_GRAMMAR) -> str:
    """As `neutralise`, but a refusal at the beginning stays one: the environment writes those itself."""
    if text == QUERY_REFUSED:
        return text
    beginnings = (refusal(name, "") for name in grammar.actions)
    beginning = next((one for one in beginnings if text.startswith(one)), "")
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
    """Return what the policy writes of a whole turn's text behind `opening`."""
    return text.removeprefix(OPEN_THINK) if leaves_thought_open(opening) else text


def with_open_tag(text: str) -> str:
    """Return a turn's text with the tag <think> where only the closing one is there: the opening held it."""
    before, closing, _ = text.partition(CLOSE_THINK)
    return OPEN_THINK + text if closing and OPEN_THINK not in before else text


def parse_turn(text: str, stop_reason: StopReason, grammar: Grammar = SEARCH_GRAMMAR) -> ParsedTurn:
    """Reads the first closed action of a segment, wherever it stands, as Search-R1 does.

    An action inside the thought is executed too: sampling stops at its closing tag, so no other one can
    follow, and whether the segment is well-formed is the reward's business. Text after the closing tag
    is ignored: the last sampled token may carry some. An action without a body, such as a search for
    nothing, is invalid unless it may be empty, and so is one with a protocol tag in its body; an empty answer
    is an answer.

    Args:
        text: the `whole_turn`, without its end-of-text token.
        stop_reason: a segment without action that was cut from outside ("length", "abort") is unfinished
            rather than invalid.
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


def split_at_tags(text: str, grammar: Grammar = SEARCH_GRAMMAR) -> list[str]:
    """Text, tag, text, tag, …, text: the pieces at odd places are protocol tags, written exactly."""
    return grammar.tag.split(text)


def turn_flaw(text: str, kind: TurnKind, grammar: Grammar = SEARCH_GRAMMAR) -> str:
    """Return why a segment is not exactly a thought and the element of its kind; empty if it is.

    Args:
        text: the segment, with `Trajectory.opening` before it.
        kind: as `parse_turn` gives it; "invalid" and "unfinished" always have a flaw.
    """
    names: list[str] = []
    opened = ""
    *pieces, rest = split_at_tags(text, grammar)
    for before, tag in zip(pieces[::2], pieces[1::2], strict=True):
        name = tag.strip("</>")
        if opened and tag != f"</{opened}>":
            is_second = {opened, name} <= {*grammar.actions, "answer"} and not tag.startswith("</")
            return f"{'two actions: ' if is_second else ''}<{opened}> is not closed before {tag}"
        if not opened and tag.startswith("</"):
            return f"{tag} closes nothing"
        if not opened and before.strip():
            return _stray(before, f"before {tag}", text, grammar)
        if opened:
            names.append(name)
        opened = "" if opened else name
    if opened:
        return f"<{opened}> is not closed"
    if rest.strip():
        return _stray(rest, f"after </{names[-1]}>" if names else "", text, grammar)
    return "" if names == ["think", kind] else _wrong_elements(names, kind, grammar)


def _stray(stray: str, where: str, text: str, grammar: Grammar) -> str:
    """The flaw of a segment with text outside its elements."""
    if unknown := _ANY_TAG.search(stray):
        tag = " ".join(unknown[0][:_LONGEST_TAG].split())
        return f"unknown action {tag}: there are {_listed(grammar)}, written exactly so"
    return f"text {where}" if grammar.opens_action.search(text) else f"no action: none of {_listed(grammar)}"


def _listed(grammar: Grammar) -> str:
    return ", ".join(f"<{name}>" for name in (*grammar.actions, "answer"))


def _wrong_elements(names: Sequence[str], kind: TurnKind, grammar: Grammar) -> str:
    """The flaw of a segment whose elements are closed, but are not a thought and then its kind."""
    actions = [name for name in names if name not in ("think", "information")]
    if "information" in names:
        return "<information> is for the environment alone"
    if not actions:
        return f"no action: none of {_listed(grammar)}"
    if len(actions) > 1:
        number = "two" if len(actions) == 2 else len(actions)
        return f"{number} actions: {', '.join(f'<{name}>' for name in actions)}"
    if names[0] != "think":
        return f"no <think> before <{actions[0]}>"
    if len(names) > 2:
        return "more than one <think>"
    return f"<{actions[0]}> is empty" if kind == "invalid" else f"<{actions[0]}> in a turn of kind {kind}"


def neutralise(text: str, extra: Collection[str] = (), grammar: Grammar = SEARCH_GRAMMAR) -> str:
    """Untrusted text without anything that could be taken for the protocol; idempotent.

    Angle brackets of tags become square ones, the header of a document and the notices of an invalid
    action, of a refused query and of a refused action lose their exact form, and every string of `extra` but
    blank ones is broken up.

    Args:
        extra: the tokenizer's control tokens, which would be encoded as such; see
            `rollout.observation.added_token_strings`.
    """
    text = well_formed(text)
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
        text = cleaned


def well_formed(text: str) -> str:
    """Text without lone surrogates, which JSON may hold and which no tokenizer and no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def well_formed_json(body: bytes) -> bytes:
    """JSON whose lone surrogates, and whatever is not UTF-8, are U+FFFD: strict parsers refuse it all."""
    return _ESCAPE.sub(
        lambda escape: rb"\ufffd" if escape[1] else escape[0], body.decode(errors="replace").encode()
    )


def printable(text: str) -> str:
    """One line without control characters."""
    words = " ".join(text.split())
    return "".join(one for one in words if unicodedata.category(one) not in ("Cc", "Cf", "Cs"))


def _defused(tag: re.Match[str]) -> str:
    name, rest = tag.groups()
    return f"[{name}" if rest is None else f"[{name}{rest}]"


def _broken(token: str) -> str:
    """The token's words without its marks, or its letters with spaces between if it is only words."""
    words = " ".join(re.findall(r"\w+", token)) or " "
    if token not in words:
        return words
    return " ".join(token) if len(token) > 1 else " "
