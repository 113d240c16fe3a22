"""One decoder for Qwen2/2.5, Qwen3 and Llama 3.x (Flax NNX), with its layers stacked on a leading axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from calibadv_jax.config import PolicyConfig
from calibadv_jax.policy.adapters import Adapters, merged, split
from calibadv_jax.policy.architecture import Architecture
from calibadv_jax.policy.kernels.custom_gradients import MASKED, RMSNorm, gated, rows_product
from calibadv_jax.policy.sharding import RULES, VocabLayout, axis_size, constrain, pin_rows, vocab_layout

Params = dict[str, Any]
Rope = tuple[Array, Array]  # cosines and sines of each token's angles [B, T, H/2]
Kernel = Literal["xla", "splash", "triton", "cudnn"]
Stack = tuple[Array, Array]  # keys and values of successive layers [L, S, K, T, H]
Cache = list[Stack]  # all layers in one stack; few layers, which are unrolled, in a stack each
Window = tuple[Sequence[int], Array | int]  # widths that may be read of a cache; index of the chosen width

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
    def product(self) -> Callable[..., Array]:
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
class DecoderParts:
    architecture: Architecture
    numerics: Numerics
    adapters: Adapters | None
    rngs: nnx.Rngs

    @property
    def options(self) -> dict[str, Any]:
        """The options of all modules' parameters but the adapters."""
        base_dtype = jnp.dtype(self.adapters.base_dtype) if self.adapters else self.numerics.param_dtype
        return {"dtype": self.numerics.compute_dtype, "param_dtype": base_dtype, "rngs": self.rngs}

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, epsilon=self.architecture.rms_norm_eps, **self.options)


class Linear(nnx.Linear):
    """Flax's linear layer plus x @ lora_a @ lora_b * scale, if the adapters have this `target`."""

    def __init__(self, build: DecoderParts, target: str, size_in: int, size_out: int, use_bias: bool):
        product, dtype, adapters = build.numerics.product, build.numerics.param_dtype, build.adapters
        super().__init__(size_in, size_out, use_bias=use_bias, dot_general=product, **build.options)
        self.scale = 0.0
        if adapters is not None and target in adapters.targets:
            self.scale = adapters.scale
            # As PEFT draws it: evenly within 1 / sqrt(size_in). The product is 0 at first.
            draw = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
            self.lora_a = nnx.Param(draw(build.rngs.lora(), (size_in, adapters.rank), dtype))
            self.lora_b = nnx.Param(jnp.zeros((adapters.rank, size_out), dtype))

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        out = super().__call__(inputs, out_sharding)
        if not self.scale:
            return out
        dimensions = ((inputs.ndim - 1,), (0,)), ((), ())
        x = inputs.astype(out.dtype)
        for matrix in (self.lora_a[...], self.lora_b[...] * self.scale):
            x = self.dot_general(x, matrix.astype(out.dtype), dimensions)
        return out + x


# --- Rotary position embeddings ---


