"""Neutralise untrusted text: questions, documents and tools' texts must not forge the turn protocol.

A forgery is text that the policy, the parser or the tokenizer could take for a tag, a control token, the
header of a document, or a notice of the environment.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from calibadv_jax.core.tags import (
    QUERY_REFUSED,
    SEARCH_GRAMMAR,
    Grammar,
    refusal_text,
    split_at_tags,
    tag_pattern,
    well_formed,
)
from calibadv_jax.core.trajectory import DEFAULT_ACTIONS, Document

# Rounds of replacements. Deeper nesting is hostile, and would take quadratic time.
MAX_NESTING = 8
_DOC_HEADER = re.compile(r"(Doc\s*+\d++)\s*+\(\s*+(Title)\s*+:", re.IGNORECASE)
_INVALID_NOTICE = re.compile(r"My\s+previous\s+action\s+is\s+invalid", re.IGNORECASE)
_REFUSAL = re.compile(r"(search\s+engine\s+does\s+not)\s+take\s+this\s+query", re.IGNORECASE)
_ACTION_REFUSAL = re.compile(r"(action\s+\w++\s+does\s+not)\s+take\s+this", re.IGNORECASE)
# A marker that is a tag, or the beginning of one: <tool_call>, </tool_call>, <function=.
_TAG_MARKER = re.compile(r"</?(\w+)[=>]?")
# Punctuation and symbols, not letters, digits and space.
_MARKS = re.compile(r"[^\w\s]+")


@dataclass(frozen=True)
class Neutraliser:
    """Removes forgeries from untrusted text, for a set of tags and a tokenizer.

    Angle brackets of tags become square brackets. Headers of documents and notices of invalid or refused
    actions lose their exact form. Control tokens are broken up. Text that is nested deeper than MAX_NESTING
    loses all punctuation. Neutralised text is not changed again.

    Attributes:
        grammar: Tags of the actions.
        control_tokens: Strings that the tokenizer takes for control tokens; blank ones stay in a text
            (`tokens.added_token_strings`).
        normalise: The tokenizer's normaliser, which changes a text before tokens are looked for. NFKC, for
            example, makes tags of full-width characters. None: the tokenizer has none.
        markers: Markup of a tool-call format, which need not be control tokens: "<tool_call>", "<function=",
            "[TOOL_CALLS]". Tags become tags in square brackets; others lose their marks.
    """

    grammar: Grammar = SEARCH_GRAMMAR
    control_tokens: frozenset[str] = frozenset()
    normalise: Callable[[str], str] | None = None
    markers: tuple[str, ...] = ()

    def neutralise(self, text: str) -> str:
        """Return a text without anything that could be taken for the protocol.

        If the tokenizer's normaliser would make a forgery of the text, its characters are replaced by their
        compatible forms (NFKC). If that is not enough, accents and capitals go too, and then punctuation.

        Args:
            text: Text of a question, a document, or an action.

        Returns:
            The neutral text; "" if each of these forms would still become a forgery.
        """
        return self._neutralise_with(self._replace_forgeries, text)

    def neutralise_markup(self, text: str) -> str:
        """Neutralise control tokens and markers alone.

        Args:
            text: A text that the environment has written, and that quotes others: headers of documents and
                notices in it stay.

        Returns:
            The neutral text, as `neutralise` returns it.
        """
        return self._neutralise_with(self._replace_markup, text)

    def neutralise_observation(self, text: str) -> str:
        """Neutralise an observation but for a refusal at its beginning, which the environment has written.

        Args:
            text: The body of an observation.
        """
        if text == QUERY_REFUSED:
            return text
        for name in self.grammar.actions:
            beginning = refusal_text(name, "")
            if text.startswith(beginning):
                return beginning + self.neutralise(text.removeprefix(beginning))
        return self.neutralise(text)

    def neutralise_but_tags(self, text: str) -> str:
        """Neutralise a text that explains the protocol: tags that are written exactly stay.

        Args:
            text: A text such as a prompt that stands in the data.
        """
        controls = frozenset(
            token for token in self.control_tokens if token not in self.grammar.tags and token.strip()
        )
        between_tags = replace(self, control_tokens=controls)
        pieces = split_at_tags(text, self.grammar)
        # The pieces at odd places are tags.
        for index in range(0, len(pieces), 2):
            pieces[index] = between_tags.neutralise(pieces[index])
        joined = "".join(pieces)
        # A control token that contains a tag is in no single piece.
        if any(token in joined for token in controls):
            return self.neutralise(text)
        return joined

    def neutralise_documents(self, documents: Sequence[Document]) -> tuple[Document, ...]:
        """Return documents whose titles and texts are neutralised, so that they may be shown and kept.

        Args:
            documents: Documents as the retriever returned them.

        Returns:
            Copies in the same order. An id loses only its lone surrogates, and a score does not change.
        """
        neutral = []
        for document in documents:
            neutral.append(
                replace(
                    document,
                    id=well_formed(document.id),
                    title=self.neutralise(document.title),
                    text=self.neutralise(document.text),
                )
            )
        return tuple(neutral)

    def _neutralise_with(self, clean: Callable[[str], str], text: str) -> str:
        """Return a text that a function, which replaces forgeries once, leaves as it is."""
        neutral = _neutralise_as_written(clean, well_formed(text))
        if not self._is_forged_by_normaliser(clean, neutral):
            return neutral
        for rewrite in (_to_compatible, _to_plain_letters, _without_marks):
            neutral = _neutralise_as_written(clean, rewrite(neutral))
            if not self._is_forged_by_normaliser(clean, neutral):
                return neutral
        return ""

    def _replace_forgeries(self, text: str) -> str:
        """Replace everything in a text that could be taken for the protocol, once."""
        text = self.grammar.tag_like.sub(_with_square_bracket, text)
        text = _DOC_HEADER.sub(r"\1 [\2]:", text)
        text = _INVALID_NOTICE.sub("my earlier action was invalid", text)
        text = _REFUSAL.sub(r"\1 accept a query", text)
        if self.grammar.actions != DEFAULT_ACTIONS:
            text = _ACTION_REFUSAL.sub(r"\1 accept this", text)
        return self._replace_markup(text)

    def _replace_markup(self, text: str) -> str:
        """Replace control tokens and markers, once."""
        if self._marker_tags is not None:
            text = self._marker_tags.sub(_with_square_bracket, text)
        if self._other_markers is not None:
            text = self._other_markers.sub(_words_of, text)
        tokens = [token for token in self.control_tokens if token in text and token.strip()]
        # The longest token comes first, since a token may be part of another.
        for token in sorted(tokens, key=lambda token: (-len(token), token)):
            text = text.replace(token, _broken_up(token))
        return text

    def _is_forged_by_normaliser(self, clean: Callable[[str], str], text: str) -> bool:
        """Return whether a text, which is neutral as it is written, holds a forgery once it is normalised."""
        if self.normalise is None:
            return False
        normalised = self.normalise(text)
        return normalised != text and clean(normalised) != normalised

    @cached_property
    def _marker_tags(self) -> re.Pattern[str] | None:
        """Pattern of a tag of a marker, written as `Grammar.tag_like` takes it; None without such markers."""
        names = {match[1] for match in map(_TAG_MARKER.fullmatch, self.markers) if match}
        return tag_pattern(sorted(names)) if names else None

    @cached_property
    def _other_markers(self) -> re.Pattern[str] | None:
        """Pattern of the markers that are no tags, with any case and space; None without such markers."""
        patterns = []
        for marker in self.markers:
            pieces = re.findall(r"\w+|[^\w\s]", marker)
            if pieces and _TAG_MARKER.fullmatch(marker) is None:
                patterns.append(r"\s*+".join(map(re.escape, pieces)))
        longest_first = sorted(set(patterns), key=lambda pattern: (-len(pattern), pattern))
        return re.compile("|".join(longest_first), re.IGNORECASE) if longest_first else None


def _neutralise_as_written(clean: Callable[[str], str], text: str) -> str:
    """Replace forgeries until none is left: a replacement can create a new one."""
    rounds = 0
    while True:
        cleaned = clean(text)
        if cleaned == text:
            return text
        rounds += 1
        text = cleaned if rounds < MAX_NESTING else _without_marks(cleaned)


def _to_compatible(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


def _to_plain_letters(text: str) -> str:
    """Return a text in lower case, without the accents and strokes that a normaliser may strip."""
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter)).lower()


def _without_marks(text: str) -> str:
    return _MARKS.sub(" ", text)


def _with_square_bracket(tag: re.Match[str]) -> str:
    """Return a match of `Grammar.tag_like` with square brackets in place of angle brackets."""
    name, attributes = tag.groups()
    if attributes is None:
        # The tag has no closing bracket.
        return f"[{name}"
    return f"[{name}{attributes}]"


def _words_of(marker: re.Match[str]) -> str:
    return _broken_up(marker[0])


def _broken_up(token: str) -> str:
    """Return the token's words without its marks, or its letters with spaces between if it is only words."""
    words = " ".join(re.findall(r"\w+", token)) or " "
    if token not in words:
        return words
    if len(token) == 1:
        return " "
    return " ".join(token)
