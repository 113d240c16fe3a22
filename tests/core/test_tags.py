"""What a turn says, and what untrusted text cannot say."""

import pytest

from calibadv_jax.core.tags import (
    STOP_STRINGS,
    TAG_NAMES,
    TAGS,
    Grammar,
    leaves_thought_open,
    parse_turn,
    turn_flaw,
)

CONTROL = "<|im_end|>"
ACCESS = Grammar(("search", "access"))


def test_grammar_of_the_search_protocol():
    assert TAG_NAMES == ("think", "search", "information", "answer")
    assert STOP_STRINGS == ("</search>", "</answer>")


@pytest.mark.parametrize(
    ("opening", "expected"),
    [("", False), ("<think>\n", True), ("<think></think>", False), ("<think></think><think>", True)],
)
def test_last_tag_says_whether_a_thought_is_open(opening, expected):
    assert leaves_thought_open(opening) is expected


@pytest.mark.parametrize(
    ("text", "kind", "think", "body"),
    [
        ("<think> a b </think>\n<search> who \n is </search>", "search", "a b", "who \n is"),
        ("<think> c </think><answer> Ann </answer>", "answer", "c", "Ann"),
        (" a </think><search>x</search>", "search", "", "x"),  # the prompt opened the thought
        ("<search> x </search><answer>y</answer>", "search", "", "x"),
        ("<think> I could <search> x </search>", "search", "", "x"),
        ("<think> so <answer> y </answer> </think>", "answer", "so <answer> y </answer>", "y"),
        ("<answer> half <search> x </search>", "search", "", "x"),
        ("</think><think>t</think></answer><answer>b</answer>", "answer", "t", "b"),
        ("<think> t </think><search>  \n</search>", "invalid", "t", ""),
        *((f"<search>a {tag} b</search>", "invalid", "", "") for tag in TAGS if tag != "</search>"),
        ("<answer></answer>", "answer", "", ""),
    ],
)
def test_first_closed_action_is_read(text, kind, think, body):
    for stop_reason in ("stop", "length"):
        turn = parse_turn(text, stop_reason)
        assert (turn.kind, turn.think) == (kind, think)
        assert (turn.query, turn.answer) == (("", body) if kind == "answer" else (body, ""))


@pytest.mark.parametrize("rest", ["\n", ".", " <answer> forged </answer>", "</search>"])
def test_text_after_the_first_closed_action_is_ignored(rest):
    turn = parse_turn(f"<search> x </search>{rest}", "stop")
    assert (turn.kind, turn.think, turn.query, turn.answer) == ("search", "", "x", "")


@pytest.mark.parametrize("body", ["", "  \n", "a <search> b", "a <think> b", "</information> b", "<answer>"])
def test_search_without_text_or_with_a_tag_is_invalid(body):
    turn = parse_turn(f"<think> t </think><search>{body}</search>", "stop")
    assert (turn.kind, turn.think, turn.query, turn.answer) == ("invalid", "t", "", "")


def test_answer_with_a_tag_is_invalid():
    turn = parse_turn("<answer> a <think> b </think></answer>", "stop")
    assert (turn.kind, turn.query, turn.answer) == ("invalid", "", "")


@pytest.mark.parametrize(
    "text", ["", "prose", "<search> x </answer>", "search> x </search>", "<SEARCH> x </SEARCH>"]
)
def test_stop_reason_decides_without_action(text):
    kinds = [parse_turn(text, stop_reason).kind for stop_reason in ("stop", "eos", "length", "abort")]
    assert kinds == ["invalid", "invalid", "unfinished", "unfinished"]


@pytest.mark.parametrize(
    ("text", "kind", "flaw"),
    [
        ("<think>t</think> <search> q </search>\n", "search", ""),
        ("<think>t</think><answer></answer>", "answer", ""),
        ("<think>t", "invalid", "<think> is not closed"),
        ("<think>t</think><search>q</answer>", "invalid", "<search> is not closed before </answer>"),
        ("t</think><search>q</search>", "search", "</think> closes nothing"),
        ("<think>t</think><search>q</search><search>r</search>", "search", "2 actions: <search>, <search>"),
        ("<think>t</think><browse>q</browse>", "invalid", "no action: none of <search>, <a"),
        ("<think>t</think><search>  </search>", "invalid", "<search> is empty"),
        ("<think>t</think><search>q</search> done", "search", "text after </search>"),
        ("<think>t</think>so<search>q</search>", "search", "text before <search>"),
        ("<search>q</search>", "search", "not exactly one <think> before <search>"),
        ("<think>t</think><think>u</think><search>q</search>", "search", "not exactly one <think>"),
        ("<think>Rome</think>", "invalid", "no action: none of <search>, <access>, <answer>"),
        ("", "invalid", "no action"),
        ("<think>t</think><information>a</information><answer>a</answer>", "answer", "<information> is for"),
        ("<think>t</think><answer>a</answer>", "search", "<answer> in a turn of kind search"),
    ],
)
def test_flaw_of_a_turn_is_named(text, kind, flaw):
    shown = turn_flaw(text, kind, ACCESS)
    assert shown.startswith(flaw) and bool(shown) == bool(flaw)


def test_empty_body_is_an_action_where_allowed():
    grammar = Grammar(("search", "list_all"), frozenset({"list_all"}))
    for name, kind in (("search", "invalid"), ("list_all", "list_all"), ("answer", "answer")):
        assert parse_turn(f"<{name}> </{name}>", "stop", grammar).kind == kind
