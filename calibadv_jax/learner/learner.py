"""The train state and its update: gradients of microbatches are summed, and the sum is applied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh

from calibadv_jax.config import Config, OptimizerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import Batch, abstract_batch, microbatches, rows_at
from calibadv_jax.learner.losses import LossFunction, Metrics
from calibadv_jax.learner.optimizer import SplitStep, make_optimizer
from calibadv_jax.policy.adapters import merge_params
from calibadv_jax.policy.attention import SHARING, keys_computed
from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.sharding import (
    batch_sharding,
    param_shardings,
    placed_params,
    replicated,
    with_shardings,
)
from calibadv_jax.policy.transformer import Decoder, Params, Policy
from calibadv_jax.policy.weights import flatten, unflatten

State = dict[str, Any]  # {"params", "opt_state", "updates": int32 []}; as in a checkpoint
HOST = "pinned_host"  # JAX's name of host memory from which devices copy


@dataclass(frozen=True)
class LearnerOptions:
    rows: int  # packed rows of one microbatch; a multiple of data x fsdp devices
    temperature: float = 1.0  # of the sampler; the learner's logits are divided by it, too
    logprob_chunk: int = 1024  # tokens of each of `rows` rows whose logits exist at once
    pack_length: int = 0  # of the widest rows; a microbatch has more of narrower ones. 0: `rows` of any width
    entropy_gradient: bool = True  # False: the entropy is no term of the loss, only reported
    offload: bool = False  # the optimizer's moments lie in host memory between the updates
    shares_prefixes: bool = False  # samples share computed tokens, see `batching.PrefixSharedRows`
    rows_key: str = "learner.microbatch_rows"  # the config key of `rows`, for messages

    @classmethod
    def from_config(cls, config: Config, optimizer: OptimizerConfig) -> LearnerOptions:
        """Return the options of a run's training steps with the policy's or the critic's optimizer."""
        return cls(
            config.learner.microbatch_rows,
            config.rollout.temperature or 1.0,
            config.policy.logprob_chunk,
            config.learner.pack_length,
            entropy_gradient=config.loss.entropy_coef != 0,
            offload=optimizer.offload == "host",
            shares_prefixes=config.learner.share_prefixes,
        )

    def check(self, policy: Policy, mesh: Mesh) -> None:
        """Raise UserError if the devices cannot divide the rows, or the kernel cannot share tokens."""
        if self.rows % (shards := mesh.shape["data"] * mesh.shape["fsdp"]):
            raise UserError(
                f"{self.rows_key} is {self.rows}, but must be a multiple of mesh.data x mesh.fsdp = {shards}"
                f" devices: set it to {-(-self.rows // shards) * shards}"
            )
        if self.shares_prefixes and policy.numerics.kernel not in SHARING:
            raise UserError(
                f"learner.share_prefixes is true, but policy.attention is {policy.numerics.kernel}, which"
                f" cannot share tokens: set it to {' or '.join(SHARING)}, or learner.share_prefixes=false"
            )


