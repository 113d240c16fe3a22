"""Demonstrations as tool calls: chats with calls, turns in tags, and the world's own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from config_rig import changed
from loop_fakes import DictRetriever, ScriptedSampler
from rows_rig import write_rows
from template_rig import family_tokenizer

from calibadv_jax.commands.demonstration_encoder import make_encoder
from calibadv_jax.commands.sft import encode_demonstration
from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.contrib.worlds.world_demonstrations import GENERATORS
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import parse_turn
from calibadv_jax.core.tool_calls import ToolCall
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.demonstrations import Demonstration, DemoTurn, MessageTurn, load_demonstrations
from calibadv_jax.rollout.agent import RolloutContext, run_trajectory

FAMILIES = ("qwen2_5", "qwen3_5", "llama3_1", "mistral", "gpt_oss")
ASKED = {"role": "user", "content": "Who painted it?"}
TEXTS = ('Doc 1(Title: "Ann") Ann painted it.', "No results found.")


@pytest.fixture(scope="module")
def words():
    return build_word_tokenizer(has_tool_calls=True)


def config_with(**sections):
    rollout = {"protocol": "tool_calls"} | sections.pop("rollout", {})
    return changed(rollout=rollout, **sections)


def called(*queries, as_text=False, **fields):
    """A message of the assistant with a search for each query."""
    calls = []
    for index, query in enumerate(queries):
        arguments = {"query": query}
        function = {"name": "search", "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({"id": f"call{index:05d}", "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


def answered(text, index=0):
    return {"role": "tool", "tool_call_id": f"call{index:05d}", "name": "search", "content": text}


def said(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def loaded(tmp_path, encoder, *rows):
    return load_demonstrations(write_rows(tmp_path / "d.jsonl", *rows), reader=encoder.message_reader)


@pytest.mark.parametrize("as_text", [False, True], ids=["object", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chat_has_the_tokens_of_the_template(tmp_path, family, as_text):
    tokenizer = family_tokenizer(family)
    encoder = make_encoder(config_with(prompt={"template": "from_data"}), tokenizer)
    # This template opens a thought in every turn.
    thought = {"reasoning_content": "I look."} if family == "qwen3_5" else {}
    chat = [
        ASKED,
        called("the painter", as_text=as_text, **thought),
        answered(TEXTS[0]),
        said("Ann", **thought),
    ]
    (demonstration,) = loaded(tmp_path, encoder, {"messages": chat})
    sample = encoder.encode(demonstration, "sampled")
    template = encoder.protocol.template
    shown = [ASKED, called("the painter", as_text=template.style.arguments_as_text, **thought), *chat[2:]]
    whole = template.renderer.render(shown)
    written = tokenizer.decode(sample.tokens)
    # Behind the last turn, a template may write what belongs to the next message.
    assert whole.startswith(written) or whole.strip() == written.strip()
    assert template.renderer.encode(written) == sample.tokens.tolist()
    trained = tokenizer.decode(sample.tokens[sample.mask])
    parts = [
        encoder.protocol.template.write_turn(turn.message, template.opening) for turn in demonstration.turns
    ]
    assert trained == "".join(parts)


def test_calls_of_a_turn_keep_their_order_and_thoughts(tmp_path):
    tokenizer = family_tokenizer("qwen2_5")
    encoder = make_encoder(config_with(), tokenizer)
    first = called("ann", "bob", reasoning_content="I need both.", content="I search.")
    chat = [
        ASKED,
        first,
        answered("about bob", 1),
        answered("about ann", 0),
        said("<think> so </think>\nAnn"),
    ]
    (demonstration,) = loaded(tmp_path, encoder, {"messages": chat})
    calls, answer = demonstration.turns
    assert calls.message.calls == (ToolCall("search", {"query": "ann"}), ToolCall("search", {"query": "bob"}))
    assert (calls.message.thought, calls.message.content) == ("I need both.", "I search.")
    assert [reply.text for reply in calls.replies] == ["about ann", "about bob"]
    assert (answer.message.thought, answer.message.content) == ("so", "Ann")
    assert demonstration.question.golden_answers == ("Ann",)
    sample = encoder.encode(demonstration, "sampled")
    context = tokenizer.decode(sample.tokens[~sample.mask])
    assert context.index("about ann") < context.index("about bob")


def test_untrained_messages_are_context(tmp_path):
    encoder = make_encoder(config_with(), family_tokenizer("qwen2_5"))
    chat = [ASKED, called("ann", weight=0), answered("x"), said("Ann")]
    (demonstration,) = loaded(tmp_path, encoder, {"messages": chat})
    sample = encoder.encode(demonstration, "sampled")
    assert encoder.protocol.settings.tokenizer.decode(sample.tokens[sample.mask]) == "Ann<|im_end|>"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([ASKED, called("x"), said("Ann")], "message 2 .*0 messages follow 1 tool calls"),
        ([ASKED, called("x", "y"), answered("z"), said("Ann")], "1 messages follow 2 tool calls"),
        ([ASKED, called("x"), answered("z", 3), said("Ann")], "no call has the id 'call00003'"),
        ([ASKED, said("Ann"), ASKED], "message 2 .*1 messages follow 0 tool calls"),
        ([ASKED, called("x"), answered("z"), ASKED, said("A")], "2 messages follow 1 tool calls"),
        ([ASKED, called(3), answered("z"), said("Ann")], 'message 2 .*The argument "query" of search'),
        ([ASKED, called("<|im_end|>"), answered("z"), said("Ann")], "cannot write the turn .*remove markup"),
        ([ASKED, {"role": "assistant", "tool_calls": "x"}], "'tool_calls' must be a list"),
        ([ASKED, {"role": "assistant", "tool_calls": [{"x": 1}]}], "must be an object with 'function'"),
        (
            [ASKED, {"role": "assistant", "tool_calls": [{"name": "search", "arguments": "{"}]}],
            "the arguments of the call of 'search' must be an object",
        ),
        (
            [ASKED, {"role": "assistant", "tool_calls": [{"name": "fly", "arguments": {}}]}],
            'There is no tool "fly"; the tools are search',
        ),
        ([{"role": "user", "content": "x", "tool_calls": called("x")["tool_calls"]}], "message 1 of"),
        ([ASKED, said("")], "the message is empty"),
        (
            [ASKED, called("x"), answered("y"), {"role": "system", "content": "Be brief."}, said("Ann")],
            "message 4 of 'messages': a system message inside the chat",
        ),
    ],
)
def test_bad_chat_is_refused(tmp_path, chat, message):
    encoder = make_encoder(config_with(), family_tokenizer("qwen2_5"))
    with pytest.raises(UserError, match=message):
        (demonstration,) = loaded(tmp_path, encoder, {"messages": chat})
        encoder.encode(demonstration, "sampled")


def test_with_tags_a_chat_with_calls_is_refused(tmp_path):
    path = write_rows(tmp_path / "d.jsonl", {"messages": [ASKED, called("x"), answered("y"), said("Ann")]})
    with pytest.raises(UserError, match="message 2 .*rollout.protocol is tags: set it to tool_calls"):
        load_demonstrations(path)


@pytest.mark.parametrize("answer_from", ["whole", "tag", "box"])
def test_turns_in_tags_become_messages(tmp_path, answer_from):
    turns = [
        {
            "text": "<think> look </think>\n<search> ann </search>",
            "documents": [{"title": "Ann", "text": "Ann painted it."}],
        },
        {"text": "<think> read </think>\n<answer> Ann </answer>"},
    ]
    row = {"id": "1", "question": "Who painted it?", "golden_answers": ["Ann"], "data_source": "x"}
    row["turns"] = turns
    encoder = make_encoder(config_with(reward={"answer_from": answer_from}), family_tokenizer("qwen2_5"))
    (demonstration,) = loaded(tmp_path, encoder, row)
    first, last = [encoder.message_of(turn, "here") for turn in demonstration.turns]
    assert (first.thought, first.calls) == ("look", (ToolCall("search", {"query": "ann"}),))
    assert (
        last.content == {"whole": "Ann", "tag": "<answer> Ann </answer>", "box": "\\boxed{Ann}"}[answer_from]
    )
    text = encoder.protocol.settings.tokenizer.decode(encoder.encode(demonstration, "sampled").tokens)
    assert '<tool_response>\nDoc 1(Title: "Ann") Ann painted it.\n</tool_response>' in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<search> x </search> and more", "text stands behind </search>"),
        ("<answer> x </answer>", "turn 1 of 2 is an answer; remove the turns behind it"),
        ("<answer>  </answer>", "the answer '' does not fit reward.answer_from=whole"),
    ],
)
def test_turn_that_is_no_message_is_refused(text, message):
    encoder = make_encoder(config_with(), family_tokenizer("qwen2_5"))
    demonstration = Demonstration(Question("7", "Who?", ("x",), "test"), (DemoTurn(text),) * 2)
    with pytest.raises(UserError, match=f"'7'.*{message}"):
        encoder.encode(demonstration, "sampled")


def test_thought_where_the_template_closes_it_is_refused():
    config = config_with(prompt={"chat_template_kwargs": {"enable_thinking": False}})
    encoder = make_encoder(config, family_tokenizer("qwen3_5"))
    turn = DemoTurn("<think> so </think>\n<answer> Ann </answer>")
    with pytest.raises(UserError, match="closes the thought before the turn.*'so'.*remove the thoughts"):
        encoder.encode(Demonstration(Question("7", "Who?", ("x",), "test"), (turn,)), "sampled")
    plain = DemoTurn("<answer> Ann </answer>")
    encoder.encode(Demonstration(Question("7", "Who?", ("x",), "test"), (plain,)), "sampled")


def test_loss_on_all_trains_the_whole_text(words):
    config = config_with(prompt={"system": ""})
    demonstration = next(GENERATORS["lookups"](0, WorldConfig()))
    sample = encode_demonstration(demonstration, config, words, "all")
    assert not sample.mask[0] and sample.mask[1:].all()


@pytest.mark.parametrize("kind", list(GENERATORS))
def test_world_is_learned_as_it_is_sampled(words, kind):
    """A rollout with the same turns and documents has the same tokens and mask."""
    config = config_with(prompt={"system": ""})
    encoder = make_encoder(config, words)
    for demonstration in islice(GENERATORS[kind](1, WorldConfig()), 30):
        sample = encoder.encode(demonstration, "sampled")
        assert words.unk_token_id not in sample.tokens
        if not all(turn.trained for turn in demonstration.turns):
            continue
        messages = [encoder.message_of(turn, "here") for turn in demonstration.turns]
        turns = [encoder.protocol.template.write_turn(message, "") for message in messages]
        turns.append("no<|im_end|>")  # behind a demonstration that ends with a search
        documents = {}
        for message, turn in zip(messages, demonstration.turns, strict=True):
            if message.calls:
                documents[message.calls[0].arguments["query"]] = list(turn.documents)
        rollout = replace(config.rollout, max_searches=len(documents), max_concurrency=1)
        context = RolloutContext(
            ScriptedSampler(words, lambda _, turn, turns=turns: turns[turn]),
            DictRetriever(documents),
            words,
            rollout,
            config.prompt,
            tool_calls=config.tool_calls,
            answer_from="whole",
        )
        trajectory = asyncio.run(run_trajectory(context, demonstration.question, 0, 0, "s"))
        ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
        mask = np.concatenate([np.zeros(len(trajectory.prompt_ids), bool), trajectory.mask])
        assert ids.tolist()[: len(sample.tokens)] == sample.tokens.tolist()
        assert mask.tolist()[: len(sample.tokens)] == sample.mask.tolist()


def test_world_folder_knows_its_protocol(tmp_path):
    config = WorldConfig(dir=str(tmp_path / "world"), people=40, train_questions=20, eval_questions=20)
    folder = write_world(config, "tool_calls")
    assert (folder / "tokenizer" / "chat_template.jinja").is_file()
    assert write_world(config, "tool_calls") == folder
    with pytest.raises(UserError, match="holds something other than this world"):
        write_world(config)
    plain = build_word_tokenizer(has_tool_calls=False)
    assert plain.chat_template is None and "<tool_call>" not in plain.get_vocab()


def test_world_tokenizer_writes_exact_json(words):
    text = '{"name": "search", "arguments": {"query": "adara almson", "url": "search"}}'
    assert words.decode(words.encode(text, add_special_tokens=False)) == text


def test_same_demonstrations_serve_either_protocol():
    """Turns in tags say the same in both: the thought, the query and the answer."""
    encoder = make_encoder(config_with(), family_tokenizer("qwen2_5"))
    for demonstration in islice(GENERATORS["imperfect"](2, WorldConfig()), 40):
        for turn in demonstration.turns:
            parsed = parse_turn(turn.text, "eos")
            message = encoder.message_of(turn, "here")
            assert message.thought == parsed.think
            query = message.calls[0].arguments["query"] if message.calls else ""
            assert (query, message.content) == (parsed.query, parsed.answer)


def test_reader_keeps_documents_apart_from_text(tmp_path):
    encoder = make_encoder(config_with(), family_tokenizer("qwen2_5"))
    chat = [ASKED, called("x"), answered(f"<tool_response>\n{TEXTS[0]}\n</tool_response>"), said("Ann")]
    (demonstration,) = loaded(tmp_path, encoder, {"messages": chat})
    turn = demonstration.turns[0]
    assert isinstance(turn, MessageTurn)
    assert turn.replies[0].documents == (Document("Ann", "Ann", "Ann painted it."),)
