"""The encoder of demonstrations that a config's protocol chooses."""

from __future__ import annotations

from typing import Any

from calibadv_jax.commands.demonstration_tokens import DemonstrationEncoder, TagEncoder
from calibadv_jax.config import Config
from calibadv_jax.rollout.tag_protocol import TagProtocol
from calibadv_jax.run.configured_protocol import configured_protocol


def make_encoder(config: Config, tokenizer: Any) -> DemonstrationEncoder:
    """Return what writes demonstrations for the protocol of a config.

    Args:
        config: The config.
        tokenizer: The policy's tokenizer.

    Raises:
        UserError: An action cannot be made, or the chat template does not fit the protocol.
    """
    protocol = configured_protocol(config, tokenizer)
    if isinstance(protocol, TagProtocol):
        return TagEncoder(config, protocol)
    from calibadv_jax.commands.tool_demonstration_tokens import ToolEncoder

    return ToolEncoder(config, protocol)
