"""One decoder for Qwen2/2.5, Qwen3 and Llama 3.x (Flax NNX).

Layers are stacked on a leading axis. Parameters are passed around as a plain nested dict of arrays;
`merge` joins them with the modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from calibadv_jax.config import PolicyConfig
from calibadv_jax.policy import attention, rotary
from calibadv_jax.policy.adapters import Adapters, Linear, merged, split
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.policy.cache import Cache, CacheView, Stack, Window
from calibadv_jax.policy.kernels.cpu_products import rows_product
from calibadv_jax.policy.kernels.elementwise import RMSNorm, gated
from calibadv_jax.policy.sharding import constrain, pin_rows
from calibadv_jax.policy.vocabulary import look_up

Params = dict[str, Any]
Rope = tuple[jax.Array, jax.Array]  # cosines and sines of each token's angles [B, T, H/2]

UNROLLED_LAYERS = 4  # so few layers are unrolled: faster, and they compile as fast as a loop

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


@dataclass(frozen=True)
class Numerics:
    """How the decoder computes; a checkpoint stores none of it."""

    compute_dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    remat: str = "none"
    kernel: attention.Kernel = "xla"
    attention_chunk: int = 128

    @property
    def product(self) -> Callable[..., jax.Array]:
        """Of activations and weights. TPU and GPU compilers find the layouts by themselves."""
        return rows_product if self.kernel == "xla" else jax.lax.dot_general

    @classmethod
    def from_config(cls, config: PolicyConfig) -> Numerics:
        kernel: attention.Kernel
        if config.attention == "auto":
            kernel = attention.KERNELS.get(jax.default_backend(), "xla")
        else:
            kernel = config.attention
        return cls(
            jnp.dtype(config.compute_dtype),
            jnp.dtype(config.param_dtype),
            config.remat,
            kernel,
            config.attention_chunk,
        )


@dataclass(frozen=True)
class Build:
    """What the modules of a decoder are made of."""

    architecture: Architecture
    numerics: Numerics
    adapters: Adapters | None
    rngs: nnx.Rngs

    @property
    def base_dtype(self) -> Any:
        """Of all parameters but the adapters'."""
        return jnp.dtype(self.adapters.base_dtype) if self.adapters else self.numerics.param_dtype

    def linear(self, target: str, size_in: int, size_out: int, use_bias: bool) -> Linear:
        """A product, with the adapter that `target` has, if any."""
        return Linear(
            size_in,
            size_out,
            adapters=self.adapters,
            target=target,
            use_bias=use_bias,
            dtype=self.numerics.compute_dtype,
            param_dtype=self.numerics.param_dtype,
            dot_general=self.numerics.product,
            rngs=self.rngs,
        )

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(
            size,
            epsilon=self.architecture.rms_norm_eps,
            dtype=self.numerics.compute_dtype,
            param_dtype=self.base_dtype,
            rngs=self.rngs,
        )


