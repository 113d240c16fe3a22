"""The check says where a chat template's rendering differs from the rollout, and why."""

from __future__ import annotations

import pytest
from template_rig import FAMILIES, TOOLS, family_template, make_tokenizer, template_text

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.chat_template import ConversationTemplate
from calibadv_jax.protocols.formats import FORMATS
from calibadv_jax.protocols.rendering import user_message
from calibadv_jax.protocols.template_check import (
    Cause,
    Exchange,
    check_template,
    compare,
    require_exact,
    rollout_segments,
)

BEFORE, WITH = "before the answer", "with the answer"
# Name of a template -> (thoughts, when) -> causes with their turns; exact elsewhere.
EXPECTED = {
    "qwen3": {
        ("without thoughts", BEFORE): [(Cause.DROPS_EMPTY_THOUGHT, 1), (Cause.DROPS_EMPTY_THOUGHT, 2)],
        ("without thoughts", WITH): [(Cause.DROPS_EMPTY_THOUGHT, 1), (Cause.DROPS_EMPTY_THOUGHT, 2)],
    },
    "forgetful": {
        ("with thoughts", BEFORE): [(Cause.DROPS_THOUGHT, 1), (Cause.DROPS_THOUGHT, 2)],
        ("with thoughts", WITH): [(Cause.DROPS_THOUGHT, 1), (Cause.DROPS_THOUGHT, 2)],
    },
    "qwen3_5": {
        ("without thoughts", BEFORE): [(Cause.TOKENS, 1)],
        ("without thoughts", WITH): [(Cause.TOKENS, 1)],
    },
    "nemotron": {
        ("without thoughts", BEFORE): [(Cause.SPELLS_OTHERWISE, 1), (Cause.SPELLS_OTHERWISE, 2)],
        ("without thoughts", WITH): [(Cause.SPELLS_OTHERWISE, turn) for turn in (1, 2, 3)],
    },
    "gpt_oss": {("with thoughts", WITH): [(Cause.DROPS_THOUGHT, 1), (Cause.DROPS_THOUGHT, 2)]},
}
CALL = ToolCall("search", {"query": "Ann"})


def causes(template):
    result = check_template(template)
    found = {}
    for case in result.cases:
        thoughts, _, when = case.title.partition(", ")
        found[thoughts, when] = [(difference.cause, difference.turn) for difference in case.differences]
    return result, found


@pytest.mark.parametrize("name", FAMILIES)
def test_check_names_turn_and_cause(name):
    result, by_case = causes(family_template(name))
    differing = {case: differences for case, differences in by_case.items() if differences}
    assert differing == EXPECTED.get(name, {})
    assert result.is_exact == (name not in EXPECTED)
    lacking = {"qwen2_5", "llama3_1", "mistral"}
    assert result.lacks_thoughts == (name in lacking) and len(by_case) == (2 if name in lacking else 4)


def test_template_that_closes_the_thought_is_compared_without_thoughts():
    result, by_case = causes(family_template("qwen3_5", enable_thinking=False))
    assert result.is_exact and list(by_case) == [("without thoughts", BEFORE), ("without thoughts", WITH)]
    _, by_case = causes(family_template("qwen3", enable_thinking=False))
    assert by_case["without thoughts", WITH] == [
        (Cause.DROPS_EMPTY_THOUGHT, 1),
        (Cause.DROPS_EMPTY_THOUGHT, 2),
    ]


def test_end_of_a_turn_that_the_next_message_writes():
    """As GLM's templates do: the policy ends a turn with the token of the role that comes next."""
    text = template_text("qwen2_5").replace(
        "{{- '<|im_end|>\\n' -}}\n  {%- elif message.role == 'tool'", "{%- elif message.role == 'tool'"
    )
    text = text.replace(
        "'<|im_start|>user\\n' ~ message.content ~ '<|im_end|>\\n'", "'<|user|>' ~ message.content"
    )
    text = text.replace("'<|im_start|>user'", "'<|tool|>'")
    tokens = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|user|>",
        "<|tool|>",
        "<tool_call>",
        "</tool_call>",
    )
    template = ConversationTemplate.derive(make_tokenizer(text, tokens), TOOLS, FORMATS["hermes"]())
    assert template.end_of_turn == ("<|tool|>", "<|user|>")
    assert template.reply([CALL], ["A"], "<|tool|>").startswith("\n<tool_response>\nA")
    assert template.reply([CALL], ["A"], "<|user|>").startswith("\n<tool_response>\nA")
    assert check_template(template).is_exact


def test_thought_that_the_prompt_opens_and_the_template_drops():
    _, by_case = causes(family_template("forgetful", opens_thought=True))
    assert by_case["with thoughts", WITH] == [(Cause.DROPS_THOUGHT, 1), (Cause.DROPS_THOUGHT, 2)]
    empty = [(Cause.DROPS_EMPTY_THOUGHT, 1), (Cause.DROPS_EMPTY_THOUGHT, 2)]
    assert by_case["without thoughts", BEFORE] == empty
    assert by_case["without thoughts", WITH] == [*empty, (Cause.DROPS_EMPTY_THOUGHT, 3)]