def inverse_frequencies(architecture: Architecture) -> Array:
    """Return the rotary frequencies, float32 [H/2], with Llama 3's scaling if the architecture has it."""
    exponents = jnp.arange(0, architecture.head_dim, 2, dtype=jnp.float32) / architecture.head_dim
    frequencies = 1.0 / (architecture.rope_theta**exponents)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_length / scaling.low_freq_factor
    high = scaling.original_length / scaling.high_freq_factor
    band = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (scaling.original_length / wavelengths - scaling.low_freq_factor) / band
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    stretched = jnp.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    return jnp.where((wavelengths <= low) & (wavelengths >= high), blended, stretched)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Apply rotary embeddings, halves convention of HuggingFace. x [B, T, N, H]; cos, sin [B, T, H/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


# --- Attention in the learner: packed rows, by one of several kernels ---


def packed_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, kernel: Kernel, chunk: int, ends: Array | None = None
) -> Array:
    """Attend causally within segments of packed rows, or within branches of their trees: [B, T, N, H].

    No kernel but cuDNN's holds an array of T x T once T is above `chunk`; see benchmarks/learner.md.

    Args:
        q: [B, T, N, H]. k, v: [B, T, K, H].
        segment_ids: int32 [B, T]; tokens see only their own segment, whose columns are contiguous.
        kernel: "xla" anywhere, "splash" on TPU, "triton" on GPU, "cudnn" (bfloat16/float16 on CUDA).
        chunk: side of the blocks of the XLA kernel; shorter rows are one block.
        ends: int32 [B, T]; if the kernel is of SHARING: the first column that does not see this one.
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


def _on_every_device(kernel: Callable[..., Array], q: Array, k: Array, v: Array, of_rows: Array) -> Array:
    """Call `kernel` on each device with its rows and heads, since the compiler cannot split it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel(q, k, v, of_rows)
    num_heads, num_kv = q.shape[2], k.shape[2]
    tensor = axis_size(mesh, RULES["heads"])
    rows = RULES["batch"] if q.shape[0] % axis_size(mesh, RULES["batch"]) == 0 else None
    heads = RULES["heads"] if num_heads % tensor == 0 else None
    kv_heads = heads if num_kv % tensor == 0 else None

    def local(q: Array, k: Array, v: Array, of_rows: Array) -> Array:
        if heads is not None and kv_heads is None:  # all lie on each device, which takes those of its queries
            query_heads = jax.lax.axis_index(heads) * q.shape[2] + jnp.arange(q.shape[2])
            k, v = (x[:, :, query_heads // (num_heads // num_kv)] for x in (k, v))
        return kernel(q, k, v, of_rows)

    queries, keys = P(rows, None, heads, None), P(rows, None, kv_heads, None)
    inputs = queries, keys, keys, P(rows, None)
    return jax.shard_map(local, in_specs=inputs, out_specs=queries, check_vma=False)(q, k, v, of_rows)


def _masked_attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """q [B, Tq, N, H]; k, v [B, K, Tk, H]; mask bool [B, 1, Tq, Tk] -> [B, Tq, N, H], by batched products."""
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv, num_keys = k.shape[1:3]
    grouped = q.transpose(0, 2, 1, 3).reshape(batch, num_kv, -1, head_dim)  # [B, K, G*Tq, H]
    scores = jnp.einsum("bkqh,bkth->bkqt", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, num_kv, -1, num_queries, num_keys) * (1.0 / math.sqrt(head_dim))
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, MASKED), axis=-1).astype(v.dtype)
    out = jnp.einsum("bkqt,bkth->bkqh", weights.reshape(batch, num_kv, -1, num_keys), v)
    return out.reshape(batch, num_heads, num_queries, head_dim).transpose(0, 2, 1, 3)


def _segment_ends(segment_ids: Array) -> Array:
    """Return one past the last column of each column's segment, int32 [B, T]."""
    columns = jnp.arange(1, segment_ids.shape[1] + 1)
    is_last = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    return jax.lax.cummin(jnp.where(is_last, columns, len(columns)), axis=1, reverse=True)


# --- Attention in the sampler: new tokens to a KV cache ---


@dataclass(frozen=True)
class CacheView:
    """Places of new tokens [B, n] in a cache of S slots with T columns each."""

    positions: Array  # int32 [B, n]: a token reads the columns up to its own
    columns: Array  # int32 [B, n], that the tokens are written to; T: nowhere
    slots: Array | None  # int32 [B], of each row; None: row b is slot b
    window: Window  # columns that are read; every written one is below them

    def written(self, stack: Stack, layer: Array, keys: Array, values: Array) -> Stack:
        """Return the stack with the tokens' keys and values [B, n, K, H] of a layer."""
        rows = jnp.arange(self.columns.shape[0]) if self.slots is None else self.slots

        def write(place: tuple[Array, ...], cached: Array, new: Array) -> Array:
            return cached.at[place].set(new.astype(cached.dtype), mode="drop")

        mesh = jax.sharding.get_abstract_mesh()
        if keys.shape[1] == 1 or mesh.empty or axis_size(mesh, RULES["kv_heads"]) == 1:
            # One head a write: the cache keeps its layout, and no layer of it is copied for the products.
            heads = jnp.arange(keys.shape[2])
            put = functools.partial(write, (layer, rows[:, None, None], heads, self.columns[:, :, None]))
        else:  # each head by itself: a device needs nothing of the other devices' heads
            of_head = functools.partial(write, (layer, rows[:, None], self.columns))
            put = jax.vmap(of_head, in_axes=2, out_axes=2)
        return put(stack[0], keys), put(stack[1], values)

    def attended(self, stack: Stack, layer: Array, queries: Array) -> Array:
        """Attend from the tokens' queries [B, n, N, H] to a layer that holds them too: [B, n, N, H]."""

        def mixed(width: int) -> Array:
            # Sliced within the branch: all columns of a branch's arguments are copied.
            sizes = 1, *stack[0].shape[1:3], width, stack[0].shape[4]
            layers = (jax.lax.dynamic_slice(cached, (layer, 0, 0, 0, 0), sizes)[0] for cached in stack)
            keys, values = (x if self.slots is None else x[self.slots] for x in layers)
            return cached_attention(queries, keys, values, self.positions)

        widths, number = self.window
        branches = [functools.partial(mixed, width) for width in widths]
        return branches[0]() if len(widths) == 1 else jax.lax.switch(number, branches)


