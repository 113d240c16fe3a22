"""Arguments are checked against the tool's schema, and the policy reads which of them does not fit."""

import pytest

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tool_calls import ToolCall, ToolSchema, check_schema, rewrite_texts, schema_fault
from calibadv_jax.protocols.call_json import typed_arguments

SEARCH = ToolSchema(
    "search",
    "Searches.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "top": {"type": "integer", "minimum": 1},
            "filter": {"$ref": "#/$defs/filter"},
            "names": {"type": "array", "items": {"type": "string"}},
            "exact": {"type": "boolean"},
        },
        "required": ["query"],
        "additionalProperties": False,
        "$defs": {
            "filter": {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
        },
    },
)


def tool(parameters):
    return ToolSchema("list", "Lists.", parameters)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"query": "Ann"}, ""),
        ({"query": "Ann", "top": 3, "filter": {"year": 1889}, "names": ["a"], "exact": True}, ""),
        ({}, 'The call of search lacks "query".'),
        ({"query": 3}, "The argument \"query\" of search does not fit: 3 is not of type 'string'."),
        ({"query": "Ann", "top": 0}, 'The argument "top" of search does not fit'),
        ({"query": "Ann", "names": ["a", 1]}, 'The argument "names.1" of search does not fit'),
        ({"query": "Ann", "filter": {}}, 'The call of search lacks "year" in "filter".'),
        (
            {"query": "Ann", "k": 3},
            "The arguments of search do not fit: Additional properties are not allowed",
        ),
        ({"query": "Ann", "top": "x" * 1000}, "…"),
    ],
)
def test_fault_names_the_argument(arguments, fault):
    message = schema_fault(arguments, SEARCH)
    assert fault in message and bool(message) == bool(fault)
    assert len(message) < 300 and "\n" not in message


def test_schema_that_is_none_is_refused():
    check_schema(SEARCH, "tools[0]")
    with pytest.raises(
        UserError, match=r'tools\[0\]: the schema of the tool list must have the type "object"'
    ):
        check_schema(tool({"type": "string"}), "tools[0]")
    with pytest.raises(UserError, match="schema of the tool list is no JSON schema"):
        check_schema(tool({"type": "object", "properties": {"x": {"type": "text"}}}), "tools[0]")


@pytest.mark.parametrize(
    "reference", ["#/$defs/missing", "http://127.0.0.1:9/schema.json", "file:///etc/hostname"]
)
def test_reference_to_elsewhere_is_refused_and_not_fetched(reference):
    schema = {"type": "object", "properties": {"x": {"$ref": reference}}}
    with pytest.raises(UserError, match="its JSON schema refers to .*; define that in it"):
        check_schema(tool(schema), "tools[0]")


@pytest.mark.parametrize(
    ("written", "typed"),
    [
        ({"query": "7"}, {"query": "7"}),
        ({"query": "Ann", "top": "3"}, {"query": "Ann", "top": 3}),
        ({"query": "Ann", "top": "three"}, {"query": "Ann", "top": "three"}),
        ({"names": '["a", "b"]'}, {"names": ["a", "b"]}),
        ({"filter": '{"year": 1889}'}, {"filter": {"year": 1889}}),
        ({"exact": "True"}, {"exact": True}),
        ({"exact": " false\n"}, {"exact": False}),
        ({"unknown": "3"}, {"unknown": "3"}),
        ({"top": 3}, {"top": 3}),
    ],
)
def test_texts_get_the_types_of_the_schema(written, typed):
    assert typed_arguments(ToolCall("search", written), SEARCH) == ToolCall("search", typed)


def test_only_explanations_are_rewritten():
    schema = {
        "type": "object",
        "properties": {
            "description": {"type": "string", "description": "a <b>", "enum": ["x"]},
            "list": {"type": "array", "items": {"type": "string", "title": "<t>"}},
        },
    }
    shown = rewrite_texts(
        ToolSchema("list", "d <e>", schema), lambda text: text.replace("<", "["), "tools[0]"
    )
    assert shown.description == "d [e>"
    assert shown.parameters["properties"]["description"]["description"] == "a [b>"
    assert shown.parameters["properties"]["list"]["items"]["title"] == "[t>"
    schema["properties"]["description"]["enum"] = ["<x>"]
    with pytest.raises(UserError, match=r"tools\[0\]: the schema of the tool list holds '<x>', .*rename it"):
        rewrite_texts(ToolSchema("list", "d", schema), lambda text: text.replace("<", "["), "tools[0]")


def test_tool_in_openais_form():
    function = SEARCH.as_function()
    assert function["type"] == "function" and function["function"]["parameters"] is SEARCH.parameters
