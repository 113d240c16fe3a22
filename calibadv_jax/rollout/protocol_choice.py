"""The protocol of turns that a config chooses."""

from __future__ import annotations

from calibadv_jax.config.sections.rollout import TAGS
from calibadv_jax.rollout.protocol import ProtocolSettings, TurnProtocol
from calibadv_jax.rollout.tag_protocol import TagProtocol


def make_protocol(settings: ProtocolSettings) -> TurnProtocol:
    """Return the protocol that `rollout.protocol` names.

    Args:
        settings: the settings of the run.

    Raises:
        UserError: if the tokenizer's chat template does not fit the protocol.
    """
    if settings.rollout.protocol == TAGS:
        return TagProtocol(settings)
    from calibadv_jax.rollout.tool_protocol import ToolProtocol

    return ToolProtocol(settings)
