"""The embedded sampler: continuous batching over a KV cache, in process, on the trainer's mesh.

A trajectory owns one row of the cache ("slot") from its first turn to its release, so that each
turn prefills only what is new. Prefill and decode have static shapes; between chunks of decoded
tokens finished rows are handed back and waiting ones admitted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from calibadv_jax.config import SamplerConfig
from calibadv_jax.interfaces import Completion, SamplingParams
from calibadv_jax.policy.sharding import RULES, param_shardings, placed_params, replicated
from calibadv_jax.policy.transformer import Cache, Params, Policy
from calibadv_jax.sampler.sampling import sample_tokens
from calibadv_jax.sampler.stopping import StopRule
from calibadv_jax.trajectory import StopReason


@dataclass
class _Request:
    """One completion in progress."""

    session: str
    context: list[int]
    sampling: SamplingParams
    future: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def everything(self) -> list[int]:
        return self.context + self.tokens


class JaxSampler:
    """Implements `interfaces.Sampler`.

    Args:
        stops: decides where a completion ends.
        max_length: tokens of the longest trajectory, prompt included.
    """

    def __init__(
        self,
        policy: Policy,
        stops: StopRule,
        config: SamplerConfig,
        mesh: Mesh,
        max_length: int,
    ):
        self.policy, self.stops, self.config, self.mesh = policy, stops, config, mesh
        self.max_length = max_length
        self._params: Params | None = None
        self._version = -1
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self._slots = -(-config.slots // shards) * shards
        self._cache: Cache | None = None
        # Token ids each row holds. Only the chunk that is running writes here, and `_admit` between chunks.
        self._cached: list[list[int]] = [[] for _ in range(self._slots)]
        self._slot_of: dict[str, int] = {}
        self._waiting: deque[_Request] = deque()
        self._active: dict[int, _Request] = {}
        self._pump_task: asyncio.Task[None] | None = None
        # A copy even where the precision is the same: the learner donates its parameters at the next update.
        self._cast = jax.jit(
            lambda params: jax.tree.map(
                lambda leaf: jnp.array(leaf, policy.numerics.compute_dtype, copy=True), params
            ),
            out_shardings=param_shardings(policy.abstract_params, mesh),
        )
        self._prefill = jax.jit(self._prefill_rows, donate_argnums=1)
        self._decode = jax.jit(self._decode_rows, donate_argnums=1, static_argnums=(4, 5))
        self._pause_table: dict[tuple[str, ...], jax.Array] = {}

    async def load(self, version: int, params: Params) -> None:
        """Takes a copy of the parameters in the policy's `compute_dtype`. No completion may be in progress.

        Raises:
            RuntimeError: completions are in progress.
        """
        if self._active or self._waiting:
            raise RuntimeError("weights cannot be swapped while completions are in progress")
        self._version, self._params = version, self._cast(params)
        for row in self._cached:
            row.clear()

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Nothing: the weights are the learner's own."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Nothing: there is nobody to lose."""
        return {}

    async def close(self) -> None:
        """Nothing: there are no connections."""

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> Completion:
        """Samples up to a stop string, end-of-text, or `sampling.max_tokens`.

        Raises:
            RuntimeError: no weights were loaded.
            ValueError: the context is empty, or leaves no room for a token.
        """
        if self._params is None:
            raise RuntimeError("no weights: call load before generating")
        if not 0 < len(token_ids) < self.max_length:
            raise ValueError(f"context of {len(token_ids)} tokens; must be 1 to {self.max_length - 1}")
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(session, list(token_ids), sampling, future))
        self._kick()
        return await future

    def release(self, session: str) -> None:
        """Frees the session's slot and drops what it still had in progress."""
        self._waiting = deque(request for request in self._waiting if request.session != session)
        slot = self._slot_of.pop(session, None)
        if slot is not None:
            self._active.pop(slot, None)
            if self._waiting:
                self._kick()

    def _kick(self) -> None:
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = asyncio.get_running_loop().create_task(self._pump())

    async def _pump(self) -> None:
        """Runs while there is work; one device call at a time, off the event loop."""
        while True:
            await asyncio.sleep(0)  # requests that are ready now are queued before rows are chosen
            self._admit()
            if not self._active:
                return
            requests = dict(self._active)
            try:
                ended = await asyncio.to_thread(self._advance, requests)
            except Exception as error:
                self._fail(error)
                raise
            for slot, reason in ended.items():
                request = requests[slot]
                if self._active.get(slot) is request:
                    del self._active[slot]
                if not request.future.done():
                    request.future.set_result(
                        Completion(request.tokens, request.logprobs, reason, (self._version,))
                    )

    def _fail(self, error: Exception) -> None:
        """Passes an engine error to every waiting request; the donated cache is lost too."""
        for request in [*self._active.values(), *self._waiting]:
            if not request.future.done():
                request.future.set_exception(error)
        self._active.clear()
        self._waiting.clear()
        self._cache = None

    def _admit(self) -> None:
        held = deque[_Request]()
        taken = set(self._slot_of.values())
        free = deque(slot for slot in range(self._slots) if slot not in taken)
        while self._waiting:
            request = self._waiting.popleft()
            if request.future.done():
                continue
            if request.session not in self._slot_of:
                if not free:
                    held.append(request)
                    continue
                slot = self._slot_of[request.session] = free.popleft()
                self._cached[slot].clear()  # not at the release: a chunk may still write the old session's
            self._active[self._slot_of[request.session]] = request
        self._waiting = held

    def _advance(self, requests: dict[int, _Request]) -> dict[int, StopReason]:
        """Prefills what is new in every row, decodes one chunk, and says which rows ended."""
        with jax.set_mesh(self.mesh):
            if self._cache is None:
                self._cache = self._new_cache()
                for row in self._cached:
                    row.clear()
            self._fill(requests)
            self._chunk(requests)
        reasons = {slot: self._ended(request) for slot, request in requests.items()}
        return {slot: reason for slot, reason in reasons.items() if reason is not None}

    def lower(self) -> dict[str, jax.stages.Lowered]:
        """Prefill and decoding of all slots, for compiling ahead of time, as `Learner.lower_update`."""
        whole, slots = replicated(self.mesh), self._slots
        policy = self.policy
        params = placed_params(policy.abstract_params, self.mesh, policy.numerics.compute_dtype)
        cache = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._cache_sharding()),
            jax.eval_shape(lambda: policy.empty_cache(slots, self.max_length)),
        )

        def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

        tokens = of(np.int32, slots, self.config.prefill_chunk)
        dtypes = (np.int32, np.int32, np.int32, np.uint32, np.float32, np.float32, np.int32)
        rows = tuple(of(dtype, slots) for dtype in dtypes)
        pause = of(np.bool_, policy.architecture.vocab_size)
        return {
            "prefill": self._prefill.lower(params, cache, tokens, rows[0], rows[0], None),
            "decode": self._decode.lower(params, cache, rows, pause, False, self.config.decode_chunk),
        }

    def _cache_sharding(self) -> NamedSharding:
        fits = self.policy.architecture.num_kv_heads % self.mesh.shape["tensor"] == 0
        return NamedSharding(self.mesh, P(RULES["batch"], RULES["kv_heads"] if fits else None))

    def _new_cache(self) -> Cache:
        make = jax.jit(
            lambda: self.policy.empty_cache(self._slots, self.max_length),
            out_shardings=self._cache_sharding(),
        )
        return make()

    def _fill(self, requests: dict[int, _Request]) -> None:
        """Brings all but the last context token of every row into the cache."""
        pending: dict[int, list[int]] = {}
        for slot, request in requests.items():
            context = request.everything
            kept = _common_prefix(self._cached[slot], context[:-1])
            del self._cached[slot][kept:]
            if kept < len(context) - 1:
                pending[slot] = context[kept:-1]
        while pending:
            pending = self._fill_once(pending)

    def _fill_once(self, pending: dict[int, list[int]]) -> dict[int, list[int]]:
        """One prefill call for all pending rows; returns what is left of them."""
        widest = min(max(len(tokens) for tokens in pending.values()), self.config.prefill_chunk)
        width = next(width for width in self._widths() if width >= widest)
        count = next(rows for rows in self._row_counts() if rows >= len(pending))
        whole = count == self._slots  # row b is slot b: no gather of the cache
        # Rows beyond the pending ones write nothing; an unused slot index keeps them harmless.
        unused = [slot for slot in range(self._slots) if slot not in pending]
        slots = list(range(self._slots)) if whole else [*pending, *unused][:count]
        tokens = np.zeros((count, width), np.int32)
        starts, counts = np.zeros(count, np.int32), np.zeros(count, np.int32)
        for row, slot in enumerate(slots):
            block = pending.get(slot, [])[:width]
            tokens[row, : len(block)] = block
            starts[row], counts[row] = len(self._cached[slot]), len(block)
            self._cached[slot].extend(block)
        index = None if whole else self._put(np.asarray(slots, np.int32))[0]
        self._cache = self._prefill(self._params, self._cache, *self._put(tokens, starts, counts), index)
        return {slot: rest[width:] for slot, rest in pending.items() if len(rest) > width}

    def _chunk(self, requests: dict[int, _Request]) -> None:
        """Decodes up to `decode_chunk` tokens in every row and appends them to the requests."""
        shape = self._slots
        last, positions, remaining, top_k = (np.zeros(shape, np.int32) for _ in range(4))
        seeds = np.zeros(shape, np.uint32)
        temperatures, top_p = np.ones(shape, np.float32), np.ones(shape, np.float32)
        for slot, request in requests.items():
            sampling = request.sampling
            last[slot] = request.everything[-1]
            positions[slot] = len(request.everything) - 1
            room = self.max_length - len(request.everything)
            remaining[slot] = min(sampling.max_tokens - len(request.tokens), room)
            temperatures[slot], top_p[slot] = sampling.temperature, sampling.top_p
            top_k[slot], seeds[slot] = sampling.top_k, sampling.seed & 0xFFFFFFFF
        stops = {request.sampling.stop for request in requests.values()}
        pause = self._pauses(tuple(sorted({stop for group in stops for stop in group})))
        filtered = any(r.sampling.top_p < 1 or r.sampling.top_k > 0 for r in requests.values())
        rows = self._put(last, positions, remaining, seeds, temperatures, top_p, top_k)
        self._cache, tokens, logprobs, counts = self._decode(
            self._params, self._cache, rows, pause, filtered, self.config.decode_chunk
        )
        tokens, logprobs, counts = jax.device_get((tokens, logprobs, counts))
        for slot, request in requests.items():
            count = int(counts[slot])
            self._cached[slot].append(int(last[slot]))
            self._cached[slot].extend(tokens[slot, : count - 1].tolist())
            request.tokens.extend(tokens[slot, :count].tolist())
            request.logprobs.extend(logprobs[slot, :count].tolist())

    def _ended(self, request: _Request) -> StopReason | None:
        # A row pauses at every token that may end it, so that nothing follows the one that does.
        ended = self.stops.find(request.tokens, request.sampling.stop)
        if ended is not None:
            return ended[1]
        full = len(request.everything) >= self.max_length
        return "length" if full or len(request.tokens) >= request.sampling.max_tokens else None

    def _pauses(self, stop: tuple[str, ...]) -> jax.Array:
        """bool [V]: tokens at which a row pauses, for the host to look whether a stop string is complete.

        A stop string can only end inside a token that contains its last character.
        """
        if stop not in self._pause_table:
            endings = {text[-1] for text in stop}
            table = np.zeros(self.policy.architecture.vocab_size, bool)
            for token in range(min(len(self.stops.tokenizer), len(table))):
                text = self.stops.text([token])
                table[token] = any(ending in text for ending in endings)
            table[list(self.stops.end_ids)] = True
            self._pause_table[stop] = jax.device_put(table, replicated(self.mesh))
        return self._pause_table[stop]

    def _put(self, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
        return jax.device_put(arrays, replicated(self.mesh))

    def _widths(self) -> list[int]:
        full = self.config.prefill_chunk
        return sorted({max(1, full // 4), full})

    def _row_counts(self) -> list[int]:
        return sorted({max(1, self._slots // 8), self._slots})

    def _prefill_rows(
        self,
        params: Params,
        cache: Cache,
        tokens: jax.Array,
        starts: jax.Array,
        counts: jax.Array,
        slots: jax.Array | None,
    ) -> Cache:
        """tokens [B, W], of which the first counts [B] are written from column starts [B] on."""
        offsets = jnp.arange(tokens.shape[1])
        positions = starts[:, None] + offsets
        valid = offsets < counts[:, None]
        return self.policy.merge(params).decode(tokens, positions, valid, cache, slots)[1]

    def _decode_rows(
        self,
        params: Params,
        cache: Cache,
        rows: tuple[jax.Array, ...],
        pause: jax.Array,
        filtered: bool,
        chunk: int,
    ) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
        """Decodes until every row has paused, run out, or made `chunk` tokens.

        Returns the cache, tokens int32 [S, chunk], log-probabilities float32 [S, chunk], counts [S].
        """
        last, positions, remaining, seeds, temperatures, top_p, top_k = rows
        decoder = self.policy.merge(params)
        num_rows = last.shape[0]

        def running(carry: Any) -> jax.Array:
            return (carry[0] < chunk) & jnp.any(carry[3])

        def one_token(carry: Any) -> Any:
            step, cache, last, live, tokens, logprobs, counts = carry
            at = positions + counts
            hidden, cache = decoder.decode(last[:, None], at[:, None], live[:, None], cache)
            chosen, chosen_logprobs = sample_tokens(
                decoder.logits(hidden[:, 0]), seeds, at, temperatures, top_p, top_k, filtered
            )
            last = jnp.where(live, chosen, last)
            tokens = tokens.at[:, step].set(jnp.where(live, chosen, 0))
            logprobs = logprobs.at[:, step].set(jnp.where(live, chosen_logprobs, 0.0))
            counts = counts + live.astype(jnp.int32)
            live = live & ~pause[chosen] & (counts < remaining)
            return step + 1, cache, last, live, tokens, logprobs, counts

        start = (
            jnp.int32(0),
            cache,
            last,
            remaining > 0,
            jnp.zeros((num_rows, chunk), jnp.int32),
            jnp.zeros((num_rows, chunk), jnp.float32),
            jnp.zeros(num_rows, jnp.int32),
        )
        _, cache, _, _, tokens, logprobs, counts = jax.lax.while_loop(running, one_token, start)
        return cache, tokens, logprobs, counts


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    shared = min(len(left), len(right))
    if list(left[:shared]) == list(right[:shared]):
        return shared
    return next(index for index in range(shared) if left[index] != right[index])
