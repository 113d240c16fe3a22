"""Reading the JSON that a policy writes into a tool call."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

from referencing.exceptions import Unresolvable

from calibadv_jax.core.tags import well_formed
from calibadv_jax.core.tool_calls import ToolCall, ToolSchema, schema_validator

# Levels of brackets in the JSON of a call, at most: deeper nesting needs a deep stack wherever it is read.
MAX_DEPTH = 50
# Names of Python for values that JSON names in another way.
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
# Characters of a number that a message quotes.
_QUOTED_LENGTH = 40
_TOO_DEEP = "The call is nested too deep."


class CallError(ValueError):
    """A call cannot be read. The message is a sentence for the policy."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text that the policy wrote.

    Lone surrogates become U+FFFD. NaN, infinite numbers and deep nesting are refused.

    Args:
        text: Any text.

    Raises:
        CallError: The text is no JSON.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_number)
    except RecursionError as error:
        raise CallError(_TOO_DEEP) from error
    except ValueError as error:
        raise CallError(f"The call is not JSON: {_reason(text, error)}.") from error
    return _well_formed_value(value, 0)


def read_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call: a JSON object, or a text that holds one.

    Args:
        value: What stands in the place of the arguments.

    Raises:
        CallError: It is neither.
    """
    if isinstance(value, str):
        value = read_json(value)
    if not isinstance(value, dict):
        raise CallError("The arguments of the call are no JSON object.")
    return value


def read_call(value: Any, arguments_key: str) -> ToolCall:
    """Return the call that a JSON value describes.

    Args:
        value: A JSON value; an object with the keys "name" and `arguments_key`, and no other but "id" and
            "type".
        arguments_key: Key of the arguments in this format.

    Raises:
        CallError: It describes no call.
    """
    form = f'{{"name": …, "{arguments_key}": {{…}}}}'
    if not isinstance(value, dict):
        raise CallError(f"The call is no JSON object: write {form}.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise CallError(f'The call has no "name": write {form}.')
    if arguments_key not in value:
        raise CallError(f'The call has no "{arguments_key}": write {form}.')
    unknown = sorted(value.keys() - {"name", arguments_key, "id", "type"})
    if unknown:
        names = ", ".join(f'"{key}"' for key in unknown)
        raise CallError(f"The call has {names} beside its name and arguments: write {form}.")
    return ToolCall(name, read_arguments(value[arguments_key]))


def typed_arguments(call: ToolCall, tool: ToolSchema) -> ToolCall:
    """Return a call whose texts have the types of the tool's schema, for formats that write texts only.

    Args:
        call: A call whose arguments are texts.
        tool: The tool that is called.

    Returns:
        A call in which a text became the JSON value that it holds, if the schema does not allow the text
        itself. Other arguments stay as they are.
    """
    properties = tool.parameters.get("properties", {})
    arguments = dict(call.arguments)
    for name, value in call.arguments.items():
        schema = properties.get(name)
        if isinstance(value, str) and isinstance(schema, dict):
            arguments[name] = _typed(value, schema, tool)
    return replace(call, arguments=arguments)


def _typed(text: str, schema: dict[str, Any], tool: ToolSchema) -> Any:
    """Return a text, or the JSON value that it holds if only that fits the schema of an argument."""
    # The argument's schema may refer to definitions of the whole schema.
    alone: dict[str, Any] = {"type": "object", "properties": {"value": schema}}
    for key in ("$defs", "definitions"):
        if key in tool.parameters:
            alone[key] = tool.parameters[key]
    validator = schema_validator(replace(tool, parameters=alone))
    try:
        if validator.is_valid({"value": text}):
            return text
        for value in _values_in(text):
            if validator.is_valid({"value": value}):
                return value
    except Unresolvable:
        # `schema_fault` reports it.
        return text
    return text


def _values_in(text: str) -> Iterator[Any]:
    """Yield the JSON value that a text holds; Python's names of values count too."""
    written = text.strip()
    try:
        yield read_json(_PYTHON_NAMES.get(written, written))
    except CallError:
        return


def _reason(text: str, error: ValueError) -> str:
    """Return why a text is no JSON, with advice where the mistake is a common one."""
    if text.strip().startswith("{{"):
        return "write single braces, { and }, in place of doubled ones"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return str(error)


def _well_formed_value(value: Any, depth: int) -> Any:
    """Return a JSON value without lone surrogates; CallError if it is nested too deep."""
    if isinstance(value, str):
        return well_formed(value)
    if not isinstance(value, list | dict):
        return value
    if depth == MAX_DEPTH:
        raise CallError(_TOO_DEEP)
    if isinstance(value, list):
        return [_well_formed_value(item, depth + 1) for item in value]
    neutral: dict[str, Any] = {}
    for name, item in value.items():
        neutral[well_formed(name)] = _well_formed_value(item, depth + 1)
    return neutral


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:_QUOTED_LENGTH]} is too large a number")
    return number
