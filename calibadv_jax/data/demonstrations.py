"""Demonstrations for the cold start, read from files of turns in our layout or of chat messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import SEARCH_GRAMMAR, Grammar, parse_turn, well_formed
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall, readable_call
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.chats import ROLES, call_id, message_calls, message_role, message_text, message_thought
from calibadv_jax.data.layouts import MARKER, question_of
from calibadv_jax.data.questions import parse_question, question_row
from calibadv_jax.data.row_files import read_rows

# Keys of a row's messages.
CHATS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue")
_INFORMATION = re.compile(r"\s*<information>(.*)</information>\s*", re.DOTALL)
_TOOL_RESPONSE = re.compile(r"\s*<tool_response>(.*)</tool_response>\s*", re.DOTALL)
_DOCUMENT = re.compile(r'Doc \d+ ?\(Title: "?(.*?)"?\) ?')


@dataclass(frozen=True)
class DemoTurn:
    """A turn that the policy should write, and the observation after it.

    Attributes:
        text: What the policy should write.
        documents: Documents of the retriever's reply.
        trained: False: the turn is context only and has no loss.
        observation: Text before the documents: the reply of a tool, or why it refused.
    """

    text: str
    documents: tuple[Document, ...] = ()
    trained: bool = True
    observation: str = ""


@dataclass(frozen=True)
class DemoReply:
    """The reply to a tool call.

    Attributes:
        documents: Documents of the retriever's reply.
        text: Text before the documents: the reply of a tool, or why it refused.
    """

    documents: tuple[Document, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class MessageTurn(DemoTurn):
    """A turn that is a message of a chat with tool calls; `text` is for readers alone.

    Attributes:
        message: The message.
        replies: The replies to its calls, in their order.
    """

    message: AssistantMessage = AssistantMessage("", "", ())
    replies: tuple[DemoReply, ...] = ()


@dataclass(frozen=True)
class MessageReader:
    """Reads the messages of an assistant for the protocol of tool calls.

    Attributes:
        read: Returns what a text of the policy says: its thought, its calls, and the rest.
        flaw_of: Returns why a message is no turn of the protocol, as a sentence; "" if it is.
    """

    read: Callable[[str], AssistantMessage]
    flaw_of: Callable[[AssistantMessage], str]


@dataclass(frozen=True)
class Demonstration:
    """A question, and the turns that the policy should write for it."""

    question: Question
    turns: tuple[DemoTurn, ...]


class _ChatMessage(NamedTuple):
    """A message of a chat."""

    role: str
    text: str
    is_trained: bool
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_ids: tuple[str, ...] = ()  # of the calls, or of the call that a tool's message answers


def load_demonstrations(
    path: Path, grammar: Grammar = SEARCH_GRAMMAR, reader: MessageReader | None = None
) -> list[Demonstration]:
    """Read the demonstrations of a file.

    Args:
        path: File of rows with a question's fields and ``turns``, or with a chat's ``messages``. A turn is
            ``{"text", "documents": [{"title", "text"}], "observation"}``.
        grammar: Tags that the turns may hold.
        reader: Reads messages with tool calls; None: the protocol is that of tags, and they are refused.

    Raises:
        UserError: The file is missing or holds no demonstration, or a row is malformed; the message names
            file and line.
    """
    demonstrations = []
    for where, row in read_rows(path, "demonstrations"):
        chat_keys = [key for key in CHATS if key in row]
        if chat_keys:
            demonstrations.append(_parse_chat(row, chat_keys[0], where, grammar, reader))
        else:
            demonstrations.append(_parse_turns(row, where, grammar))
    if not demonstrations:
        raise UserError(f"{path}: no demonstrations in it")
    return demonstrations


def demonstration_row(demonstration: Demonstration) -> dict[str, Any]:
    """Return a row of a file that `load_demonstrations` reads.

    Args:
        demonstration: Its turns have documents or nothing as observations, and all are trained.
    """
    turns = []
    for turn in demonstration.turns:
        documents = [
            {"id": document.id, "title": document.title, "text": document.text} for document in turn.documents
        ]
        turns.append({"text": turn.text, "documents": documents})
    return question_row(demonstration.question) | {"turns": turns}


def split_held_out(
    demonstrations: Sequence[Demonstration], share: float, seed: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Split demonstrations by question into those to train on and those to hold out.

    Args:
        demonstrations: All demonstrations of a file.
        share: Share of the questions to hold out, from 0 to 1; above 0 at least one question is held out.
        seed: Seed of the choice.

    Returns:
        The demonstrations to train on, and the held-out ones, both in the order of the file.

    Raises:
        UserError: No question would be left to train on.
    """
    texts = [demonstration.question.text for demonstration in demonstrations]
    questions = list(dict.fromkeys(texts))
    num_held_out = max(1, round(share * len(questions))) if share else 0
    if num_held_out and num_held_out >= len(questions):
        raise UserError(f"sft.held_out={share:g} takes all {len(questions)} questions of the file: lower it")
    order = np.random.default_rng(seed).permutation(len(questions))
    held_out_questions = {questions[index] for index in order[:num_held_out]}
    trained: list[Demonstration] = []
    held_out: list[Demonstration] = []
    for demonstration in demonstrations:
        if demonstration.question.text in held_out_questions:
            held_out.append(demonstration)
        else:
            trained.append(demonstration)
    return trained, held_out


