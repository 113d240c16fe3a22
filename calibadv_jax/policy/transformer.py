"""One decoder for Qwen2/2.5, Qwen3 and Llama 3.x (Flax NNX).

From top to bottom: numerics, rotary embeddings, attention of the learner (packed rows) and of the sampler (KV
cache), look-up of tokens, the decoder, and `Policy`. Layers are stacked on a leading axis. Parameters are a
plain nested dict of arrays, which `Policy.merge` joins with the modules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from calibadv_jax.config import PolicyConfig
from calibadv_jax.policy.adapters import Adapters, Linear, merged, split
from calibadv_jax.policy.architecture import Architecture, RopeScaling
from calibadv_jax.policy.kernels.custom_gradients import MASKED, RMSNorm, gated, rows_product
from calibadv_jax.policy.sharding import RULES, Layout, axis_size, constrain, layout_of, pin_rows

Params = dict[str, Any]
Rope = tuple[jax.Array, jax.Array]  # cosines and sines of each token's angles [B, T, H/2]

Kernel = Literal["xla", "splash", "triton", "cudnn"]
Local = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
Stack = tuple[jax.Array, jax.Array]  # keys and values of successive layers [L, S, K, T, H]
Cache = list[Stack]  # all layers in one stack; few layers, which are unrolled, in a stack each
Window = tuple[
    Sequence[int], jax.Array | int
]  # widths that may be read of a cache, and the chosen one's index

UNROLLED_LAYERS = 4  # so few layers are unrolled: faster, and they compile as fast as a loop
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
KERNELS: dict[str, Kernel] = {"tpu": "splash", "gpu": "triton"}  # of a backend; "xla" where none is named
SHARING: tuple[Kernel, ...] = ("xla", "cudnn")  # in which sequences may share prefixes
SCORE_BYTES = 2**28  # of float32 scores at once, on each device, in attention to a KV cache


@dataclass(frozen=True)
class Numerics:
    """Precision, memory and kernels of the decoder; a checkpoint stores none of it."""

    compute_dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    remat: str = "none"
    kernel: Kernel = "xla"
    attention_chunk: int = 128

    @property
    def product(self) -> Callable[..., jax.Array]:
        """Multiply activations and weights. TPU and GPU compilers find the layouts by themselves."""
        return rows_product if self.kernel == "xla" else jax.lax.dot_general

    @classmethod
    def from_config(cls, config: PolicyConfig) -> Numerics:
        kernel = config.attention
        if kernel == "auto":  # only then: to ask for the backend loads it, and `plan` compiles for another
            kernel = KERNELS.get(jax.default_backend(), "xla")
        dtypes = jnp.dtype(config.compute_dtype), jnp.dtype(config.param_dtype)
        return cls(*dtypes, config.remat, kernel, config.attention_chunk)


@dataclass(frozen=True)
class Build:
    """The arguments of a decoder's modules."""

    architecture: Architecture
    numerics: Numerics
    adapters: Adapters | None
    rngs: nnx.Rngs

    @property
    def base_dtype(self) -> Any:
        """The dtype of all parameters but the adapters'."""
        return jnp.dtype(self.adapters.base_dtype) if self.adapters else self.numerics.param_dtype

    def linear(self, target: str, size_in: int, size_out: int, use_bias: bool) -> Linear:
        """Return a product, with the adapter of `target`, if it has one."""
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


# --- Rotary position embeddings ---


def inverse_frequencies(architecture: Architecture) -> jax.Array:
    """Return the rotary frequencies, float32 [H/2], with Llama 3's scaling if the architecture has it."""
    exponents = jnp.arange(0, architecture.head_dim, 2, dtype=jnp.float32) / architecture.head_dim
    frequencies = 1.0 / (architecture.rope_theta**exponents)
    scaling = architecture.rope_scaling
    return frequencies if scaling is None else _llama3(frequencies, scaling)