class Attention(nnx.Module):
    """Grouped-query self-attention."""

    def __init__(self, build: Build):
        a = build.architecture
        self.architecture, self.numerics = a, build.numerics
        heads, kv_heads = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        self.q = build.linear("q", a.hidden_size, heads, a.qkv_bias)
        self.k = build.linear("k", a.hidden_size, kv_heads, a.qkv_bias)
        self.v = build.linear("v", a.hidden_size, kv_heads, a.qkv_bias)
        self.o = build.linear("o", heads, a.hidden_size, a.out_bias)
        if a.qk_norm:
            self.q_norm, self.k_norm = build.norm(a.head_dim), build.norm(a.head_dim)

    def project(self, x: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, D] -> q [B, T, N, H], k and v [B, T, K, H], rotated."""
        heads = (*x.shape[:2], -1, self.architecture.head_dim)
        q, k, v = self.q(x).reshape(heads), self.k(x).reshape(heads), self.v(x).reshape(heads)
        if self.architecture.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotary.rotate(q, *rope), rotary.rotate(k, *rope), v

    def output(self, x: jax.Array) -> jax.Array:
        """[B, T, N, H] -> [B, T, D]."""
        return self.o(x.reshape(*x.shape[:2], -1))


class Mlp(nnx.Module):
    """SwiGLU."""

    def __init__(self, build: Build):
        a = build.architecture
        self.gate = build.linear("gate", a.hidden_size, a.intermediate_size, a.mlp_bias)
        self.up = build.linear("up", a.hidden_size, a.intermediate_size, a.mlp_bias)
        self.down = build.linear("down", a.intermediate_size, a.hidden_size, a.mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(gated(self.gate(x), self.up(x)))


class Block(nnx.Module):
    """Pre-norm decoder layer."""

    def __init__(self, build: Build):
        width = build.architecture.hidden_size
        self.attn_norm = build.norm(width)
        self.attn = Attention(build)
        self.mlp_norm = build.norm(width)
        self.mlp = Mlp(build)

    def packed(self, x: jax.Array, rope: Rope, segment_ids: jax.Array, ends: jax.Array | None) -> jax.Array:
        """Rows [B, T, D] of the learner, each with several sequences."""
        q, k, v = self.attn.project(self.attn_norm(x), rope)
        kernel, chunk = self.attn.numerics.kernel, self.attn.numerics.attention_chunk
        mixed = attention.packed_attention(q, k, v, segment_ids, kernel, chunk, ends)
        x = x + self.attn.output(mixed)
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", "length", "activation")

    def cached(
        self, x: jax.Array, rope: Rope, view: CacheView, stack: Stack, layer: jax.Array
    ) -> tuple[jax.Array, Stack]:
        """New tokens [B, n, D] of the sampler, beside those that the cache holds of their sequences."""
        q, k, v = self.attn.project(self.attn_norm(x), rope)
        stack = view.written(stack, layer, k, v)
        mixed = view.attended(stack, layer, q)
        x = pin_rows(x + self.attn.output(mixed.astype(x.dtype)))
        return pin_rows(x + self.mlp(self.mlp_norm(x))), stack


class Decoder(nnx.Module):
    """Token ids to hidden states; `logits` applies the (possibly tied) output head."""

    def __init__(self, build: Build):
        a, numerics, rngs = build.architecture, build.numerics, build.rngs
        dtypes: Any = {"dtype": numerics.compute_dtype, "param_dtype": build.base_dtype, "rngs": rngs}
        self.architecture, self.numerics = a, numerics
        self.embed = nnx.Embed(
            a.vocab_size, a.hidden_size, embedding_init=nnx.initializers.normal(0.02), **dtypes
        )

        @nnx.split_rngs(splits=a.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(replace(build, rngs=rngs))

        self.layers = stacked(rngs)
        self.final_norm = build.norm(a.hidden_size)
        if not a.tie_word_embeddings:
            self.lm_head = nnx.Linear(a.hidden_size, a.vocab_size, use_bias=False, **dtypes)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        ends: jax.Array | None = None,
    ) -> jax.Array:
        """Packed rows: tokens, positions, segment_ids int32 [B, T] -> hidden [B, T, D].

        Positions restart in every segment; padding is a segment of its own. `ends` in place of the segments:
        see `packed_attention`.
        """
        x = look_up(self.embed.embedding[...], tokens, self.numerics.compute_dtype)
        x = constrain(x, "batch", "length", "activation")
        rope = self._rotary(positions)
        graph, stack = nnx.split(self.layers)

        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graph, params).packed(x, rope, segment_ids, ends), None

        if self.numerics.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.numerics.remat])
        x, _ = jax.lax.scan(layer, x, stack, unroll=self.architecture.num_layers <= UNROLLED_LAYERS)
        return self.final_norm(x)

    def decode(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        valid: jax.Array,
        cache: Cache,
        slots: jax.Array | None = None,
        embedded: jax.Array | None = None,
        window: Window | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Appends tokens [B, n] at `positions` to cache rows and returns their hidden states [B, n, D].

        Args:
            embedded: [B, n, D], from `embed_groups`; None: they are looked up here.
            valid: bool [B, n]; invalid tokens are not written and their output is meaningless.
            slots: int32 [B], the cache row of each batch row; None: row b is slot b.
            window: columns that are read; every valid position is below them. None: all.
        """
        length = cache[0][0].shape[3]
        columns = jnp.where(valid, positions, length)  # out of range: the write is dropped
        view = CacheView(positions, columns, slots, window or ([length], 0))
        x = self.embed(tokens).astype(self.numerics.compute_dtype) if embedded is None else embedded
        x = pin_rows(x)
        rope = self._rotary(positions)
        graph, params = nnx.split(self.layers)

        # A stack is carried whole and written in place; a scan over its layers would copy each of them.
        def layer(carry: tuple[jax.Array, Stack], inputs: Any) -> tuple[tuple[jax.Array, Stack], None]:
            (x, stack), (params, index) = carry, inputs
            block = nnx.merge(graph, params)
            return block.cached(x, rope, view, stack, index), None

        updated: Cache = []
        first = 0
        for stack in cache:
            count = stack[0].shape[0]
            of_stack = jax.tree.map(lambda p, at=first, end=first + count: p[at:end], params)
            (x, stack), _ = jax.lax.scan(layer, (x, stack), (of_stack, jnp.arange(count)), unroll=count == 1)
            updated.append(stack)
            first += count
        return self.final_norm(x), updated

    def embed_groups(self, tokens: jax.Array) -> jax.Array:
        """Embeddings [groups, B, n, D] of the tokens [groups, B, n] of rows that the devices hold.

        Outside the `vmap` over the groups: within it the compiler gathers the rows of all on every device.
        """
        rows = tokens.reshape(-1, tokens.shape[-1])
        found = look_up(self.embed.embedding[...], rows, self.numerics.compute_dtype)
        return found.reshape(*tokens.shape, -1)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 [..., V]; the products are of the compute dtype, their sums stay float32."""
        weights, vocab_first = self.head()
        product = "...d,vd->...v" if vocab_first else "...d,dv->...v"
        dtype = self.numerics.compute_dtype
        return jnp.einsum(
            product, hidden.astype(dtype), weights.astype(dtype), preferred_element_type=jnp.float32
        )

    def head(self) -> tuple[jax.Array, bool]:
        """The output head's weights as stored: [V, D] and True where they are the embeddings, else [D, V]."""
        if self.architecture.tie_word_embeddings:
            return self.embed.embedding[...], True
        return self.lm_head.kernel[...], False

    def _rotary(self, positions: jax.Array) -> Rope:
        angles = positions[..., None].astype(jnp.float32) * rotary.inverse_frequencies(self.architecture)
        return jnp.cos(angles), jnp.sin(angles)


