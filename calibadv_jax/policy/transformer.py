"""One decoder for Qwen2/2.5, Qwen3 and Llama 3.x (Flax NNX), with its layers stacked on a leading axis.

From top to bottom: numerics, linear layers, attention, MLP, decoder layer, decoder. The attention formulas
are in `attention`, rotary embeddings in `rotary`, the token look-up in `embedding`, RMS norm and gate in
`kernels`.

Letters in shapes: B rows, T tokens of a row, D width of the hidden states, F inner width of the MLP, N query
heads, K key-value heads, H head dimension, V vocabulary, L layers, n new tokens of a row in decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from calibadv_jax.config import PolicyConfig
from calibadv_jax.policy.adapters import Adapters, fold_adapters, split
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.policy.attention import (
    BACKEND_KERNELS,
    Cache,
    CacheView,
    Kernel,
    Stack,
    Window,
    packed_attention,
)
from calibadv_jax.policy.embedding import look_up
from calibadv_jax.policy.kernels.custom_gradients import RMSNorm, gated, rows_product
from calibadv_jax.policy.rotary import Rope, rotary_embeddings, rotate
from calibadv_jax.policy.sharding import constrain, pin_rows

Params = dict[str, Any]

# Decoders with at most so many layers are unrolled: they run faster, and compile as fast as a loop.
MAX_UNROLLED_LAYERS = 4
# What is saved of a layer for its backward pass, by `policy.remat`. "none" saves everything.
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
# Standard deviation of the initial embeddings. The other matrices have Flax's default initializer.
EMBEDDING_STDDEV = 0.02


# --- How a decoder computes ---


@dataclass(frozen=True)
class Numerics:
    """Precision, memory and kernels of the decoder; a checkpoint stores none of it.

    Attributes:
        compute_dtype: of activations and of the operands of products.
        param_dtype: of the trained parameters.
        remat: "none", or a key of REMAT_POLICIES: what a backward pass computes again.
        kernel: of attention in packed rows.
        attention_chunk: tokens of a block of the "xla" kernel.
    """

    compute_dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    remat: str = "none"
    kernel: Kernel = "xla"
    attention_chunk: int = 128

    @property
    def product(self) -> Callable[..., Array]:
        """Function that multiplies activations [..., D] and weights [D, F], given their dimension numbers.

        It is `rows_product` with the "xla" kernel. Otherwise it is JAX's own, since compilers for TPU and GPU
        choose good layouts.
        """
        if self.kernel == "xla":
            return rows_product
        return jax.lax.dot_general

    @classmethod
    def from_config(cls, config: PolicyConfig) -> Numerics:
        """Return the numerics of a config.

        Args:
            config: the section `policy`. With `attention` at auto, the kernel is that of JAX's default
                backend.

        Returns:
            The numerics.
        """
        kernel = config.attention
        if kernel == "auto":
            # Only here: asking for the backend loads it, and `calibadv plan` compiles for another one.
            kernel = BACKEND_KERNELS.get(jax.default_backend(), "xla")
        return cls(
            compute_dtype=jnp.dtype(config.compute_dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            remat=config.remat,
            kernel=kernel,
            attention_chunk=config.attention_chunk,
        )


@dataclass(frozen=True)
class DecoderBuild:
    """What the constructors of all modules of a decoder need.

    Attributes:
        architecture: sizes and variants.
        numerics: precision, memory and kernels.
        adapters: LoRA adapters; None: every parameter is trained.
        rngs: random keys of the initial parameters.
    """

    architecture: Architecture
    numerics: Numerics
    adapters: Adapters | None
    rngs: nnx.Rngs

    @property
    def options(self) -> dict[str, Any]:
        """Options of every Flax module; adapters have the numerics' `param_dtype` instead of this one."""
        param_dtype = self.numerics.param_dtype
        if self.adapters:
            param_dtype = jnp.dtype(self.adapters.base_dtype)
        return {"dtype": self.numerics.compute_dtype, "param_dtype": param_dtype, "rngs": self.rngs}

    def norm(self, size: int) -> RMSNorm:
        """Return an RMS norm with the decoder's epsilon and dtypes.

        Args:
            size: D, size of the last axis.

        Returns:
            The module, whose scale is 1 at first.
        """
        return RMSNorm(size, epsilon=self.architecture.rms_norm_eps, **self.options)


# --- Linear layers ---


