"""The actions of a run, from its config; each is made once in a process."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from pathlib import Path
from typing import Any

from calibadv_jax.config import Config, McpConfig, ToolConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import Action
from calibadv_jax.core.tags import NAME, RESERVED
from calibadv_jax.core.user_functions import failure, import_user_function, load_optional
from calibadv_jax.rollout.actions import AccessAction, OwnAction, SearchAction
from calibadv_jax.rollout.observation import decode, encode
from calibadv_jax.rollout.prompts import ACTIONS

DEFAULT = [ToolConfig("search")]
LOG = "mcp.log"  # in the run's folder: what the programs of MCP servers write to standard error
EXPECTED = "a class that is called without arguments, as in examples/own_tool.py"


def make_actions(config: Config) -> tuple[Action, ...]:
    """Return the actions in the order of the config; none for search alone.

    MCP servers are asked for their tools at the first call. Raises UserError if an action cannot be made, or
    two have the same name.
    """
    if config.tools == DEFAULT:
        return ()
    tools = json.dumps([dataclasses.asdict(tool) for tool in config.tools])
    actions = _made(tools, Path(config.run.dir) / LOG)
    if isinstance(actions, UserError):
        raise actions
    return actions


@functools.cache
def _made(tools: str, log: Path) -> tuple[Action, ...] | UserError:
    """Return the actions, or the error: a server that does not answer is waited for once."""
    actions: list[Action] = []
    try:
        for values in json.loads(tools):
            mcp = values.pop("mcp")
            tool = ToolConfig(**values, mcp=mcp and McpConfig(**mcp))
            tool_actions = [] if tool.mcp else [_named_action(tool)]
            if tool.mcp:
                tool_actions = load_optional("mcp_tools").mcp_actions(tool.mcp, tool.max_length, log)
            for action in tool_actions:
                _check(action, tool, actions)
                actions.append(action)
    except UserError as error:
        return error
    return tuple(actions)


def _named_action(tool: ToolConfig) -> Action:
    built_in = {"search": SearchAction, "access": AccessAction}
    if tool.name in built_in:
        return built_in[tool.name](max_length=tool.max_length)
    try:
        action = import_user_function(tool.name, "tools", (), EXPECTED)()
    except UserError:
        raise
    except Exception as error:  # a class of the user's own may raise anything
        raise UserError(f"tools: making {tool.name} failed: {failure(error)}; correct it") from error
    if not isinstance(action, Action) or not inspect.iscoroutinefunction(action.call):
        kind = "a subclass of calibadv_jax.Action with `async def call`, as in examples/own_tool.py"
        raise UserError(f"tools: {tool.name} must give an object of {kind}")
    for text in ("name", "purpose"):
        if not isinstance(getattr(action, text, None), str):
            raise UserError(f"tools: {tool.name} has no text {text!r}; see examples/own_tool.py")
    return OwnAction(action, tool.timeout, tool.max_length)


def _check(action: Action, tool: ToolConfig, earlier: list[Action]) -> None:
    where = tool.name or (tool.mcp and (tool.mcp.url or tool.mcp.command))
    named = f"tools: {where} has an action named {action.name!r}"
    if not NAME.fullmatch(action.name) or action.name.lower() in RESERVED:
        rule = f"letters, digits and underscores, and none of {', '.join(RESERVED)}"
        raise UserError(f"{named}: it must be {rule}")
    if any(action.name.lower() == other.name.lower() for other in earlier):
        hint = "of a server's tools: tools[].mcp.tools names those that are on"
        raise UserError(f"{named}, as another entry has; leave one of them out ({hint})")


def describe_actions(config: Config) -> list[str]:
    """Return lines for the terminal; none where search alone is on. Raises as `make_actions`."""
    actions = make_actions(config)
    if not actions:
        return []
    lines = [f"actions ON: {', '.join(action.name for action in actions)}"]
    template = config.prompt.template
    if template != "paper" and ACTIONS not in template:
        advice = f"unless the policy knows them, set prompt.template=paper, or put {ACTIONS} in your template"
        lines.append(f"  the prompt lists none of them: {advice}")
    return lines


def check_tags(actions: tuple[Action, ...], tokenizer: Any) -> None:
    """Refuse (UserError) a tokenizer that loses the actions' tags; `load_tokenizer` checks the protocol's."""
    for action in actions:
        for tag in (f"<{action.name}>", f"</{action.name}>"):
            if tag not in decode(tokenizer, encode(tokenizer, f"{tag} a")):
                fault = f"the tokenizer cannot write {tag}: encoding and decoding loses it"
                advice = "add it to the tokenizer as a token, or choose a tokenizer that can write any text"
                raise UserError(f"tools: {fault}; {advice}")