class Learner:
    """Owns the compiled functions; the state is passed to its methods and donated by `update`.

    The state holds the trained parameters. The frozen ones of a policy with adapters are `base` (from `init`;
    else empty), which is never donated: samplers may share it. `abstract_state` has the ShapeDtypeStructs of
    the state, with shardings, for restoring a checkpoint. Raises UserError as `LearnerOptions.check`.
    """

    metrics_of = "actor"  # prefix of its metrics

    def __init__(
        self, policy: Policy, optimizer: optax.GradientTransformation, mesh: Mesh, options: LearnerOptions
    ):
        options.check(policy, mesh)
        self.policy, self.optimizer, self.mesh, self.options = policy, optimizer, mesh, options
        self.base: Params = {}
        abstract = jax.eval_shape(self._state_of, policy.abstract_trained)
        self._state_shardings = self._shardings(abstract, options.offload)
        self.abstract_state = with_shardings(abstract, self._state_shardings)
        self._abstract_base = placed_params(policy.split(policy.abstract_params)[0], mesh)
        self._abstract_gradients = placed_params(policy.abstract_trained, mesh, jnp.float32)
        self._placed = param_shardings(policy.abstract_trained, mesh)
        self._accumulate: dict[LossFunction, jax.stages.Wrapped] = {}
        self._apply: SplitStep | jax.stages.Wrapped
        if options.offload:
            placed = jax.tree.leaves(self._shardings(abstract, offload=False))
            owners = jax.tree.leaves(self._owners(abstract))
            self._apply = SplitStep(self._applied, self.abstract_state, placed, owners)
        else:
            shardings = self._state_shardings, None
            self._apply = jax.jit(self._applied, donate_argnums=0, out_shardings=shardings)
        zeros = functools.partial(optax.tree.zeros_like, policy.abstract_trained, jnp.float32)
        self._zeros = jax.jit(zeros, out_shardings=self._placed)
        self._is_shared = jax.process_count() > 1  # not the mesh's: it may be a topology's
        # Every process holds all of the values that it reads.
        whole = replicated(mesh) if self._is_shared else None
        self._logprobs = jax.jit(lambda *arguments: self._values(*arguments)[0], out_shardings=whole)
        self._norm = jax.jit(optax.tree.norm)
        self._pass: tuple[list[Any], int] = [], 0  # in progress: results of microbatches, and their number

    def init(self, params: Params) -> State:
        """Return the first state. `params` must be in their shardings; the trained ones are donated."""
        self.base, trained = self.policy.split(params)
        return jax.jit(self._state_of, out_shardings=self._state_shardings, donate_argnums=0)(trained)

    def whole(self, params: Params) -> Params:
        """Join the base and these parameters; no array is copied."""
        return merge_params(self.base, params)

    def update(
        self, state: State, batches: Sequence[Batch], loss: LossFunction, reference: Params | None = None
    ) -> tuple[State, dict[str, float]]:
        """Update once, over all rows of packed batches [R, L], each with an L of its own.

        A non-finite gradient leaves the state unchanged and is reported as ``skipped`` = 1. Without
        batches the gradient is 0, and the loss and its terms are omitted.

        Args:
            loss: from `losses`; the same object must be passed every time (one compilation each).
            reference: parameters of the KL term's policy; {} is the base without adapters. None: no term.
        """
        if loss not in self._accumulate:
            self._accumulate[loss] = self._compile(loss)
        parts: list[Metrics] = []
        with jax.set_mesh(self.mesh):
            gradients = self._zeros()
            accumulate = self._accumulate[loss]
            for microbatch in self._microbatches(batches, parts):
                gradients, metrics = accumulate(self.base, state, gradients, microbatch, reference)
                parts.append(metrics)
            state, applied = self._apply(state, gradients)
        sums, applied = jax.device_get((parts, applied))
        self._pass = [], 0
        totals = {name: float(sum(part[name] for part in sums)) for name in sums[0]} if sums else {}
        return state, totals | {name: float(value) for name, value in applied.items()}

    def is_finite(self, params: Params) -> bool:
        with jax.set_mesh(self.mesh):
            return bool(np.isfinite(jax.device_get(self._norm(params))))

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray:
        """Return the log-probabilities of the targets of packed rows: float32 [R, L]."""
        parts: list[Array] = []
        with jax.set_mesh(self.mesh):
            for microbatch in self._microbatches([batch], parts):
                parts.append(self._logprobs(self.base, params, microbatch))
        values = np.concatenate(jax.device_get(parts))[: batch.tokens.shape[0]]
        self._pass = [], 0
        return values

    def microbatches(self) -> tuple[int, int]:
        """Return how many microbatches of the pass in progress are computed, and of how many; never wait."""
        parts, total = self._pass
        return sum(jax.tree.leaves(part)[0].is_ready() for part in parts), total

    def position_cost(self, length: int) -> float:
        """Return a forward pass' floating-point operations for a position of a row of `length` tokens."""
        numerics = self.policy.numerics
        seen = keys_computed(numerics.kernel, length, numerics.attention_chunk)
        return self.policy.architecture.flops_per_token(seen)

    def lower_update(self, length: int, loss: LossFunction) -> jax.stages.Lowered:
        """Lower a microbatch's gradient, with all that lies on the devices, which may be a topology's."""
        with jax.set_mesh(self.mesh):
            arguments = self._abstract_base, self.abstract_state, self._abstract_gradients
            return self._compile(loss).lower(*arguments, self._abstract_microbatch(length), None)

    def lower_apply(self) -> jax.stages.Lowered:
        """Lower the optimizer's step with a sum of gradients, as `lower_update`."""
        with jax.set_mesh(self.mesh):
            return self._apply.lower(self.abstract_state, self._abstract_gradients)

    def lower_logprobs(self, length: int) -> jax.stages.Lowered:
        """Lower the log-probabilities of one microbatch, as `lower_update`."""
        with jax.set_mesh(self.mesh):
            params, microbatch = self.abstract_state["params"], self._abstract_microbatch(length)
            return self._logprobs.lower(self._abstract_base, params, microbatch)

    def _abstract_microbatch(self, length: int) -> Batch:
        shape = self._rows_at(length), length
        return abstract_batch(shape, batch_sharding(self.mesh), self.options.shares_prefixes)

    def _microbatches(self, batches: Sequence[Batch], parts: list[Any]) -> Iterator[Batch]:
        """Yield every microbatch, on the devices; `parts` takes their results."""
        self._pass = parts, sum(-(-len(b.tokens) // self._rows_at(b.tokens.shape[1])) for b in batches)
        for batch in batches:
            for microbatch in microbatches(batch, self._rows_at(batch.tokens.shape[1])):
                yield self._put(microbatch)

    def _rows_at(self, length: int) -> int:
        return rows_at(length, self.options.rows, self.options.pack_length)

    def _put(self, microbatch: Batch) -> Batch:
        """Place a microbatch; every process has all of it, and puts its own rows."""
        rows = batch_sharding(self.mesh)
        if not self._is_shared:
            return jax.device_put(microbatch, rows)
        put = jax.make_array_from_process_local_data
        return jax.tree.map(lambda array: put(rows, array, array.shape), microbatch)

    def _compile(self, loss: LossFunction) -> jax.stages.Wrapped:
        def objective(
            params: Params, base: Params, microbatch: Batch, reference: Params | None
        ) -> tuple[Array, Metrics]:
            trained = microbatch.weights != 0  # most columns hold documents, and the head is costly
            logprobs, entropies = self._values(base, params, microbatch, trained)
            reference_logprobs = None
            if reference is not None:
                reference_logprobs = self._values(base, reference, microbatch, trained)[0]
            total, metrics = loss(logprobs, entropies, microbatch, reference_logprobs)
            return total, metrics | {f"{self.metrics_of}/loss": total}

        def accumulate(
            base: Params, state: State, gradients: Params, microbatch: Batch, reference: Params | None
        ) -> tuple[Params, Metrics]:
            more, metrics = jax.grad(objective, has_aux=True)(state["params"], base, microbatch, reference)
            return jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, more), metrics

        # Unused arguments stay, so that the compiler's plan of the memory counts the optimizer's state.
        return jax.jit(accumulate, donate_argnums=2, keep_unused=True, out_shardings=(self._placed, None))

    def _applied(self, state: State, gradients: Params) -> tuple[State, Metrics]:
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        changes, opt_state = self.optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], changes)
        new = {"params": params, "opt_state": opt_state, "updates": state["updates"] + 1}
        new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
        return new, {f"{self.metrics_of}/grad_norm": norm, f"{self.metrics_of}/skipped": 1.0 - finite}

    def _values(
        self, base: Params, params: Params, microbatch: Batch, used: Array | None = None
    ) -> tuple[Array, Array]:
        """Return log-probabilities and entropies, float32 [R, L]; arbitrary outside the `used` columns."""
        decoder, options = self.policy.merge(merge_params(base, params)), self.options
        # More rows: as many logits at once.
        chunk = max(1, options.logprob_chunk * options.rows // len(microbatch.tokens))
        hidden, targets = target_hidden_states(decoder, microbatch), microbatch.targets
        return token_logprobs(
            decoder, hidden, targets, options.temperature, chunk, options.entropy_gradient, used
        )

    def _state_of(self, params: Params) -> State:
        updates = jnp.zeros((), jnp.int32)
        return {"params": params, "opt_state": self.optimizer.init(params), "updates": updates}

    def _shardings(self, state: State, offload: bool) -> State:
        """Place moments with their parameter, or in host memory near it."""
        placed = flatten(param_shardings(self.policy.abstract_trained, self.mesh))
        moments = dict(placed)
        if offload:
            moments = {path: sharding.with_memory_kind(HOST) for path, sharding in placed.items()}
        placed[""] = moments[""] = replicated(self.mesh)
        return {
            part: jax.tree.map((moments if part == "opt_state" else placed).__getitem__, names)
            for part, names in self._owners(state).items()
        }

    def _owners(self, state: State) -> State:
        """Return the parameter that each leaf of the state belongs to; "" for leaves that all share."""
        paths = unflatten({path: path for path in flatten(self.policy.abstract_trained)})
        moments = optax.tree.map_params(
            self.optimizer,
            lambda leaf, path: leaf if _is_masked(leaf) else path,
            state["opt_state"],
            paths,
            transform_non_params=lambda leaf: "",
            is_leaf=_is_masked,
        )
        return {"params": paths, "opt_state": moments, "updates": ""}


def target_hidden_states(decoder: Decoder, batch: Batch) -> Array:
    """Return the state that predicts the target of each column, [R, L, D]."""
    hidden = decoder(batch.tokens, batch.positions, batch.segment_ids, batch.ends)
    return hidden if batch.sources is None else jnp.take_along_axis(hidden, batch.sources[..., None], axis=1)


def _is_masked(leaf: Any) -> bool:
    return isinstance(leaf, optax.MaskedNode)  # this part of the optimizer leaves it to another part


def init_params(policy: Policy, mesh: Mesh, seed: int, only_trained: bool = False) -> Params:
    with jax.set_mesh(mesh):
        return _initializer(policy, mesh, only_trained)(jax.random.key(seed))


@functools.lru_cache(maxsize=4)  # a policy and the reference of its KL term are drawn by one program
def _initializer(policy: Policy, mesh: Mesh, only_trained: bool) -> Callable[[Array], Params]:
    if only_trained:
        trained = param_shardings(policy.abstract_trained, mesh)
        return jax.jit(lambda key: policy.split(policy.init(key))[1], out_shardings=trained)
    return jax.jit(policy.init, out_shardings=param_shardings(policy.abstract_params, mesh))


def policy_learner(config: Config, policy: Policy, mesh: Mesh, schedule: optax.Schedule) -> Learner:
    """Return the learner of a run's training steps; UserError as `LearnerOptions.check`."""
    options = LearnerOptions.from_config(config, config.learner.optimizer)
    return Learner(policy, make_optimizer(config.learner.optimizer, schedule), mesh, options)