def _parse_turns(row: dict[str, Any], where: str, grammar: Grammar) -> Demonstration:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        raise UserError(
            f"{where}: field 'turns' must be a non-empty list, got {turns!r}; or give 'messages' of a chat"
        )
    parsed_turns = tuple(_parse_turn(turn, where, grammar) for turn in turns)
    return Demonstration(parse_question(row, where), parsed_turns)


def _parse_turn(turn: object, where: str, grammar: Grammar) -> DemoTurn:
    text = turn.get("text") if isinstance(turn, dict) else None
    if not isinstance(turn, dict) or not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: every turn needs a non-empty 'text', got {turn!r}")
    _check_action(text, where, grammar)
    documents = turn.get("documents", [])
    if not isinstance(documents, list) or not all(map(_is_document, documents)):
        raise UserError(f"{where}: 'documents' must be a list of objects with 'title' and 'text'")
    observation = turn.get("observation", "")
    if not isinstance(observation, str):
        raise UserError(f"{where}: 'observation' must be a text, got {observation!r}")
    shown_documents = []
    for document in documents:
        title = document["title"]
        document_id = str(document.get("id", title))
        shown_documents.append(Document(document_id, title, document["text"]))
    return DemoTurn(well_formed(text), tuple(shown_documents), observation=observation)


def _is_document(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("title"), str) and isinstance(value.get("text"), str)


def _check_action(text: str, where: str, grammar: Grammar) -> None:
    if parse_turn(text, "eos", grammar).kind != "invalid":
        return
    valid_forms = []
    for name in grammar.actions:
        body = "query" if name == "search" else "…"
        valid_forms.append(f"<{name}> {body} </{name}>")
    valid_forms.append("<answer> answer </answer>")
    raise UserError(f"{where}: a turn must hold {' or '.join(valid_forms)}, got {text[:80]!r}")


def _parse_chat(
    row: Mapping[str, Any], key: str, where: str, grammar: Grammar, reader: MessageReader | None
) -> Demonstration:
    """Return the demonstration of a chat.

    The messages before the assistant's first message are the prompt. Messages of other roles after it are
    observations.
    """
    messages = _parse_messages(row[key], key, where)
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise UserError(f"{where}: no message of an assistant in {key!r}; remove the row")
    num_prompt_messages = roles.index("assistant")
    prompt = messages[:num_prompt_messages]
    if reader is None:
        turns = _chat_turns(messages, num_prompt_messages, key, where, grammar)
    else:
        turns = _message_turns(messages, num_prompt_messages, key, where, grammar, reader)
    question_text = _question_text(row, prompt, key, where)
    answer = _answer_of(turns[-1], grammar) or question_text
    question = {
        "id": where if row.get("id") is None else row["id"],
        "question": question_text,
        "golden_answers": row.get("golden_answers") or [answer],
        "data_source": row.get("data_source") or "demonstrations",
        "prompt": [{"role": message.role, "content": message.text} for message in prompt],
    }
    turns_with_documents = tuple(_with_documents(turn) for turn in turns)
    return Demonstration(parse_question(question, where), turns_with_documents)