class Linear(nnx.Linear):
    """Flax's linear layer, plus x @ lora_a @ lora_b * scale if the adapters include this matrix.

    Args:
        build: sizes, numerics and adapters of the decoder.
        target: name of the matrix in `Adapters.targets`.
        size_in: width of the input.
        size_out: width of the output.
        use_bias: whether a bias is added.
    """

    def __init__(self, build: DecoderBuild, target: str, size_in: int, size_out: int, use_bias: bool):
        product = build.numerics.product
        super().__init__(size_in, size_out, use_bias=use_bias, dot_general=product, **build.options)
        adapters = build.adapters
        self.scale = 0.0  # without an adapter
        if adapters is not None and target in adapters.targets:
            self.scale = adapters.scale
            dtype = build.numerics.param_dtype
            # As in PEFT: lora_a is uniform within 1 / sqrt(size_in), and the product is 0 at first.
            initializer = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
            lora_a = initializer(build.rngs.lora(), (size_in, adapters.rank), dtype)
            self.lora_a = nnx.Param(lora_a)
            self.lora_b = nnx.Param(jnp.zeros((adapters.rank, size_out), dtype))

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Return inputs @ kernel, plus the bias and the adapter if there are any.

        Args:
            inputs: [..., size_in].
            out_sharding: passed to Flax; None: none.

        Returns:
            [..., size_out] in the compute dtype.
        """
        out = super().__call__(inputs, out_sharding)
        if not self.scale:
            return out
        last_with_first = ((inputs.ndim - 1,), (0,)), ((), ())
        change = inputs.astype(out.dtype)
        lora_b = self.lora_b[...] * self.scale
        for matrix in (self.lora_a[...], lora_b):
            change = self.dot_general(change, matrix.astype(out.dtype), last_with_first)
        return out + change


# --- Attention, MLP and decoder layer ---


class Attention(nnx.Module):
    """Projections of grouped-query self-attention."""

    def __init__(self, build: DecoderBuild):
        architecture = build.architecture
        hidden_size = architecture.hidden_size
        q_size = architecture.num_heads * architecture.head_dim
        kv_size = architecture.num_kv_heads * architecture.head_dim
        self.architecture = architecture
        self.numerics = build.numerics
        self.q = Linear(build, "q", hidden_size, q_size, architecture.qkv_bias)
        self.k = Linear(build, "k", hidden_size, kv_size, architecture.qkv_bias)
        self.v = Linear(build, "v", hidden_size, kv_size, architecture.qkv_bias)
        self.o = Linear(build, "o", q_size, hidden_size, architecture.out_bias)
        if architecture.qk_norm:
            self.q_norm = build.norm(architecture.head_dim)
            self.k_norm = build.norm(architecture.head_dim)

    def project(self, x: Array, rope: Rope) -> tuple[Array, Array, Array]:
        """Project hidden states to queries, keys and values; queries and keys are rotated.

        Args:
            x: normalised hidden states [B, T, D].
            rope: cosines and sines of the tokens' angles.

        Returns:
            q [B, T, N, H], k [B, T, K, H] and v [B, T, K, H].
        """
        batch, length, _ = x.shape
        by_head = (batch, length, -1, self.architecture.head_dim)
        q = self.q(x).reshape(by_head)  # [B, T, D] -> [B, T, N*H] -> [B, T, N, H]
        k = self.k(x).reshape(by_head)  # [B, T, D] -> [B, T, K*H] -> [B, T, K, H]
        v = self.v(x).reshape(by_head)
        if self.architecture.qk_norm:
            q = self.q_norm(q)
            k = self.k_norm(k)
        cos, sin = rope
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def output(self, x: Array) -> Array:
        """Project the heads' outputs to hidden states.

        Args:
            x: [B, T, N, H].

        Returns:
            [B, T, D] in the compute dtype.
        """
        batch, length, _, _ = x.shape
        return self.o(x.reshape(batch, length, -1))  # [B, T, N*H] -> [B, T, D]


class Mlp(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, build: DecoderBuild):
        architecture = build.architecture
        hidden_size = architecture.hidden_size
        inner_size = architecture.intermediate_size
        self.gate = Linear(build, "gate", hidden_size, inner_size, architecture.mlp_bias)
        self.up = Linear(build, "up", hidden_size, inner_size, architecture.mlp_bias)
        self.down = Linear(build, "down", inner_size, hidden_size, architecture.mlp_bias)

    def __call__(self, x: Array) -> Array:
        """Return the MLP of hidden states.

        Args:
            x: [B, T, D].

        Returns:
            [B, T, D] in the compute dtype.
        """
        inner = gated(self.gate(x), self.up(x))  # [B, T, F]
        return self.down(inner)


class Block(nnx.Module):
    """Pre-norm decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, build: DecoderBuild):
        hidden_size = build.architecture.hidden_size
        self.attn_norm = build.norm(hidden_size)
        self.attn = Attention(build)
        self.mlp_norm = build.norm(hidden_size)
        self.mlp = Mlp(build)

    def forward_packed(self, x: Array, rope: Rope, segment_ids: Array, ends: Array | None) -> Array:
        """Compute the layer for packed rows of the learner, each with several sequences.

        Args:
            x: hidden states [B, T, D].
            rope: cosines and sines of the tokens' angles.
            segment_ids: int32 [B, T], as in `packed_attention`.
            ends: int32 [B, T], as in `packed_attention`.

        Returns:
            Hidden states [B, T, D].
        """
        q, k, v = self.attn.project(self.attn_norm(x), rope)
        kernel = self.attn.numerics.kernel
        chunk = self.attn.numerics.attention_chunk
        attended = packed_attention(q, k, v, segment_ids, kernel, chunk, ends)  # [B, T, N, H]
        x = x + self.attn.output(attended)
        x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "batch", "length", "activation")

    def forward_cached(
        self,
        x: Array,
        rope: Rope,
        view: CacheView,
        stack: Stack,
        layer: Array,
    ) -> tuple[Array, Stack]:
        """Compute the layer for new tokens of the sampler, whose sequences begin in the KV cache.

        Args:
            x: hidden states [B, n, D] of the new tokens.
            rope: cosines and sines of the new tokens' angles.
            view: places of the new tokens in the cache.
            stack: keys and values of successive layers.
            layer: int32 [], index of this layer in the stack.

        Returns:
            Hidden states [B, n, D], and the stack with the new tokens' keys and values.
        """
        q, k, v = self.attn.project(self.attn_norm(x), rope)
        stack = view.write(stack, layer, k, v)
        attended = view.attend(stack, layer, q)  # [B, n, N, H]
        x = pin_rows(x + self.attn.output(attended.astype(x.dtype)))
        x = pin_rows(x + self.mlp(self.mlp_norm(x)))
        return x, stack


