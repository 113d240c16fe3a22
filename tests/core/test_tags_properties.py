"""Whatever a document or a question says, it cannot speak for the protocol."""

import re

import pytest

from calibadv_jax.core.neutraliser import Neutraliser
from calibadv_jax.core.tags import TAG_NAMES, parse_turn, turn_flaw, well_formed

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

CONTROL = (
    *("<|im_end|>", "<|im_start|>", "<||>", "<unk>", "</s>"),
    *("[INST]", "<|search|>", "PAD", "im_end", "A"),
)
PIECES = (
    *(f"<{slash}{name}>" for name in TAG_NAMES for slash in ("", "/")),
    *CONTROL,
    *"<>/|[]():1.\n\t ",
    *("search", "THINK", "info", "rmation", "Doc", "Title", "my", "previous", "action", "is", "invalid"),
    *("My previous action is invalid.", "Doc 1(Title: "),
)
TEXT = st.one_of(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.text(max_size=80))
FORBIDDEN = (
    re.compile(r"<\s*/?\s*(think|search|information|answer)\b", re.IGNORECASE),
    re.compile(r"Doc\s*\d+\s*\(\s*Title\s*:", re.IGNORECASE),
    re.compile(r"My previous action is invalid", re.IGNORECASE),
)


@hypothesis.given(TEXT, st.sets(st.sampled_from(CONTROL)))
@hypothesis.settings(max_examples=400)
def test_no_output_speaks_the_protocol(text, control_tokens):
    neutraliser = Neutraliser(control_tokens=frozenset(control_tokens))
    cleaned = neutraliser.neutralise(text)
    assert not [pattern for pattern in FORBIDDEN if pattern.search(cleaned)]
    assert not [token for token in control_tokens if token in cleaned]
    assert neutraliser.neutralise(cleaned) == cleaned


@hypothesis.given(st.text(st.characters(exclude_characters="<("), max_size=80))
def test_text_without_brackets_keeps_every_word(text):
    hypothesis.assume("previous" not in text.lower())
    assert Neutraliser(control_tokens=frozenset(["<|im_end|>"])).neutralise(text) == well_formed(text)


BODY = rf"((?:(?!</?(?:{'|'.join(TAG_NAMES)})>).)*)"
FLAT = re.compile(rf"\s*<think>{BODY}</think>\s*<(search|answer)>{BODY}</\2>\s*", re.DOTALL)
PROTOCOL = (*(f"<{slash}{name}>" for name in TAG_NAMES for slash in ("", "/")), "a", " ", "<b>")


@hypothesis.settings(max_examples=500)
@hypothesis.given(
    before=st.lists(st.sampled_from(PROTOCOL), max_size=4).map("".join),
    middle=st.sampled_from(["", "<think>t</think><search>q</search>", "<think>t</think> <answer> </answer>"]),
    after=st.lists(st.sampled_from(PROTOCOL), max_size=4).map("".join),
)
def test_turn_without_flaw_is_thought_and_action(before, middle, after):
    text = before + middle + after
    kind = parse_turn(text, "stop").kind
    flat = FLAT.fullmatch(text)
    assert (turn_flaw(text, kind) == "") == (flat is not None and flat[2] == kind)
    if kind == "invalid":
        assert turn_flaw(text, kind)
