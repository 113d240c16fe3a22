"""The losses by their names in the config, and the user's own."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from calibadv_jax.config import LossConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.own_function import failure, is_address, own_function
from calibadv_jax.learner.losses import looks, terms
from calibadv_jax.learner.losses.tokens import Tokens

EXPECTED = "def my_loss(tokens: Tokens, config: LossConfig) -> tuple[jax.Array, jax.Array]"
RETURNED = "the terms to minimise (float32 [R, L]) and which tokens are clipped (bool [R, L])"


@dataclass(frozen=True)
class Loss:
    """A loss, and what it needs beside the tokens of a microbatch."""

    terms: terms.TokenLoss
    says: str  # what it does, for whoever starts a run
    look: looks.Look | None = None
    asks_logprobs: bool = False  # the look needs those of the current policy: one more forward pass an update
    every_sample: bool = False  # samples without advantage count, too


LOSSES: dict[str, Loss] = {
    "vanilla": Loss(terms.vanilla, "PPO's clipped ratio, token by token"),
    "cispo": Loss(terms.cispo, "REINFORCE weighted by the clipped ratio: clipped tokens keep their gradient"),
    "gspo": Loss(terms.gspo, "PPO with one ratio a trajectory; its widths are of the order of 0.0003"),
    "gmpo": Loss(
        terms.gmpo, "geometric mean of a trajectory's clipped ratios; clip_low and clip_high bound logarithms"
    ),
    "gpg": Loss(terms.gpg, "REINFORCE: no ratio and no clip"),
    "clip_cov": Loss(
        terms.scaled,
        "PPO without a few tokens of large covariance of advantage and log-probability; one more forward"
        " pass an update",
        looks.clip_cov,
        asks_logprobs=True,
        every_sample=True,
    ),
    "kl_cov": Loss(
        terms.kl_cov,
        "no clip; the tokens of largest covariance of advantage and log-probability are held near the policy"
        " that sampled them; one more forward pass an update",
        looks.kl_cov,
        asks_logprobs=True,
        every_sample=True,
    ),
    "lld": Loss(
        terms.lld, "PPO with a penalty on praised tokens that have become less likely", looks.praised
    ),
    "balance": Loss(
        terms.scaled,
        "as the authors published it: tokens with a negative advantage get no gradient, and those with a"
        " positive one are pushed down where loss.balance_ratio is above 1; loss.name=balance_detached does"
        " what was meant",
        looks.balance,
    ),
    "sapo": Loss(terms.sapo, "a smooth gate in place of PPO's clip"),
    "dppo_tv": Loss(
        terms.dppo_tv,
        "REINFORCE weighted by the ratio; a token whose probability has moved by more than clip_low or"
        " clip_high where its advantage pushes it gets no gradient",
    ),
    "dppo_kl": Loss(terms.dppo_kl, "as dppo_tv, with a KL divergence in place of the difference"),
    "dro": Loss(
        terms.dro,
        "REINFORCE without a clip, with a quadratic penalty on the distance from the policy that sampled",
        every_sample=True,
    ),
    "balance_detached": Loss(
        terms.scaled,
        "PPO with the blamed tokens' terms rescaled to balance_ratio times those of the praised ones; one"
        " more forward pass an update",
        looks.balance_detached,
        asks_logprobs=True,
    ),
}


@functools.cache  # one object a loss: programs are compiled for it
def find_loss(name: str) -> Loss:
    """The loss of `loss.name`, which is one of LOSSES or ``package.module:function``.

    Raises:
        UserError: there is no such function, or it has another signature.
    """
    if not is_address(name):
        return LOSSES[name]
    parameters = ("tokens", "config")
    function = own_function(name, "loss.name", parameters, EXPECTED)

    def terms_of(tokens: Tokens, config: LossConfig) -> terms.Terms:
        try:
            return function(tokens, config)
        except Exception as error:  # a function of the user's own may raise anything
            raise UserError(
                f"loss.name is {name}, but calling it raised {failure(error)}; expected: {EXPECTED}"
            ) from error

    return Loss(terms_of, f"your own: {name}", every_sample=True)


def check_loss(config: LossConfig) -> list[str]:
    """What the loss does, in words; nothing for the default one. An own loss is tried on abstract tokens.

    Raises:
        UserError: an own loss cannot be used.
    """
    loss = find_loss(config.name)
    if is_address(config.name):
        _try(loss.terms, config)
    return [] if config.name == "vanilla" else [f"loss {config.name}: {loss.says}"]


def _try(function: terms.TokenLoss, config: LossConfig) -> None:
    shape = 2, 4
    numbers = jax.ShapeDtypeStruct(shape, jnp.float32)
    flags, ids = jax.ShapeDtypeStruct(shape, jnp.bool_), jax.ShapeDtypeStruct(shape, jnp.int32)

    def tried(numbers: jax.Array, flags: jax.Array, ids: jax.Array) -> terms.Terms:
        return function(Tokens(numbers, numbers, numbers, numbers, flags, ids, None), config)

    found = jax.eval_shape(tried, numbers, flags, ids)
    fits = isinstance(found, tuple) and [getattr(one, "shape", None) for one in found] == [shape, shape]
    if not fits or found[0].dtype != jnp.float32 or found[1].dtype != jnp.bool_:
        raise UserError(f"loss.name is {config.name}, but it must return {RETURNED}; expected: {EXPECTED}")
