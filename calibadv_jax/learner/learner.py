"""The train state and its one donated, jitted update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from calibadv_jax.config import LossConfig
from calibadv_jax.errors import UserError
from calibadv_jax.learner.batching import Batch, abstract_batch, microbatches
from calibadv_jax.learner.losses import LossFunction, Metrics
from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.sharding import batch_sharding, param_shardings, replicated
from calibadv_jax.policy.transformer import Params, Policy

State = dict[str, Any]  # {"params", "opt_state", "updates": int32 []}; what a checkpoint holds


class Learner:
    """Owns the compiled functions; the state is passed to its methods and donated by `update`.

    Args:
        rows: packed rows of one microbatch; a multiple of data x fsdp devices.
        temperature: of the sampler; the learner's log-probabilities divide by it, too.
        logprob_chunk: tokens per row whose logits exist at once.
        rows_key: the config key that `rows` comes from, for the message.
        entropy_gradient: False where the loss does not contain the entropy, so that it is only reported.

    Raises:
        UserError: the devices cannot share the rows.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        rows: int,
        temperature: float = 1.0,
        logprob_chunk: int = 1024,
        rows_key: str = "learner.microbatch_rows",
        entropy_gradient: bool = True,
    ):
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        if rows % shards:
            raise UserError(
                f"{rows_key} is {rows}, but must be a multiple of mesh.data x mesh.fsdp = {shards} devices:"
                f" set it to {-(-rows // shards) * shards}"
            )
        self.policy, self.optimizer, self.mesh = policy, optimizer, mesh
        self.rows, self.temperature, self.logprob_chunk = rows, temperature, logprob_chunk
        self.entropy_gradient = entropy_gradient
        self._updates: dict[Any, jax.stages.Wrapped] = {}
        self._most = 1  # microbatches of the largest update so far
        self._logprobs = jax.jit(self._logprobs_of)

    def abstract_state(self) -> State:
        """ShapeDtypeStructs with shardings, for restoring a checkpoint."""
        params = self.policy.abstract_params
        shapes = jax.eval_shape(self._state_of, params)
        shardings = self._shardings(shapes)
        return jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, shardings
        )

    def init(self, params: Params) -> State:
        """State of the first step. `params` must be in their shardings; they are donated."""
        shardings = self._shardings(jax.eval_shape(self._state_of, params))
        return jax.jit(self._state_of, out_shardings=shardings, donate_argnums=0)(params)

    def update(
        self, state: State, batch: Batch, loss: LossFunction, reference: Params | None = None
    ) -> tuple[State, dict[str, float]]:
        """One optimizer update over all rows of a packed batch [R, L].

        A non-finite gradient leaves the state as it was and is reported as ``actor/skipped`` = 1.

        Args:
            loss: from `losses`; the same object must be passed every time (one compilation each).
            reference: parameters of the KL term's policy, or None.
        """
        split, filled = microbatches(batch, self.rows, self._most)
        self._most = split.tokens.shape[0]  # a smaller batch takes the shape that is compiled already
        with jax.set_mesh(self.mesh):
            split = jax.device_put(split, batch_sharding(self.mesh, leading=1))
            if loss not in self._updates:
                self._updates[loss] = self._compile(loss)
            count = jax.device_put(np.int32(filled), replicated(self.mesh))
            state, metrics = self._updates[loss](state, split, count, reference)
        return state, {name: float(value) for name, value in jax.device_get(metrics).items()}

    def logprobs(self, params: Params, batch: Batch) -> np.ndarray:
        """Log-probabilities of the targets of packed rows: float32 [R, L]."""
        split, filled = microbatches(batch, self.rows)
        parts = []
        with jax.set_mesh(self.mesh):
            for index in range(filled):
                one = jax.tree.map(lambda x, i=index: x[i], split)
                one = jax.device_put(one, batch_sharding(self.mesh))
                parts.append(np.asarray(self._logprobs(params, one)[0]))
        return np.concatenate(parts)[: batch.tokens.shape[0]]

    def lower_update(self, count: int, length: int, loss: LossFunction) -> jax.stages.Lowered:
        """The update by `count` microbatches of rows of `length` tokens, for compiling ahead of time.

        The mesh's devices need not be attached: they may be a topology's (``jax.experimental.topologies``).
        """
        batch = abstract_batch((count, self.rows, length), batch_sharding(self.mesh, leading=1))
        filled = jax.ShapeDtypeStruct((), np.int32, sharding=replicated(self.mesh))
        with jax.set_mesh(self.mesh):
            return self._compile(loss).lower(self.abstract_state(), batch, filled, None)

    def lower_logprobs(self, length: int) -> jax.stages.Lowered:
        """The log-probabilities of one microbatch, as `lower_update`."""
        batch = abstract_batch((self.rows, length), batch_sharding(self.mesh))
        with jax.set_mesh(self.mesh):
            return self._logprobs.lower(self.abstract_state()["params"], batch)

    def _compile(self, loss: LossFunction) -> jax.stages.Wrapped:
        shardings = self._shardings(jax.eval_shape(self._state_of, self.policy.abstract_params))

        def update(
            state: State, batch: Batch, filled: jax.Array, reference: Params | None
        ) -> tuple[State, Metrics]:
            gradients, metrics = self._gradients(state["params"], batch, filled, loss, reference)
            norm = optax.global_norm(gradients)
            finite = jnp.isfinite(norm)
            changes, opt_state = self.optimizer.update(gradients, state["opt_state"], state["params"])
            new = {
                "params": optax.apply_updates(state["params"], changes),
                "opt_state": opt_state,
                "updates": state["updates"] + 1,
            }
            new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
            return new, metrics | {"actor/grad_norm": norm, "actor/skipped": 1.0 - finite}

        return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))

    def _gradients(
        self,
        params: Params,
        batch: Batch,
        filled: jax.Array,
        loss: LossFunction,
        reference: Params | None,
    ) -> tuple[Params, Metrics]:
        """Sums gradients and metrics over the filled microbatches of [M, R, L]."""

        def objective(params: Params, one: Batch) -> tuple[jax.Array, Metrics]:
            logprobs, entropies = self._logprobs_of(params, one)
            known = None if reference is None else jax.lax.stop_gradient(self._logprobs_of(reference, one)[0])
            total, metrics = loss(logprobs, entropies, one, known)
            return total, metrics | {"actor/loss": total}

        def one_more(index: jax.Array, total: tuple[Params, Metrics]) -> tuple[Params, Metrics]:
            one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch)
            gradients, metrics = jax.grad(objective, has_aux=True)(params, one)
            gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
            return jax.tree.map(jnp.add, total, (gradients, metrics))

        first = jax.tree.map(lambda x: x[0], batch)
        shapes = jax.eval_shape(lambda p, one: objective(p, one)[1], params, first)
        zeros = (
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
        )
        # A loop, not a scan: the trip count is data, so padding microbatches cost nothing.
        return jax.lax.fori_loop(0, filled, one_more, zeros)

    def _logprobs_of(self, params: Params, one: Batch) -> tuple[jax.Array, jax.Array]:
        decoder = self.policy.merge(params)
        hidden = decoder(one.tokens, one.positions, one.segment_ids)
        return token_logprobs(
            decoder, hidden, one.targets, self.temperature, self.logprob_chunk, self.entropy_gradient
        )

    def _state_of(self, params: Params) -> State:
        return {
            "params": params,
            "opt_state": self.optimizer.init(params),
            "updates": jnp.zeros((), jnp.int32),
        }

    def _shardings(self, state: State) -> State:
        """Moments live where their parameter lives: matched by the tail of the tree path."""
        params = param_shardings(self.policy.abstract_params, self.mesh)
        flat = {
            tuple(str(key.key) for key in path): (leaf.shape, at)
            for (path, leaf), at in zip(
                jax.tree_util.tree_leaves_with_path(self.policy.abstract_params),
                jax.tree.leaves(params),
                strict=True,
            )
        }

        def sharding(path: Any, leaf: Any) -> Any:
            names = tuple(str(getattr(key, "key", getattr(key, "name", ""))) for key in path)
            tails = (names[start:] for start in range(len(names)))
            known = next((flat[tail] for tail in tails if tail in flat), None)
            return known[1] if known is not None and known[0] == leaf.shape else replicated(self.mesh)

        return jax.tree_util.tree_map_with_path(sharding, state)


def init_params(policy: Policy, mesh: Mesh, seed: int) -> Params:
    """Random parameters, created in their shardings."""
    shardings = param_shardings(policy.abstract_params, mesh)
    with jax.set_mesh(mesh):
        return jax.jit(policy.init, out_shardings=shardings)(jax.random.key(seed))


def on_policy_only(loss: LossConfig, minibatch_size: int, epochs: int) -> bool:
    """True where every rollout gets exactly one update, so that old and current policy are the same."""
    return loss.old_logprobs == "recompute" and minibatch_size == 0 and epochs == 1
