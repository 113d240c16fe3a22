"""Chats in rows: OpenAI's messages with role and content, ShareGPT's with from and value, texts in parts.

Messages of an assistant may have tool calls, whose arguments are an object or a text of JSON.
"""

from __future__ import annotations

import json
from typing import Any

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tags import well_formed, well_formed_json
from calibadv_jax.core.tool_calls import ToolCall

# Keys of the role and of the text of a message: OpenAI's names, and ShareGPT's.
ROLE_KEYS = ("role", "from")
TEXT_KEYS = ("content", "value")
# Keys of the thought of a message: DeepSeek's and Qwen's name, vLLM's, and that of gpt-oss' templates.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
# Name of a role in published chats -> role.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}


def message_role(message: Any) -> str | None:
    """Return the role of a message; None if it has none that is known."""
    if not isinstance(message, dict):
        return None
    names = [message[key] for key in ROLE_KEYS if message.get(key) is not None]
    return ROLES.get(str(names[0])) if names else None


def message_text(message: Any) -> str | None:
    """Return the text of a message, its parts of text joined; None if it has none or other parts."""
    if not isinstance(message, dict):
        return None
    contents = [message[key] for key in TEXT_KEYS if message.get(key) is not None]
    content = contents[0] if contents else None
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not texts or not all(isinstance(text, str) for text in texts):
        return None
    return "".join(str(text) for text in texts)


def message_thought(message: Any) -> str:
    """Return the thought of a message that stands beside its text; "" if there is none."""
    if not isinstance(message, dict):
        return ""
    thoughts = [message[key] for key in THOUGHT_KEYS if isinstance(message.get(key), str)]
    return thoughts[0] if thoughts else ""


def message_calls(message: Any) -> tuple[tuple[ToolCall, ...], tuple[str, ...], str]:
    """Return the tool calls of a message.

    Returns:
        The calls in order; their ids, where all have one; and why they cannot be read, or "".
    """
    items = message.get("tool_calls") if isinstance(message, dict) else None
    if not items:
        return (), (), ""
    if not isinstance(items, list):
        return (), (), f"'tool_calls' must be a list, got {str(items)[:60]!r}"
    calls = []
    ids = []
    for item in items:
        function = item.get("function", item) if isinstance(item, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            return (
                (),
                (),
                f"a tool call must be an object with 'function' and its 'name', got {str(item)[:60]!r}",
            )
        arguments = _arguments(function.get("arguments", function.get("parameters", {})))
        if arguments is None:
            return (
                (),
                (),
                f"the arguments of the call of {name!r} must be an object, or a text of JSON with one",
            )
        calls.append(ToolCall(well_formed(name), arguments))
        if isinstance(item.get("id"), str):
            ids.append(item["id"])
    return tuple(calls), tuple(ids) if len(set(ids)) == len(calls) else (), ""


def call_id(message: Any) -> tuple[str, ...]:
    """Return the id of the call that a message of a tool answers; none if it names none."""
    name = message.get("tool_call_id") if isinstance(message, dict) else None
    return (name,) if isinstance(name, str) and name else ()


def _arguments(value: Any) -> dict[str, Any] | None:
    """Return the arguments of a call, an object or a text of JSON; None if they are neither."""
    text = value if isinstance(value, str) else json.dumps(value)
    if not text.strip():
        return {}
    try:
        arguments = json.loads(well_formed_json(text.encode("utf-8", "surrogatepass")).decode())
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def as_chat(prompt: Any, has_answer: bool) -> Any:
    """Return a chat as OpenAI writes it; other prompts unchanged.

    Args:
        prompt: A text or a chat.
        has_answer: Whether the messages after the user's last one are an answer, which is left out.
    """
    messages = prompt if isinstance(prompt, list) else []
    roles = [message_role(message) for message in messages]
    texts = [message_text(message) for message in messages]
    if "user" not in roles or None in roles or None in texts:
        return prompt
    end = len(roles) - roles[::-1].index("user") if has_answer else len(roles)
    return [{"role": role, "content": text} for role, text in zip(roles[:end], texts[:end], strict=True)]


def only_request(prompt: Any, where: str) -> Any:
    """Return the text of the message that asks: the last one, or the user's only one if an answer follows it.

    Args:
        prompt: A text or a chat.
        where: Place of the row, for messages.

    Returns:
        The text of the message. A prompt that is no chat is returned unchanged.

    Raises:
        UserError: A chat that ends with another role has several messages of the user.
    """
    messages = [prompt] if isinstance(prompt, dict) else prompt
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return prompt
    roles = [message_role(message) for message in messages]
    if roles[-1] in ("user", None) or "user" not in roles:
        return message_text(messages[-1])
    if roles.count("user") > 1:
        raise UserError(
            f"{where}: a chat of several turns, in which the question is not known; "
            "add a key with the question"
        )
    return message_text(messages[roles.index("user")])