def _answer_of(turn: DemoTurn, grammar: Grammar) -> str:
    """Return the answer of a turn, or else the body of its action; "" if it has neither."""
    if isinstance(turn, MessageTurn):
        return turn.message.content
    action = parse_turn(turn.text, "eos", grammar)
    return action.answer or action.query


def _chat_turns(
    messages: Sequence[_ChatMessage], start: int, key: str, where: str, grammar: Grammar
) -> list[DemoTurn]:
    """Return the turns in the messages from index `start` on, which is the assistant's first message."""
    turns: list[DemoTurn] = []
    previous_role = ""
    for number, message in enumerate(messages[start:], start + 1):
        place = f"{where}: message {number} of {key!r}"
        if message.role == "system":
            raise UserError(f"{place}: a system message inside the chat")
        if message.calls:
            raise UserError(
                f"{place}: it has tool calls, and rollout.protocol is tags: set it to tool_calls, or write"
                " the call as <search> query </search>"
            )
        if message.role == "assistant":
            if previous_role == "assistant":
                raise UserError(
                    f"{place}: two messages of the assistant follow each other; "
                    "put what the search returned between them, or join them"
                )
            text = message.text.strip()
            _check_action(text, place, grammar)
            if not text.endswith(grammar.stop_strings):
                raise UserError(
                    f"{place}: the policy stops after its action; "
                    f"remove what follows the tag in {text[-60:]!r}"
                )
            turns.append(DemoTurn(text, trained=message.is_trained))
        else:
            observation = f"{turns[-1].observation}\n{_shown_text(message)}".strip()
            turns[-1] = replace(turns[-1], observation=observation)
        previous_role = message.role
    return turns


def _shown_text(message: _ChatMessage) -> str:
    """Return the text of an observation without the tags around it."""
    for pattern in (_INFORMATION, _TOOL_RESPONSE):
        match = pattern.fullmatch(message.text)
        if match:
            return match.group(1).strip()
    return message.text.strip()


def _message_turns(
    messages: Sequence[_ChatMessage],
    start: int,
    key: str,
    where: str,
    grammar: Grammar,
    reader: MessageReader,
) -> list[DemoTurn]:
    """Return the turns in the messages from index `start` on, for the protocol of tool calls."""
    turns: list[DemoTurn] = []
    index = start
    while index < len(messages):
        message = messages[index]
        place = f"{where}: message {index + 1} of {key!r}"
        if message.role == "system":
            raise UserError(f"{place}: a system message inside the chat")
        index += 1
        replies = []
        while index < len(messages) and messages[index].role not in ("assistant", "system"):
            replies.append(messages[index])
            index += 1
        turns.append(_message_turn(message, replies, index == len(messages), place, grammar, reader))
    return turns


def _message_turn(
    message: _ChatMessage,
    replies: Sequence[_ChatMessage],
    is_last: bool,
    place: str,
    grammar: Grammar,
    reader: MessageReader,
) -> DemoTurn:
    """Return the turn of a message of the assistant and of the messages behind it."""
    if (
        not message.calls
        and not message.thought
        and parse_turn(message.text, "eos", grammar).kind != "invalid"
    ):
        observation = "\n".join(_shown_text(reply) for reply in replies)
        return DemoTurn(message.text.strip(), trained=message.is_trained, observation=observation)
    parsed = reader.read(message.text.strip())
    if parsed.flaw or (parsed.calls and message.calls) or (parsed.thought and message.thought):
        flaw = parsed.flaw or "Its text repeats what stands in its other fields."
        raise UserError(f"{place}: {flaw} Correct it, or remove the row")
    thought = message.thought or parsed.thought
    read_message = AssistantMessage(thought, parsed.content, message.calls or parsed.calls)
    flaw = reader.flaw_of(read_message)
    if flaw:
        raise UserError(f"{place}: {flaw} Correct it, or remove the row")
    ordered = _ordered_replies(message.call_ids, replies, len(read_message.calls), is_last, place)
    text = "; ".join(readable_call(call) for call in read_message.calls) or read_message.content
    return MessageTurn(text, trained=message.is_trained, message=read_message, replies=ordered)


