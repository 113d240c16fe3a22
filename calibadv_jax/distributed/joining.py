"""Bring the processes of a run together, before JAX knows its devices, and end them together."""

from __future__ import annotations

import atexit
import math
import os
import re
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
from jax._src import distributed  # the only place where JAX gives its client of the coordination service
from jax._src.clusters import ClusterEnv

from calibadv_jax.config import Config, DistributedConfig, SamplerConfig
from calibadv_jax.core.errors import (
    EnvironmentFailure,
    UserError,
    exit_status,
    is_lost_process,
    storage_errno,
)
from calibadv_jax.core.stopping import Stop, exit_process_now
from calibadv_jax.distributed.exchange import Hosts, Joined
from calibadv_jax.metrics.console import Console

AUTO = "auto"
KEYS = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
PERIOD = 0.5  # seconds between two checks
PATIENCE = 10  # times the timeout after which a process is given up
LINE = 300  # bytes of a message at most
_HELLO, _GO = re.compile(rb"calibadv (\d+) (\d+)\s*"), b"go\n"
MARGIN = 10.0  # seconds for which an error waits for the news that another process is lost


@dataclass(frozen=True)
class Place:
    """A process of a run; of an automatic address, JAX finds out what is None."""

    address: str  # host:port of process 0, or AUTO
    num_processes: int | None
    process_id: int | None


@contextmanager
def init_distributed(config: Config) -> Iterator[Hosts]:
    """Yield this process among the run's, by the section `distributed`; UserError if one is missing."""
    place, timeout = _place(config.distributed), config.distributed.timeout
    hosts = _join(place, timeout, Console(config.log.progress).warn) if place else None
    if hosts is None:
        yield Hosts()
        return
    try:
        _check(config, hosts)
        yield hosts
    except BaseException as error:
        if hosts.in_step:
            _end(hosts)
        else:
            _end_alone(hosts, error, timeout)
        raise
    _end(hosts)


def alone(config: DistributedConfig, command: str) -> None:
    """Refuse (UserError) several processes, for a command that runs in one."""
    place = _place(config)
    if place and (place.num_processes or 1) > 1:
        fault = f"calibadv {command} runs in one process: start it once"
        raise UserError(f"{fault}, without distributed.num_processes and {KEYS['num_processes']}")


def describe_processes(config: Config) -> list[str]:
    """Return a line on how many processes train; none for one. Raises UserError as `init_distributed`."""
    place = _place(config.distributed)
    if not place:
        return []
    if place.num_processes is None or place.address == AUTO:
        return ["several processes ON: as many as JAX detects"]
    own_workers(config.sampler, 0, place.num_processes)
    text = f"this is number {place.process_id} of {place.num_processes}; they meet at {place.address}"
    return [f"several processes ON: {text}"]


def _place(config: DistributedConfig) -> Place | None:
    """Return this process's place by keys and environment; None for one process."""
    values: dict[str, Any] = {name: getattr(config, name) for name in KEYS}
    for name, variable in KEYS.items():
        text = os.environ.get(variable)
        if text and values[name] in ("", None):
            is_number = name != "coordinator_address"
            if is_number and not text.isdigit():
                fault = f"environment variable {variable}={text!r} is no number"
                raise UserError(f"{fault}; set it to one, or unset it")
            values[name] = int(text) if is_number else text
    address, count, index = values.values()
    if count == 1 or not (address or count):
        return None
    if not address:
        fault = f"distributed.num_processes is {count}, but nothing says where they meet"
        raise UserError(f"{fault}: set distributed.coordinator_address to host:port of process 0, or to auto")
    missing = [name for name, value in values.items() if value is None]
    if address != AUTO and missing:
        raise UserError(
            f"distributed.coordinator_address is {address}, but distributed.{missing[0]} is missing: give"
            f" it (or {KEYS[missing[0]]}), or set distributed.coordinator_address=auto"
        )
    if count is not None and index is not None and index >= count:
        fault = f"distributed.process_id is {index}, but there are distributed.num_processes={count}"
        raise UserError(f"{fault}: they are numbered 0 to {count - 1}")
    return Place(address, count, index)


