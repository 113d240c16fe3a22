"""Bring the processes of a run together, before JAX knows its devices, and end them together."""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NoReturn

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
from calibadv_jax.core.signals import Stop, exit_process_now
from calibadv_jax.distributed.process_group import MultiProcessGroup, ProcessGroup
from calibadv_jax.distributed.rendezvous import wait_for_processes
from calibadv_jax.metrics.console import Console

AUTO = "auto"  # value of distributed.coordinator_address with which JAX detects address and numbers
# Keys of the section `distributed` -> environment variables that are read where the key is not set.
KEYS = {
    "coordinator_address": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
# Seconds for which an error waits for the news that another process is lost, which may have caused it.
LOST_PROCESS_SECONDS = 10.0


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a run meet, and the number of this one.

    With the address AUTO, the numbers that are None are detected by JAX.
    """

    address: str  # host:port of process 0, or AUTO
    num_processes: int | None
    process_id: int | None


@contextmanager
def init_distributed(config: Config) -> Iterator[ProcessGroup]:
    """Join the processes of a run for the time of the block, by the section `distributed`.

    Args:
        config: The config of the run. Where `distributed` leaves a key empty, the environment variable in
            KEYS is read.

    Yields:
        The process group: for a run with one process, `ProcessGroup` itself.

    Raises:
        UserError: The section is incomplete, the processes have different configs or numbers of devices, or
            the config does not suit several processes.
        EnvironmentFailure: A process is missing, or the port cannot be opened.
        SystemExit: A signal came while the processes were waiting for each other.
    """
    rendezvous = _read_rendezvous(config.distributed)
    timeout = config.distributed.timeout
    process_group = None
    if rendezvous is not None:
        process_group = _join(rendezvous, timeout, Console(config.log.progress).warn)
    if process_group is None:
        yield ProcessGroup()
        return
    try:
        _check_processes(config, process_group)
        yield process_group
    except BaseException as error:
        if process_group.can_save_together:
            _end_together(process_group)
        else:
            _end_alone(process_group, error, timeout)
        raise
    _end_together(process_group)


def require_single_process(config: DistributedConfig, command: str) -> None:
    """Check that only one process was started, for a command that runs in one process.

    Args:
        config: The section `distributed`.
        command: Name of the command in messages.

    Raises:
        UserError: Several processes are configured.
    """
    rendezvous = _read_rendezvous(config)
    if rendezvous is not None and (rendezvous.num_processes or 1) > 1:
        raise UserError(
            f"calibadv {command} runs in one process: start it once, without distributed.num_processes and"
            f" {KEYS['num_processes']}"
        )


def describe_processes(config: Config) -> list[str]:
    """Return a line on how many processes train; no line for one process.

    Args:
        config: The config of the run.

    Returns:
        One line, or no line.

    Raises:
        UserError: The section `distributed` is incomplete, or there are too few vLLM workers.
    """
    rendezvous = _read_rendezvous(config.distributed)
    if rendezvous is None:
        return []
    if rendezvous.num_processes is None or rendezvous.address == AUTO:
        return ["several processes ON: as many as JAX detects"]
    workers_of_process(config.sampler, 0, rendezvous.num_processes)
    return [
        f"several processes ON: this is number {rendezvous.process_id} of {rendezvous.num_processes};"
        f" they meet at {rendezvous.address}"
    ]


def _read_rendezvous(config: DistributedConfig) -> Rendezvous | None:
    """Return where this process meets the others, by keys and environment; None for a single process."""
    address = config.coordinator_address or os.environ.get(KEYS["coordinator_address"], "")
    count = config.num_processes
    if count is None:
        count = _read_number(KEYS["num_processes"])
    index = config.process_id
    if index is None:
        index = _read_number(KEYS["process_id"])
    if count == 1 or not (address or count):
        return None
    if not address:
        raise UserError(
            f"distributed.num_processes is {count}, but nothing says where they meet: set"
            " distributed.coordinator_address to host:port of process 0, or to auto"
        )
    if address != AUTO:
        if count is None:
            _refuse_missing_key("num_processes", address)
        if index is None:
            _refuse_missing_key("process_id", address)
    if count is not None and index is not None and index >= count:
        raise UserError(
            f"distributed.process_id is {index}, but there are distributed.num_processes={count}: they are"
            f" numbered 0 to {count - 1}"
        )
    return Rendezvous(address, count, index)


def _read_number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdigit():
        raise UserError(f"environment variable {variable}={text!r} is no number; set it to one, or unset it")
    return int(text)


def _refuse_missing_key(key: str, address: str) -> NoReturn:
    raise UserError(
        f"distributed.coordinator_address is {address}, but distributed.{key} is missing: give it (or"
        f" {KEYS[key]}), or set distributed.coordinator_address=auto"
    )


def _join(rendezvous: Rendezvous, timeout: float, warn: Callable[[str], object]) -> MultiProcessGroup | None:
    """Connect this process with the others through JAX; return None if JAX detects a single process."""
    is_auto = rendezvous.address == AUTO
    address: str | None = rendezvous.address
    count = rendezvous.num_processes
    index = rendezvous.process_id
    if is_auto:
        # The same detection as in jax.distributed.initialize.
        address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, count, index, None, None, math.ceil(timeout)
        )
    # If anything is missing here, the error of JAX below says what.
    if address and count is not None and count > 1 and index is not None:
        with Stop():  # a signal ends the wait at once
            wait_for_processes(address, count, index, timeout, warn)
    # JAX's service would handle SIGTERM itself, and end a process in its own way, later, if another is lost.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=None if is_auto else rendezvous.address,
            num_processes=rendezvous.num_processes,
            process_id=rendezvous.process_id,
            cluster_detection_method=None if is_auto else "deactivate",
            heartbeat_timeout_seconds=math.ceil(3 * timeout + LOST_PROCESS_SECONDS),
            shutdown_timeout_seconds=math.ceil(timeout),
        )
    except (RuntimeError, ValueError) as error:  # JaxRuntimeError is a RuntimeError
        place = "the job's processes (auto)" if is_auto else address
        raise EnvironmentFailure(
            f"distributed.coordinator_address: process {rendezvous.process_id} could not join {place}:"
            f" {' '.join(str(error).split())[:300]}; is every process started, with the same address and"
            " num_processes, and is the port free?"
        ) from error
    state = distributed.global_state
    if state.num_processes == 1:
        return None
    return MultiProcessGroup(state.client, state.process_id, state.num_processes, timeout)


def _check_processes(config: Config, process_group: MultiProcessGroup) -> None:
    """Raise UserError unless the processes fit together: services, devices, config."""
    num_machines = len(set(process_group.machines))
    if num_machines > 1 and config.asks_retriever and not config.retriever.url:
        raise UserError(
            f"retriever.url is empty, and the processes are on {num_machines} machines: start the"
            " retrieval service yourself, and set retriever.url to an address that all of them reach"
        )
    workers_of_process(config.sampler, 0, process_group.process_count)
    with process_group.barrier("devices"):  # so that all processes end with the same status
        devices = process_group.all_gather("devices", jax.local_device_count())
        if len(set(devices)) > 1:
            raise UserError(f"the processes have {devices} devices: each must have the same number")
    for section, values in asdict(config).items():
        if section == "distributed":
            continue  # it holds the number of each process
        process_group.assert_equal(f"section {section!r} in its config", partial(repr, values))


def _end_together(process_group: MultiProcessGroup) -> None:
    process_group.final_barrier()
    jax.distributed.shutdown()


def _end_alone(process_group: MultiProcessGroup, error: BaseException, timeout: float) -> None:
    """Tell the other processes why this one ends, and let it end without waiting for them.

    They are elsewhere in the program, so they cannot reach the same barrier.
    """
    if isinstance(error, jax.errors.JaxRuntimeError) or is_lost_process(error):
        # A program on the devices of all processes fails here too if another process is lost. The watchdog
        # knows which one, and ends this process during the wait.
        time.sleep(timeout + LOST_PROCESS_SECONDS)
    status: object = 1
    if isinstance(error, SystemExit):
        status = error.code
    if isinstance(error, UserError) or storage_errno(error) is not None:
        status = exit_status(error)
    process_group.watchdog.report_failure(" ".join(f"{type(error).__name__} {error}".split()))
    # This exit handler runs before JAX's own, which waits for the other processes.
    atexit.register(exit_process_now, status if isinstance(status, int) else 1)


def workers_of_process(config: SamplerConfig, index: int, count: int) -> tuple[SamplerConfig, int]:
    """Return the vLLM workers of a process.

    Args:
        config: The section `sampler`.
        index: Number of the process.
        count: Number of processes.

    Returns:
        The section with the workers of this process only, and the number of workers of earlier processes.

    Raises:
        UserError: The workers cannot be divided between the processes.
    """
    if config.name != "vllm":
        return config, 0
    total = len(config.urls) or config.workers
    if config.urls and total < count:
        raise UserError(
            f"sampler.urls names {total} vLLM worker{'s' if total > 1 else ''} for {count} processes: each"
            f" process needs one of its own; start {count - total} more"
        )
    if not config.urls and total % count:
        raise UserError(
            f"sampler.workers is {config.workers}, for {count} processes that start as many each: set it to"
            f" a multiple of {count}"
        )
    begin = total * index // count
    end = total * (index + 1) // count
    if config.urls:
        return replace(config, urls=config.urls[begin:end]), begin
    worker_devices = config.worker_devices[begin:end]
    return replace(config, workers=end - begin, worker_devices=worker_devices), begin
