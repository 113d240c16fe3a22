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
from jax.sharding import Mesh, NamedSharding

from calibadv_jax.config import Config, OptimizerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.batching import Batch, abstract_batch, microbatches, rows_at
from calibadv_jax.learner.objective import LossFunction, Metrics
from calibadv_jax.learner.optimizer import SplitStep, make_optimizer
from calibadv_jax.policy.adapters import merge_params
from calibadv_jax.policy.attention import PREFIX_SHARING_KERNELS, keys_computed
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

# {"params": trained parameters, "opt_state": the optimizer's, "updates": int32 []}, as in a checkpoint.
State = dict[str, Any]
HOST = "pinned_host"  # JAX's name of host memory that devices copy from
SHARED_LEAF = ""  # Owner of a leaf of the state that belongs to no single parameter.


@dataclass(frozen=True)
class LearnerOptions:
    """How a learner computes.

    Attributes:
        rows: packed rows of one microbatch; a multiple of the data x fsdp devices.
        temperature: of the sampler; the learner's logits are divided by it, too.
        logprob_chunk: tokens of a row whose logits exist at once in a microbatch of `rows` rows. It is
            smaller in a microbatch of more rows, so that as many logits exist.
        pack_length: tokens of the widest rows; a microbatch has more of narrower rows. 0: a microbatch has
            `rows` rows of any width.
        entropy_gradient: False: the entropy is only reported, and is no term of the loss.
        offload: whether the optimizer's moments are in host memory between the updates.
        shares_prefixes: whether samples share computed tokens (`prefix_sharing.PrefixSharedRows`).
        rows_key: the config key of `rows`, for messages.
    """

    rows: int
    temperature: float = 1.0
    logprob_chunk: int = 1024
    pack_length: int = 0
    entropy_gradient: bool = True
    offload: bool = False
    shares_prefixes: bool = False
    rows_key: str = "learner.microbatch_rows"

    @classmethod
    def from_config(cls, config: Config, optimizer: OptimizerConfig) -> LearnerOptions:
        """Return the options of a run's training steps.

        Args:
            config: of the run.
            optimizer: the policy's or the critic's.

        Returns:
            The options. A temperature of 0 (greedy sampling) becomes 1.
        """
        return cls(
            rows=config.learner.microbatch_rows,
            temperature=config.rollout.temperature or 1.0,
            logprob_chunk=config.policy.logprob_chunk,
            pack_length=config.learner.pack_length,
            entropy_gradient=config.loss.entropy_coef != 0,
            offload=optimizer.offload == "host",
            shares_prefixes=config.learner.share_prefixes,
        )

    def check(self, policy: Policy, mesh: Mesh) -> None:
        """Check that these options fit a policy and a mesh.

        Args:
            policy: its attention kernel is checked.
            mesh: its axes data and fsdp are checked.

        Raises:
            UserError: if the devices do not divide the rows, or the kernel cannot share tokens.
        """
        row_shards = mesh.shape["data"] * mesh.shape["fsdp"]
        if self.rows % row_shards:
            next_multiple = -(-self.rows // row_shards) * row_shards
            raise UserError(
                f"{self.rows_key} is {self.rows}, but must be a multiple of mesh.data x mesh.fsdp ="
                f" {row_shards} devices: set it to {next_multiple}"
            )
        kernel = policy.numerics.kernel
        if self.shares_prefixes and kernel not in PREFIX_SHARING_KERNELS:
            raise UserError(
                f"learner.share_prefixes is true, but policy.attention is {kernel}, which"
                f" cannot share tokens: set it to {' or '.join(PREFIX_SHARING_KERNELS)}, or"
                " learner.share_prefixes=false"
            )


class Learner:
    """Owns the compiled functions; the state is passed to its methods, and donated by `update`.

    The state holds the trained parameters.

    Args:
        policy: the decoder.
        optimizer: applied to the sum of gradients.
        mesh: the devices.
        options: how it computes.

    Attributes:
        base: frozen parameters of a policy with adapters, from `init`; else empty. They are never donated, so
            that samplers may share them.
        abstract_state: ShapeDtypeStructs of the state, with shardings, for restoring a checkpoint.

    Raises:
        UserError: as `LearnerOptions.check`.
    """

    metrics_prefix = "actor"

    def __init__(
        self,
        policy: Policy,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        options: LearnerOptions,
    ):
        options.check(policy, mesh)
        self.policy = policy
        self.optimizer = optimizer
        self.mesh = mesh
        self.options = options
        self.base: Params = {}
        abstract = jax.eval_shape(self._initial_state, policy.abstract_trained)
        self._state_shardings = self._shardings(abstract, options.offload)
        self.abstract_state = with_shardings(abstract, self._state_shardings)
        frozen, _ = policy.split(policy.abstract_params)
        self._abstract_base = placed_params(frozen, mesh)
        self._abstract_gradients = placed_params(policy.abstract_trained, mesh, jnp.float32)
        self._gradient_shardings = param_shardings(policy.abstract_trained, mesh)
        self._accumulate: dict[LossFunction, jax.stages.Wrapped] = {}
        self._apply = self._compile_apply(abstract)
        zeros = functools.partial(optax.tree.zeros_like, policy.abstract_trained, jnp.float32)
        self._zeros = jax.jit(zeros, out_shardings=self._gradient_shardings)
        # By the number of processes and not by the mesh, which may be a topology without devices.
        self._has_many_processes = jax.process_count() > 1
        self._logprobs = self._compile_logprobs()
        self._norm = jax.jit(optax.tree.norm)
        # The pass in progress: results of its microbatches so far, and the number of its microbatches.
        self._pass: tuple[list[Any], int] = ([], 0)

    # --- Training ---

    def init(self, params: Params) -> State:
        """Return the first state, and keep the frozen parameters as `base`.

        Args:
            params: all parameters of the policy, in their shardings. The trained ones are donated.

        Returns:
            Trained parameters, the optimizer's first state, and 0 updates.
        """
        self.base, trained = self.policy.split(params)
        initialise = jax.jit(self._initial_state, out_shardings=self._state_shardings, donate_argnums=0)
        return initialise(trained)

    def with_base(self, params: Params) -> Params:
        """Return all parameters, given the trained ones.

        Args:
            params: trained parameters, nested.

        Returns:
            The parameters together with `base`, nested; no array is copied.
        """
        return merge_params(self.base, params)

    def update(
        self,
        state: State,
        batches: Sequence[Batch],
        loss: LossFunction,
        reference: Params | None = None,
    ) -> tuple[State, dict[str, float]]:
        """Update the parameters once, by all rows of packed batches.

        Args:
            state: from `init`, an earlier update or a checkpoint; donated.
            batches: packed rows [R, L], each batch with an L of its own. Without batches the gradient is 0.
            loss: from `objective`. Pass the same object every time, since each is compiled once.
            reference: parameters of the KL term's policy; {}: the base without adapters. None: no term.

        Returns:
            The new state, and metrics: sums over the microbatches, the gradient's norm, and ``skipped``. With
            a non-finite gradient the state is unchanged and ``skipped`` is 1. Without batches the loss and
            its terms are omitted. The names of loss, norm and ``skipped`` begin with `metrics_prefix` and a
            slash.
        """
        if loss not in self._accumulate:
            self._accumulate[loss] = self._compile_accumulate(loss)
        accumulate = self._accumulate[loss]
        microbatch_metrics: list[Metrics] = []
        with jax.set_mesh(self.mesh):
            gradients = self._zeros()
            for microbatch in self._microbatches(batches, microbatch_metrics):
                gradients, metrics = accumulate(self.base, state, gradients, microbatch, reference)
                microbatch_metrics.append(metrics)
            state, step_metrics = self._apply(state, gradients)
        summands, step_values = jax.device_get((microbatch_metrics, step_metrics))
        self._pass = ([], 0)
        totals: dict[str, float] = {}
        if summands:
            for name in summands[0]:
                totals[name] = float(sum(values[name] for values in summands))
        for name, value in step_values.items():
            totals[name] = float(value)
        return state, totals

    def is_finite(self, params: Params) -> bool:
        """Return whether no parameter is NaN or infinite.

        Args:
            params: nested parameters on the mesh.

        Returns:
            True if the global norm of the parameters is finite.
        """
        with jax.set_mesh(self.mesh):
            return bool(np.isfinite(jax.device_get(self._norm(params))))

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray:
        """Return the log-probabilities of the targets of packed rows.

        Args:
            params: trained parameters.
            batch: packed rows [R, L].

        Returns:
            Nats, float32 [R, L].
        """
        results: list[Array] = []
        with jax.set_mesh(self.mesh):
            for microbatch in self._microbatches([batch], results):
                results.append(self._logprobs(self.base, params, microbatch))
        num_rows = batch.tokens.shape[0]
        values = np.concatenate(jax.device_get(results))[:num_rows]
        self._pass = ([], 0)
        return values

    def microbatches(self) -> tuple[int, int]:
        """Return the progress of the current pass over microbatches, without waiting for it.

        Returns:
            Number of microbatches that are computed, and number of all microbatches of the pass; (0, 0)
            between passes.
        """
        results, total = self._pass
        num_computed = sum(jax.tree.leaves(result)[0].is_ready() for result in results)
        return num_computed, total

    def position_cost(self, length: int) -> float:
        """Return a forward pass' floating-point operations for one column of a row.

        Args:
            length: columns of the row.

        Returns:
            The number of operations, as `Architecture.flops_per_token`.
        """
        numerics = self.policy.numerics
        num_keys = keys_computed(numerics.kernel, length, numerics.attention_chunk)
        return self.policy.architecture.flops_per_token(num_keys)

    # --- Programs, lowered without data ---

    def lower_update(self, length: int, loss: LossFunction) -> jax.stages.Lowered:
        """Lower the gradient of a microbatch, with everything that is on the devices meanwhile.

        Args:
            length: columns of a row.
            loss: from `objective`.

        Returns:
            The program; the devices may be those of a topology.
        """
        with jax.set_mesh(self.mesh):
            return self._compile_accumulate(loss).lower(
                self._abstract_base,
                self.abstract_state,
                self._abstract_gradients,
                self._abstract_microbatch(length),
                None,
            )

    def lower_apply(self) -> jax.stages.Lowered:
        """Lower the optimizer's step with a sum of gradients.

        Returns:
            The program, as `lower_update`; with moments in host memory the largest one, as `SplitStep.lower`.
        """
        with jax.set_mesh(self.mesh):
            return self._apply.lower(self.abstract_state, self._abstract_gradients)

    def lower_logprobs(self, length: int) -> jax.stages.Lowered:
        """Lower the log-probabilities of one microbatch.

        Args:
            length: columns of a row.

        Returns:
            The program, as `lower_update`.
        """
        with jax.set_mesh(self.mesh):
            params = self.abstract_state["params"]
            return self._logprobs.lower(self._abstract_base, params, self._abstract_microbatch(length))

    # --- Microbatches ---

    def _abstract_microbatch(self, length: int) -> Batch:
        shape = (self._rows_at(length), length)
        return abstract_batch(shape, batch_sharding(self.mesh), self.options.shares_prefixes)

    def _microbatches(self, batches: Sequence[Batch], results: list[Any]) -> Iterator[Batch]:
        """Yield every microbatch on the devices, and count them for `microbatches`.

        Args:
            batches: packed rows.
            results: the caller appends the result of each microbatch.
        """
        total = 0
        for batch in batches:
            num_rows, length = batch.tokens.shape
            total += -(-num_rows // self._rows_at(length))
        self._pass = (results, total)
        for batch in batches:
            length = batch.tokens.shape[1]
            for microbatch in microbatches(batch, self._rows_at(length)):
                yield self._put(microbatch)

    def _rows_at(self, length: int) -> int:
        return rows_at(length, self.options.rows, self.options.pack_length)

    def _put(self, microbatch: Batch) -> Batch:
        """Place a microbatch on the devices. Every process has all of it, and puts its own rows."""
        sharding = batch_sharding(self.mesh)
        if not self._has_many_processes:
            return jax.device_put(microbatch, sharding)

        def put_own_rows(array: np.ndarray) -> Array:
            """Put the rows of an array [R, L] that belong to this process on its devices."""
            return jax.make_array_from_process_local_data(sharding, array, array.shape)

        return jax.tree.map(put_own_rows, microbatch)

    # --- Compiled functions ---

    def _compile_accumulate(self, loss: LossFunction) -> jax.stages.Wrapped:
        """Return the jitted function that adds the gradient of a microbatch."""

        def objective(
            params: Params, base: Params, microbatch: Batch, reference: Params | None
        ) -> tuple[Array, Metrics]:
            """Return the loss of a microbatch and its metrics."""
            # Most columns hold documents, and the output head is costly: others are not computed.
            is_used = microbatch.weights != 0
            logprobs, entropies = self._values(base, params, microbatch, is_used)
            reference_logprobs = None
            if reference is not None:
                reference_logprobs, _ = self._values(base, reference, microbatch, is_used)
            total, metrics = loss(logprobs, entropies, microbatch, reference_logprobs)
            return total, metrics | {f"{self.metrics_prefix}/loss": total}

        def accumulate(
            base: Params,
            state: State,
            gradients: Params,
            microbatch: Batch,
            reference: Params | None,
        ) -> tuple[Params, Metrics]:
            """Return the sum of gradients with that of a microbatch, and its metrics."""
            gradient = jax.grad(objective, has_aux=True)
            change, metrics = gradient(state["params"], base, microbatch, reference)

            def add(total: Array, part: Array) -> Array:
                """Add a gradient to a sum in float32."""
                return total + part.astype(jnp.float32)

            return jax.tree.map(add, gradients, change), metrics

        # Unused arguments stay, so that the compiler's plan of the memory counts the optimizer's state.
        return jax.jit(
            accumulate, donate_argnums=2, keep_unused=True, out_shardings=(self._gradient_shardings, None)
        )

    def _compile_apply(self, abstract: State) -> SplitStep | jax.stages.Wrapped:
        """Return the function that applies a sum of gradients to a state."""
        if self.options.offload:
            on_devices = jax.tree.leaves(self._shardings(abstract, offload=False))
            owners = jax.tree.leaves(self._owners(abstract))
            return SplitStep(self._step, self.abstract_state, on_devices, owners)
        return jax.jit(self._step, donate_argnums=0, out_shardings=(self._state_shardings, None))

    def _compile_logprobs(self) -> jax.stages.Wrapped:
        """Return the jitted function of the log-probabilities of a microbatch."""

        def logprobs(base: Params, params: Params, microbatch: Batch) -> Array:
            """Return the log-probabilities of the targets, float32 [R, L]."""
            return self._values(base, params, microbatch)[0]

        # Every process reads all values.
        out_shardings = replicated(self.mesh) if self._has_many_processes else None
        return jax.jit(logprobs, out_shardings=out_shardings)

    def _step(self, state: State, gradients: Params) -> tuple[State, Metrics]:
        """Apply the optimizer, unless the gradient is not finite."""
        norm = optax.tree.norm(gradients)
        is_finite = jnp.isfinite(norm)
        changes, opt_state = self.optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], changes)
        new_state = {"params": params, "opt_state": opt_state, "updates": state["updates"] + 1}

        def keep_if_finite(new: Array, old: Array) -> Array:
            """Return the new value of a leaf, or the old one if the gradient is not finite."""
            return jnp.where(is_finite, new, old)

        new_state = jax.tree.map(keep_if_finite, new_state, state)
        metrics = {
            f"{self.metrics_prefix}/grad_norm": norm,
            f"{self.metrics_prefix}/skipped": 1.0 - is_finite,
        }
        return new_state, metrics

    def _values(
        self,
        base: Params,
        params: Params,
        microbatch: Batch,
        used: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return log-probabilities and entropies of the targets.

        Args:
            base: frozen parameters.
            params: trained parameters, or those of a reference.
            microbatch: packed rows [R, L].
            used: bool [R, L], columns whose values are used; others are arbitrary. None: all.

        Returns:
            Both float32 [R, L].
        """
        decoder = self.policy.merge(merge_params(base, params))
        # Microbatches of narrower rows have more rows, and as many logits at once.
        num_rows = len(microbatch.tokens)
        chunk = max(1, self.options.logprob_chunk * self.options.rows // num_rows)
        return token_logprobs(
            decoder,
            target_hidden_states(decoder, microbatch),
            microbatch.targets,
            self.options.temperature,
            chunk,
            self.options.entropy_gradient,
            used,
        )

    # --- The state ---

    def _initial_state(self, params: Params) -> State:
        updates = jnp.zeros((), jnp.int32)
        return {"params": params, "opt_state": self.optimizer.init(params), "updates": updates}

    def _shardings(self, state: State, offload: bool) -> State:
        """Return the sharding of each leaf of a state.

        Args:
            state: the state, or its ShapeDtypeStructs.
            offload: whether moments are in host memory near their parameter, or else beside it.
        """
        param_placement: dict[str, NamedSharding] = flatten(
            param_shardings(self.policy.abstract_trained, self.mesh)
        )
        moment_placement = dict(param_placement)
        if offload:
            for path, sharding in param_placement.items():
                moment_placement[path] = sharding.with_memory_kind(HOST)
        param_placement[SHARED_LEAF] = replicated(self.mesh)
        moment_placement[SHARED_LEAF] = replicated(self.mesh)
        owners = self._owners(state)
        return {
            "params": jax.tree.map(param_placement.__getitem__, owners["params"]),
            "opt_state": jax.tree.map(moment_placement.__getitem__, owners["opt_state"]),
            "updates": param_placement[owners["updates"]],
        }

    def _owners(self, state: State) -> State:
        """Return the path of the parameter that each leaf of the state belongs to, or SHARED_LEAF."""
        paths = unflatten({path: path for path in flatten(self.policy.abstract_trained)})
        moments = optax.tree.map_params(
            self.optimizer,
            lambda leaf, path: leaf if _is_masked(leaf) else path,
            state["opt_state"],
            paths,
            transform_non_params=lambda leaf: SHARED_LEAF,
            is_leaf=_is_masked,
        )
        return {"params": paths, "opt_state": moments, "updates": SHARED_LEAF}


def target_hidden_states(decoder: Decoder, batch: Batch) -> Array:
    """Return the hidden state that predicts the target of each column.

    Args:
        decoder: the policy or critic.
        batch: packed rows [R, L].

    Returns:
        [R, L, D].
    """
    hidden = decoder(batch.tokens, batch.positions, batch.segment_ids, batch.ends)
    if batch.sources is None:
        return hidden
    return jnp.take_along_axis(hidden, batch.sources[..., None], axis=1)


def _is_masked(leaf: Any) -> bool:
    """Return whether this part of an optimizer leaves the parameter to another part."""
    return isinstance(leaf, optax.MaskedNode)


def init_params(policy: Policy, mesh: Mesh, seed: int, only_trained: bool = False) -> Params:
    """Draw random parameters, each on its devices.

    Args:
        policy: the decoder.
        mesh: the devices.
        seed: of the random key.
        only_trained: whether the frozen parameters are left out.

    Returns:
        Nested parameters in the policy's dtypes and shardings.
    """
    with jax.set_mesh(mesh):
        return _initializer(policy, mesh, only_trained)(jax.random.key(seed))


@functools.lru_cache(maxsize=4)  # One program draws a policy and the reference of its KL term.
def _initializer(policy: Policy, mesh: Mesh, only_trained: bool) -> Callable[[Array], Params]:
    if not only_trained:
        return jax.jit(policy.init, out_shardings=param_shardings(policy.abstract_params, mesh))

    def init_trained(key: Array) -> Params:
        """Draw all parameters, and return the trained ones."""
        _, trained = policy.split(policy.init(key))
        return trained

    return jax.jit(init_trained, out_shardings=param_shardings(policy.abstract_trained, mesh))


def policy_learner(config: Config, policy: Policy, mesh: Mesh, schedule: optax.Schedule) -> Learner:
    """Return the learner of a run's training steps.

    Args:
        config: of the run.
        policy: the decoder.
        mesh: the devices.
        schedule: learning rate by update.

    Returns:
        A learner without state; see `Learner.init`.

    Raises:
        UserError: as `LearnerOptions.check`.
    """
    options = LearnerOptions.from_config(config, config.learner.optimizer)
    optimizer = make_optimizer(config.learner.optimizer, schedule)
    return Learner(policy, optimizer, mesh, options)
