"""The protocol of a run's turns, from its config."""

from __future__ import annotations

from typing import Any

from calibadv_jax.config import Config
from calibadv_jax.rollout.protocol import ProtocolSettings, TurnProtocol
from calibadv_jax.rollout.protocol_choice import make_protocol
from calibadv_jax.run.configured_actions import make_actions


def configured_protocol(config: Config, tokenizer: Any) -> TurnProtocol:
    """Return the protocol of a run.

    Args:
        config: The run's config.
        tokenizer: The policy's tokenizer.

    Raises:
        UserError: An action cannot be made, or the chat template does not fit the protocol.
    """
    actions = make_actions(config)
    return make_protocol(
        ProtocolSettings(
            tokenizer, config.rollout, config.prompt, actions, config.tool_calls, config.answer_from
        )
    )