def cached_attention(q: Array, k: Array, v: Array, positions: Array) -> Array:
    """Attend from new tokens q [B, n, N, H] at `positions` int32 [B, n] to a KV cache [B, K, T, H]."""
    at_once = max(1, SCORE_BYTES // (4 * math.prod(q.shape[1:3]) * k.shape[2]))

    def attend(q: Array, k: Array, v: Array, positions: Array) -> Array:
        visible = (jnp.arange(k.shape[2]) <= positions[:, :, None])[:, None]  # [B, 1, n, T], of rows at once
        return _masked_attention(q, k, v, visible)

    def one_row(row: tuple[Array, ...]) -> Array:
        return attend(*(x[None] for x in row))[0]

    if len(q) <= at_once:
        return attend(q, k, v, positions)
    return jax.lax.map(one_row, (q, k, v, positions), batch_size=at_once)


# --- The look-up of tokens ---


def look_up(table: Array, tokens: Array, dtype: Any) -> Array:
    """Return rows of `table` [V, D] at `tokens` int32 [B, T]: [B, T, D] of `dtype`; gradients in float32."""
    return _look_up(vocab_layout(tokens.shape[0], table.shape[1], table.shape[0]), dtype, table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(layout: VocabLayout, dtype: Any, table: Array, tokens: Array) -> Array:
    def local(table: Array, tokens: Array) -> Array:
        index = layout.gathered(tokens, 0) - layout.first(table.shape[0])
        rows = table.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        rows = layout.over_vocab(rows.astype(dtype))
        if layout.width is None:
            return rows
        return jax.lax.all_to_all(rows, layout.width, split_axis=0, concat_axis=2, tiled=True)

    inputs = layout.spec("vocab", "width"), layout.spec("rows", None)
    return layout.on_devices(local, inputs, layout.spec("rows", None, None))(table, tokens)


def _look_up_backward(layout: VocabLayout, dtype: Any, saved: Any, gradient: Array) -> tuple[Array, None]:
    def local(table: Array, tokens: Array, gradient: Array) -> Array:
        tokens = layout.gathered(tokens, 0)
        if layout.width is not None:
            gradient = jax.lax.all_to_all(gradient, layout.width, split_axis=2, concat_axis=0, tiled=True)
        index = tokens - layout.first(table.shape[0])
        total = jnp.zeros(table.shape, jnp.float32)
        total = total.at[index].add(gradient.astype(jnp.float32), mode="drop", wrap_negative_indices=False)
        return layout.over_replicas(total).astype(table.dtype)

    weights = layout.spec("vocab", "width")
    inputs = weights, layout.spec("rows", None), layout.spec("rows", None, None)
    return layout.on_devices(local, inputs, weights)(*saved, gradient), None


_look_up.defvjp(lambda *arguments: (_look_up(*arguments), arguments[2:]), _look_up_backward)


# --- The decoder ---


class Attention(nnx.Module):
    """Projections of grouped-query self-attention."""

    def __init__(self, build: DecoderParts):
        architecture = build.architecture
        self.architecture, self.numerics = architecture, build.numerics
        hidden, head_dim = architecture.hidden_size, architecture.head_dim
        heads, kv_heads = architecture.num_heads * head_dim, architecture.num_kv_heads * head_dim
        self.q = Linear(build, "q", hidden, heads, architecture.qkv_bias)
        self.k = Linear(build, "k", hidden, kv_heads, architecture.qkv_bias)
        self.v = Linear(build, "v", hidden, kv_heads, architecture.qkv_bias)
        self.o = Linear(build, "o", heads, hidden, architecture.out_bias)
        if architecture.qk_norm:
            self.q_norm, self.k_norm = build.norm(head_dim), build.norm(head_dim)

    def project(self, x: Array, rope: Rope) -> tuple[Array, Array, Array]:
        """Project x [B, T, D] to q [B, T, N, H], k and v [B, T, K, H], q and k rotated."""
        heads = (*x.shape[:2], -1, self.architecture.head_dim)
        q, k, v = self.q(x).reshape(heads), self.k(x).reshape(heads), self.v(x).reshape(heads)
        if self.architecture.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *rope), rotate(k, *rope), v

    def output(self, x: Array) -> Array:
        return self.o(x.reshape(*x.shape[:2], -1))  # [B, T, N, H] -> [B, T, D]


class Mlp(nnx.Module):
    """SwiGLU."""

    def __init__(self, build: DecoderParts):
        architecture = build.architecture
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        self.gate = Linear(build, "gate", hidden, inner, architecture.mlp_bias)
        self.up = Linear(build, "up", hidden, inner, architecture.mlp_bias)
        self.down = Linear(build, "down", inner, hidden, architecture.mlp_bias)

    def __call__(self, x: Array) -> Array:
        return self.down(gated(self.gate(x), self.up(x)))


class Block(nnx.Module):
    """Pre-norm decoder layer."""

    def __init__(self, build: DecoderParts):
        width = build.architecture.hidden_size
        self.attn_norm = build.norm(width)
        self.attn = Attention(build)
        self.mlp_norm = build.norm(width)
        self.mlp = Mlp(build)

    def packed(self, x: Array, rope: Rope, segment_ids: Array, ends: Array | None) -> Array:
        """Compute rows [B, T, D] of the learner, each with several sequences."""
        qkv = self.attn.project(self.attn_norm(x), rope)
        kernel, chunk = self.attn.numerics.kernel, self.attn.numerics.attention_chunk
        x = x + self.attn.output(packed_attention(*qkv, segment_ids, kernel, chunk, ends))
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", "length", "activation")

    def cached(
        self, x: Array, rope: Rope, view: CacheView, stack: Stack, layer: Array
    ) -> tuple[Array, Stack]:
        """Compute new tokens [B, n, D] of the sampler, whose sequences begin in the cache."""
        q, k, v = self.attn.project(self.attn_norm(x), rope)
        stack = view.written(stack, layer, k, v)
        x = pin_rows(x + self.attn.output(view.attended(stack, layer, q).astype(x.dtype)))
        return pin_rows(x + self.mlp(self.mlp_norm(x))), stack


class Decoder(nnx.Module):
    """Token ids to hidden states; `logits` applies the (possibly tied) output head."""

    def __init__(self, build: DecoderParts):
        architecture = build.architecture
        self.architecture, self.numerics = architecture, build.numerics
        vocab, hidden = architecture.vocab_size, architecture.hidden_size
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(vocab, hidden, embedding_init=normal, **build.options)

        @nnx.split_rngs(splits=architecture.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(replace(build, rngs=rngs))

        self.layers = stacked(build.rngs)
        self.final_norm = build.norm(hidden)
        if not architecture.tie_word_embeddings:
            self.lm_head = nnx.Linear(hidden, vocab, use_bias=False, **build.options)

    def __call__(
        self, tokens: Array, positions: Array, segment_ids: Array, ends: Array | None = None
    ) -> Array:
        """Compute the hidden states [B, T, D] of packed rows: tokens, positions, segment_ids int32 [B, T].

        Positions restart in every segment; padding is a segment of its own. `ends`: see `packed_attention`.
        """
        x = look_up(self.embed.embedding[...], tokens, self.numerics.compute_dtype)
        x = constrain(x, "batch", "length", "activation")
        rope = self._rotary(positions)
        graph, stack = nnx.split(self.layers)

        def layer(x: Array, params: Any) -> tuple[Array, None]:
            return nnx.merge(graph, params).packed(x, rope, segment_ids, ends), None

        if self.numerics.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.numerics.remat])
        x, _ = jax.lax.scan(layer, x, stack, unroll=self.architecture.num_layers <= UNROLLED_LAYERS)
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
        def layer(carry: tuple[Array, Stack], inputs: Any) -> tuple[tuple[Array, Stack], None]:
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

    def embed_groups(self, tokens: Array) -> Array:
        """Embed tokens [groups, B, n], a group a device: [groups, B, n, D]."""
        # Outside the `vmap` over the groups: within it the compiler gathers all rows on every device.
        rows = tokens.reshape(-1, tokens.shape[-1])
        embedded = look_up(self.embed.embedding[...], rows, self.numerics.compute_dtype)
        return embedded.reshape(*tokens.shape, -1)

    def logits(self, hidden: Array) -> Array:
        """Return the logits of hidden states [..., D]: float32 [..., V], products in the compute dtype."""
        weights, vocab_first = self.head()
        product = "...d,vd->...v" if vocab_first else "...d,dv->...v"
        dtype = self.numerics.compute_dtype
        operands = hidden.astype(dtype), weights.astype(dtype)
        return jnp.einsum(product, *operands, preferred_element_type=jnp.float32)

    def head(self) -> tuple[Array, bool]:
        """Return the output head's weights: [V, D] and True if they are the embeddings, else [D, V]."""
        if self.architecture.tie_word_embeddings:
            return self.embed.embedding[...], True
        return self.lm_head.kernel[...], False

    def _rotary(self, positions: Array) -> Rope:
        angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(self.architecture)
        return jnp.cos(angles), jnp.sin(angles)