def _join(place: Place, timeout: float, warn: Callable[[str], object]) -> Joined | None:
    address: str | None = place.address
    count, index = place.num_processes, place.process_id
    is_auto = address == AUTO
    if is_auto:  # as JAX does below
        detect = ClusterEnv.auto_detect_unset_distributed_params
        address, count, index, _ = detect(None, count, index, None, None, math.ceil(timeout))
    if address and count is not None and count > 1 and index is not None:  # else JAX says what is missing
        with Stop():  # a signal ends the wait at once
            meet(address, count, index, timeout, warn)
    # JAX would take SIGTERM for itself; and it ends a process in its own way where another is lost, later.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=None if is_auto else place.address,
            num_processes=place.num_processes,
            process_id=place.process_id,
            cluster_detection_method=None if is_auto else "deactivate",
            heartbeat_timeout_seconds=math.ceil(3 * timeout + MARGIN),
            shutdown_timeout_seconds=math.ceil(timeout),
        )
    except (RuntimeError, ValueError) as error:  # JaxRuntimeError is one
        where = "the job's processes (auto)" if is_auto else address
        raise EnvironmentFailure(
            f"distributed.coordinator_address: process {place.process_id} could not join {where}:"
            f" {' '.join(str(error).split())[:300]}; is every process started, with the same address and"
            " num_processes, and is the port free?"
        ) from error
    state = distributed.global_state
    if state.num_processes == 1:
        return None
    return Joined(state.client, state.process_id, state.num_processes, timeout)


def _check(config: Config, hosts: Joined) -> None:
    if len(set(hosts.machines)) > 1 and config.asks_retriever and not config.retriever.url:
        raise UserError(
            f"retriever.url is empty, and the processes are on {len(set(hosts.machines))} machines: start the"
            " retrieval service yourself, and set retriever.url to an address that all of them reach"
        )
    own_workers(config.sampler, 0, hosts.count)
    with hosts.barrier("devices"):  # so that all end with the same status
        devices = hosts.exchange("devices", jax.local_device_count())
        if len(set(devices)) > 1:
            raise UserError(f"the processes have {devices} devices: each must have the same number")
    for section, values in (asdict(config) | {"distributed": None}).items():
        hosts.assert_equal(f"section {section!r} in its config", partial(repr, values))


def _end(hosts: Joined) -> None:
    hosts.final_barrier()
    jax.distributed.shutdown()


def _end_alone(hosts: Joined, error: BaseException, timeout: float) -> None:
    """Say why this process ends, and let it end without waiting for the others, which are elsewhere."""
    if isinstance(error, jax.errors.JaxRuntimeError) or is_lost_process(error):
        # A program that another process has left fails here too: `Watch` knows why, and ends this one.
        time.sleep(timeout + MARGIN)
    status = error.code if isinstance(error, SystemExit) else 1
    if isinstance(error, UserError) or storage_errno(error) is not None:
        status = exit_status(error)
    hosts.watch.last_words(" ".join(f"{type(error).__name__} {error}".split()))
    # This runs before JAX' own end, which waits for the others.
    atexit.register(exit_process_now, status if isinstance(status, int) else 1)


