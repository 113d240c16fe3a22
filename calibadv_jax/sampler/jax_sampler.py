"""The embedded sampler: continuous batching over a KV cache, in process, on the trainer's mesh.

A trajectory owns one row of the cache ("slot") from its first turn to its release, so that each turn prefills
its new tokens only. Prefill and decode have static shapes; between chunks of decoded tokens finished rows are
handed back and waiting ones admitted. The next chunk of the others begins before the host has read the text
of the finished ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.interfaces import Completion, Sampler, SamplingParams
from calibadv_jax.core.signals import await_in_daemon_thread
from calibadv_jax.policy.sharding import replicated
from calibadv_jax.policy.transformer import Params, Policy
from calibadv_jax.sampler.engine import CacheEngine, DecodeRows
from calibadv_jax.sampler.stop_rule import StopRule

QUIET = 0.002  # seconds without a new request after which an idle sampler begins to decode
MOST_WAITS = 10  # largest number of times that it waits for QUIET seconds


@dataclass
class _Request:
    """A completion in progress."""

    session: str
    context: list[int]
    sampling: SamplingParams
    future: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)  # sampled so far
    logprobs: list[float] = field(default_factory=list)  # log-probability of each sampled token

    @property
    def length(self) -> int:
        """Number of tokens of context and completion."""
        return len(self.context) + len(self.tokens)

    @property
    def newest_token(self) -> int:
        """The last token of the completion, or of the context if none has been sampled."""
        return self.tokens[-1] if self.tokens else self.context[-1]


class _PauseTable(NamedTuple):
    """Whether a row pauses after each token, because a completion may end there: bool [V]."""

    on_host: np.ndarray
    on_device: jax.Array


class JaxSampler(Sampler):
    """The embedded sampler, which computes on the devices of the trainer.

    All methods are called on one event loop. Only the engine works in a thread, on one chunk at a time.
    """

    def __init__(self, policy: Policy, stops: StopRule, config: SamplerConfig, mesh: Mesh, max_length: int):
        """Prepare a sampler without weights; `load` gives it the first ones.

        Args:
            policy: the decoder, without its parameters.
            stops: where completions end.
            config: `slots`, `decode_chunk` and `prefill_chunk` are read.
            mesh: the devices to sample on.
            max_length: number of tokens of the longest trajectory, prompt included.
        """
        self.policy = policy
        self.stops = stops
        self.config = config
        self.mesh = mesh
        self.max_length = max_length
        self._version = -1  # version of the loaded weights; -1: none are loaded
        self._engine = CacheEngine(policy, mesh, config, max_length)
        self._slot_of: dict[str, int] = {}  # slot of each session
        self._waiting: deque[_Request] = deque()  # requests that have not been given a slot
        self._active: dict[int, _Request] = {}  # requests in progress, by slot
        self._pump_task: asyncio.Task[None] | None = None
        self._pause_tables: dict[tuple[str, ...], _PauseTable] = {}  # the table for each set of stop strings

    async def load(self, version: int, published: Params) -> None:
        """Sample with these parameters from now on.

        Args:
            version: of the policy.
            published: all parameters on the devices. They are copied in `compute_dtype`, and may be donated
                after the return, except the frozen base of adapters.

        Raises:
            RuntimeError: completions are in progress.
        """
        if self._active or self._waiting:
            raise RuntimeError("weights cannot be swapped while completions are in progress")
        self._version = version
        self._engine.load(published)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> Completion:
        """Sample a completion; an error of the engine or the tokenizer is raised in all waiting calls.

        Args:
            token_ids: the context, 1 to `max_length` - 1 tokens.
            sampling: how to sample. The completion is also cut where the trajectory is `max_length` long.
            session: name of the trajectory, which keeps its slot until `release`.

        Returns:
            The tokens up to a stop string, end-of-text token or limit.

        Raises:
            RuntimeError: no weights are loaded.
            ValueError: the context is empty, or leaves no room for a token.
        """
        if self._version < 0:
            raise RuntimeError("no weights: call load before generating")
        if not 0 < len(token_ids) < self.max_length:
            raise ValueError(f"context of {len(token_ids)} tokens; must be 1 to {self.max_length - 1}")
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(session, list(token_ids), sampling, future))
        self._start_pump()
        return await future

    def release(self, session: str) -> None:
        """Give the slot of a session to others, and drop its requests.

        Args:
            session: name of a trajectory that has ended; it may be unknown.
        """
        self._waiting = deque(request for request in self._waiting if request.session != session)
        slot = self._slot_of.pop(session, None)
        if slot is not None:
            self._active.pop(slot, None)
            if self._waiting:
                self._start_pump()

    def _start_pump(self) -> None:
        """Start the task that serves the requests, unless it is running."""
        if self._pump_task is None or self._pump_task.done():
            self._pump_task = asyncio.create_task(self._pump())

    async def _pump(self) -> None:
        """Decode chunk after chunk until no request is left."""
        await self._gather()
        paused: dict[int, _Request] = {}
        while True:
            await asyncio.sleep(0)  # requests that are ready now are queued before rows are chosen
            self._admit()
            running = {slot: request for slot, request in self._active.items() if slot not in paused}
            if not running and not paused:
                return
            try:
                paused = await self._round(running, paused)
            except Exception as error:  # the engine's or the tokenizer's: all waiting callers must get it
                self._fail(error)
                raise

    async def _round(self, running: dict[int, _Request], paused: dict[int, _Request]) -> dict[int, _Request]:
        """Decode a chunk of the running rows, hand back the paused ones meanwhile; return the next paused."""
        if not running:
            self._hand_back(paused)
            return {}
        chunk = asyncio.create_task(await_in_daemon_thread(self._advance, running))
        await asyncio.sleep(0)  # the chunk begins
        try:
            self._hand_back(paused)
        finally:
            next_paused = await chunk  # nothing else may use the engine before
        return next_paused

    async def _gather(self) -> None:
        """Wait for the requests of a step: a chunk costs the same for one row and for all."""
        for _ in range(MOST_WAITS):
            before = len(self._waiting)
            await asyncio.sleep(QUIET)
            if len(self._waiting) == before or before >= self._engine.slots:
                return

    def _hand_back(self, paused: dict[int, _Request]) -> None:
        """Return the completions of paused rows that have ended; the others go on with the next chunk."""
        for slot, request in paused.items():
            # A row pauses at every token that may end it, so that nothing follows the one that does.
            end = self.stops.find(request.tokens, request.sampling.stop)
            if self._active.get(slot) is not request:
                continue  # it was released meanwhile
            if end is None and not self._is_full(request):
                continue  # it paused at a token that might have ended it, or may end another row
            del self._active[slot]
            if not request.future.done():
                reason = "length" if end is None else end[1]
                completion = Completion(request.tokens, request.logprobs, reason, (self._version,))
                request.future.set_result(completion)

    def _fail(self, error: Exception) -> None:
        """Raise an error in all waiting callers, and drop the cache."""
        for request in [*self._active.values(), *self._waiting]:
            if not request.future.done():
                request.future.set_exception(error)
        self._active.clear()
        self._waiting.clear()
        self._engine.drop()

    def _admit(self) -> None:
        """Give slots to waiting requests, as far as there are free ones."""
        used = set(self._slot_of.values())
        free = deque(slot for slot in self._engine.in_turn if slot not in used)
        requests = self._waiting
        self._waiting = deque()
        for request in requests:
            if request.future.done():
                continue
            if request.session not in self._slot_of:
                if not free:
                    self._waiting.append(request)
                    continue
                slot = free.popleft()
                self._slot_of[request.session] = slot
                # Cleared now and not at the release: a chunk may still have written the old session's tokens.
                self._engine.held[slot].clear()
            self._active[self._slot_of[request.session]] = request

    def _advance(self, requests: dict[int, _Request]) -> dict[int, _Request]:
        """Prefill new contexts, decode a chunk, and return the rows that may have ended."""
        contexts = {slot: request.context for slot, request in requests.items() if not request.tokens}
        self._engine.fill(contexts)
        self._chunk(requests)
        table = self._pause_table(requests)
        paused = {}
        for slot, request in requests.items():
            newest_token = request.tokens[-1]
            if table.on_host[newest_token] or self._is_full(request):
                paused[slot] = request
        return paused

    def _chunk(self, requests: dict[int, _Request]) -> None:
        """Decode a chunk in the slots of these requests, and add its tokens to them."""
        rows = DecodeRows.idle(self._engine.slots)
        for slot, request in requests.items():
            sampling = request.sampling
            rows.last[slot] = request.newest_token
            rows.positions[slot] = request.length - 1
            room = self.max_length - request.length
            rows.remaining[slot] = min(sampling.max_tokens - len(request.tokens), room)
            rows.seeds[slot] = sampling.seed & 0xFFFFFFFF
            rows.temperatures[slot] = sampling.temperature
            rows.top_p[slot] = sampling.top_p
            rows.top_k[slot] = sampling.top_k
        all_sampling = [request.sampling for request in requests.values()]
        filtered = any(sampling.top_p < 1 or sampling.top_k > 0 for sampling in all_sampling)
        table = self._pause_table(requests)
        tokens, logprobs, counts = self._engine.decode(rows, table.on_device, filtered)
        for slot, request in requests.items():
            count = int(counts[slot])
            # The cache lacks the newest token: decoding reads it when it samples the next one.
            self._engine.held[slot].append(int(rows.last[slot]))
            self._engine.held[slot].extend(tokens[slot, : count - 1].tolist())
            request.tokens.extend(tokens[slot, :count].tolist())
            request.logprobs.extend(logprobs[slot, :count].tolist())

    def _is_full(self, request: _Request) -> bool:
        """Return whether a request has no room for another token."""
        return request.length >= self.max_length or len(request.tokens) >= request.sampling.max_tokens

    def _pause_table(self, requests: dict[int, _Request]) -> _PauseTable:
        """Return after which tokens rows pause, given the stop strings of all requests together."""
        strings: set[str] = set()
        for request in requests.values():
            strings.update(request.sampling.stop)
        stop = tuple(sorted(strings))
        if stop not in self._pause_tables:
            vocab_size = self.policy.architecture.vocab_size
            pauses = np.zeros(vocab_size, bool)
            for token in range(min(self.stops.num_ids, vocab_size)):
                pauses[token] = self.stops.may_end(token, stop)
            pauses[list(self.stops.end_ids)] = True
            on_device = jax.device_put(pauses, replicated(self.mesh))
            self._pause_tables[stop] = _PauseTable(pauses, on_device)
        return self._pause_tables[stop]