# --- The decoder ---


class Decoder(nnx.Module):
    """Maps token ids to hidden states; `logits` applies the output head, which may be the embeddings."""

    def __init__(self, build: DecoderBuild):
        architecture = build.architecture
        vocab_size = architecture.vocab_size
        hidden_size = architecture.hidden_size
        self.architecture = architecture
        self.numerics = build.numerics
        normal = nnx.initializers.normal(EMBEDDING_STDDEV)
        self.embed = nnx.Embed(vocab_size, hidden_size, embedding_init=normal, **build.options)

        @nnx.split_rngs(splits=architecture.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked_layers(rngs: nnx.Rngs) -> Block:
            """Make one layer for each random key, with the parameters of all layers stacked."""
            return Block(replace(build, rngs=rngs))

        self.layers = stacked_layers(build.rngs)  # every parameter has a leading axis L
        self.final_norm = build.norm(hidden_size)
        if not architecture.tie_word_embeddings:
            self.lm_head = nnx.Linear(hidden_size, vocab_size, use_bias=False, **build.options)

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        segment_ids: Array,
        ends: Array | None = None,
    ) -> Array:
        """Compute the hidden states of packed rows.

        Args:
            tokens: int32 [B, T].
            positions: int32 [B, T]; they restart in every segment.
            segment_ids: int32 [B, T], the sequence of each token in its row; padding is a segment, too.
            ends: int32 [B, T], as in `packed_attention`.

        Returns:
            [B, T, D] in the compute dtype, after the last norm.
        """
        x = look_up(self.embed.embedding[...], tokens, self.numerics.compute_dtype)
        x = constrain(x, "batch", "length", "activation")
        rope = self._rotary(positions)
        graph, layer_params = nnx.split(self.layers)

        def apply_layer(x: Array, params: Any) -> tuple[Array, None]:
            """Return the hidden states after one layer."""
            block = nnx.merge(graph, params)
            return block.forward_packed(x, rope, segment_ids, ends), None

        if self.numerics.remat != "none":
            apply_layer = jax.checkpoint(apply_layer, policy=REMAT_POLICIES[self.numerics.remat])
        is_unrolled = self.architecture.num_layers <= MAX_UNROLLED_LAYERS
        x, _ = jax.lax.scan(apply_layer, x, layer_params, unroll=is_unrolled)
        return self.final_norm(x)

    def decode(
        self,
        tokens: Array,
        positions: Array,
        valid: Array,
        cache: Cache,
        slots: Array | None = None,
        embedded: Array | None = None,
        window: Window | None = None,
    ) -> tuple[Array, Cache]:
        """Append new tokens to rows of a KV cache.

        Args:
            tokens: int32 [B, n].
            positions: int32 [B, n], the column of each token in its slot.
            valid: bool [B, n]. Other tokens are not written, and their output is meaningless.
            cache: from `Policy.empty_cache` or an earlier call.
            slots: int32 [B], the slot of each row; None: row b is slot b.
            embedded: [B, n, D], from `embed_groups`; None: the tokens are looked up here.
            window: columns that are read; every valid position is inside. None: all columns.

        Returns:
            Hidden states [B, n, D] after the last norm, and the cache with the new tokens.
        """
        num_columns = cache[0][0].shape[3]
        # A column past the end: the write is dropped.
        columns = jnp.where(valid, positions, num_columns)
        view = CacheView(positions, columns, slots, window or ([num_columns], 0))
        if embedded is None:
            embedded = self.embed(tokens).astype(self.numerics.compute_dtype)
        x = pin_rows(embedded)
        rope = self._rotary(positions)
        graph, layer_params = nnx.split(self.layers)

        # A stack is carried as a whole and written in place. A scan over its layers would copy each layer.
        def apply_layer(carry: tuple[Array, Stack], inputs: Any) -> tuple[tuple[Array, Stack], None]:
            """Return hidden states and stack after one layer of the stack."""
            x, stack = carry
            params, layer = inputs
            block = nnx.merge(graph, params)
            return block.forward_cached(x, rope, view, stack, layer), None

        updated: Cache = []
        first_layer = 0
        for stack in cache:
            num_layers = stack[0].shape[0]
            stack_params = _slice_layers(layer_params, first_layer, first_layer + num_layers)
            inputs = (stack_params, jnp.arange(num_layers))
            (x, stack), _ = jax.lax.scan(apply_layer, (x, stack), inputs, unroll=num_layers == 1)
            updated.append(stack)
            first_layer += num_layers
        return self.final_norm(x), updated

    def embed_groups(self, tokens: Array) -> Array:
        """Embed the tokens of several groups of rows, one group for each device.

        Call it outside the `vmap` over the groups: inside, the compiler gathers all rows on every device.

        Args:
            tokens: int32 [groups, B, n].

        Returns:
            [groups, B, n, D] in the compute dtype.
        """
        rows = tokens.reshape(-1, tokens.shape[-1])  # [groups*B, n]
        embedded = look_up(self.embed.embedding[...], rows, self.numerics.compute_dtype)
        return embedded.reshape(*tokens.shape, -1)

    def logits(self, hidden: Array) -> Array:
        """Return the logits of hidden states.

        Args:
            hidden: [..., D], after the last norm.

        Returns:
            float32 [..., V], not divided by a temperature. The operands of the product have the compute
            dtype.
        """
        weights, is_vocab_first = self.head()
        equation = "...D,VD->...V" if is_vocab_first else "...D,DV->...V"
        dtype = self.numerics.compute_dtype
        states = hidden.astype(dtype)
        weights = weights.astype(dtype)
        return jnp.einsum(equation, states, weights, preferred_element_type=jnp.float32)

    def head(self) -> tuple[Array, bool]:
        """Return the weights of the output head, and whether their first axis is the vocabulary.

        Returns:
            The embeddings [V, D] and True if they are tied, else [D, V] and False; in the parameters' dtype.
        """
        if self.architecture.tie_word_embeddings:
            return self.embed.embedding[...], True
        return self.lm_head.kernel[...], False

    def _rotary(self, positions: Array) -> Rope:
        """Return the cosines and sines of the angles at positions [B, T]."""
        return rotary_embeddings(self.architecture, positions)


