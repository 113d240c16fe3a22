"""Trajectories as OpenAI's messages: calls of tools, their results, and the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from calibadv_jax.core.interfaces import Action, parse_object
from calibadv_jax.core.tags import without_controls
from calibadv_jax.core.tool_calls import ToolCall
from calibadv_jax.core.trajectory import Trajectory, Turn
from calibadv_jax.rollout.protocol import TurnProtocol

Message = dict[str, Any]


def messages_of(trajectory: Trajectory, protocol: TurnProtocol, shown: Callable[[str], str]) -> list[Message]:
    """Return the messages behind the question, with the agent's calls as `tool_calls`.

    Args:
        trajectory: A finished trajectory.
        protocol: The protocol of its turns.
        shown: Returns a text as clients may see it.

    Returns:
        For each turn a message of the assistant, and for each of its calls the message of the tool. Arguments
        are texts of JSON. A turn without a call or an answer has its text as content.
    """
    actions = {action.name: action for action in protocol.settings.enabled_actions}
    messages: list[Message] = []
    for number, turn in enumerate(trajectory.turns, 1):
        calls = calls_of(turn, actions)
        message: Message = {"role": "assistant", "content": None}
        if turn.think:
            message["reasoning_content"] = shown(turn.think)
        if turn.kind == "answer":
            message["content"] = shown(turn.answer)
        elif not calls:
            message["content"] = shown(turn.text)
        else:
            message["tool_calls"] = [
                _call(call, _call_id(number, index), shown) for index, call in enumerate(calls)
            ]
        messages.append(message)
        if not len(turn.observation_ids):
            continue
        texts = protocol.reply_texts(turn)
        if calls:
            for index, text in enumerate(texts):
                # The text is neutralised already; doing it again would break the headers of documents.
                content = without_controls(text)
                messages.append({"role": "tool", "tool_call_id": _call_id(number, index), "content": content})
        elif not turn.is_closed_thought:
            messages.append({"role": "user", "content": shown("\n".join(texts) or turn.observation_text)})
    return messages


def calls_of(turn: Turn, actions: dict[str, Action]) -> tuple[ToolCall, ...]:
    """Return the calls of a turn; the action of a turn in tags is the call that it stands for.

    Args:
        turn: The turn.
        actions: The actions that are on, by name.
    """
    if turn.calls or turn.kind not in actions:
        return turn.calls
    action = actions[turn.kind]
    properties = list(action.schema().parameters.get("properties", {}))
    arguments = parse_object(turn.query) if action.parameters is not None else None
    if arguments is None:
        arguments = {properties[0] if properties else "input": turn.query}
    return (ToolCall(action.name, arguments),)


def _call(call: ToolCall, call_id: str, shown: Callable[[str], str]) -> Message:
    arguments = json.dumps(_shown_values(call.arguments, shown))
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _call_id(turn: int, index: int) -> str:
    return f"call_{turn}_{index}"


def _shown_values(value: Any, shown: Callable[[str], str]) -> Any:
    """Return a value of JSON whose texts are as clients may see them."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list):
        return [_shown_values(item, shown) for item in value]
    if isinstance(value, dict):
        return {shown(name): _shown_values(item, shown) for name, item in value.items()}
    return value
