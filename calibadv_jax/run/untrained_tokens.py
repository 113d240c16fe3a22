"""Tokens that a policy has to write, and that nobody ever trained.

A model may have control tokens for tool calls without having seen one: those of
Qwen2.5-Coder-0.5B-Instruct have the embeddings of thousands of ids that no text contains. Such a token has
the logit of all these ids in every context. Adapters leave the output head as it is, so that they cannot
teach the policy to prefer it.
"""

from __future__ import annotations

import numpy as np

from calibadv_jax.config import Config
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.configured_protocol import configured_protocol
from calibadv_jax.run.model import Model, find_folder
from calibadv_jax.snapshots.huggingface import read_head_rows

# A token is untrained if the cosine of its row of the output head and the mean of the unused rows is larger.
# In Qwen2.5-Coder-0.5B-Instruct it is 1.0000 for "<tool_call>" and 0.88 for "<|im_end|>", which was trained;
# after 20 updates of all parameters with calls it is 0.9895, and the policy writes "<tool_call>".
SAME_DIRECTION = 0.998
MOST_UNUSED = 256  # rows that are read: every one costs a read of its own


def untrained_tokens(config: Config, model: Model, path: str) -> list[str]:
    """Return the protocol's control tokens that a policy cannot tell from tokens without a use.

    They are recognised by the rows of ids beyond the tokenizer's, which models have so that their vocabulary
    is a round number. Nothing is found where there are no such ids, or where their rows were drawn at random.

    Args:
        config: The run's config.
        model: The run's model.
        path: HuggingFace folder or repository of the weights; empty for random ones.

    Returns:
        The tokens, in the order of their ids.

    Raises:
        UserError: The weights are missing, damaged or of another policy, or the protocol does not fit.
    """
    first_unused = max(model.tokenizer.get_vocab().values()) + 1
    last_unused = min(model.policy.architecture.vocab_size, first_unused + MOST_UNUSED)
    unused = range(first_unused, last_unused)
    ids = sorted(configured_protocol(config, model.tokenizer).control_ids)
    if not (path and ids and unused):
        return []
    folder, _ = find_folder(config, path, with_weights=True, resolved=model.pins)
    rows = read_head_rows(folder, model.policy, [*ids, *unused])  # [tokens + unused ids, D]
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    directions = rows / np.maximum(norms, np.finfo(np.float32).tiny)
    cosines = directions[: len(ids)] @ directions[len(ids) :].mean(axis=0)  # [tokens]
    untrained = [token for token, cosine in zip(ids, cosines, strict=True) if cosine > SAME_DIRECTION]
    return model.tokenizer.convert_ids_to_tokens(untrained)


def check_control_tokens(config: Config, model: Model, path: str) -> None:
    """Refuse adapters where the protocol needs a token that they cannot teach.

    Args:
        config: The run's config.
        model: The run's model.
        path: HuggingFace folder or repository of the weights that adapters would be trained on.

    Raises:
        UserError: There is such a token, or as `untrained_tokens`.
    """
    if not config.policy.lora.rank:
        return
    tokens = untrained_tokens(config, model, path)
    if tokens:
        raise UserError(f"{path}: {untrained_text(tokens)}")


def untrained_text(tokens: list[str]) -> str:
    """Return what untrained tokens mean for a run, and the ways out.

    Args:
        tokens: At least one.
    """
    return (
        f"{', '.join(tokens)}: never trained, since the output head has the same row for ids without a token;"
        " adapters (policy.lora) cannot teach the policy to write this. Give the tokens rows of their own"
        " (calibadv init-tokens), train all parameters in the cold start (policy.lora.rank=0), or use"
        " rollout.protocol=tags"
    )
