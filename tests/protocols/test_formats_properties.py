"""Whatever the policy writes, reading it raises nothing, and nothing in a thought is executed."""

from __future__ import annotations

import pytest

from calibadv_jax.core.tool_calls import ToolCall
from calibadv_jax.protocols.formats import FORMATS

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<function=search>",
        "</function>",
        "<parameter=q>",
    ),
    *("</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|python_tag|>"),
    *(
        "<|start|>assistant",
        "<|channel|>analysis",
        "<|channel|>final",
        "<|channel|>commentary",
        "<|message|>",
    ),
    *(
        "<|end|>",
        " to=functions.search",
        " json",
        "<|start|>user",
        "\n",
        " ",
        "x",
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\ud800",
    ),
    *(
        '{"name": "search", "arguments": {"q": "x"}}',
        '{"name": "search", "parameters": {"q": "x"}}',
        '{"q": "x"}',
    ),
    *('{{"name": "search", "arguments": {}}}', '{"name": ', "1e999", "NaN", "9" * 5000),
)
TEXT = st.one_of(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.text(max_size=40))
CALL = ToolCall("search", {"q": "x"})


@pytest.mark.parametrize("name", FORMATS)
@hypothesis.settings(max_examples=200)
@hypothesis.given(text=TEXT, opening=st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n", "[THINK]"]))
def test_reading_raises_nothing(name, text, opening):
    message = FORMATS[name]().parse(text, opening)
    for call in message.calls:
        assert call.name and isinstance(call.arguments, dict)
    assert not message.flaw or message.flaw.endswith(".")


@pytest.mark.parametrize("name", FORMATS)
@hypothesis.settings(max_examples=200)
@hypothesis.given(thought=TEXT, is_open=st.booleans())
def test_nothing_in_a_thought_is_executed(name, thought, is_open):
    """Whatever stands in a thought, and is not the end of it: only the call behind it counts."""
    call_format = FORMATS[name]()
    open_tag, close_tag = call_format.thought_tags
    hypothesis.assume(close_tag not in thought)
    call = call_format.write_call(CALL)
    if name == "gpt_oss":
        hypothesis.assume("<|" not in thought)
        closing = call_format.thought_closing()
        opening = ""
        before = f"{open_tag}{thought}"
    else:
        closing = close_tag
        opening = f"{open_tag}\n" if is_open else ""
        before = thought if is_open else f"{open_tag}{thought}"
    assert call_format.parse(f"{before}{closing}Paris.", opening).calls == ()
    assert call_format.parse(before, opening).calls == ()
    executed = call_format.parse(f"{before}{closing}{call}", opening).calls
    assert executed in ((CALL,), ()) and (executed or open_tag in thought)