def meet(address: str, count: int, index: int, timeout: float, warn: Callable[[str], object]) -> None:
    """Wait until all processes have started; `address` (host:port) is that of process 0.

    After `timeout` seconds `warn` gets a line with the missing processes; after `PATIENCE` times as long they
    are given up (EnvironmentFailure). Raises UserError if the processes disagree about their numbers.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise UserError(f"distributed.coordinator_address={address} names no port; set it to host:port")
    begun, has_warned = time.monotonic(), False

    def check(missing: str) -> None:
        nonlocal has_warned
        seconds = time.monotonic() - begun
        if seconds > PATIENCE * timeout:
            raise EnvironmentFailure(
                f"{missing} did not start within {seconds:.0f} s; start every process, with the same"
                " distributed.coordinator_address and num_processes, at an address that all reach"
            )
        if seconds > timeout and not has_warned:
            has_warned = True
            warn(f"waiting for {missing} since {seconds:.0f} s")

    if index:
        _come(host.strip("[]"), int(port), count, index, check)
    else:
        bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address).rpartition(":")[2]
        _receive(int(bound), count, check)


def _receive(port: int, count: int, check: Callable[[str], None]) -> None:
    has_ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=has_ipv6)
    except OSError as error:
        fault = f"distributed.coordinator_address: port {port} cannot be opened ({error.strerror})"
        raise EnvironmentFailure(f"{fault}; end the process that has it, or choose another port") from error
    present: dict[socket.socket, int] = {}  # number of the process, by its connection
    with ExitStack() as stack:
        stack.enter_context(listener)
        while len(present) < count - 1:
            readable, _, _ = select.select([listener, *present], [], [], PERIOD)
            check(_names(set(range(1, count)) - set(present.values())))
            ended = [present[connection] for connection in readable if connection in present]
            if ended:  # nothing else makes them readable: they only wait
                fault = f"{_names(ended)} ended before all had started"
                raise EnvironmentFailure(f"{fault}; start all processes again")
            if readable:
                _admit(stack.enter_context(listener.accept()[0]), count, present)
        for connection in present:
            with suppress(OSError):
                connection.sendall(_GO)
        for connection in present:  # they close first, so that JAX can open the port at once
            with suppress(OSError):
                connection.recv(1)


def _admit(connection: socket.socket, count: int, present: dict[socket.socket, int]) -> None:
    """Read which process this is; anything else that connects is left alone."""
    connection.settimeout(PERIOD)
    with suppress(OSError):
        if (hello := _HELLO.fullmatch(connection.recv(LINE))) is None:
            return
        index, its_count = map(int, hello.groups())
        if index in present.values() or (its_count == count and not index):
            raise UserError(f"distributed: two processes are number {index}")
        if its_count != count or index >= count:
            problem = f"is {its_count} in process {index} and {count} in process 0"
            raise UserError(f"distributed.num_processes {problem}")
        present[connection] = index


def _come(host: str, port: int, count: int, index: int, check: Callable[[str], None]) -> None:
    while True:
        check(f"process 0 ({host}:{port})")
        try:
            connection = socket.create_connection((host, port), timeout=2.0)
            break
        except OSError:  # not started yet, or its name is not known yet
            time.sleep(PERIOD)
    with connection, connection.makefile("rb") as lines, suppress(OSError):
        connection.sendall(b"calibadv %d %d\n" % (index, count))
        while not select.select([connection], [], [], PERIOD)[0]:
            check("another process (process 0 says which)")
        if lines.readline(LINE) == _GO:
            return
    fault = f"process 0 ({host}:{port}) ended before all had started"
    raise EnvironmentFailure(f"{fault}; see its error, and start all processes again")


def _names(indices: Iterable[int]) -> str:
    names = sorted(indices)
    return f"process {names[0]}" if len(names) == 1 else f"processes {', '.join(map(str, names))}"


def own_workers(config: SamplerConfig, index: int, count: int) -> tuple[SamplerConfig, int]:
    """Return `sampler` with the workers of process `index`, and the number before; UserError if too few."""
    if config.name != "vllm":
        return config, 0
    total = len(config.urls) or config.workers
    if config.urls and total < count:
        fault = f"sampler.urls names {total} vLLM worker{'s' if total > 1 else ''} for {count} processes"
        raise UserError(f"{fault}: each process needs one of its own; start {count - total} more")
    if not config.urls and total % count:
        fault = f"sampler.workers is {config.workers}, for {count} processes that start as many each"
        raise UserError(f"{fault}: set it to a multiple of {count}")
    begin, end = (total * number // count for number in (index, index + 1))
    if config.urls:
        return replace(config, urls=config.urls[begin:end]), begin
    return replace(config, workers=end - begin, worker_devices=config.worker_devices[begin:end]), begin