class Critic(Decoder):
    """A decoder with a head of one number in place of the logits: what a trajectory will be worth.

    The head is zero at first, so that nothing is expected before anything was learned.
    """

    def __init__(self, build: Build):
        super().__init__(build)
        self.value_head = nnx.Linear(
            build.architecture.hidden_size,
            1,
            use_bias=False,
            kernel_init=nnx.initializers.zeros,
            param_dtype=build.numerics.param_dtype,
            rngs=build.rngs,
        )

    def values(self, hidden: jax.Array) -> jax.Array:
        """[B, T, D] -> float32 [B, T], of the state after each token."""
        kernel = self.value_head.kernel[...][:, 0].astype(hidden.dtype)
        return jnp.einsum("btd,d->bt", hidden, kernel, preferred_element_type=jnp.float32)


class Policy:
    """A decoder without its parameters: what jitted functions close over.

    `Policy.merge(params)` gives the `Decoder`; `policy.init(key)` draws parameters.

    Args:
        adapters: those that are trained, in the numerics' `param_dtype`; all other parameters are then frozen
            and in their `base_dtype`. None: every parameter is trained.
        kind: of decoder, for a critic.

    Attributes:
        abstract_params: all parameters; leaves are ShapeDtypeStructs.
        abstract_base: of these, all but the adapters.
        abstract_trained: of these, what a learner trains.
    """

    def __init__(
        self,
        architecture: Architecture,
        numerics: Numerics,
        adapters: Adapters | None = None,
        kind: type[Decoder] = Decoder,
    ):
        self.architecture, self.numerics, self.adapters, self.kind = architecture, numerics, adapters, kind
        self.graph, self.abstract_params = self._abstract(adapters)
        self.abstract_base, found = split(self.abstract_params)
        self.abstract_trained: Params = found if adapters else self.abstract_params
        self._plain = self._abstract(None)[0] if adapters else self.graph

    def merge(self, params: Params) -> Decoder:
        """The decoder of all parameters, or of the base alone."""
        return nnx.merge(self.graph if split(params)[1] else self._plain, params)

    def split(self, params: Params) -> tuple[Params, Params]:
        """The frozen and the trained ones of all parameters; no array is copied."""
        return split(params) if self.adapters else ({}, params)

    def merged(self, params: Params, dtype: Any) -> Params:
        """Parameters without adapters that compute the same, in `dtype`."""
        return merged(params, self.adapters.scale if self.adapters else 0.0, dtype)

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters; jit it with `out_shardings` so that they are created sharded.

        The base is the one that is drawn without adapters.
        """
        rngs = nnx.Rngs(key, lora=jax.random.fold_in(key, 1))
        return nnx.to_pure_dict(nnx.state(self._decoder(self.adapters, rngs)))

    def _decoder(self, adapters: Adapters | None, rngs: nnx.Rngs) -> Decoder:
        return self.kind(Build(self.architecture, self.numerics, adapters, rngs))

    def _abstract(self, adapters: Adapters | None) -> tuple[Any, Params]:
        abstract = nnx.eval_shape(lambda: self._decoder(adapters, nnx.Rngs(0)))
        graph, state = nnx.split(abstract)
        return graph, nnx.to_pure_dict(state)

    def empty_cache(self, slots: int, length: int) -> Cache:
        """Zeroed keys and values for `slots` rows of `length` tokens."""
        a = self.architecture
        dtype = self.numerics.compute_dtype
        # The products of an unrolled layer read its own array; of a common one they would read a copy.
        stacks = [1] * a.num_layers if a.num_layers <= UNROLLED_LAYERS else [a.num_layers]
        shapes = [(count, slots, a.num_kv_heads, length, a.head_dim) for count in stacks]
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes]
