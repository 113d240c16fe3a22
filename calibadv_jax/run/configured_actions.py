"""The actions of a run, made from its config once in a process."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from calibadv_jax.config import Config, McpConfig, ToolConfig
from calibadv_jax.config.sections.rollout import TOOL_CALLS
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action
from calibadv_jax.core.tags import NAME, RESERVED
from calibadv_jax.core.tokens import decode, encode
from calibadv_jax.core.user_functions import describe_failure, import_user_function, load_optional
from calibadv_jax.rollout.actions import AccessAction, GuardedAction, SearchAction
from calibadv_jax.rollout.prompts import ACTIONS_PLACE

DEFAULT = [ToolConfig("search")]
LOG = "mcp.log"  # File in the run's folder to which MCP servers' programs write their standard error.
EXPECTED = "a class that is called without arguments, as in examples/own_tool.py"
BUILT_IN: dict[str, Callable[..., Action]] = {"search": SearchAction, "access": AccessAction}


def make_actions(config: Config) -> tuple[Action, ...]:
    """Return the actions of a config.

    MCP servers are asked for their tools at the first call.

    Args:
        config: The run's config.

    Returns:
        The actions in the order of `tools`. Empty if search is the only one.

    Raises:
        UserError: An action cannot be made, or two have the same name.
    """
    if config.tools == DEFAULT:
        return ()
    tools = json.dumps([dataclasses.asdict(tool) for tool in config.tools])
    actions = _build_actions(tools, Path(config.run.dir) / LOG)
    if isinstance(actions, UserError):
        raise actions
    return actions


@functools.cache
def _build_actions(tools: str, log: Path) -> tuple[Action, ...] | UserError:
    """Return the actions of the JSON text of `tools`, or the error of the first that cannot be made.

    The error is returned, not raised, so that the cache keeps it: a server that does not answer is waited for
    only once.
    """
    actions: list[Action] = []
    try:
        for values in json.loads(tools):
            mcp_values = values.pop("mcp")
            mcp = McpConfig(**mcp_values) if mcp_values else None
            tool = ToolConfig(**values, mcp=mcp)
            for action in _tool_actions(tool, log):
                _check_name(action, tool, actions)
                actions.append(action)
    except UserError as error:
        return error
    return tuple(actions)


def _tool_actions(tool: ToolConfig, log: Path) -> Sequence[Action]:
    """Return the actions of one entry of `tools`: those of an MCP server, or a single one."""
    if not tool.mcp:
        return [_named_action(tool)]
    mcp_actions: Callable[..., Sequence[Action]] = load_optional("mcp_tools").mcp_actions
    return mcp_actions(tool.mcp, tool.max_length, log)


def _named_action(tool: ToolConfig) -> Action:
    """Return a built-in action, or an object of the user's class."""
    if tool.name in BUILT_IN:
        return BUILT_IN[tool.name](max_length=tool.max_length)
    try:
        action = import_user_function(tool.name, "tools", (), EXPECTED)()
    except UserError:
        raise
    except Exception as error:  # a class of the user's own may raise anything
        raise UserError(f"tools: making {tool.name} failed: {describe_failure(error)}; correct it") from error
    if not isinstance(action, Action) or not inspect.iscoroutinefunction(action.call):
        raise UserError(
            f"tools: {tool.name} must give an object of a subclass of calibadv_jax.Action with"
            " `async def call`, as in examples/own_tool.py"
        )
    for attribute in ("name", "purpose"):
        if not isinstance(getattr(action, attribute, None), str):
            raise UserError(f"tools: {tool.name} has no text {attribute!r}; see examples/own_tool.py")
    return GuardedAction(action, tool.timeout, tool.max_length)


def _check_name(action: Action, tool: ToolConfig, earlier: list[Action]) -> None:
    """Refuse (UserError) a name that cannot be a tag, or that an earlier action has."""
    entry = _entry_name(tool)
    if not NAME.fullmatch(action.name) or action.name.lower() in RESERVED:
        raise UserError(
            f"tools: {entry} has an action named {action.name!r}: it must be letters, digits and underscores,"
            f" and none of {', '.join(RESERVED)}"
        )
    earlier_names = {other.name.lower() for other in earlier}
    if action.name.lower() in earlier_names:
        raise UserError(
            f"tools: {entry} has an action named {action.name!r}, as another entry has; leave one of them out"
            " (tools[].mcp.tools selects the tools of a server)"
        )


def _entry_name(tool: ToolConfig) -> object:
    """Return what names an entry of `tools` in a message: its name, or the server's address or program."""
    if tool.mcp and not tool.name:
        return tool.mcp.url or tool.mcp.command
    return tool.name


def describe_actions(config: Config) -> list[str]:
    """Describe the actions for the terminal.

    Args:
        config: The run's config.

    Returns:
        Lines of text; none if search is the only action.

    Raises:
        UserError: As `make_actions`.
    """
    actions = make_actions(config)
    if not actions:
        return []
    lines = [f"actions ON: {', '.join(action.name for action in actions)}"]
    if config.rollout.protocol == TOOL_CALLS:
        return lines
    template = config.prompt.template
    if template != "paper" and ACTIONS_PLACE not in template:
        lines.append(
            "  the prompt lists none of them: unless the policy knows them, set prompt.template=paper, or put"
            f" {ACTIONS_PLACE} in your template"
        )
    return lines


def check_tags(actions: tuple[Action, ...], tokenizer: Any) -> None:
    """Check that a tokenizer can write the actions' tags; `load_tokenizer` checks the other tags.

    Args:
        actions: As `make_actions` returns them.
        tokenizer: A HuggingFace tokenizer.

    Raises:
        UserError: Encoding and decoding loses a tag.
    """
    for action in actions:
        for tag in (f"<{action.name}>", f"</{action.name}>"):
            if tag not in decode(tokenizer, encode(tokenizer, f"{tag} a")):
                raise UserError(
                    f"tools: the tokenizer cannot write {tag}: encoding and decoding loses it; add it to the"
                    " tokenizer as a token, or choose a tokenizer that can write any text"
                )
