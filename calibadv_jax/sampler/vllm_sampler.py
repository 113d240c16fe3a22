"""The sampler over one or many vLLM servers: token-in, token-out, with weights from snapshots.

Every completion carries the version label of the weights that wrote it. If the label is not of this run (the
worker was restarted, or someone else used it), the reply is discarded, and the worker loads the snapshot.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from aiohttp import ClientTimeout

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.errors import REFUSAL, RequestFailed, UserError
from calibadv_jax.core.interfaces import Completion, SamplingParams
from calibadv_jax.sampler.rollout_workers import ask_alive, ask_label
from calibadv_jax.sampler.stop_rule import StopRule
from calibadv_jax.sampler.vllm_messages import completion_request, error_message, read_completion
from calibadv_jax.services.http_client import (
    BadReply,
    PerLoop,
    Unreachable,
    open_session,
    request,
    wait_with_health_check,
)

PROBE_PAUSE = 1.0  # seconds between two attempts to bring a lost worker back
WATCH_PAUSE = 10.0  # seconds between two checks of whether workers with open requests are still there
SWAP_TIMEOUT = 1800.0  # seconds a worker may take to load a snapshot
REQUEST_TIMEOUT = 1800.0  # seconds a completion may take; then its worker counts as lost
MAX_LOSSES = 5  # workers that may be lost over one completion: it may be what kills them
MAX_EMPTY = 6  # replies without a token, one after another, after which their worker counts as lost
EMPTY_PAUSE = 0.05  # seconds to wait after the first reply without a token; doubles with each further one
GENERATE = "/inference/v1/generate"


class WorkerLost(Exception):
    """The worker did not answer, or its answer shows that it is not usable for this run."""


class _Snapshot(NamedTuple):
    """The weights that all workers are to serve."""

    path: Path
    version: int


@dataclass
class Worker:
    """What the sampler knows of one vLLM server.

    Attributes:
        url: address of the server, without a slash at its end.
        version: of the weights that it serves; None: it is not known to be usable.
        busy: number of completions in progress.
        requests: the open requests of these completions.
        loss_reason: why it is not usable; "" while it is usable or swaps weights.
        refusal: its error for the current snapshot; it is not asked again before the next snapshot.
        reviving: the task that brings it back after a loss.
        lock: held while its weights are swapped.
    """

    url: str
    version: int | None = None
    busy: int = 0
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    loss_reason: str = "not started"
    refusal: UserError | None = None
    reviving: asyncio.Task[None] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def cancel_requests(self) -> None:
        """Cancel the open requests, whose completions then go to other workers."""
        for posted in self.requests:
            posted.cancel()


class VllmSampler:
    """Implements `interfaces.Sampler` over the URLs of vLLM workers, on the loop that first uses it.

    Attributes:
        workers: what is known of each worker, in the order of the URLs.
        run: name of this session at the workers; labels of weights begin with it.
        lost_count: number of times that a usable worker was lost.
    """

    def __init__(
        self,
        urls: Sequence[str],
        config: SamplerConfig,
        stops: StopRule,
        tokenizer_hash: str,
        vocab_size: int = 2**31,
    ):
        """Prepare a sampler without weights; `load` gives it the first ones. Nothing is sent yet.

        Args:
            urls: addresses of workers, which need not answer yet.
            config: `patience` is read, the seconds to wait for a usable worker.
            stops: where completions end.
            tokenizer_hash: hash of the vocabulary. Workers refuse snapshots of another one.
            vocab_size: all sampled token ids are below it.
        """
        self.config = config
        self.stops = stops
        self.tokenizer_hash = tokenizer_hash
        self.vocab_size = vocab_size
        self.run = _new_session()
        self.workers = [Worker(url.rstrip("/")) for url in urls]
        self.lost_count = 0
        self._http = PerLoop(lambda: open_session(REQUEST_TIMEOUT))
        self._snapshot: _Snapshot | None = None
        self._home: dict[str, Worker] = {}  # the worker that caches the prefix of each session
        self._changed = asyncio.Event()  # a worker has become usable, or refused the snapshot
        self._watching: asyncio.Task[None] | None = None

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> Completion:
        """Sample up to a stop string, end-of-text, or `sampling.max_tokens`.

        A completion cut by a weight swap, or whose worker was lost, continues. vLLM looks for stop strings in
        the tokens of one request, and misses one that a cut has divided: `stops` decides by all tokens of the
        completion.

        Args:
            token_ids: the context.
            sampling: how to sample.
            session: name of the trajectory, which stays at one worker while this is not much busier.

        Returns:
            The completion, with the versions of all weights that wrote parts of it.

        Raises:
            RuntimeError: no weights were loaded.
            RequestFailed: no worker was usable in time, one refuses the request, or MAX_LOSSES workers were
                lost over it.
            UserError: every worker refuses the snapshot, or one is no vLLM worker of this project.
        """
        if self._snapshot is None:
            raise RuntimeError("no weights: call load before generating")
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []  # each version once, in the order of the tokens
        losses = 0
        empty_replies = 0  # one after another
        while True:
            worker = await self._choose(session)
            worker.busy += 1
            try:
                part = await self._ask(worker, token_ids, tokens, sampling)
                empty_replies = 0 if part.token_ids else empty_replies + 1
                if empty_replies == MAX_EMPTY:
                    empty_replies = 0
                    raise WorkerLost(f"{MAX_EMPTY} replies without a token")
            except WorkerLost as error:
                self._mark_lost(worker, str(error))
                losses += 1
                if losses == MAX_LOSSES:
                    raise RequestFailed(
                        "sampler", f"{losses} vLLM workers were lost over one completion; the last: {error}"
                    ) from error
                continue
            finally:
                worker.busy -= 1
            tokens += part.token_ids
            logprobs += part.logprobs
            for version in part.policy_versions:
                if version not in versions:
                    versions.append(version)
            if empty_replies:  # cut before its first token, by a swap or by another client of the worker
                await asyncio.sleep(EMPTY_PAUSE * 2 ** (empty_replies - 1))
                continue
            end = self.stops.find(tokens, sampling.stop)
            if end is not None:
                count, reason = end
                return Completion(tokens[:count], logprobs[:count], reason, tuple(versions))
            if part.stop_reason == "eos":
                return Completion(tokens, logprobs, "eos", tuple(versions))
            if part.stop_reason == "length" or len(tokens) >= sampling.max_tokens:
                return Completion(tokens, logprobs, "length", tuple(versions))

    def release(self, session: str) -> None:
        """Forget which worker caches the prefix of an ended trajectory.

        Args:
            session: name of the trajectory; it may be unknown.
        """
        self._home.pop(session, None)

    async def load(self, version: int, published: Path) -> None:
        """Load a snapshot into every worker that answers; the others follow before they serve again.

        Args:
            version: of the policy. If it does not ascend, as after a rollback, a new session begins.
            published: the folder of the snapshot, which the workers can read too.

        Raises:
            UserError: a worker refuses the snapshot and keeps the old weights.
            RequestFailed: no worker was usable in time.
        """
        if self._snapshot and version <= self._snapshot.version:  # workers take no older versions
            self.run = _new_session()
            for worker in self.workers:
                worker.version = None
        self._snapshot = _Snapshot(published.absolute(), version)
        # A refusal is raised when all are done: a swap that is cancelled leaves its worker paused.
        swaps = [self._try_swap(worker) for worker in self.workers]
        for outcome in await asyncio.gather(*swaps, return_exceptions=True):
            if outcome is not None:
                raise outcome
        await self._wait_for_any()

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Compute the log-probabilities of given tokens with the weights of each usable worker.

        Args:
            token_ids: T token ids.

        Returns:
            float32 [T - 1] by the worker's URL: the log-probabilities, in nats, of tokens 1 … T - 1. Workers
            that fail are left out and count as lost.

        Raises:
            RequestFailed: a worker refuses the request.
            UserError: a server is no vLLM worker of this project.
        """
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body = {"token_ids": list(token_ids), "sampling_params": sampling}
        values = {}
        for worker in [worker for worker in self.workers if worker.version is not None]:
            try:
                reply = await self._post(worker, GENERATE, json=body)
                entries = reply["prompt_logprobs"][1:]  # the first token has none
                logprobs = []
                for token, entry in zip(token_ids[1:], entries, strict=True):
                    logprobs.append(entry[str(token)]["logprob"])
                values[worker.url] = np.array(logprobs, np.float32)
            except (WorkerLost, KeyError, TypeError, ValueError, OverflowError) as error:
                self._mark_lost(worker, f"{type(error).__name__}: {error}")
        return values

    def metrics(self) -> dict[str, float]:
        """Return the sampler's metrics.

        Returns:
            ``rollout/workers_lost``: the number of lost workers since the program's start.
        """
        return {"rollout/workers_lost": float(self.lost_count)}

    async def close(self) -> None:
        """Cancel the tasks of this sampler and close its connections."""
        tasks = [self._watching]
        tasks += [worker.reviving for worker in self.workers]
        for task in tasks:
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        http = self._http.take()
        if http is not None:
            await http.close()

    # --- Completions ---

    async def _choose(self, session: str) -> Worker:
        """Return the session's own worker, or the least busy one if the own worker is much busier."""
        await self._wait_for_any()
        usable = [worker for worker in self.workers if worker.version is not None]
        least_busy = min(usable, key=lambda worker: worker.busy)
        home = self._home.get(session)
        if home is None or home.version is None or home.busy > 2 * least_busy.busy + 8:
            home = least_busy
            self._home[session] = home
        return home

    async def _wait_for_any(self) -> None:
        """Wait until a worker is usable; raise UserError if all refuse the snapshot."""
        while all(worker.version is None for worker in self.workers):
            refusals = [worker.refusal for worker in self.workers if worker.refusal is not None]
            if len(refusals) == len(self.workers):
                raise refusals[0]
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self.config.patience)
            except TimeoutError:
                reasons = "; ".join(f"{worker.url}: {worker.loss_reason}" for worker in self.workers)
                raise RequestFailed(
                    "sampler",
                    f"no vLLM worker for {self.config.patience:g} s ({reasons}); start one with"
                    " scripts/launch_vllm_worker.sh, or raise sampler.patience",
                ) from None

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
            max_tokens = sampling.max_tokens - len(done)
            return read_completion(reply, self._version, max_tokens, self.vocab_size)
        except ValueError as error:
            raise WorkerLost(f"unusable reply ({error})") from error
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # this completion itself is cancelled, not only its request
            raise WorkerLost(worker.loss_reason or "the worker was lost and is usable again") from None
        finally:
            worker.requests.discard(posted)

    def _version(self, label: str) -> int:
        """Return the version in a label of this run's weights; raise WorkerLost for other labels."""
        run, _, number = label.partition("/")
        if run != self.run or not number.isdecimal():
            raise WorkerLost(f"serves weights {label!r}, which are not this run's")
        return int(number)

    # --- Lost workers ---

    async def _watch(self) -> None:
        """Mark workers as lost that hold completions and are gone.

        A vLLM server that was told to end, as by the death of its launcher, keeps its connections for ever
        and answers nothing more on them; another server may listen at the same address meanwhile.
        """
        while True:
            await asyncio.sleep(WATCH_PAUSE)
            checks = []
            for worker in self.workers:
                if worker.requests and worker.version is not None:
                    checks.append(self._check(worker))
            await asyncio.gather(*checks)

    async def _check(self, worker: Worker) -> None:
        """Mark a worker as lost, and cancel its requests, if it is gone or has other weights."""
        http = self._http.get()
        try:
            try:
                self._version(str(await ask_label(http, worker.url)))
            except Unreachable:
                # The label comes between two steps of the engine; a step over long prompts takes minutes.
                await ask_alive(http, worker.url)
        except (Unreachable, UserError, WorkerLost) as error:
            if worker.version is not None:  # else its weights are being swapped
                self._mark_lost(worker, str(error))
                worker.cancel_requests()

    def _mark_lost(self, worker: Worker, reason: str) -> None:
        """Send nothing more to the worker until it serves the current snapshot."""
        if not worker.loss_reason:  # it was usable, or its weights were being swapped
            self.lost_count += 1
        worker.version = None
        worker.loss_reason = reason
        if worker.reviving is None or worker.reviving.done():
            worker.reviving = asyncio.create_task(self._revive(worker))

    async def _revive(self, worker: Worker) -> None:
        """Try to load the snapshot into a lost worker until it succeeds or the worker refuses."""
        while worker.version is None:
            await asyncio.sleep(PROBE_PAUSE)
            try:
                await self._swap(worker)
            except WorkerLost as error:
                worker.loss_reason = str(error)
            except UserError as error:  # it would refuse this snapshot again
                worker.loss_reason = str(error)
                worker.refusal = error
                self._changed.set()
                return

    # --- Weight swaps ---

    async def _try_swap(self, worker: Worker) -> None:
        """Load the current snapshot into a worker, or mark it as lost; raise UserError if it refuses."""
        try:
            await self._swap(worker)
        except WorkerLost as error:
            self._mark_lost(worker, str(error))

    async def _swap(self, worker: Worker) -> None:
        """Load snapshots into a worker until it has the current one."""
        async with worker.lock:
            assert self._snapshot is not None
            worker.refusal = None
            while worker.version != self._snapshot.version:
                snapshot = self._snapshot
                is_new = worker.version is None
                worker.version = None  # no new request goes there during the swap
                if is_new:
                    session = {"session": self.run, "tokenizer": self.tokenizer_hash}
                    info = {"init_info": session}
                    await self._control(worker, "/init_weight_transfer_engine", "refuses the run", json=info)
                await self._control(worker, "/pause", params={"mode": "abort"})
                try:
                    await self._update(worker, snapshot)
                finally:
                    await self._control(worker, "/resume")
                if is_new:
                    worker.cancel_requests()  # those from before the loss get no answer
                worker.version = snapshot.version
                worker.loss_reason = ""
                self._changed.set()

    async def _update(self, worker: Worker, snapshot: _Snapshot) -> None:
        """Load a snapshot into a paused worker."""
        try:
            await self._control(worker, "/start_weight_update")
        except WorkerLost as error:
            if "already active" not in str(error):
                raise
            await self._control(worker, "/finish_weight_update")  # a trainer was stopped during its swap
            await self._control(worker, "/start_weight_update")
        update = {"update_info": {"path": str(snapshot.path), "version": snapshot.version}}
        timeout = ClientTimeout(SWAP_TIMEOUT)
        await self._control(
            worker, "/update_weights", f"refuses {snapshot.path}", json=update, timeout=timeout
        )
        label = {"weight_version": f"{self.run}/{snapshot.version}"}
        await self._control(worker, "/finish_weight_update", json=label)

    # --- HTTP ---

    async def _control(self, worker: Worker, route: str, refusal: str = "", **arguments: Any) -> Any:
        """`_post` on a connection of its own: vLLM's server closes the one on which it reported a failure.

        A load may take long: the health of the server is checked while the reply is awaited, so that one that
        is stopped or hangs is noticed.
        """
        http = self._http.get()

        async def check_alive() -> None:
            """Raise Unreachable if the worker is not alive."""
            await ask_alive(http, worker.url)

        reply = self._post(worker, route, refusal, headers={"connection": "close"}, **arguments)
        try:
            return await wait_with_health_check(reply, check_alive, WATCH_PAUSE)
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
            _, reason = message.split(REFUSAL, 1)
            raise UserError(f"vLLM worker {worker.url} {refusal}: {reason}")
        if reply.status in (400, 422):
            refused = f"vLLM worker {worker.url} refuses {route}: {message}"
            if route == GENERATE:
                raise RequestFailed("sampler", refused)
            raise UserError(refused)
        if reply.status == 404:
            raise UserError(
                f"{worker.url}{route}: no such route; start the worker with scripts/launch_vllm_worker.sh"
            )
        raise WorkerLost(f"{route}: status {reply.status}: {message}")


def _new_session() -> str:
    """Return a random name for a session at the workers."""
    return uuid.uuid4().hex[:12]