def test_lines_say_what_is_trained():
    lines = check_template(family_template("forgetful")).lines()
    assert lines[0] == "the chat template of test/forgetful writes tool calls in the format hermes"
    assert f"without thoughts, {WITH}: the rollout has the tokens of the template's own rendering" in lines
    (difference,) = (line for line in lines if line.startswith(f"with thoughts, {WITH}"))
    assert (
        "turn 1, turn 2: it drops the thought of the turn: '<think>" in difference and "became" in difference
    )
    assert "is trained" in lines[-1]
    assert "is trained" not in check_template(family_template("magistral")).lines()[-1]
    assert "no place for them" in check_template(family_template("llama3_1")).lines()[-1]


@pytest.mark.parametrize("scheme", ["first", "always"])
@pytest.mark.parametrize("name", ["mistral", "llama3_1"])
def test_tokenizer_that_writes_a_space_before_the_first_word(name, scheme):
    """As tokenizers of SentencePiece do: tokens of a text on its own are not those behind another."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"\u2581": 0, **{chr(code): code for code in range(1, 256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    call_format, control_tokens = FAMILIES[name]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in control_tokens])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=control_tokens[0], bos_token=control_tokens[1]
    )
    wrapped.chat_template = template_text(name)
    template = ConversationTemplate.derive(wrapped, TOOLS, FORMATS[call_format]())
    result, by_case = causes(template)
    assert result.is_exact, by_case


def test_history_refuse():
    require_exact(check_template(family_template("magistral")))
    with pytest.raises(UserError, match="test/qwen3 differs from the rollout in turn 1 .*history=keep"):
        require_exact(check_template(family_template("qwen3")))


def changed_template(old, new):
    text = template_text("qwen2_5")
    assert old in text
    return ConversationTemplate.derive(make_tokenizer(text.replace(old, new)), TOOLS, FORMATS["hermes"]())


def test_environments_part_that_depends_on_the_history():
    """A template that numbers the answers of tools writes another part in the second turn."""
    numbered = changed_template("'\\n<tool_response>\\n' ~", "'\\n<tool_response>\\n' ~ loop.index ~ ': ' ~")
    differences = compare(numbered, [user_message("Who?")], two_calls())
    assert [(difference.cause, difference.turn) for difference in differences] == [(Cause.ENVIRONMENT, 2)]


def test_prompt_that_depends_on_the_history():
    counting = changed_template(
        "'<|im_start|>system\\n' ~ first", "'<|im_start|>system\\n' ~ first ~ messages | length"
    )
    differences = compare(counting, [user_message("Who?")], two_calls())
    assert [(difference.cause, difference.turn) for difference in differences] == [(Cause.PROMPT, 0)]


def test_message_that_changes_later():
    shortening = changed_template(
        "(call.function.arguments | tojson)", "((call.function.arguments if loop.last else {}) | tojson)"
    )
    exchanges = [Exchange(AssistantMessage("", "", (CALL, CALL)), ("A", "B"))]
    (difference,) = compare(shortening, [user_message("Who?")], exchanges)
    assert (difference.cause, difference.turn) == (Cause.CHANGES_MESSAGE, 1)


def test_conversation_that_is_refused():
    refusing = changed_template(
        "{%- if add_generation_prompt", "{{- x.y.z if messages | length > 4 -}}{%- if add_generation_prompt"
    )
    (difference,) = compare(refusing, [user_message("Who?")], two_calls())
    assert (difference.cause, difference.turn) == (Cause.REFUSAL, 2)


def two_calls():
    return [
        Exchange(AssistantMessage("", "", (CALL,)), ("first answer",)),
        Exchange(AssistantMessage("", "", (CALL,)), ("second answer",)),
    ]


def test_lost_separator_would_be_seen():
    """The fault of other trainers: the line break behind the end of a turn is missing."""
    template = family_template("qwen2_5")

    class Losing(ConversationTemplate):
        def reply(self, calls, texts, ended_by):
            return super().reply(calls, texts, ended_by).removeprefix("\n")

    losing = Losing(**{name: getattr(template, name) for name in template.__dataclass_fields__})
    differences = compare(losing, [user_message("Who?")], two_calls())
    assert differences


@pytest.mark.parametrize("name", FAMILIES)
def test_segments_alternate_and_know_who_wrote_them(name):
    exchanges = [*two_calls(), Exchange(AssistantMessage("", "Ann.", ()))]
    segments = rollout_segments(family_template(name), [user_message("Who?")], exchanges)
    assert [segment.is_sampled for segment in segments] == [False, True, False, True, False, True]
    assert "Who?" in segments[0].text and "first answer" in segments[2].text
    assert "Ann" in segments[1].text and "second answer" in segments[4].text
