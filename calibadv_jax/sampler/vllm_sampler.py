"""The sampler over one or many vLLM servers: token-in, token-out, with weights from snapshots.

Every completion carries the version label of the weights that wrote it. If the label is not of this run (the
worker was restarted, or someone else used it), the reply is discarded, and the worker loads the snapshot.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import ClientTimeout

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.errors import REFUSAL, RequestFailed, UserError
from calibadv_jax.core.interfaces import Completion, SamplingParams
from calibadv_jax.core.tags import printable
from calibadv_jax.core.trajectory import StopReason
from calibadv_jax.sampler.stopping import StopRule
from calibadv_jax.sampler.vllm_worker import ask_alive, ask_label
from calibadv_jax.services.http_client import BadReply, PerLoop, Unreachable, open_session, request, watched

PROBE_PAUSE = 1.0  # seconds between two attempts to bring a lost worker back
WATCH_PAUSE = 10.0  # seconds between two checks of whether workers with open requests are still there
SWAP_TIMEOUT = 1800.0  # seconds a worker may take to load a snapshot
REQUEST_TIMEOUT = 1800.0  # seconds a completion may take; then its worker counts as lost
MAX_LOSSES = 5  # workers lost over one completion: it may be what kills them
MAX_EMPTY = 6  # replies without a token, one after another, after which their worker counts as lost
EMPTY_PAUSE = 0.05  # seconds after the first of them; doubles
HIGHEST = 1e-4  # of a log-probability: above 0 only by rounding
LOWEST = -9999.0  # vLLM's minus infinity, which no sampled token can have
GENERATE = "/inference/v1/generate"


class WorkerLost(Exception):
    """The worker did not answer, or its answer shows that it is not usable for this run."""


@dataclass
class Worker:
    url: str
    version: int | None = None  # of its weights; None: not known to be usable
    busy: int = 0  # completions in progress
    requests: set[asyncio.Task[Any]] = field(default_factory=set)  # of these completions
    lost: str = "not started"  # why it is not usable
    refusal: UserError | None = None  # of the current snapshot: it is not asked again before the next one
    reviving: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while weights are swapped

    def drop_requests(self) -> None:
        for posted in self.requests:
            posted.cancel()


class VllmSampler:
    """Implements `interfaces.Sampler` over the URLs of `vllm_worker` servers, on the loop that first uses it.

    A worker with another `tokenizer_hash` refuses the run; tokens must be below `vocab_size`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        config: SamplerConfig,
        stops: StopRule,
        tokenizer_hash: str,
        vocab_size: int = 2**31,
    ):
        self.config, self.stops = config, stops
        self.tokenizer_hash, self.vocab_size = tokenizer_hash, vocab_size
        self.run = uuid.uuid4().hex[:12]
        self.workers = [Worker(url.rstrip("/")) for url in urls]
        self._http = PerLoop(lambda: open_session(REQUEST_TIMEOUT))
        self._snapshot: tuple[Path, int] | None = None
        self._home: dict[str, Worker] = {}  # session -> the worker that caches its prefix
        self._changed = asyncio.Event()  # a worker has become usable, or refused the snapshot
        self._watching: asyncio.Task[None] | None = None
        self.lost_count = 0

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> Completion:
        """Sample up to a stop string, end-of-text, or `sampling.max_tokens`.

        A completion cut by a weight swap, or whose worker was lost, continues. vLLM looks for stop strings in
        the tokens of one request, and misses one that a cut has divided: `stops` decides over the whole
        completion. Raises RequestFailed without a worker in time, if one refuses the request, or after
        MAX_LOSSES workers.
        """
        if self._snapshot is None:
            raise RuntimeError("no weights: call load before generating")
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: dict[int, None] = {}
        losses = empty = 0
        while True:
            worker = await self._choose(session)
            worker.busy += 1
            try:
                part = await self._ask(worker, token_ids, tokens, sampling)
                empty = 0 if part.token_ids else empty + 1
                if empty == MAX_EMPTY:
                    empty = 0
                    raise WorkerLost(f"{MAX_EMPTY} replies without a token")
            except WorkerLost as error:
                self._lose(worker, str(error))
                losses += 1
                if losses == MAX_LOSSES:
                    message = f"{losses} vLLM workers were lost over one completion; the last: {error}"
                    raise RequestFailed("sampler", message) from error
                continue
            finally:
                worker.busy -= 1
            tokens += part.token_ids
            logprobs += part.logprobs
            versions |= dict.fromkeys(part.policy_versions)
            if empty:  # cut before its first token, by a swap or by someone else
                await asyncio.sleep(EMPTY_PAUSE * 2 ** (empty - 1))
                continue
            if ended := self.stops.find(tokens, sampling.stop):
                count, reason = ended
                return Completion(tokens[:count], logprobs[:count], reason, tuple(versions))
            if part.stop_reason in ("eos", "length") or len(tokens) >= sampling.max_tokens:
                end: StopReason = "eos" if part.stop_reason == "eos" else "length"
                return Completion(tokens, logprobs, end, tuple(versions))

    def release(self, session: str) -> None:
        self._home.pop(session, None)

    async def load(self, version: int, published: Path) -> None:
        """Load a snapshot into every worker that answers; the others follow before they serve again.

        Raises UserError if a worker refuses it and keeps the old one, RequestFailed without a worker in time.
        """
        if self._snapshot and version <= self._snapshot[1]:  # a rollback; workers take no old versions
            self.run = uuid.uuid4().hex[:12]
            for worker in self.workers:
                worker.version = None
        self._snapshot = (published.absolute(), version)
        # A refusal is raised when all are done: a swap that is cancelled leaves its worker paused.
        swaps = [self._bring(worker) for worker in self.workers]
        for outcome in await asyncio.gather(*swaps, return_exceptions=True):
            if outcome is not None:
                raise outcome
        await self._wait_for_any()

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Return log-probabilities float32 [T - 1] of tokens 1 … T - 1 under the weights of each URL."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        values = {}
        for worker in [worker for worker in self.workers if worker.version is not None]:
            try:
                reply = await self._post(worker, GENERATE, json=body)
                entries = zip(token_ids[1:], reply["prompt_logprobs"][1:], strict=True)
                logprobs = [entry[str(token)]["logprob"] for token, entry in entries]
                values[worker.url] = np.array(logprobs, np.float32)
            except (WorkerLost, KeyError, TypeError, ValueError, OverflowError) as error:
                self._lose(worker, f"{type(error).__name__}: {error}")
        return values

    def metrics(self) -> dict[str, float]:
        return {"rollout/workers_lost": float(self.lost_count)}

    async def close(self) -> None:
        for task in [self._watching, *(worker.reviving for worker in self.workers)]:
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if http := self._http.take():
            await http.close()

    async def _choose(self, session: str) -> Worker:
        """Return the session's own worker, or the least busy one if the own worker is much busier."""
        await self._wait_for_any()
        usable = [worker for worker in self.workers if worker.version is not None]
        least = min(usable, key=lambda worker: worker.busy)
        home = self._home.get(session)
        if home is None or home.version is None or home.busy > 2 * least.busy + 8:
            home = self._home[session] = least
        return home

    async def _wait_for_any(self) -> None:
        while all(worker.version is None for worker in self.workers):
            refusals = [worker.refusal for worker in self.workers if worker.refusal is not None]
            if len(refusals) == len(self.workers):
                raise refusals[0]
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self.config.patience)
            except TimeoutError:
                states = "; ".join(f"{worker.url}: {worker.lost}" for worker in self.workers)
                way_out = "start one with scripts/launch_vllm_worker.sh, or raise sampler.patience"
                message = f"no vLLM worker for {self.config.patience:g} s ({states}); {way_out}"
                raise RequestFailed("sampler", message) from None

    async def _ask(
        self, worker: Worker, context: Sequence[int], done: list[int], sampling: SamplingParams
    ) -> Completion:
        """Return the tokens that the worker adds to `done`; raise WorkerLost if it is gone meanwhile."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        body = completion_request(context, done, sampling, self.stops)
        posted = asyncio.create_task(self._post(worker, GENERATE, json=body))
        worker.requests.add(posted)
        try:
            reply = await posted
            return read_completion(reply, self._version, sampling.max_tokens - len(done), self.vocab_size)
        except ValueError as error:
            raise WorkerLost(f"unusable reply ({error})") from error
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # this completion itself is cancelled
                raise
            raise WorkerLost(worker.lost or "gone, and here again") from None
        finally:
            worker.requests.discard(posted)

    async def _watch(self) -> None:
        """Lose workers that hold completions and are gone.

        A vLLM server that was told to end, as by the death of its launcher, keeps its connections for ever
        and answers nothing more on them; another server may listen at the same address meanwhile.
        """
        while True:
            await asyncio.sleep(WATCH_PAUSE)
            holding = [worker for worker in self.workers if worker.requests and worker.version is not None]
            await asyncio.gather(*map(self._check, holding))

    async def _check(self, worker: Worker) -> None:
        http = self._http.get()
        try:
            try:
                self._version(str(await ask_label(http, worker.url)))
            except Unreachable:
                # The label comes between two steps of the engine; a step over long prompts takes minutes.
                await ask_alive(http, worker.url)
        except (Unreachable, UserError, WorkerLost) as error:
            if worker.version is not None:  # else it is being swapped
                self._lose(worker, str(error))
                worker.drop_requests()

    def _version(self, label: str) -> int:
        run, _, number = label.partition("/")
        if run != self.run or not number.isdecimal():
            raise WorkerLost(f"serves weights {label!r}, which are not this run's")
        return int(number)

    def _lose(self, worker: Worker, reason: str) -> None:
        """Send nothing more to the worker until it serves the current snapshot."""
        if not worker.lost:  # it was usable, or was being swapped
            self.lost_count += 1
        worker.version, worker.lost = None, reason
        if worker.reviving is None or worker.reviving.done():
            worker.reviving = asyncio.create_task(self._revive(worker))

    async def _revive(self, worker: Worker) -> None:
        while worker.version is None:
            await asyncio.sleep(PROBE_PAUSE)
            try:
                await self._swap(worker)
            except WorkerLost as error:
                worker.lost = str(error)
            except UserError as error:  # it would refuse this snapshot again
                worker.lost, worker.refusal = str(error), error
                self._changed.set()
                return

    async def _bring(self, worker: Worker) -> None:
        try:
            await self._swap(worker)
        except WorkerLost as error:
            self._lose(worker, str(error))

    async def _swap(self, worker: Worker) -> None:
        async with worker.lock:
            assert self._snapshot is not None
            worker.refusal = None
            while worker.version != (version := self._snapshot[1]):
                before, worker.version = worker.version, None  # nothing new goes there meanwhile
                path = self._snapshot[0]
                if before is None:
                    info = {"init_info": {"session": self.run, "tokenizer": self.tokenizer_hash}}
                    await self._control(worker, "/init_weight_transfer_engine", "refuses the run", json=info)
                await self._control(worker, "/pause", params={"mode": "abort"})
                try:
                    await self._update(worker, path, version)
                finally:
                    await self._control(worker, "/resume")
                if before is None:
                    worker.drop_requests()  # its older requests have no answer
                worker.version, worker.lost = version, ""
                self._changed.set()

    async def _update(self, worker: Worker, path: Path, version: int) -> None:
        try:
            await self._control(worker, "/start_weight_update")
        except WorkerLost as error:
            if "already active" not in str(error):
                raise
            await self._control(worker, "/finish_weight_update")  # a trainer was stopped during its swap
            await self._control(worker, "/start_weight_update")
        update = {"update_info": {"path": str(path), "version": version}}
        timeout = ClientTimeout(SWAP_TIMEOUT)
        await self._control(worker, "/update_weights", f"refuses {path}", json=update, timeout=timeout)
        label = {"weight_version": f"{self.run}/{version}"}
        await self._control(worker, "/finish_weight_update", json=label)

    async def _control(self, worker: Worker, route: str, refusal: str = "", **arguments: Any) -> Any:
        """`_post` on a connection of its own: vLLM's server closes the one on which it reported a failure.

        A load may take long. A server that is stopped or hangs is noticed by its health meanwhile.
        """
        alive = partial(ask_alive, self._http.get(), worker.url)
        reply = self._post(worker, route, refusal, headers={"connection": "close"}, **arguments)
        try:
            return await watched(reply, alive, WATCH_PAUSE)
        except Unreachable as error:
            raise WorkerLost(f"{route}: {error}") from error

    async def _post(self, worker: Worker, route: str, refusal: str = "", **arguments: Any) -> Any:
        """Return the JSON reply of a route; `refusal` is the verb of the UserError if our engine refuses."""
        try:
            reply = await request(self._http.get(), "POST", worker.url + route, **arguments)
            if reply.status == 200:
                return json.loads(reply.body)
        except (BadReply, Unreachable, ValueError, RecursionError) as error:
            raise WorkerLost(f"{route}: {error}") from error
        message = error_message(reply.body)
        if REFUSAL in message:
            raise UserError(f"vLLM worker {worker.url} {refusal}: {message.split(REFUSAL, 1)[1]}")
        if reply.status in (400, 422):
            refused = f"vLLM worker {worker.url} refuses {route}: {message}"
            raise RequestFailed("sampler", refused) if route == GENERATE else UserError(refused)
        if reply.status == 404:
            way_out = "start the worker with scripts/launch_vllm_worker.sh"
            raise UserError(f"{worker.url}{route}: no such route; {way_out}")
        raise WorkerLost(f"{route}: status {reply.status}: {message}")


def completion_request(
    context: Sequence[int], done: Sequence[int], sampling: SamplingParams, stops: StopRule
) -> dict[str, Any]:
    """Build the request for the tokens that follow `done`; after a cut it has another seed."""
    seed = sampling.seed
    if done:
        digest = hashlib.blake2b(f"{seed}/{len(done)}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "big")
    parameters = {
        "max_tokens": sampling.max_tokens - len(done),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed,
        # Also the missing part of a stop string that was cut, which may end a part where it means nothing.
        "stop": [*sampling.stop, *stops.remainders(done, sampling.stop)],
        "stop_token_ids": sorted(stops.end_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }
    return {"token_ids": [*context, *done], "sampling_params": parameters}


def read_completion(
    reply: Any, version_of: Callable[[str], int], max_tokens: int, vocab_size: int
) -> Completion:
    """Return the completion in a reply to a request for `max_tokens` tokens, all below `vocab_size`.

    `version_of` parses labels of weights. Raises ValueError for an invalid reply, token or log-probability.
    """
    try:
        (choice,) = reply["choices"]
        tokens = list(choice["token_ids"] or [])
        content = (choice["logprobs"] or {}).get("content") or []
        logprobs = [float(entry["logprob"]) for entry in content]
        labels = [str(span["version"]) for span in choice["weight_versions"] or []]
        finished, stop = str(choice["finish_reason"]), choice.get("stop_reason")
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    # Without a stop string (or with a token id) "stop" is the end of the text.
    reasons: dict[str, StopReason] = {"length": "length", "abort": "abort"}
    reasons["stop"] = "stop" if isinstance(stop, str) else "eos"
    if finished not in reasons or (finished != "abort" and not tokens):
        raise ValueError(f"finish_reason {finished!r} with {len(tokens)} tokens")
    if len(logprobs) != len(tokens) or len(tokens) > max_tokens or (tokens and not labels):
        counts = f"{len(tokens)} tokens where {max_tokens} were asked for, {len(logprobs)} log-probabilities"
        raise ValueError(f"{counts}, labels {labels}")
    for token, logprob in zip(tokens, logprobs, strict=True):
        # A comparison with NaN is false.
        if type(token) is not int or not 0 <= token < vocab_size or not LOWEST < logprob <= HIGHEST:
            raise ValueError(f"token {token!r} of {vocab_size} with log-probability {logprob}")
    return Completion(tokens, logprobs, reasons[finished], tuple(map(version_of, labels)))


def error_message(body: bytes) -> str:
    """Return vLLM's message on one line, without its advice to read a stack trace."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = body.decode(errors="replace")
    return printable(message).split(", please check the stack trace")[0][:600]