def _llama3(frequencies: jax.Array, scaling: RopeScaling) -> jax.Array:
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_length / scaling.low_freq_factor
    high = scaling.original_length / scaling.high_freq_factor
    smooth = (scaling.original_length / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = jnp.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return jnp.where((wavelengths <= low) & (wavelengths >= high), blended, stretched)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply rotary embeddings, halves convention of HuggingFace. x [B, T, N, H]; cos, sin [B, T, H/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


# --- Attention in the learner: packed rows, by one of several kernels ---


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    kernel: Kernel,
    chunk: int,
    ends: jax.Array | None = None,
) -> jax.Array:
    """Attend causally within the segments of packed rows, or within the branches of their trees.

    No kernel but cuDNN's holds an array of T x T once T is above `chunk`; see benchmarks/learner.md.

    Args:
        q: [B, T, N, H]. k, v: [B, T, K, H].
        segment_ids: int32 [B, T]; tokens see only their own segment, whose columns are contiguous.
        kernel: "xla" anywhere, "splash" on TPU, "triton" on GPU, "cudnn" (bfloat16/float16 on CUDA).
        chunk: side of the blocks of the XLA kernel; shorter rows are one block.
        ends: int32 [B, T] in place of the segments: the first column that does not see this one. Only for a
            kernel of SHARING.

    Returns:
        [B, T, N, H].
    """
    if kernel not in SHARING:
        assert ends is None, kernel
        from calibadv_jax.policy.kernels.flash import splash_attention, triton_attention

        flash = splash_attention if kernel == "splash" else triton_attention
        return _on_every_device(flash, q, k, v, segment_ids)
    columns = jnp.arange(q.shape[1])
    ends = _segment_ends(segment_ids) if ends is None else jnp.maximum(ends, columns + 1)
    if kernel == "xla" and q.shape[1] > chunk:
        from calibadv_jax.policy.kernels.blockwise import blockwise_attention

        return _on_every_device(lambda *rows: blockwise_attention(*rows, chunk), q, k, v, ends)
    mask = ((columns[:, None] >= columns) & (columns[:, None] < ends[:, None, :]))[:, None]  # [B, 1, T, T]
    if kernel == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=kernel)
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    return _masked_attention(q, k, v, mask)


def keys_computed(kernel: Kernel, length: int, chunk: int) -> float:
    """Return the mean number of keys that a row's `length` adds to a token of `packed_attention`."""
    if kernel == "cudnn" or (kernel == "xla" and length <= chunk):
        return float(length)
    return 0.0 if kernel == "xla" else length / 2  # causal


def _on_every_device(
    kernel: Local, q: jax.Array, k: jax.Array, v: jax.Array, of_rows: jax.Array
) -> jax.Array:
    """Call `kernel` on each device of the mesh with its rows and heads: the compiler cannot split it.

    Key-value heads that the tensor axis does not divide lie on all devices; each takes those of its queries.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel(q, k, v, of_rows)
    num_heads, num_kv = q.shape[2], k.shape[2]
    tensor = axis_size(mesh, RULES["heads"])
    rows = RULES["batch"] if q.shape[0] % axis_size(mesh, RULES["batch"]) == 0 else None
    heads = RULES["heads"] if num_heads % tensor == 0 else None
    kv_heads = heads if num_kv % tensor == 0 else None

    def local(q: jax.Array, k: jax.Array, v: jax.Array, of_rows: jax.Array) -> jax.Array:
        if heads is not None and kv_heads is None:
            mine = jax.lax.axis_index(heads) * q.shape[2] + jnp.arange(q.shape[2])
            k, v = (x[:, :, mine // (num_heads // num_kv)] for x in (k, v))
        return kernel(q, k, v, of_rows)

    queries, keys = P(rows, None, heads, None), P(rows, None, kv_heads, None)
    return jax.shard_map(
        local, in_specs=(queries, keys, keys, P(rows, None)), out_specs=queries, check_vma=False
    )(q, k, v, of_rows)


def _masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B, Tq, N, H]; k, v [B, K, Tk, H]; mask bool [B, 1, Tq, Tk] -> [B, Tq, N, H].

    Heads come first, and the queries of a key-value head are one matrix: plain batched products.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv, num_keys = k.shape[1:3]
    grouped = q.transpose(0, 2, 1, 3).reshape(batch, num_kv, -1, head_dim)  # [B, K, G*Tq, H]
    scores = jnp.einsum("bkqh,bkth->bkqt", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, num_kv, -1, num_queries, num_keys) * (1.0 / math.sqrt(head_dim))
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, MASKED), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkqt,bkth->bkqh", weights.reshape(batch, num_kv, -1, num_keys), v)
    return out.reshape(batch, num_heads, num_queries, head_dim).transpose(0, 2, 1, 3)


def _segment_ends(segment_ids: jax.Array) -> jax.Array:
    """Return one past the last column of each column's segment, int32 [B, T]."""
    columns = jnp.arange(1, segment_ids.shape[1] + 1)
    is_last = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    return jax.lax.cummin(jnp.where(is_last, columns, len(columns)), axis=1, reverse=True)


