"""The KV cache of the embedded sampler and the programs that fill it and decode from it.

A layer of a cache with six slots, on two devices:

               column  0         10        20        30     max_length
                       |         |         |         |         |
    group 0:   slot 0  ########################................|     # holds the keys and values of a token
    device 0   slot 1  ##############==========................|     . is empty
               slot 2  ######################==................|     = a segment of a tile
    group 1:   slot 3  ##########==========....................|
    device 1   slot 4  ........................................|
               slot 5  #################.......................|
                       |<------- a window ------->|

Slot: the tokens of one session, a trajectory that is being written. The beginning of its next turn stays.
Group: the slots that one device holds and works on.
Tile: the work that prefill does at once, here two segments of at most ten new tokens in each group. A longer
context is several segments of its slot, in tiles one after the other. All tiles have one shape, so that
prefill is one program; places of a tile without tokens are computed and not written.
Window: the columns that a call reads, the narrowest of a few widths that holds the longest row. Platforms in
BRANCHING choose it within one program, others have a program for each.
Decoding works on all slots at once, a column of each at a time, until all have paused or made a full chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from calibadv_jax.config import SamplerConfig
from calibadv_jax.policy.adapters import merge_params
from calibadv_jax.policy.attention import Cache
from calibadv_jax.policy.sharding import (
    RULES,
    axis_size,
    cache_axes,
    param_shardings,
    partition_spec,
    placed_params,
    replicated,
)
from calibadv_jax.policy.transformer import Decoder, Params, Policy
from calibadv_jax.policy.weights import flatten, unflatten
from calibadv_jax.sampler.prefixes import Copy, Prefixes
from calibadv_jax.sampler.sampling import sample_tokens
from calibadv_jax.sampler.tiles import Segment, Tiles, TileShape

# Columns of the narrowest window. Every window is a program to compile, so all short rows share one.
MIN_WINDOW = 1024
# Platforms on which one program has windows of all widths: a branch costs next to nothing there.
BRANCHING = {"cpu"}
# The widths of such a program are multiples of STEP columns.
STEP = 64
# Such a program has at most this many widths.
MOST_WIDTHS = 8

Widths = tuple[int, ...]  # widths of the windows of one program, in columns, ascending


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeRows:
    """What decoding needs to know of each of the S slots.

    Attributes:
        last: int32 [S], the token id that the cache does not hold yet.
        positions: int32 [S], position of `last`.
        remaining: int32 [S], number of tokens that the slot may make; 0: it makes none.
        seeds: uint32 [S].
        temperatures: float32 [S]; 0: greedy.
        top_p: float32 [S]; 1: off.
        top_k: int32 [S]; 0: off.
    """

    last: Any
    positions: Any
    remaining: Any
    seeds: Any
    temperatures: Any
    top_p: Any
    top_k: Any

    @classmethod
    def idle(cls, slots: int) -> DecodeRows:
        """Return rows none of which makes tokens.

        Args:
            slots: S, number of slots.

        Returns:
            NumPy arrays [S], which the caller fills in: `remaining` and all other integers are 0,
            temperatures and top_p are 1.
        """
        return cls(
            last=np.zeros(slots, np.int32),
            positions=np.zeros(slots, np.int32),
            remaining=np.zeros(slots, np.int32),
            seeds=np.zeros(slots, np.uint32),
            temperatures=np.ones(slots, np.float32),
            top_p=np.ones(slots, np.float32),
            top_k=np.zeros(slots, np.int32),
        )


class _DecodeState(NamedTuple):
    """What the decoding loop carries from one token to the next; S slots, N tokens of a chunk."""

    step: jax.Array  # int32 [], number of tokens made by the rows that have made most
    cache: Cache
    last: jax.Array  # int32 [S], the newest token of each row
    live: jax.Array  # bool [S], whether the row makes another token
    tokens: jax.Array  # int32 [S, N]
    logprobs: jax.Array  # float32 [S, N]
    counts: jax.Array  # int32 [S], number of tokens that each row has made


class CacheEngine:
    """Slots of a KV cache on a mesh. Every call has one of a few static shapes.

    Slot s is row s % rows of group s // rows. There is a group for every device of the axes that split slots.
    The number of slots is rounded up to a multiple of the groups.

    On a CPU, a row gets the same bits in every slot and beside any other rows, where the slots of a device
    times the vocabulary are a multiple of 16 (else the last elements of a vector loop round differently).
    Programs of different shapes round differently: so prefill has one shape, and decoding takes all slots.

    Attributes:
        slots: number of slots.
        decode_chunk: largest number of tokens that one call of `decode` makes in a slot.
        held: by slot, the token ids whose keys and values the cache holds. `fill` updates it; the caller of
            `decode` adds the decoded tokens, and clears a slot that it gives to another session.
        in_turn: all slots, ordered so that successive ones are on different devices: the first few keep all
            devices busy.
    """

    def __init__(self, policy: Policy, mesh: Mesh, config: SamplerConfig, max_length: int):
        """Prepare the programs; nothing is compiled or allocated yet.

        Args:
            policy: the decoder, without its parameters.
            mesh: the devices that hold the cache and the parameters.
            config: `slots`, `decode_chunk` and `prefill_chunk` are read.
            max_length: number of columns, the tokens of the longest trajectory.
        """
        self.policy = policy
        self.mesh = mesh
        self.max_length = max_length
        self.decode_chunk = config.decode_chunk
        self._slot_axis, self._head_axis = cache_axes(policy.architecture.num_kv_heads, mesh.shape["tensor"])
        self._groups = axis_size(mesh, RULES[self._slot_axis])
        self._rows = -(-config.slots // self._groups)
        self.slots = self._groups * self._rows
        platform = mesh.devices.flat[0].platform
        self._tile = TileShape.fitting(self._groups, self._rows, config.prefill_chunk, platform)
        self._prefixes = Prefixes(self._tile)
        self.held: list[list[int]] = [[] for _ in range(self.slots)]
        slots_by_group = np.arange(self.slots).reshape(self._groups, self._rows)  # [groups, rows]
        self.in_turn = slots_by_group.T.ravel().tolist()
        # Widths of the windows of every program, both ascending.
        self._programs: list[Widths] = [(width,) for width in _halvings(max_length)]
        if platform in BRANCHING:
            self._programs = [tuple(even_widths(max_length))]
        self._params: Params | None = None
        self._cache: Cache | None = None  # leaves [groups, L, rows, K, T, H]
        self._cast = jax.jit(self._copied)
        self._prefill = jax.jit(self._prefill_tiles, donate_argnums=1, static_argnums=3)
        self._copy = jax.jit(self._copy_columns, donate_argnums=0, static_argnums=3)
        self._decode = jax.jit(self._decode_rows, donate_argnums=1, static_argnums=(4, 5))

    def load(self, params: Params) -> None:
        """Take a copy of the parameters in `compute_dtype`, and forget the cache.

        Args:
            params: all parameters on the devices. The frozen base of adapters is copied only if its dtype
                differs; everything else may be donated after the return.
        """
        base, _ = self.policy.split(params)
        dtype = self.policy.numerics.compute_dtype
        shared = {path: leaf for path, leaf in flatten(base).items() if leaf.dtype == dtype}
        copied = {path: leaf for path, leaf in flatten(params).items() if path not in shared}
        self._params = merge_params(unflatten(shared), self._cast(unflatten(copied)))
        self.forget()

    def _copied(self, params: Params) -> Params:
        # A copy even where the precision is the same: the learner donates its parameters at the next update.
        dtype = self.policy.numerics.compute_dtype
        copies = jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)
        return jax.lax.with_sharding_constraint(copies, param_shardings(params, self.mesh))

    def forget(self) -> None:
        """Treat every slot as empty, so that the next `fill` computes all tokens of its contexts."""
        for row in self.held:
            row.clear()

    def drop(self) -> None:
        """Drop the cache, which a failed call has donated."""
        self._cache = None

    def fill(self, contexts: dict[int, list[int]]) -> None:
        """Bring all but the last token of contexts into the cache, by copies where possible.

        Args:
            contexts: token ids by slot. The part that `held` says the cache already holds is not computed.
        """
        if self._cache is None:
            self._cache = jax.jit(self._empty_cache, out_shardings=self._cache_sharding())()
            self.forget()
        with jax.set_mesh(self.mesh):
            for wave in self._prefixes.plan_fill(contexts, self.held):
                if any(wave.copies):
                    slots, counts, width = self._copy_arguments(wave.copies)
                    self._cache = self._copy(self._cache, slots, counts, width)
                for call in self._tile.calls(wave.segments):
                    tiles = jax.device_put(call, replicated(self.mesh))
                    widths = self._widths(call.columns)
                    self._cache = self._prefill(self._params, self._cache, tiles, widths)

    def decode(
        self, rows: DecodeRows, pause: jax.Array, filtered: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Decode in every slot until it has paused, run out, or made `decode_chunk` tokens.

        Args:
            rows: NumPy arrays of all S slots, from `DecodeRows.idle`. The cache holds the tokens before
                `last`.
            pause: bool [V] on the devices, the tokens after which a slot pauses.
            filtered: whether any slot has top_p or top_k.

        Returns:
            tokens: int32 [S, decode_chunk]; 0 where a slot made none.
            logprobs: float32 [S, decode_chunk], log-probabilities in nats; 0 where a slot made none.
            counts: int32 [S], number of tokens that each slot made.
        """
        widths = self._widths(rows.positions + np.minimum(rows.remaining, self.decode_chunk))
        with jax.set_mesh(self.mesh):
            placed = jax.device_put(rows, replicated(self.mesh))
            self._cache, tokens, logprobs, counts = self._decode(
                self._params, self._cache, placed, pause, filtered, widths
            )
        return jax.device_get((tokens, logprobs, counts))

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """Lower prefill, copies and decoding of all slots for compiling ahead of time.

        Returns:
            Programs by name: "prefill", "copy" and "decode", the last without top_p and top_k.
        """
        policy = self.policy
        params = placed_params(policy.abstract_params, self.mesh, policy.numerics.compute_dtype)
        cache = _abstract(jax.eval_shape(self._empty_cache), self._cache_sharding())
        (call,) = self._tile.calls([[Segment(0, 0, [0])] for _ in range(self._groups)])
        everywhere = replicated(self.mesh)
        tiles = _abstract(call, everywhere)
        copies = _abstract(np.zeros((self._groups, 2, self._rows), np.int32), everywhere)
        num_copies = _abstract(np.zeros(self._groups, np.int32), everywhere)
        rows = _abstract(DecodeRows.idle(self.slots), everywhere)
        pause = _abstract(np.zeros(policy.architecture.vocab_size, np.bool_), everywhere)
        widths = self._programs[-1]
        with jax.set_mesh(self.mesh):
            return {
                "prefill": self._prefill.lower(params, cache, tiles, widths),
                "copy": self._copy.lower(cache, copies, num_copies, self.max_length),
                "decode": self._decode.lower(params, cache, rows, pause, False, widths),
            }

    def _cache_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(self._slot_axis, None, None, self._head_axis))

    def _empty_cache(self) -> Cache:
        empty = self.policy.empty_cache(self._rows, self.max_length)
        return jax.tree.map(lambda leaf: jnp.zeros((self._groups, *leaf.shape), leaf.dtype), empty)

    def _widths(self, columns: np.ndarray) -> Widths:
        """Return the widths of the narrowest program that holds the longest of rows of these columns."""
        longest = columns.max()
        return next(widths for widths in self._programs if widths[-1] >= longest)

    def _prefill_tiles(self, params: Params, cache: Cache, tiles: Tiles, widths: Widths) -> Cache:
        """Write the keys and values of the tiles' tokens into the cache."""
        offsets = jnp.arange(tiles.tokens.shape[-1])  # [width]
        decoder = self.policy.merge(params)

        def prefill_tile(number: Any, cache: Cache) -> Cache:
            """Write the keys and values of tile `number` into the cache."""
            positions = tiles.starts[number][..., None] + offsets  # [groups, rows, width]
            valid = offsets < tiles.counts[number][..., None]  # [groups, rows, width]
            slots = None if tiles.slots is None else tiles.slots[number]  # [groups, rows]
            append = self._append(decoder, tiles.columns[number], widths)
            tokens = tiles.tokens[number]  # [groups, rows, width]
            embedded = decoder.embed_groups(tokens)  # [groups, rows, width, D]
            _, cache = append(tokens, positions, valid, cache, slots, embedded)
            return cache

        if len(tiles.tokens) == 1:
            return prefill_tile(0, cache)
        return jax.lax.fori_loop(0, tiles.num_used, prefill_tile, cache)

    def _copy_arguments(self, groups: Sequence[Sequence[Copy]]) -> tuple[jax.Array, jax.Array, int]:
        """Return the slots, counts and width of `_copy_columns` for the copies of every group."""
        slots = np.zeros((self._groups, 2, self._rows), np.int32)
        for group, copies in enumerate(groups):
            for number, copy in enumerate(copies):
                slots[group, :, number] = copy.source, copy.target
        counts = np.array([len(copies) for copies in groups], np.int32)
        columns = max(copy.columns for copies in groups for copy in copies)
        all_widths = [width for widths in self._programs for width in widths]
        width = next(width for width in all_widths if width >= columns)
        by_group = NamedSharding(self.mesh, partition_spec(self._slot_axis))
        return jax.device_put(slots, by_group), jax.device_put(counts, by_group), width

    def _copy_columns(self, cache: Cache, slots: jax.Array, counts: jax.Array, width: int) -> Cache:
        """Copy the first `width` columns of slots to others of their group, one after the other.

        The columns beyond the shared prefix are copied too; they are overwritten before they are read.
        `slots` are int32 [groups, 2, rows], sources and targets; `counts` int32 [groups], number of copies.
        """

        def copy_in_group(cache: Cache, slots: jax.Array, counts: jax.Array) -> Cache:
            """Copy in one device's group: leaves [1, L, rows, K, T, H], slots [1, 2, rows], counts [1]."""

            def copy_slot(number: jax.Array, cache: Cache) -> Cache:
                """Copy one slot; `number` is the index of the copy in the group."""
                source, target = slots[0, :, number]

                def with_copy(stack: jax.Array) -> jax.Array:
                    """Return keys or values [1, L, rows, K, T, H] with the copy."""
                    groups, layers, _, kv_heads, _, head_dim = stack.shape
                    sizes = (groups, layers, 1, kv_heads, width, head_dim)
                    columns = jax.lax.dynamic_slice(stack, (0, 0, source, 0, 0, 0), sizes)
                    return jax.lax.dynamic_update_slice(stack, columns, (0, 0, target, 0, 0, 0))

                return jax.tree.map(with_copy, cache)

            return jax.lax.fori_loop(0, counts[0], copy_slot, cache)

        by_group = partition_spec(self._slot_axis)
        cache_spec = self._cache_sharding().spec
        copy = jax.shard_map(
            copy_in_group,
            mesh=self.mesh,
            in_specs=(cache_spec, by_group, by_group),
            out_specs=cache_spec,
            check_vma=False,
        )
        return copy(cache, slots, counts)

    def _append(self, decoder: Decoder, columns: jax.Array, widths: Widths) -> Callable[..., Any]:
        """Return `Decoder.decode` for every group [groups, ...], in the narrowest window of `columns`."""
        number: Any = 0  # index of the window among `widths`
        if len(widths) > 1:
            number = jnp.sum(columns > jnp.asarray(widths[:-1], jnp.int32))
        decode = partial(decoder.decode, window=(widths, number))
        return jax.vmap(decode, spmd_axis_name=RULES[self._slot_axis])

    def _decode_rows(
        self,
        params: Params,
        cache: Cache,
        rows: DecodeRows,
        pause: jax.Array,
        filtered: bool,
        widths: Widths,
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
        """Decode a chunk in all slots: the cache, and what `decode` returns."""
        columns = jnp.max(rows.positions + jnp.minimum(rows.remaining, self.decode_chunk))
        loop = partial(self._decode_loop, filtered, widths)
        if 1 < self.mesh.size == self.mesh.shape["data"]:
            # Every device has all parameters: it decodes its own rows, and waits for no other at every token.
            batch = P(RULES["batch"])
            loop = jax.shard_map(
                loop,
                mesh=self.mesh,
                in_specs=(P(), batch, batch, P(), P()),
                out_specs=(batch, batch, batch, batch),
                check_vma=False,
            )
        return loop(params, cache, rows, pause, columns)

    def _decode_loop(
        self,
        filtered: bool,
        widths: Widths,
        params: Params,
        cache: Cache,
        rows: DecodeRows,
        pause: jax.Array,
        columns: jax.Array,
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
        """Decode in all groups of the cache until none of their rows is live."""
        chunk = self.decode_chunk
        decoder = self.policy.merge(params)
        append = self._append(decoder, columns, widths)
        num_rows = rows.last.shape[0]  # S, or the slots of this device

        def is_running(state: _DecodeState) -> jax.Array:
            """Return whether another token is to be made, bool []."""
            return (state.step < chunk) & jnp.any(state.live)

        def by_group(array: jax.Array) -> jax.Array:
            """Reshape an array [S] to [groups, rows, 1]."""
            return array.reshape(-1, self._rows, 1)

        def decode_token(state: _DecodeState) -> _DecodeState:
            """Make one token in every live row."""
            positions = rows.positions + state.counts
            hidden, cache = append(
                by_group(state.last), by_group(positions), by_group(state.live), state.cache, None, None
            )
            logits = decoder.logits(hidden.reshape(num_rows, -1))  # [groups, rows, 1, D] -> [S, V]
            chosen, chosen_logprobs = sample_tokens(
                logits, rows.seeds, positions, rows.temperatures, rows.top_p, rows.top_k, filtered
            )
            last = jnp.where(state.live, chosen, state.last)
            new_tokens = jnp.where(state.live, chosen, 0)
            tokens = state.tokens.at[:, state.step].set(new_tokens)
            new_logprobs = jnp.where(state.live, chosen_logprobs, 0.0)
            logprobs = state.logprobs.at[:, state.step].set(new_logprobs)
            counts = state.counts + state.live.astype(jnp.int32)
            live = state.live & ~pause[chosen] & (counts < rows.remaining)
            return _DecodeState(state.step + 1, cache, last, live, tokens, logprobs, counts)

        no_tokens = jnp.zeros((num_rows, chunk), jnp.int32)
        no_logprobs = no_tokens.astype(jnp.float32)
        no_counts = jnp.zeros(num_rows, jnp.int32)
        start = _DecodeState(
            step=jnp.int32(0),
            cache=cache,
            last=rows.last,
            live=rows.remaining > 0,
            tokens=no_tokens,
            logprobs=no_logprobs,
            counts=no_counts,
        )
        end = jax.lax.while_loop(is_running, decode_token, start)
        return end.cache, end.tokens, end.logprobs, end.counts


def _abstract(tree: Any, place: NamedSharding) -> Any:
    """Return the shapes and dtypes of arrays, with one sharding for all of them."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)


def _halvings(length: int) -> list[int]:
    """Return window widths, ascending: `length` and its halves down to MIN_WINDOW."""
    widths = [length]
    while widths[0] >= 2 * MIN_WINDOW:
        widths.insert(0, -(-widths[0] // 2))
    return widths


def even_widths(length: int) -> list[int]:
    """Return evenly spaced window widths.

    Args:
        length: number of columns of the cache.

    Returns:
        At most MOST_WIDTHS widths, ascending: multiples of STEP below `length`, and `length`.
    """
    step = STEP * -(-length // (STEP * MOST_WIDTHS))
    return [*range(step, length, step), length]