class CriticDecoder(Decoder):
    """A decoder with a value head in place of the logits. It is zero at first."""

    def __init__(self, build: DecoderParts):
        super().__init__(build)
        width, dtype = build.architecture.hidden_size, build.numerics.param_dtype
        zeros = nnx.initializers.zeros
        self.value_head = nnx.Linear(
            width, 1, use_bias=False, param_dtype=dtype, kernel_init=zeros, rngs=build.rngs
        )

    def values(self, hidden: Array) -> Array:
        """Return the value after each token: float32 [B, T], of hidden states [B, T, D]."""
        kernel = self.value_head.kernel[...][:, 0].astype(hidden.dtype)
        return jnp.einsum("btd,d->bt", hidden, kernel, preferred_element_type=jnp.float32)


class Policy:
    """A decoder without its parameters, for jitted functions to close over.

    With `adapters` these are trained in the numerics' `param_dtype`, and all other parameters are frozen in
    the adapters' `base_dtype`; without, every parameter is trained.

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
        self.graph, state = nnx.split(nnx.eval_shape(lambda: self._decoder(adapters, nnx.Rngs(0))))
        self._plain = self.graph  # of the base alone
        if adapters:
            self._plain = nnx.split(nnx.eval_shape(lambda: self._decoder(None, nnx.Rngs(0))))[0]
        self.abstract_params: Params = nnx.to_pure_dict(state)
        self.abstract_base, trained = split(self.abstract_params)
        self.abstract_trained: Params = trained if adapters else self.abstract_params

    def merge(self, params: Params) -> Decoder:
        """Return the decoder of all parameters, or of the base alone."""
        return nnx.merge(self.graph if split(params)[1] else self._plain, params)

    def split(self, params: Params) -> tuple[Params, Params]:
        """Split all parameters into the frozen and the trained ones; no array is copied."""
        return split(params) if self.adapters else ({}, params)

    def merged(self, params: Params, dtype: Any) -> Params:
        """Return parameters without adapters that compute the same, in `dtype`."""
        return merged(params, self.adapters.scale if self.adapters else 0.0, dtype)

    def init(self, key: Array) -> Params:
        """Draw parameters; the base does not depend on the adapters. Jit it with `out_shardings`."""
        rngs = nnx.Rngs(key, lora=jax.random.fold_in(key, 1))
        return nnx.to_pure_dict(nnx.state(self._decoder(self.adapters, rngs)))

    def _decoder(self, adapters: Adapters | None, rngs: nnx.Rngs) -> Decoder:
        return self.kind(DecoderParts(self.architecture, self.numerics, adapters, rngs))

    def empty_cache(self, slots: int, length: int) -> Cache:
        """Return zeroed keys and values for `slots` rows of `length` tokens."""
        num_layers, dtype = self.architecture.num_layers, self.numerics.compute_dtype
        # An unrolled layer's products read its own array; they would read a copy of a common one.
        stacks = [1] * num_layers if num_layers <= UNROLLED_LAYERS else [num_layers]
        row = slots, self.architecture.num_kv_heads, length, self.architecture.head_dim
        return [(jnp.zeros((count, *row), dtype), jnp.zeros((count, *row), dtype)) for count in stacks]
