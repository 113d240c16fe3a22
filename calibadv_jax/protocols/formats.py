"""The formats of tool calls by their names, and which of them a chat template writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tool_calls import ToolSchema
from calibadv_jax.core.user_functions import describe_failure, import_user_function, is_address
from calibadv_jax.protocols.call_format import CallFormat
from calibadv_jax.protocols.chat_template import ConversationTemplate
from calibadv_jax.protocols.gpt_oss_format import GptOssFormat
from calibadv_jax.protocols.plain_formats import LlamaJsonFormat, MistralFormat
from calibadv_jax.protocols.probes import (
    NO_END,
    NoCallShown,
    Probes,
    probe_call,
    reads_probe,
    shortened,
    written_call,
)
from calibadv_jax.protocols.rendering import STYLES, TemplateFailure, TemplateRenderer
from calibadv_jax.protocols.schema_format import SchemaFormat
from calibadv_jax.protocols.tagged_formats import HermesFormat, QwenXmlFormat
from calibadv_jax.protocols.template_date import DEFAULT_DATE

# Formats by their names in `tool_calls.format`, in the order in which `detect_format` tries them.
FORMATS: dict[str, type[CallFormat]] = {
    "hermes": HermesFormat,
    "qwen_xml": QwenXmlFormat,
    "llama_json": LlamaJsonFormat,
    "mistral": MistralFormat,
    "gpt_oss": GptOssFormat,
}
# The format that `detect_format` finds.
AUTO = "auto"
# The format that the tokenizer itself describes in its response template.
SCHEMA = "schema"
KEY = "tool_calls.format"
_EXPECTED = "a class derived from calibadv_jax.protocols.call_format.CallFormat, made without arguments"
_PROBE_TOOL = ToolSchema(
    "search",
    "Searches.",
    {
        "type": "object",
        "properties": {"probe": {"type": "string", "description": "Text."}},
        "required": ["probe"],
    },
)


def load_format(
    name: str,
    tokenizer: Any,
    template_kwargs: Mapping[str, Any] | None = None,
    date_string: str = DEFAULT_DATE,
) -> CallFormat:
    """Return the format of `tool_calls.format`.

    Args:
        name: A key of FORMATS, "schema", "auto", or ``package.module:Class``.
        tokenizer: A tokenizer of transformers.
        template_kwargs: `prompt.chat_template_kwargs`.
        date_string: `prompt.date_string`.

    Raises:
        UserError: There is no such format, the class cannot be used, or no format is the template's.
    """
    if name == AUTO:
        return detect_format(tokenizer, template_kwargs, date_string)
    if name in FORMATS:
        return FORMATS[name]()
    if name == SCHEMA:
        return SchemaFormat(_renderer(tokenizer, template_kwargs, date_string))
    if not is_address(name):
        raise UserError(
            f"{KEY} is {name!r}: must be one of {', '.join([AUTO, *FORMATS, SCHEMA])},"
            " or a class of your own as package.module:Class"
        )
    make_format = import_user_function(name, KEY, (), _EXPECTED)
    try:
        call_format = make_format()
    except Exception as error:  # a class of the user's own may raise anything
        raise UserError(
            f"{KEY} is {name}, but making it failed: {describe_failure(error)}; correct it"
        ) from error
    if not isinstance(call_format, CallFormat):
        raise UserError(f"{KEY} is {name}, which is no tool-call format; expected: {_EXPECTED}")
    if not getattr(call_format, "name", ""):
        raise UserError(f"{KEY} is {name}, which has no name: set the attribute name of the class")
    return call_format


def detect_format(
    tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, date_string: str = DEFAULT_DATE
) -> CallFormat:
    """Return the format in which a chat template writes calls.

    A call is rendered, and the first format that reads exactly this call is taken; after all others the
    tokenizer's own response template.

    Args:
        tokenizer: A tokenizer of transformers.
        template_kwargs: `prompt.chat_template_kwargs`.
        date_string: `prompt.date_string`.

    Raises:
        UserError: The template renders no call, or none that a format reads; the message has its name.
    """
    renderer = _renderer(tokenizer, template_kwargs, date_string)
    reason = ""
    for style in STYLES:
        try:
            written = written_call(renderer, style, probe_call(_PROBE_TOOL.name))
        except NoCallShown:
            reason = reason or "it renders calls as nothing"
            continue
        except TemplateFailure as failure:
            reason = reason or f"it fails on a call: {failure}"
            continue
        for make_format in FORMATS.values():
            call_format = make_format()
            if reads_probe(renderer, call_format, written, _PROBE_TOOL.name):
                return call_format
        if SchemaFormat.is_described(tokenizer):
            schema_format = SchemaFormat(renderer)
            if reads_probe(renderer, schema_format, written, _PROBE_TOOL.name):
                return schema_format
        if any(
            Probes(renderer, make_format(), style, _PROBE_TOOL.name).is_endless()
            for make_format in FORMATS.values()
        ):
            reason = NO_END
        else:
            reason = f"no format reads its calls, such as {shortened(written)}"
    raise UserError(
        f"{renderer.title} does not work with tools: {reason}; choose a policy whose template supports them,"
        f" rollout.protocol=tags, or a format of your own ({KEY}=package.module:Class)"
    )


def end_of_turn_ids(
    tokenizer: Any, name: str, template_kwargs: Mapping[str, Any], date_string: str
) -> list[int]:
    """Return the tokens that end a turn in a chat template.

    Args:
        tokenizer: A tokenizer of transformers.
        name: As in `load_format`.
        template_kwargs: `prompt.chat_template_kwargs`.
        date_string: `prompt.date_string`.

    Raises:
        UserError: The template does not work with tools.
    """
    call_format = load_format(name, tokenizer, template_kwargs, date_string)
    template = ConversationTemplate.derive(
        tokenizer, [_PROBE_TOOL], call_format, template_kwargs, date_string
    )
    return [tokenizer.convert_tokens_to_ids(token) for token in template.end_of_turn]


def _renderer(
    tokenizer: Any, template_kwargs: Mapping[str, Any] | None, date_string: str
) -> TemplateRenderer:
    return TemplateRenderer(tokenizer, [_PROBE_TOOL], template_kwargs or {}, date_string)
