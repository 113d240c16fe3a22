"""The example of a format of one's own works with a template after GLM's."""

from __future__ import annotations

import pytest
from template_rig import TOOLS, make_tokenizer, template_text

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.chat_template import ConversationTemplate
from calibadv_jax.protocols.formats import load_format
from calibadv_jax.protocols.template_check import check_template

ADDRESS = "examples.own_format:GlmFormat"
TOKENS = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
CALL = ToolCall("search", {"query": "7", "top": 3})


@pytest.fixture(scope="module")
def template():
    tokenizer = make_tokenizer(template_text("glm"), TOKENS, "test/glm")
    return ConversationTemplate.derive(tokenizer, TOOLS, load_format(ADDRESS, tokenizer))


def test_rollout_is_the_templates_rendering(template):
    assert template.end_of_turn == ("<|observation|>", "<|user|>")
    reply = template.reply([CALL], ["A <arg_value> <|user|>"], "<|observation|>")
    assert reply == "\n<tool_response>\nA [arg_value] user\n</tool_response><|assistant|>"
    assert check_template(template).is_exact


def test_calls_have_the_types_of_the_schema(template):
    call = template.call_format.write_call(CALL)
    assert template.parse(f"\n<think>hm</think>\n{call}\n{call}") == AssistantMessage("hm", "", (CALL, CALL))
    assert template.parse(f"\n<think>{call}</think>\nParis") == AssistantMessage(call, "Paris", ())
    for broken in (
        call.replace("</arg_key>", ""),
        call.replace("search", ""),
        call.replace("3", "</arg_value>3"),
    ):
        assert template.parse(broken).calls == () and "a name" in template.parse(broken).flaw


def test_without_it_the_template_is_refused():
    tokenizer = make_tokenizer(template_text("glm"), TOKENS, "test/glm")
    with pytest.raises(UserError, match="test/glm .*no format reads its calls, .*a format of your own"):
        load_format("auto", tokenizer)