# --- Attention in the sampler: new tokens to a KV cache ---


@dataclass(frozen=True)
class CacheView:
    """Places of new tokens [B, n] in a cache of S slots with T columns each."""

    positions: jax.Array  # int32 [B, n]: a token reads the columns up to its own
    columns: jax.Array  # int32 [B, n], that the tokens are written to; T: nowhere
    slots: jax.Array | None  # int32 [B], of each row; None: row b is slot b
    window: Window  # columns that are read; every written one is below them

    def written(self, stack: Stack, layer: jax.Array, keys: jax.Array, values: jax.Array) -> Stack:
        """Return the stack with the tokens' keys and values [B, n, K, H] of a layer."""
        rows = jnp.arange(self.columns.shape[0]) if self.slots is None else self.slots
        mesh = jax.sharding.get_abstract_mesh()
        if keys.shape[1] == 1 or mesh.empty or axis_size(mesh, RULES["kv_heads"]) == 1:
            # One head a write: the cache keeps its layout, and no layer of it is copied for the products.
            heads = jnp.arange(keys.shape[2])
            at = layer, rows[:, None, None], heads, self.columns[:, :, None]
            first, second = (
                held.at[at].set(new.astype(held.dtype), mode="drop")
                for held, new in zip(stack, (keys, values), strict=True)
            )
            return first, second
        # Each head by itself: a device needs nothing of the other devices' heads.
        write = jax.vmap(
            lambda held, new: held.at[layer, rows[:, None], self.columns].set(
                new.astype(held.dtype), mode="drop"
            ),
            in_axes=2,
            out_axes=2,
        )
        return write(stack[0], keys), write(stack[1], values)

    def attended(self, stack: Stack, layer: jax.Array, queries: jax.Array) -> jax.Array:
        """Attend from the tokens' queries [B, n, N, H] to a layer that holds them too: [B, n, N, H]."""

        def mixed(width: int) -> jax.Array:
            # Sliced within the branch: all columns of a branch's arguments are copied.
            sizes = 1, *stack[0].shape[1:3], width, stack[0].shape[4]
            near = (jax.lax.dynamic_slice(held, (layer, 0, 0, 0, 0), sizes)[0] for held in stack)
            keys, values = (x if self.slots is None else x[self.slots] for x in near)
            return cached_attention(queries, keys, values, self.positions)

        widths, number = self.window
        branches = [functools.partial(mixed, width) for width in widths]
        return branches[0]() if len(widths) == 1 else jax.lax.switch(number, branches)


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Attend from new tokens to a KV cache whose column is the position: [B, n, N, H].

    Takes as many rows at a time as have SCORE_BYTES of scores together, at least one.

    Args:
        q: [B, n, N, H] at `positions` int32 [B, n].
        k, v: [B, K, T, H], the new tokens already written.
    """
    batch, num_new, num_heads, _ = q.shape
    at_once = max(1, SCORE_BYTES // (4 * num_new * num_heads * k.shape[2]))
    if batch <= at_once:
        return _cached_rows(q, k, v, positions)

    def one_row(row: tuple[jax.Array, ...]) -> jax.Array:
        return _cached_rows(*(x[None] for x in row))[0]

    return jax.lax.map(one_row, (q, k, v, positions), batch_size=at_once)


def _cached_rows(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    batch, num_new, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    grouped = q.reshape(batch, num_new, num_kv, num_heads // num_kv, head_dim)
    grouped = grouped.transpose(0, 2, 1, 3, 4).reshape(batch, num_kv, -1, head_dim)  # [B, K, n*G, H]
    scores = jnp.einsum("bkqh,bkth->bkqt", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * (1.0 / math.sqrt(head_dim))
    visible = jnp.arange(k.shape[2]) <= jnp.repeat(positions, num_heads // num_kv, axis=1)[:, :, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, MASKED), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkqt,bkth->bkqh", weights, v)
    out = out.reshape(batch, num_kv, num_new, num_heads // num_kv, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, num_new, num_heads, head_dim)


# --- The look-up of tokens ---


def look_up(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Return rows of `table` [V, D] at `tokens` int32 [B, T]: [B, T, D] of `dtype`; gradients in float32."""
    return _look_up(layout_of(tokens.shape[0], table.shape[1], table.shape[0]), dtype, table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(layout: Layout, dtype: Any, table: jax.Array, tokens: jax.Array) -> jax.Array:
    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        tokens = _of_all_columns(layout, tokens)
        index = tokens - layout.first(table.shape[0])
        rows = table.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        rows = layout.over_vocab(rows.astype(dtype))
        if layout.width is None:
            return rows
        return jax.lax.all_to_all(rows, layout.width, split_axis=0, concat_axis=2, tiled=True)

    inputs = layout.spec("vocab", "width"), layout.spec("rows", None)
    return layout.on_devices(local, inputs, layout.spec("rows", None, None))(table, tokens)


def _look_up_forward(
    layout: Layout, dtype: Any, table: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _look_up(layout, dtype, table, tokens), (table, tokens)


def _look_up_backward(
    layout: Layout, dtype: Any, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    def local(table: jax.Array, tokens: jax.Array, gradient: jax.Array) -> jax.Array:
        tokens = _of_all_columns(layout, tokens)
        if layout.width is not None:
            gradient = jax.lax.all_to_all(gradient, layout.width, split_axis=2, concat_axis=0, tiled=True)
        index = tokens - layout.first(table.shape[0])
        total = jnp.zeros(table.shape, jnp.float32)
        total = total.at[index].add(gradient.astype(jnp.float32), mode="drop", wrap_negative_indices=False)
        return layout.over_replicas(total).astype(table.dtype)

    table, tokens = saved
    weights = layout.spec("vocab", "width")
    inputs = weights, layout.spec("rows", None), layout.spec("rows", None, None)
    return layout.on_devices(local, inputs, weights)(table, tokens, gradient), None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def _of_all_columns(layout: Layout, tokens: jax.Array) -> jax.Array:
    """Gather the tokens of all devices that hold columns of the same rows of the table."""
    return tokens if layout.width is None else jax.lax.all_gather(tokens, layout.width, tiled=True)


# --- The decoder ---


class Attention(nnx.Module):
    """Projections of grouped-query self-attention."""

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
        """Project x [B, T, D] to q [B, T, N, H], k and v [B, T, K, H], q and k rotated."""
        heads = (*x.shape[:2], -1, self.architecture.head_dim)
        q, k, v = self.q(x).reshape(heads), self.k(x).reshape(heads), self.v(x).reshape(heads)
        if self.architecture.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rope), rotate(k, *rope), v

    def output(self, x: jax.Array) -> jax.Array:
        """Project [B, T, N, H] to [B, T, D]."""
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
        """Compute rows [B, T, D] of the learner, each with several sequences."""
        q, k, v = self.attn.project(self.attn_norm(x), rope)
        kernel, chunk = self.attn.numerics.kernel, self.attn.numerics.attention_chunk
        mixed = packed_attention(q, k, v, segment_ids, kernel, chunk, ends)
        x = x + self.attn.output(mixed)
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", "length", "activation")

    def cached(
        self, x: jax.Array, rope: Rope, view: CacheView, stack: Stack, layer: jax.Array
    ) -> tuple[jax.Array, Stack]:
        """Compute new tokens [B, n, D] of the sampler, whose sequences begin in the cache."""
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
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, ends: jax.Array | None = None
    ) -> jax.Array:
        """Compute the hidden states [B, T, D] of packed rows: tokens, positions, segment_ids int32 [B, T].

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
        """Append tokens [B, n] at `positions` to cache rows and return their hidden states [B, n, D].

        Args:
            embedded: [B, n, D], from `embed_groups`; None: the tokens are looked up here.
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

        # A stack is carried whole and written in place; a scan over its layers would copy each layer.
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
        """Embed tokens [groups, B, n], a group a device: [groups, B, n, D].

        Outside the `vmap` over the groups: within it the compiler gathers all rows on every device.
        """
        rows = tokens.reshape(-1, tokens.shape[-1])
        embedded = look_up(self.embed.embedding[...], rows, self.numerics.compute_dtype)
        return embedded.reshape(*tokens.shape, -1)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Return the logits of hidden states [..., D]: float32 [..., V], products in the compute dtype."""
        weights, vocab_first = self.head()
        product = "...d,vd->...v" if vocab_first else "...d,dv->...v"
        dtype = self.numerics.compute_dtype
        return jnp.einsum(
            product, hidden.astype(dtype), weights.astype(dtype), preferred_element_type=jnp.float32
        )

    def head(self) -> tuple[jax.Array, bool]:
        """Return the output head's weights: [V, D] and True if they are the embeddings, else [D, V]."""
        if self.architecture.tie_word_embeddings:
            return self.embed.embedding[...], True
        return self.lm_head.kernel[...], False

    def _rotary(self, positions: jax.Array) -> Rope:
        angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(self.architecture)
        return jnp.cos(angles), jnp.sin(angles)


class Critic(Decoder):
    """A decoder with a value head in place of the logits. It is zero at first."""

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
        """Return the value after each token: float32 [B, T], of hidden states [B, T, D]."""
        kernel = self.value_head.kernel[...][:, 0].astype(hidden.dtype)
        return jnp.einsum("btd,d->bt", hidden, kernel, preferred_element_type=jnp.float32)


class Policy:
    """A decoder without its parameters, for jitted functions to close over.

    Args:
        adapters: trained in the numerics' `param_dtype`, while all other parameters are frozen in the
            adapters' `base_dtype`. None: every parameter is trained.
        kind: the class of the decoder.

    Attributes:
        abstract_params: all parameters; leaves are ShapeDtypeStructs.
        abstract_base: all but the adapters.
        abstract_trained: the parameters that a learner trains.
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
        self.abstract_base, trained = split(self.abstract_params)
        self.abstract_trained: Params = trained if adapters else self.abstract_params
        self._plain = self._abstract(None)[0] if adapters else self.graph

    def merge(self, params: Params) -> Decoder:
        """Return the decoder of all parameters, or of the base alone."""
        return nnx.merge(self.graph if split(params)[1] else self._plain, params)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Split all parameters into the frozen and the trained ones; no array is copied."""
        return split(params) if self.adapters else ({}, params)

    def merged(self, params: Params, dtype: Any) -> Params:
        """Return parameters without adapters that compute the same, in `dtype`."""
        return merged(params, self.adapters.scale if self.adapters else 0.0, dtype)

    def init(self, key: jax.Array) -> Params:
        """Draw parameters; the base does not depend on the adapters. Jit it with `out_shardings`."""
        rngs = nnx.Rngs(key, lora=jax.random.fold_in(key, 1))
        return nnx.to_pure_dict(nnx.state(self._decoder(self.adapters, rngs)))

    def _decoder(self, adapters: Adapters | None, rngs: nnx.Rngs) -> Decoder:
        return self.kind(Build(self.architecture, self.numerics, adapters, rngs))

    def _abstract(self, adapters: Adapters | None) -> tuple[Any, Params]:
        abstract = nnx.eval_shape(lambda: self._decoder(adapters, nnx.Rngs(0)))
        graph, state = nnx.split(abstract)
        return graph, nnx.to_pure_dict(state)

    def empty_cache(self, slots: int, length: int) -> Cache:
        """Return zeroed keys and values for `slots` rows of `length` tokens."""
        a = self.architecture
        dtype = self.numerics.compute_dtype
        # An unrolled layer's products read its own array; they would read a copy of a common one.
        stacks = [1] * a.num_layers if a.num_layers <= UNROLLED_LAYERS else [a.num_layers]
        shapes = [(count, slots, a.num_kv_heads, length, a.head_dim) for count in stacks]
        return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes]
