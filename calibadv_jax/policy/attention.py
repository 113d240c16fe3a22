"""Attention of the decoder: within packed rows for the learner, to a KV cache for the sampler.

Letters: B rows, T tokens of a row, N query heads, K key-value heads, G = N / K query heads of a key-value
head, H head dimension, n new tokens of each row, L layers, S slots of a KV cache.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.kernels.custom_gradients import MASKED
from calibadv_jax.policy.recomputation import name_attention
from calibadv_jax.policy.sharding import RULES, axis_size

Kernel = Literal["xla", "splash", "triton", "tokamax", "cudnn"]
Stack = tuple[Array, Array]  # keys and values of successive layers, each [L, S, K, T, H]
Cache = list[Stack]  # one stack of all layers, or a stack for each of a few layers, which are unrolled
Window = tuple[Sequence[int], Array | int]  # widths that a cache may be read at; index of the chosen width

# Compute capabilities of the GPUs that tokamax has kernels for, with gradients: Ampere to Blackwell (B200).
# Those of later cards (RTX 50xx: 12.0) have "xla".
TOKAMAX_CAPABILITIES = (8.0, 11.0)
TOKAMAX_VERSION = "0.0.17"  # pinned: the functions used are not public
# Kernels that support sequences with a shared prefix.
PREFIX_SHARING_KERNELS: tuple[Kernel, ...] = ("xla", "cudnn")
# Bytes of float32 scores that exist at once on each device in attention to a KV cache.
SCORE_BYTES = 2**28


# --- Packed rows ---


def packed_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    kernel: Kernel,
    chunk: int,
    ends: Array | None = None,
) -> Array:
    """Attend causally within the segments of packed rows, or within the branches of their prefix trees.

    If T is above `chunk`, only the cuDNN kernel holds an array of T x T; see benchmarks/learner.md.

    Args:
        q: queries [B, T, N, H].
        k: keys [B, T, K, H].
        v: values [B, T, K, H].
        segment_ids: int32 [B, T]. A token sees only its own segment, whose columns are contiguous.
        kernel: "xla" on any device, "splash" on TPU, "tokamax" on GPU with half precision, "triton" on GPU,
            "cudnn" on CUDA with half precision.
        chunk: tokens of a block of the "xla" kernel; shorter rows are one block. Other kernels ignore it.
        ends: int32 [B, T], the first column that does not see this one; only with a kernel of
            PREFIX_SHARING_KERNELS. None: the end of the column's segment.

    Returns:
        [B, T, N, H] in the dtype that q, k and v have in common.

    Raises:
        AssertionError: if `ends` is given to another kernel.
    """
    length = q.shape[1]
    if kernel not in PREFIX_SHARING_KERNELS:
        assert ends is None, kernel
        return _on_every_device(_flash_kernel(kernel), q, k, v, segment_ids)
    columns = jnp.arange(length)
    ends = _segment_ends(segment_ids) if ends is None else jnp.maximum(ends, columns + 1)
    if kernel == "xla" and length > chunk:
        from calibadv_jax.policy.kernels.blockwise import blockwise_attention

        def in_blocks(q: Array, k: Array, v: Array, ends: Array) -> Array:
            """Attend in blocks of `chunk` tokens."""
            return blockwise_attention(q, k, v, ends, chunk)

        return _on_every_device(in_blocks, q, k, v, ends)
    is_visible = (columns[:, None] >= columns) & (columns[:, None] < ends[:, None, :])  # [B, Tq, Tk]
    mask = is_visible[:, None]  # [B, 1, Tq, Tk]
    if kernel == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=kernel)
    keys = k.transpose(0, 2, 1, 3)  # [B, K, T, H]
    values = v.transpose(0, 2, 1, 3)
    (out,) = name_attention(_masked_attention(q, keys, values, mask))
    return out


def _flash_kernel(kernel: Kernel) -> Callable[..., Array]:
    """Import a kernel that needs nothing but segment ids; some of them warn, or need further packages."""
    if kernel == "splash":
        from calibadv_jax.policy.kernels.splash import splash_attention

        return splash_attention
    if kernel == "tokamax":
        from calibadv_jax.policy.kernels.tokamax_kernels import tokamax_attention

        return tokamax_attention
    from calibadv_jax.policy.kernels.triton import triton_attention

    return triton_attention


def best_kernel(backend: str, compute_dtype: DTypeLike, capability: float = 0.0) -> Kernel:
    """Return the kernel that `policy.attention=auto` stands for.

    Args:
        backend: JAX's name of the kind of device: cpu, gpu or tpu.
        compute_dtype: of the policy's activations.
        capability: compute capability of a GPU, such as 9.0; 0: unknown.

    Returns:
        On GPUs with JAX 0.10 "triton"; with later versions, which deprecate it, "tokamax" or, where it has no
        kernel, "xla".
    """
    if backend == "tpu":
        return "splash"
    if backend != "gpu":
        return "xla"
    if jax.__version_info__ < (0, 11):
        return "triton"
    first, end = TOKAMAX_CAPABILITIES
    is_half = jnp.dtype(compute_dtype) == jnp.bfloat16
    if is_half and first <= capability < end:
        return "tokamax"
    return "xla"


def default_kernel(compute_dtype: DTypeLike) -> Kernel:
    """Return `best_kernel` of JAX's default device, which loads its backend.

    Args:
        compute_dtype: of queries, keys and values.

    Returns:
        The kernel's name.

    Raises:
        UserError: tokamax is that kernel, and is not installed.
    """
    capability = float(getattr(jax.devices()[0], "compute_capability", 0.0))
    kernel = best_kernel(jax.default_backend(), compute_dtype, capability)
    if kernel == "tokamax" and importlib.util.find_spec("tokamax") is None:
        raise UserError(
            "policy.attention=auto uses tokamax on this GPU, which is not installed: pip install"
            f" 'tokamax=={TOKAMAX_VERSION}', or set policy.attention=xla, which is slower"
        )
    return kernel


def keys_computed(kernel: Kernel, length: int, chunk: int) -> float:
    """Return the mean number of keys that a token of a row costs by the row's length.

    Args:
        kernel: of `packed_attention`.
        length: T, tokens of the row.
        chunk: of `packed_attention`.

    Returns:
        T for a kernel that computes all scores, T / 2 for one that computes the causal half, and 0 for the
        blockwise kernel, whose cost follows the sequences instead.
    """
    computes_all_scores = kernel == "cudnn" or (kernel == "xla" and length <= chunk)
    if computes_all_scores:
        return float(length)
    if kernel == "xla":
        return 0.0
    return length / 2


def _on_every_device(kernel: Callable[..., Array], q: Array, k: Array, v: Array, row_array: Array) -> Array:
    """Call `kernel` on each device with its rows and heads, since the compiler cannot split a kernel.

    Args:
        kernel: returns the attended values, given the other four arguments.
        q: queries [B, T, N, H].
        k: keys [B, T, K, H].
        v: values [B, T, K, H].
        row_array: int32 [B, T], the kernel's last argument.

    Returns:
        [B, T, N, H].
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return kernel(q, k, v, row_array)
    batch, _, num_heads, _ = q.shape
    num_kv = k.shape[2]
    tensor = axis_size(mesh, RULES["heads"])
    rows_axes = RULES["batch"] if batch % axis_size(mesh, RULES["batch"]) == 0 else None
    heads_axis = RULES["heads"] if num_heads % tensor == 0 else None
    kv_axis = heads_axis if num_kv % tensor == 0 else None
    queries_per_kv = num_heads // num_kv

    def attend_on_device(q: Array, k: Array, v: Array, row_array: Array) -> Array:
        """Attend with one device's rows and heads."""
        if heads_axis is not None and kv_axis is None:
            # Each device has all key-value heads, and selects one for each of its query heads.
            num_local_heads = q.shape[2]
            query_heads = jax.lax.axis_index(heads_axis) * num_local_heads + jnp.arange(num_local_heads)
            k = k[:, :, query_heads // queries_per_kv]
            v = v[:, :, query_heads // queries_per_kv]
        return kernel(q, k, v, row_array)

    q_spec = P(rows_axes, None, heads_axis, None)
    kv_spec = P(rows_axes, None, kv_axis, None)
    inputs = (q_spec, kv_spec, kv_spec, P(rows_axes, None))
    attend = jax.shard_map(attend_on_device, in_specs=inputs, out_specs=q_spec, check_vma=False)
    return attend(q, k, v, row_array)


def _masked_attention(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Attend where a mask allows it, with all scores at once.

    In einsums, q are the G * Tq queries that read one key-value head, and t are the Tk keys.

    Args:
        q: queries [B, Tq, N, H].
        k: keys [B, K, Tk, H].
        v: values [B, K, Tk, H].
        mask: bool [B, 1, Tq, Tk], True where a query sees a key.

    Returns:
        [B, Tq, N, H].
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv, num_keys = k.shape[1:3]
    grouped = q.transpose(0, 2, 1, 3).reshape(batch, num_kv, -1, head_dim)  # [B, K, G*Tq, H]
    scores = jnp.einsum("BKqH,BKtH->BKqt", grouped, k, preferred_element_type=jnp.float32)
    scale = 1.0 / math.sqrt(head_dim)
    scores = scores.reshape(batch, num_kv, -1, num_queries, num_keys) * scale  # [B, K, G, Tq, Tk]
    scores = jnp.where(mask[:, :, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    weights = weights.reshape(batch, num_kv, -1, num_keys)  # [B, K, G*Tq, Tk]
    out = jnp.einsum("BKqt,BKtH->BKqH", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)
    return out.reshape(batch, num_heads, num_queries, head_dim).transpose(0, 2, 1, 3)


def _segment_ends(segment_ids: Array) -> Array:
    """Return one past the last column of each column's segment, int32 [B, T]."""
    length = segment_ids.shape[1]
    next_columns = jnp.arange(1, length + 1)
    differs_from_next = segment_ids[:, 1:] != segment_ids[:, :-1]
    is_last = jnp.pad(differs_from_next, ((0, 0), (0, 1)), constant_values=True)
    return jax.lax.cummin(jnp.where(is_last, next_columns, length), axis=1, reverse=True)


# --- New tokens and a KV cache ---


@dataclass(frozen=True)
class CacheView:
    """Places of new tokens [B, n] in a cache of S slots with T columns each.

    Attributes:
        positions: int32 [B, n]. A token reads the columns up to its own position.
        columns: int32 [B, n], the columns that the tokens are written to; T: the token is not written.
        slots: int32 [B], the slot of each row; None: row b is slot b.
        window: columns that are read. Every written column is inside.
    """

    positions: Array
    columns: Array
    slots: Array | None
    window: Window

    def write(self, stack: Stack, layer: Array, keys: Array, values: Array) -> Stack:
        """Return the stack with the new tokens of one layer.

        Args:
            stack: keys and values [L, S, K, T, H].
            layer: int32 [], index of the layer in the stack.
            keys: [B, n, K, H] of the new tokens.
            values: [B, n, K, H] of the new tokens.

        Returns:
            Keys and values of the shape and dtype of `stack`. Tokens whose column is T are dropped.
        """
        num_rows = self.columns.shape[0]
        num_new, num_kv = keys.shape[1:3]
        slots = jnp.arange(num_rows) if self.slots is None else self.slots

        def write_at(place: tuple[Array, ...], cached: Array, new: Array) -> Array:
            """Return a cached array [L, S, K, T, H] with the new tokens written at `place`."""
            return cached.at[place].set(new.astype(cached.dtype), mode="drop")

        mesh = jax.sharding.get_abstract_mesh()
        put: Callable[[Array, Array], Array]
        if num_new == 1 or mesh.empty or axis_size(mesh, RULES["kv_heads"]) == 1:
            # One write for each head. The cache then keeps its layout, and the compiler copies no layer of it
            # for the products.
            heads = jnp.arange(num_kv)
            head_places = (layer, slots[:, None, None], heads, self.columns[:, :, None])
            put = functools.partial(write_at, head_places)
        else:
            # Mapped over the heads, so that a device needs nothing of the other devices' heads.
            token_places = (layer, slots[:, None], self.columns)
            put = jax.vmap(functools.partial(write_at, token_places), in_axes=2, out_axes=2)
        cached_keys, cached_values = stack
        return put(cached_keys, keys), put(cached_values, values)

    def attend(self, stack: Stack, layer: Array, queries: Array) -> Array:
        """Attend from new tokens to one layer of a stack that already holds them.

        Args:
            stack: keys and values [L, S, K, T, H].
            layer: int32 [], index of the layer in the stack.
            queries: [B, n, N, H].

        Returns:
            [B, n, N, H] in the dtype of the stack; meaningless for tokens that were not written.
        """
        _, num_slots, num_kv, _, head_dim = stack[0].shape

        def read(cached: Array, width: int) -> Array:
            """Return the first `width` columns of this layer for each row, [B, K, width, H]."""
            sizes = (1, num_slots, num_kv, width, head_dim)
            layer_columns = jax.lax.dynamic_slice(cached, (layer, 0, 0, 0, 0), sizes)[0]  # [S, K, width, H]
            if self.slots is None:
                return layer_columns
            return layer_columns[self.slots]  # [B, K, width, H]

        def attend_to(width: int) -> Array:
            """Attend to the first `width` columns."""
            # Sliced inside the branch: all columns of a branch's arguments would be copied.
            cached_keys, cached_values = stack
            keys = read(cached_keys, width)
            values = read(cached_values, width)
            return cached_attention(queries, keys, values, self.positions)

        widths, number = self.window
        if len(widths) == 1:
            return attend_to(widths[0])
        branches = [functools.partial(attend_to, width) for width in widths]
        return jax.lax.switch(number, branches)


def cached_attention(q: Array, k: Array, v: Array, positions: Array) -> Array:
    """Attend from new tokens to a KV cache, with at most SCORE_BYTES of scores at once.

    A single row is never divided, even if its scores take more.

    Args:
        q: queries [B, n, N, H].
        k: keys [B, K, T, H].
        v: values [B, K, T, H].
        positions: int32 [B, n]. A token sees the columns up to its own position.

    Returns:
        [B, n, N, H] in the dtype of `v`.
    """
    num_rows, num_new, num_heads, _ = q.shape
    num_columns = k.shape[2]
    row_bytes = 4 * num_new * num_heads * num_columns
    rows_at_once = max(1, SCORE_BYTES // row_bytes)

    def attend(q: Array, k: Array, v: Array, positions: Array) -> Array:
        """Attend with all scores of the given rows at once."""
        is_visible = jnp.arange(num_columns) <= positions[:, :, None]  # [B, n, T] of the rows at once
        return _masked_attention(q, k, v, is_visible[:, None])

    def attend_row(row: tuple[Array, Array, Array, Array]) -> Array:
        """Attend with one row, whose arrays lack the axis B."""
        q, k, v, positions = row
        return attend(q[None], k[None], v[None], positions[None])[0]

    if num_rows <= rows_at_once:
        return attend(q, k, v, positions)
    return jax.lax.map(attend_row, (q, k, v, positions), batch_size=rows_at_once)
