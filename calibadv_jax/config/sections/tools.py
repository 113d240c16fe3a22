"""The actions of the policy."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, refuse_credentials
from calibadv_jax.core.own_function import is_address

OF_RETRIEVER = ("search", "access")
OWN_TOOL = "my_package.my_module:Tool"


@dataclass(frozen=True, config=SECTION)
class McpConfig:
    command: str = ""
    """Program of a server that is started here and speaks MCP on its standard input and output, with its
    arguments, as in a shell."""
    url: str = ""
    """Address of a running server that speaks MCP over HTTP, instead of `command`. If the environment
    variable MCP_TOKEN is set, it is sent as a bearer token."""
    tools: list[str] = Field(default_factory=list)
    """Tools of the server that are on; empty: all of them."""
    timeout: PositiveFloat = 60.0
    """Seconds that one call may take."""
    patience: PositiveFloat = 300.0
    """Seconds for which the server may be away; then the trajectory that asks for it has failed."""

    @model_validator(mode="after")
    def _is_one_server(self) -> McpConfig:
        refuse_credentials("url", self.url, "MCP_TOKEN")
        if bool(self.command.strip()) == bool(self.url):
            raise ValueError("mcp needs a command to start, or the url of a running server: give one of them")
        return self


@dataclass(frozen=True, config=SECTION)
class ToolConfig:
    name: Annotated[str, Field(json_schema_extra={"enum": [*OF_RETRIEVER, OWN_TOOL]})] = ""
    """search: documents for a query; access: one page of the retrieval service, by its address; a module
    and a class with a colon between them: an action of your own, see examples/own_tool.py."""
    mcp: McpConfig | None = None
    """Instead of `name`: a server whose tools become actions."""
    max_length: NonNegativeInt = 0
    """Largest number of tokens of an observation of this action; 0: rollout.max_observation_length."""
    timeout: PositiveFloat = 60.0
    """Seconds that one call of an action of your own may take; then the trajectory has failed."""

    @model_validator(mode="after")
    def _is_known(self) -> ToolConfig:
        if bool(self.name) == bool(self.mcp):
            raise ValueError("give a name, or an mcp server")
        if self.name and self.name not in OF_RETRIEVER and not is_address(self.name):
            raise ValueError(
                f"name is {self.name!r}: must be one of {', '.join(OF_RETRIEVER)}, or a class of your own as"
                f" {OWN_TOOL}"
            )
        return self


def tool_of(entry: Any) -> Any:
    """An entry of the list as a section: a text is its name."""
    return {"name": entry} if isinstance(entry, str) else entry