def _slice_layers(params: Any, start: int, end: int) -> Any:
    """Return the parameters [L, ...] of the layers from `start` up to `end`."""
    return jax.tree.map(lambda param: param[start:end], params)


class CriticDecoder(Decoder):
    """A decoder with a value head, which is zero at first, instead of logits."""

    def __init__(self, build: DecoderBuild):
        super().__init__(build)
        self.value_head = nnx.Linear(
            build.architecture.hidden_size,
            1,
            use_bias=False,
            param_dtype=build.numerics.param_dtype,
            kernel_init=nnx.initializers.zeros,
            rngs=build.rngs,
        )

    def values(self, hidden: Array) -> Array:
        """Return the value after each token.

        Args:
            hidden: [B, T, D], after the last norm.

        Returns:
            float32 [B, T], in units of the return.
        """
        kernel = self.value_head.kernel[...][:, 0].astype(hidden.dtype)  # [D]
        return jnp.einsum("BTD,D->BT", hidden, kernel, preferred_element_type=jnp.float32)


# --- A decoder and its parameters ---


class Policy:
    """A decoder without its parameters, for jitted functions to close over.

    With adapters, these are trained in the numerics' `param_dtype`, and all other parameters are frozen in
    the adapters' `base_dtype`. Without adapters every parameter is trained.

    Args:
        architecture: sizes and variants of the decoder.
        numerics: precision, memory and kernels.
        adapters: LoRA adapters; None: none.
        kind: class of the decoder.

    Attributes:
        abstract_params: ShapeDtypeStructs of all parameters, as a nested dict.
        abstract_base: those of all parameters but the adapters and a critic's head.
        abstract_trained: those of the parameters that a learner trains.
    """

    def __init__(
        self,
        architecture: Architecture,
        numerics: Numerics,
        adapters: Adapters | None = None,
        kind: type[Decoder] = Decoder,
    ):
        self.architecture = architecture
        self.numerics = numerics
        self.adapters = adapters
        self.kind = kind
        self.graph, state = self._split_abstract(adapters)
        self._base_graph = self.graph
        if adapters:
            self._base_graph, _ = self._split_abstract(None)
        self.abstract_params: Params = nnx.to_pure_dict(state)
        self.abstract_base, added = split(self.abstract_params)
        self.abstract_trained: Params = added if adapters else self.abstract_params

    def merge(self, params: Params) -> Decoder:
        """Return the decoder with these parameters.

        Args:
            params: nested parameters: all of them, or the base without adapters.

        Returns:
            The decoder. It shares the arrays.
        """
        _, added = split(params)
        return nnx.merge(self.graph if added else self._base_graph, params)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Split all parameters into the frozen and the trained ones.

        Args:
            params: all parameters, nested.

        Returns:
            The frozen parameters, which are {} for a policy without adapters, and the trained ones. No array
            is copied.
        """
        if self.adapters:
            return split(params)
        return {}, params

    def fold_adapters(self, params: Params, dtype: Any) -> Params:
        """Return equivalent parameters without adapters.

        Args:
            params: all parameters.
            dtype: of the results.

        Returns:
            Parameters of the base, with the adapters folded in.
        """
        scale = self.adapters.scale if self.adapters else 0.0
        return fold_adapters(params, scale, dtype)

    def init(self, key: Array) -> Params:
        """Draw all parameters; the base does not depend on the adapters.

        Args:
            key: a JAX random key.

        Returns:
            Nested parameters. To create them with their shardings, jit this method with `out_shardings`.
        """
        rngs = nnx.Rngs(key, lora=jax.random.fold_in(key, 1))
        decoder = self._decoder(self.adapters, rngs)
        return nnx.to_pure_dict(nnx.state(decoder))

    def empty_cache(self, slots: int, length: int) -> Cache:
        """Return a KV cache of zeros in the compute dtype.

        Args:
            slots: S, number of sequences.
            length: T, tokens of a slot.

        Returns:
            Keys and values [L, S, K, T, H], in one stack of all layers or in a stack for each layer.
        """
        num_layers = self.architecture.num_layers
        # The products of an unrolled layer read its own array. They would read a copy of a common one.
        is_unrolled = num_layers <= MAX_UNROLLED_LAYERS
        stack_sizes = [1] * num_layers if is_unrolled else [num_layers]
        layer_shape = (slots, self.architecture.num_kv_heads, length, self.architecture.head_dim)
        dtype = self.numerics.compute_dtype
        cache: Cache = []
        for size in stack_sizes:
            keys = jnp.zeros((size, *layer_shape), dtype)
            values = jnp.zeros((size, *layer_shape), dtype)
            cache.append((keys, values))
        return cache

    def _decoder(self, adapters: Adapters | None, rngs: nnx.Rngs) -> Decoder:
        return self.kind(DecoderBuild(self.architecture, self.numerics, adapters, rngs))

    def _split_abstract(self, adapters: Adapters | None) -> tuple[Any, Any]:
        """Return graph and state of a decoder whose parameters are ShapeDtypeStructs."""
        decoder = nnx.eval_shape(lambda: self._decoder(adapters, nnx.Rngs(0)))
        return nnx.split(decoder)
