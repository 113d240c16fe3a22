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
Decoding works on all slots at once, a column of each at a time, until all have paused or made a whole chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
    placed_params,
    replicated,
    spec,
)
from calibadv_jax.policy.transformer import Decoder, Params, Policy
from calibadv_jax.policy.weights import flatten, unflatten
from calibadv_jax.sampler.prefixes import Copy, Prefixes, Segment, Tiles, TileShape
from calibadv_jax.sampler.sampling import sample_tokens

MIN_WINDOW = 1024  # columns; every window is a program to compile, so that short rows have one
BRANCHING = {"cpu"}  # platforms on which one program has all widths: a branch costs next to nothing there
STEP, MOST_WIDTHS = 64, 8  # the widths of such a program are multiples of STEP columns, at most so many
SlotArrays = tuple[jax.Array, ...]
Widths = tuple[int, ...]  # of the windows of a program


class CacheEngine:
    """Slots of a KV cache on a mesh. Every call has one of a few static shapes.

    Slot s is row s % rows of group s // rows. There is a group for every device of the axes that split slots.
    The number of slots is rounded up to a multiple of the groups.

    On a CPU, a row gets the same bits in every slot and beside any other rows, where the slots of a device
    times the vocabulary are a multiple of 16 (else the last elements of a vector loop round differently).
    Programs of different shapes round differently: so prefill has one shape, and decoding takes all slots.

    Attributes:
        held: token ids that the cache holds of each slot, by `fill`; the caller of `decode` adds its tokens,
            and clears a slot that another session takes.
        in_turn: all slots; successive ones are of different devices, so that few rows keep all busy.
    """

    def __init__(self, policy: Policy, mesh: Mesh, config: SamplerConfig, max_length: int):
        self.policy, self.mesh, self.max_length = policy, mesh, max_length
        self.decode_chunk = config.decode_chunk
        self._slot_axis, self._head_axis = cache_axes(policy.architecture.num_kv_heads, mesh.shape["tensor"])
        self._groups = axis_size(mesh, RULES[self._slot_axis])
        self._rows = -(-config.slots // self._groups)
        self.slots = self._groups * self._rows
        platform = mesh.devices.flat[0].platform
        self._tile = TileShape.fitting(self._groups, self._rows, config.prefill_chunk, platform)
        self._prefixes = Prefixes(self._tile)
        self.held: list[list[int]] = [[] for _ in range(self.slots)]
        self.in_turn = np.arange(self.slots).reshape(self._groups, self._rows).T.ravel().tolist()
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
        """Take a copy of the parameters in `compute_dtype`, a base only if it differs; forget the cache."""
        base, dtype = self.policy.split(params)[0], self.policy.numerics.compute_dtype
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
        for row in self.held:
            row.clear()

    def drop(self) -> None:
        """Drop the cache, which a failed call has donated."""
        self._cache = None

    def fill(self, contexts: dict[int, list[int]]) -> None:
        """Bring all but the last token of every slot's context into the cache, by copies where possible."""
        if self._cache is None:
            self._cache = jax.jit(self._empty_cache, out_shardings=self._cache_sharding())()
            self.forget()
        with jax.set_mesh(self.mesh):
            for wave in self._prefixes.fill(contexts, self.held):
                if any(wave.copies):
                    self._cache = self._copy(self._cache, *self._copies(wave.copies))
                for call in self._tile.calls(wave.segments):
                    tiles = jax.device_put(call, replicated(self.mesh))
                    self._cache = self._prefill(self._params, self._cache, tiles, self._widths(call.columns))

    def empty_rows(self) -> tuple[np.ndarray, ...]:
        """Return `rows` of `decode` in which no slot makes tokens."""
        integers, ones = np.zeros((4, self.slots), np.int32), np.ones((2, self.slots), np.float32)
        return *integers[:3], np.zeros(self.slots, np.uint32), *ones, integers[3]

    def decode(
        self, rows: tuple[np.ndarray, ...], pause: jax.Array, filtered: bool
    ) -> tuple[np.ndarray, ...]:
        """Decode in every slot until it has paused, run out, or made `decode_chunk` tokens.

        The `rows` hold each slot's last token, its position, tokens it may make (0: none), seed, temperature,
        top_p, top_k; `pause`, bool [V], the tokens after which it pauses; `filtered`: any has top_p or top_k.
        Returns tokens int32 [S, decode_chunk], log-probabilities float32 [S, decode_chunk], counts int32 [S].
        """
        _, positions, remaining, *_ = rows
        widths = self._widths(positions + np.minimum(remaining, self.decode_chunk))
        whole = replicated(self.mesh)
        with jax.set_mesh(self.mesh):
            rows = jax.device_put(rows, whole)
            self._cache, *decoded = self._decode(self._params, self._cache, rows, pause, filtered, widths)
        return tuple(jax.device_get(decoded))

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """Lower prefill and decoding of all slots for compiling ahead of time."""
        policy = self.policy
        params = placed_params(policy.abstract_params, self.mesh, policy.numerics.compute_dtype)

        def abstract(tree: Any, place: NamedSharding) -> Any:
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree
            )

        cache = abstract(jax.eval_shape(self._empty_cache), self._cache_sharding())
        (call,) = self._tile.calls([[Segment(0, 0, [0])] for _ in range(self._groups)])
        copies = np.zeros((self._groups, 2, self._rows), np.int32), np.zeros(self._groups, np.int32)
        work = call, copies, self.empty_rows(), np.zeros(policy.architecture.vocab_size, np.bool_)
        tiles, copied, rows, pause = abstract(work, replicated(self.mesh))
        widths = self._programs[-1]
        with jax.set_mesh(self.mesh):
            return {
                "prefill": self._prefill.lower(params, cache, tiles, widths),
                "copy": self._copy.lower(cache, *copied, self.max_length),
                "decode": self._decode.lower(params, cache, rows, pause, False, widths),
            }

    def _cache_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, spec(self._slot_axis, None, None, self._head_axis))

    def _empty_cache(self) -> Cache:
        empty = self.policy.empty_cache(self._rows, self.max_length)
        return jax.tree.map(lambda leaf: jnp.zeros((self._groups, *leaf.shape), leaf.dtype), empty)

    def _widths(self, columns: np.ndarray) -> Widths:
        """Return the widths of the narrowest program that holds the longest row."""
        return next(widths for widths in self._programs if widths[-1] >= columns.max())

    def _prefill_tiles(self, params: Params, cache: Cache, tiles: Tiles, widths: Widths) -> Cache:
        offsets = jnp.arange(tiles.tokens.shape[-1])
        decoder = self.policy.merge(params)

        def one_tile(number: Any, cache: Cache) -> Cache:
            positions = tiles.starts[number][..., None] + offsets
            valid = offsets < tiles.counts[number][..., None]
            rows = None if tiles.slots is None else tiles.slots[number]
            append = self._append(decoder, tiles.columns[number], widths)
            tokens = tiles.tokens[number]
            return append(tokens, positions, valid, cache, rows, decoder.embed_groups(tokens))[1]

        if len(tiles.tokens) == 1:
            return one_tile(0, cache)
        return jax.lax.fori_loop(0, tiles.used, one_tile, cache)

    def _copies(self, groups: Sequence[Sequence[Copy]]) -> tuple[jax.Array, jax.Array, int]:
        """Return the arguments of `_copy_columns` after the cache."""
        slots = np.zeros((self._groups, 2, self._rows), np.int32)
        for group, copies in enumerate(groups):
            for number, copy in enumerate(copies):
                slots[group, :, number] = copy.source, copy.target
        counts = np.array([len(copies) for copies in groups], np.int32)
        columns = max(copy.columns for copies in groups for copy in copies)
        width = next(width for widths in self._programs for width in widths if width >= columns)
        by_group = NamedSharding(self.mesh, spec(self._slot_axis))
        return jax.device_put(slots, by_group), jax.device_put(counts, by_group), width

    def _copy_columns(self, cache: Cache, slots: jax.Array, counts: jax.Array, width: int) -> Cache:
        """Copy the first `width` columns of slots to others of their group, one after the other.

        Columns that are copied beyond the shared prefix are written anew before they are read. `slots` are
        int32 [groups, 2, rows], sources and targets; `counts` int32 [groups], number of them.
        """

        def copy_in_group(cache: Cache, slots: jax.Array, counts: jax.Array) -> Cache:
            def copy_one(number: jax.Array, cache: Cache) -> Cache:
                source, target = slots[0, :, number]

                def moved(held: jax.Array) -> jax.Array:
                    sizes = (*held.shape[:2], 1, held.shape[3], width, held.shape[5])
                    columns = jax.lax.dynamic_slice(held, (0, 0, source, 0, 0, 0), sizes)
                    return jax.lax.dynamic_update_slice(held, columns, (0, 0, target, 0, 0, 0))

                return jax.tree.map(moved, cache)

            return jax.lax.fori_loop(0, counts[0], copy_one, cache)

        by_group, cache_spec = spec(self._slot_axis), self._cache_sharding().spec
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
        number = jnp.sum(columns > jnp.asarray(widths[:-1], jnp.int32)) if widths[1:] else 0
        decode = partial(decoder.decode, window=(widths, number))
        return jax.vmap(decode, spmd_axis_name=RULES[self._slot_axis])

    def _decode_rows(
        self, params: Params, cache: Cache, rows: SlotArrays, pause: jax.Array, filtered: bool, widths: Widths
    ) -> tuple[Cache, *SlotArrays]:
        _, positions, remaining, *_ = rows
        columns = jnp.max(positions + jnp.minimum(remaining, self.decode_chunk))
        loop = partial(self._decode_loop, filtered, widths)
        if 1 < self.mesh.size == self.mesh.shape["data"]:
            # Every device has all parameters: it decodes its own rows, and waits for no other at every token.
            batch = P(RULES["batch"])
            inputs, outputs = (P(), batch, batch, P(), P()), (batch, batch, batch, batch)
            loop = jax.shard_map(loop, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return loop(params, cache, rows, pause, columns)

    def _decode_loop(self, filtered: bool, widths: Widths, *arrays: Any) -> tuple[Cache, *SlotArrays]:
        """Decode in all groups of the cache until none of their rows goes on."""
        params, cache, rows, pause, columns = arrays
        last, positions, remaining, seeds, temperatures, top_p, top_k = rows
        chunk, decoder = self.decode_chunk, self.policy.merge(params)
        append, num_rows = self._append(decoder, columns, widths), last.shape[0]

        def running(carry: Any) -> jax.Array:
            return (carry[0] < chunk) & jnp.any(carry[3])

        def one_token(carry: Any) -> Any:
            step, cache, last, live, tokens, logprobs, counts = carry
            places = positions + counts
            token, position, valid = (array.reshape(-1, self._rows, 1) for array in (last, places, live))
            hidden, cache = append(token, position, valid, cache, None, None)
            logits = decoder.logits(hidden.reshape(num_rows, -1))
            sampling = seeds, places, temperatures, top_p, top_k
            chosen, chosen_logprobs = sample_tokens(logits, *sampling, filtered)
            last = jnp.where(live, chosen, last)
            tokens = tokens.at[:, step].set(jnp.where(live, chosen, 0))
            logprobs = logprobs.at[:, step].set(jnp.where(live, chosen_logprobs, 0.0))
            counts = counts + live.astype(jnp.int32)
            live = live & ~pause[chosen] & (counts < remaining)
            return step + 1, cache, last, live, tokens, logprobs, counts

        no_tokens = jnp.zeros((num_rows, chunk), jnp.int32)
        no_logprobs, counts = no_tokens.astype(jnp.float32), jnp.zeros(num_rows, jnp.int32)
        start = jnp.int32(0), cache, last, remaining > 0, no_tokens, no_logprobs, counts
        _, cache, _, _, tokens, logprobs, counts = jax.lax.while_loop(running, one_token, start)
        return cache, tokens, logprobs, counts


def _halvings(length: int) -> list[int]:
    """Return window widths, ascending: `length` and its halves down to MIN_WINDOW."""
    widths = [length]
    while widths[0] >= 2 * MIN_WINDOW:
        widths.insert(0, -(-widths[0] // 2))
    return widths


def even_widths(length: int) -> list[int]:
    """Return window widths, ascending: multiples of STEP below `length`, and `length`."""
    step = STEP * -(-length // (STEP * MOST_WIDTHS))
    return [*range(step, length, step), length]
