"""Tools and tool calls: the values that flow between the chat template, the agent loop and the actions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import referencing
from jsonschema.exceptions import SchemaError, best_match
from referencing.exceptions import Unresolvable

from calibadv_jax.core.errors import UserError, one_line

# Characters of a value of the policy that a message quotes.
_QUOTED_LENGTH = 60
# Keys of a JSON schema whose texts the policy reads, and which no call has to repeat.
_EXPLANATIONS = ("description", "title", "$comment")
# A schema names no document on the network: nothing is fetched.
_NO_DOCUMENTS: referencing.Registry[Any] = referencing.Registry()


@dataclass(frozen=True)
class ToolSchema:
    """A tool as a chat template shows it to the policy.

    Attributes:
        name: Name of the tool.
        description: What the tool does.
        parameters: Its arguments as a JSON schema of the type "object".
    """

    name: str
    description: str
    parameters: dict[str, Any]

    def as_function(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, which chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the policy.

    Attributes:
        name: Name of the tool, as the policy wrote it.
        arguments: The arguments, which may break the tool's schema.
    """

    name: str
    arguments: dict[str, Any]


def readable_call(call: ToolCall) -> str:
    """Return a call as a line for readers: search(query="Who?")."""
    arguments = []
    for name, value in call.arguments.items():
        arguments.append(f"{name}={json.dumps(value, ensure_ascii=False)}")
    return f"{call.name}({', '.join(arguments)})"


@dataclass(frozen=True)
class AssistantMessage:
    """A turn of the policy, as a tool-call format reads it.

    Attributes:
        thought: Text of the thought, stripped. Calls in it are text.
        content: The rest of the text without the calls, stripped.
        calls: The calls to execute, in order; empty if one of them cannot be read.
        flaw: A sentence for the policy, which says why the turn is not well formed; "" if it is.
    """

    thought: str
    content: str
    calls: tuple[ToolCall, ...]
    flaw: str = ""


def schema_fault(arguments: dict[str, Any], tool: ToolSchema) -> str:
    """Return why arguments break the schema of their tool.

    Args:
        arguments: Arguments of a call.
        tool: The tool, whose schema `check_schema` has taken.

    Returns:
        A sentence for the policy that names the argument; "" if the arguments fit.
    """
    validator = schema_validator(tool)
    try:
        error = best_match(validator.iter_errors(arguments))
    except Unresolvable as failure:
        raise UserError(
            f"tool {tool.name}: its JSON schema refers to {failure.ref}; define that in it"
        ) from failure
    if error is None:
        return ""
    path = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "required":
        missing = [name for name in error.validator_value if name not in error.instance]
        names = ", ".join(f'"{name}"' for name in missing)
        inside = f' in "{path}"' if path else ""
        return f"The call of {tool.name} lacks {names}{inside}."
    if not path:
        return f"The arguments of {tool.name} do not fit: {_shortened(error.message)}."
    return f'The argument "{path}" of {tool.name} does not fit: {_shortened(error.message)}.'


def schema_validator(tool: ToolSchema) -> jsonschema.Draft202012Validator:
    """Return what checks values against the schema of a tool's arguments; it fetches no other document."""
    return jsonschema.Draft202012Validator(tool.parameters, registry=_NO_DOCUMENTS)


def check_schema(tool: ToolSchema, source: str) -> None:
    """Refuse a tool whose arguments are no JSON schema of the type "object".

    Args:
        tool: The tool.
        source: Where the tool comes from, for messages.

    Raises:
        UserError: The schema is not valid.
    """
    if tool.parameters.get("type") != "object":
        raise UserError(
            f'{source}: the schema of the tool {tool.name} must have the type "object", and has '
            f"{tool.parameters.get('type')!r}"
        )
    try:
        jsonschema.Draft202012Validator.check_schema(tool.parameters)
        # References are looked up only where an argument has a value for them.
        schema_fault({name: "" for name in tool.parameters.get("properties", {})}, tool)
    except SchemaError as error:
        raise UserError(
            f"{source}: the schema of the tool {tool.name} is no JSON schema: {one_line(error)}"
        ) from error


def rewrite_texts(tool: ToolSchema, rewrite: Callable[[str], str], source: str) -> ToolSchema:
    """Return a tool all of whose texts went through a function, for tools that others have described.

    Args:
        tool: The tool.
        rewrite: Returns a text as the policy may read it, see `Neutraliser.neutralise`.
        source: Where the tool comes from, for messages.

    Raises:
        UserError: The name of the tool, of an argument or a value that calls have to repeat would change.
    """
    return replace(
        tool,
        name=_unchanged(tool.name, rewrite, f"{source}: the name of the tool"),
        description=rewrite(tool.description),
        parameters=_rewrite_schema(tool.parameters, rewrite, f"{source}: the schema of the tool {tool.name}"),
    )


def _rewrite_schema(value: Any, rewrite: Callable[[str], str], place: str, key: str = "") -> Any:
    """Return a part of a JSON schema with its explanations rewritten, and other texts unchanged."""
    if isinstance(value, str):
        if key in _EXPLANATIONS:
            return rewrite(value)
        return _unchanged(value, rewrite, place)
    if isinstance(value, list):
        return [_rewrite_schema(item, rewrite, place, key) for item in value]
    if isinstance(value, dict):
        rewritten = {}
        for name, item in value.items():
            # An argument may be named "description": then its value is a schema, and no text.
            rewritten[_unchanged(str(name), rewrite, place)] = _rewrite_schema(
                item, rewrite, place, str(name)
            )
        return rewritten
    return value


def _unchanged(text: str, rewrite: Callable[[str], str], place: str) -> str:
    if rewrite(text) != text:
        raise UserError(
            f"{place} holds {text[:_QUOTED_LENGTH]!r}, which is markup to the chat template or the tokenizer;"
            " rename it, or leave the tool out"
        )
    return text


def _shortened(text: str) -> str:
    line = " ".join(text.split()).removesuffix(".")
    return line if len(line) <= 3 * _QUOTED_LENGTH else line[: 3 * _QUOTED_LENGTH] + "…"