def _ordered_replies(
    call_ids: Sequence[str], replies: Sequence[_ChatMessage], num_calls: int, is_last: bool, place: str
) -> tuple[DemoReply, ...]:
    """Return the replies to the calls of a message in the order of the calls."""
    if not replies and is_last:
        return ()
    if len(replies) != num_calls:
        raise UserError(
            f"{place}: {len(replies)} messages follow {num_calls} tool calls; every call needs one message of"
            " the role tool, and an answer none"
        )
    order = {name: index for index, name in enumerate(call_ids)}
    answered = [reply.call_ids[0] for reply in replies if reply.call_ids]
    ordered = list(replies)
    if len(answered) == num_calls and set(answered) == set(order):
        ordered.sort(key=lambda reply: order[reply.call_ids[0]])
    elif answered and order and not set(answered) <= set(order):
        raise UserError(f"{place}: no call has the id {sorted(set(answered) - set(order))[0]!r}; correct it")
    shown = []
    for reply in ordered:
        turn = _with_documents(DemoTurn("", observation=_shown_text(reply)))
        shown.append(DemoReply(turn.documents, turn.observation))
    return tuple(shown)


def _parse_messages(value: Any, key: str, where: str) -> list[_ChatMessage]:
    items = value if isinstance(value, list) else []
    messages = []
    for number, item in enumerate(items, 1):
        role = message_role(item)
        text = message_text(item)
        calls, call_ids, fault = message_calls(item)
        if fault:
            raise UserError(f"{where}: message {number} of {key!r}: {fault}")
        if text is None and calls:
            text = ""
        if role is None or text is None or (calls and role != "assistant"):
            raise UserError(
                f"{where}: message {number} of {key!r} must be an object with 'role' or 'from' "
                f"({', '.join(ROLES)}) and a text 'content' or 'value', got {str(item)[:80]!r}; "
                "tool calls stand in 'tool_calls' of a message of the assistant"
            )
        is_trained = item.get("weight", 1) != 0
        thought = well_formed(message_thought(item)).strip()
        ids = call_ids or call_id(item)
        messages.append(_ChatMessage(role, well_formed(text), is_trained, thought, calls, ids))
    if not messages:
        raise UserError(f"{where}: {key!r} must be a non-empty list, got {str(value)[:80]!r}")
    return messages


def _question_text(row: Mapping[str, Any], prompt: Sequence[_ChatMessage], key: str, where: str) -> Any:
    """Return the row's own question, or else the question in the last message of the prompt."""
    if "question" in row:
        return row["question"]
    if not prompt or prompt[-1].role != "user":
        raise UserError(f"{where}: {key!r}: the message before the assistant's first must be a user's")
    text = prompt[-1].text
    if text.count(MARKER) == 1:
        return question_of(text, where)
    return text.strip()


def _with_documents(turn: DemoTurn) -> DemoTurn:
    """Parse documents out of an observation that lists them as the agent loop does."""
    # The text before the first document, then a title and a text for each document.
    before, *titles_and_texts = _DOCUMENT.split(turn.observation)
    if before.strip() or not titles_and_texts:
        return turn
    documents = []
    for title, text in zip(titles_and_texts[::2], titles_and_texts[1::2], strict=True):
        documents.append(Document(title, title, text.strip()))
    return replace(turn, observation="", documents=tuple(documents))
