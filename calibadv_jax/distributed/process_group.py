"""The processes of a run: exchange values, and stop all processes at the same place.

All processes run the same program. Work of a single process, such as its share of the rollouts, is done in a
`local_work` block. There a signal or an error stops the process at once. The block ends with a barrier: if
one process stops, all processes stop there, at the same step and with the same parameters, so that together
they can save them.

Programs that run on the devices of all processes are outside of these blocks. There a signal takes effect at
the next barrier. An error leaves the other processes waiting within a program, so that their `Watchdog` must
end them.
"""

from __future__ import annotations

import math
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from calibadv_jax.core.errors import (
    ENVIRONMENT_STATUS,
    INPUT_STATUS,
    EnvironmentFailure,
    UserError,
    exit_status,
)
from calibadv_jax.core.signals import REMOTE_STOP_STATUS, Stop
from calibadv_jax.distributed.all_gather import AllGather
from calibadv_jax.distributed.save_barrier import SaveBarrier
from calibadv_jax.distributed.serialization import from_bytes, to_bytes
from calibadv_jax.distributed.watchdog import STOPPING, Watchdog

T = TypeVar("T")

# Bytes of the longest value that is sent with the message of a barrier. Longer ones go from device to device,
# because the coordination service is slow.
LONGEST_INLINE_VALUE = 2**14


class ProcessGroup:
    """The process group of a run with a single process, which has nothing to exchange and no one to wait for.

    Attributes:
        process_index: Number of this process, from 0.
        process_count: Number of processes.
        can_save_together: After an error: whether all processes have stopped at the same place, and can
            still save a checkpoint together.
    """

    process_index: int = 0
    process_count: int = 1
    can_save_together: bool = True

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which writes the files of the run."""
        return self.process_index == 0

    def all_gather(self, name: str, value: T) -> list[T]:
        """Return the values of all processes. Every call is a barrier.

        Args:
            name: Name of the barrier in messages. All processes must call the barriers in the same order.
            value: Value of this process; see `serialization.to_bytes`.

        Returns:
            One value for each process, in the order of their numbers.

        Raises:
            UserError: Another process stops here with an error (EnvironmentFailure unless its input was bad).
            SystemExit: Another process, or this one, stops here after a signal.
            RuntimeError: Another process is at another barrier, which is an error in the program.
        """
        return [value]

    def run_on_main_and_broadcast(self, name: str, work: Callable[[], T]) -> T:
        """Do `work` in process 0 only, and return its result in all processes.

        Args:
            name: Name of the barrier in messages.
            work: Called without arguments in process 0. A signal ends it at once.

        Returns:
            The result of `work`, which must be a value as for `all_gather`.

        Raises:
            Exception: In process 0 the error of `work`. The other processes get the errors of `all_gather`.
        """
        return work()

    def mark_desynchronized(self) -> None:
        """Note that an operation of all processes has failed in this process: see `can_save_together`."""

    def save_barrier(self) -> SaveBarrier | None:
        """Return a new barrier for the threads that save checkpoints.

        Returns:
            A barrier for one `CheckpointStore`; None for a single process, where Orbax needs none.
        """
        return None

    @contextmanager
    def stop_at_barriers(self, stop: Stop) -> Iterator[None]:
        """Let a signal end the process in `local_work` or at a barrier only, within the block.

        The block itself ends with a barrier. With a single process this does nothing: `stop` alone decides.

        Args:
            stop: The handler of signals, whose block is open.

        Raises:
            UserError: As `all_gather`, at the end of the block.
            SystemExit: A signal came to this process or to another one.
        """
        yield

    @contextmanager
    def local_work(self, name: str) -> Iterator[None]:
        """Do work of this process alone in the block, and wait for all processes at its end.

        It is a `barrier` whose block a signal ends at once, in all processes.

        Args:
            name: Name of the barrier in messages.

        Raises:
            UserError: As `all_gather`.
            SystemExit: A signal came to this process or to another one.
        """
        yield

    @contextmanager
    def barrier(self, name: str) -> Iterator[None]:
        """Wait for all processes at the end of the block.

        If the block fails in one process, it fails in all: there with the block's own error, in the others
        with an error that quotes it.

        Args:
            name: Name of the barrier in messages.

        Raises:
            UserError: As `all_gather`.
            SystemExit: As `all_gather`.
        """
        yield

    def assert_equal(self, name: str, value: Callable[[], object]) -> None:
        """Check that a value is the same in all processes.

        Args:
            name: Name of the value in messages.
            value: Computes the value; not called in a run with a single process.

        Raises:
            UserError: The value differs between the processes.
        """

    def assert_shared_folder(self, key: str, folder: Path) -> None:
        """Check that all processes see the same folder.

        Args:
            key: Config key of the folder, for messages.
            folder: An existing folder.

        Raises:
            UserError: A file that process 0 writes there is not seen by another process.
        """


SINGLE_PROCESS = ProcessGroup()


class MultiProcessGroup(ProcessGroup):
    """The process group of a run with several processes, which JAX has brought together.

    Args:
        client: Client of JAX's coordination service.
        process_index: Number of this process.
        process_count: Number of processes.
        timeout: Seconds without a sign of life after which another process is lost.
    """

    def __init__(self, client: Any, index: int, count: int, timeout: float):
        self.process_index = index
        self.process_count = count
        self.can_save_together = False
        self.machines = [""] * count  # host name of each process; empty before the first exchange
        self._client = client
        self._timeout = timeout
        self._all_gather = AllGather(client, "calibadv_exchange", index, count)
        # Until `steps` begins, no handler of signals uses this object. It is held for as long, so that the
        # stop of another process takes effect in `local_work` or at a barrier only.
        self._stop = Stop()
        self._held_until_steps = ExitStack()
        self._held_until_steps.enter_context(self._stop.held())
        self._common_error: BaseException | None = None  # the error with which all processes have stopped
        self.watchdog = Watchdog(
            client, index, count, timeout, self.describe_process, self.on_other_process_stopping
        )
        self.watchdog.start()
        self.machines = self.all_gather("names", socket.gethostname())

    def describe_process(self, index: int) -> str:
        """Return the name of a process in messages: ``process 1 (node17)``.

        Args:
            index: Number of the process.

        Returns:
            Number and host name; the number alone before the host names have been exchanged.
        """
        machine = self.machines[index]
        return f"process {index} ({machine})" if machine else f"process {index}"

    def all_gather(self, name: str, value: T) -> list[T]:
        """Return the values of all processes, see `ProcessGroup.all_gather`.

        If every value has at most LONGEST_INLINE_VALUE bytes, the values are sent with the barrier's
        messages. Otherwise they go from device to device.

        Args:
            name: Name of the barrier in messages.
            value: Value of this process; see `serialization.to_bytes`.

        Returns:
            One value for each process, in the order of their numbers.

        Raises:
            UserError: Another process stops here with an error.
            SystemExit: Another process, or this one, stops here after a signal.
            RuntimeError: Another process is at another barrier.
            pickle.UnpicklingError: A value has a type that `serialization.from_bytes` refuses.
        """
        data = to_bytes(value)
        inline_value = data if len(data) <= LONGEST_INLINE_VALUE else b""
        # From here on the other processes rely on this one, so a signal takes effect after the exchange.
        with self._stop.held():
            messages = self._wait_at_barrier(name, len(data), inline_value)
            longest = max(message.value_length for message in messages)
            if longest <= LONGEST_INLINE_VALUE:
                values = [message.inline_value for message in messages]
            else:
                values = _all_gather_on_devices(data, [message.value_length for message in messages])
        return [from_bytes(value) for value in values]

    def run_on_main_and_broadcast(self, name: str, work: Callable[[], T]) -> T:
        """Do `work` in process 0 only, see `ProcessGroup.run_on_main_and_broadcast`.

        Args:
            name: Name of both barriers in messages: the one after `work`, and that of the exchange.
            work: Called without arguments in process 0.

        Returns:
            The result of `work`, in all processes.

        Raises:
            Exception: In process 0 the error of `work`. The other processes get the errors of `all_gather`.
        """
        value: Any = None
        with self.local_work(name):
            if self.is_main:
                value = work()
        return self.all_gather(name, value)[0]

    def mark_desynchronized(self) -> None:
        """Note that an operation of all processes has failed here: `can_save_together` becomes false."""
        self.can_save_together = False

    def save_barrier(self) -> SaveBarrier:
        """Return a new barrier for the threads that save checkpoints.

        Returns:
            A barrier for one `CheckpointStore`.
        """
        return SaveBarrier(self._client, self.process_index, self.process_count, self.describe_process)

    @contextmanager
    def stop_at_barriers(self, stop: Stop) -> Iterator[None]:
        """Hold signals within the block, see `ProcessGroup.stop_at_barriers`.

        Args:
            stop: The handler of signals; from now on it also gets the stops of other processes.

        Raises:
            UserError: As `all_gather`, at the barrier of the last step.
            SystemExit: A signal came to this process or to another one.
        """
        self._stop = stop
        with stop.held():
            yield
            self._wait_at_barrier("the last step")

    @contextmanager
    def local_work(self, name: str) -> Iterator[None]:
        """Do work of this process alone in the block, see `ProcessGroup.local_work`.

        Args:
            name: Name of the barrier in messages.

        Raises:
            UserError: As `all_gather`.
            SystemExit: A signal came to this process or to another one.
        """
        with self.barrier(name), self._stop.released():
            yield

    @contextmanager
    def barrier(self, name: str) -> Iterator[None]:
        """Wait for all processes at the end of the block, see `ProcessGroup.barrier`.

        If the block fails, the other processes have twice the timeout to come to a barrier. If one does not
        come, `can_save_together` stays false.

        Args:
            name: Name of the barrier in messages.

        Raises:
            UserError: As `all_gather`.
            SystemExit: As `all_gather`.
        """
        try:
            yield
        except BaseException as error:
            # After a common error all processes have left the same barrier already.
            if error is not self._common_error:
                self._announce_stop(name, error)
            raise
        self._wait_at_barrier(name)

    def assert_equal(self, name: str, value: Callable[[], object]) -> None:
        """Check that a value is the same in all processes.

        Args:
            name: Name of the value in messages.
            value: Computes the value, which is compared with ``!=``: no array.

        Raises:
            UserError: The value differs between the processes. Every process raises it.
        """
        with self.barrier(name):
            local_value = value()
            for index, other_value in enumerate(self.all_gather(name, local_value)):
                if other_value != local_value:
                    raise UserError(
                        f"{self.describe_process(index)} has another {name} than"
                        f" {self.describe_process(self.process_index)}: start all processes with the same"
                        " config and the same files"
                    )

    def assert_shared_folder(self, key: str, folder: Path) -> None:
        """Check that all processes see a file that process 0 writes into the folder for a moment.

        Args:
            key: Config key of the folder, for messages.
            folder: An existing folder.

        Raises:
            UserError: A process does not see the file within the timeout.
            OSError: In process 0, if the folder cannot be written.
        """

        def choose_name() -> str:
            """Return a name that no other run has chosen."""
            return f".seen_by_all_{secrets.token_hex(8)}"

        file = folder / self.run_on_main_and_broadcast(key, choose_name)
        try:
            self.run_on_main_and_broadcast(key, file.touch)
            with self.barrier(key):
                deadline = time.monotonic() + self._timeout  # the file system of a network may be slow
                while not file.exists():
                    if time.monotonic() > deadline:
                        raise UserError(
                            f"{key}={folder}: {self.describe_process(self.process_index)} does not see there"
                            f" what {self.describe_process(0)} writes: all processes must share one folder"
                        )
                    time.sleep(0.1)
        finally:
            if self.is_main:
                file.unlink(missing_ok=True)

    def final_barrier(self) -> None:
        """Wait for all processes at the end of the run, and stop watching them.

        Errors and signals of other processes have no effect here.

        Raises:
            jax.errors.JaxRuntimeError: The coordination service cannot be reached: process 0 has ended.
        """
        self._gather_messages(_BarrierMessage("the end"))
        self.watchdog.close()

    def on_other_process_stopping(self) -> None:
        """Stop this process too, because another process stops.

        The other process's note may come late. After the barrier at which all processes stopped it must not
        interrupt this process, which may be saving. Nor must it replace an error with which this process is
        ending already.

        Raises:
            SystemExit: The main thread is in `local_work`, which ends at once.
        """
        if self._common_error is None and sys.exc_info()[1] is None:
            self._stop.request_stop()

    def _wait_at_barrier(
        self, name: str, value_length: int = 0, inline_value: bytes = b""
    ) -> list[_BarrierMessage]:
        """Wait until all processes are at this barrier, and return their messages; raises as `all_gather`."""
        # A signal that comes after this message is sent takes effect at the next barrier: all processes must
        # decide on the same messages.
        own_message = _BarrierMessage(name, value_length, inline_value, stop_status=self._signal_status())
        messages = self._gather_messages(own_message)
        if any(message.error or message.stop_status is not None for message in messages):
            self._stop_together(messages)
        for index, message in enumerate(messages):
            if message.name != name:
                raise RuntimeError(
                    f"{self.describe_process(index)} is at the barrier {message.name!r}, this process is at"
                    f" {name!r}"
                )
        return messages

    def _announce_stop(self, name: str, error: BaseException) -> None:
        """Tell the other processes at the next barrier that this one stops, and wait for them.

        Afterwards the caller raises `error`. If this process stops only because another one does, this raises
        the common error of all processes instead.
        """
        with suppress(jax.errors.JaxRuntimeError):
            self.watchdog.write_note(STOPPING, "")
        status = None
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            status = error.code
        was_requested = self._stop.was_requested and status is not None
        message = _BarrierMessage(
            name,
            error="" if status is not None else _describe_error(error),
            error_status=exit_status(error) if isinstance(error, UserError) else ENVIRONMENT_STATUS,
            stop_status=None if was_requested else status,
        )
        try:
            messages = self._gather_messages(message, deadline=time.monotonic() + 2 * self._timeout)
        except (TimeoutError, jax.errors.JaxRuntimeError):
            # The others are elsewhere, so `can_save_together` stays false and their watchdog ends them.
            return
        if was_requested:
            self._stop_together(messages)
        self._common_error = error
        self.can_save_together = True

    def _stop_together(self, messages: list[_BarrierMessage]) -> NoReturn:
        """Raise the error with which all processes stop at a barrier, given their messages.

        It is the error of the last process that failed; without any, the first exit status that a signal set.
        """
        statuses = [message.stop_status for message in messages]
        statuses.append(self._signal_status())
        error: BaseException = SystemExit(next((status for status in statuses if status), REMOTE_STOP_STATUS))
        for index, message in enumerate(messages):
            if message.error:
                kind = UserError if message.error_status == INPUT_STATUS else EnvironmentFailure
                error = kind(f"{self.describe_process(index)} has ended: {message.error}")
        self._common_error = error
        self.can_save_together = True
        raise error

    def _signal_status(self) -> int | None:
        """Return the exit status that a signal to this process has set, if any."""
        return None if self._stop.was_requested else self._stop.status

    def _gather_messages(self, message: _BarrierMessage, deadline: float = math.inf) -> list[_BarrierMessage]:
        """Return the messages of all processes at a barrier.

        Raises TimeoutError if a process is missing at the `deadline`, a time of the monotonic clock.
        """

        def check() -> None:
            """Tell the others of a signal that came during the wait, and end the wait at the deadline."""
            if self._stop.status is not None:
                # A signal came during the wait: it must also interrupt the local work of the others.
                self.watchdog.write_note(STOPPING, "")
            if time.monotonic() >= deadline:
                raise TimeoutError(message.name)

        return [_BarrierMessage(*values) for values in self._all_gather(astuple(message), check)]


@dataclass(frozen=True)
class _BarrierMessage:
    """What a process tells the others at a barrier."""

    name: str  # name of the barrier
    value_length: int = 0  # bytes of the value that the process exchanges here
    inline_value: bytes = b""  # the value itself if it is short, otherwise empty
    error: str = ""  # the error with which the process stops here, if any
    error_status: int = 0  # exit status of that error
    stop_status: int | None = None  # exit status with which the process stops here after a signal


def _all_gather_on_devices(data: bytes, lengths: list[int]) -> list[bytes]:
    """Exchange long values through the devices, given the lengths in bytes of the values of all processes."""
    # Each length needs a program of its own, so lengths are padded to powers of two.
    padded_length = 2 ** int(np.ceil(np.log2(max(lengths))))
    padded = np.zeros(padded_length, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(padded)  # uint8 [processes, padded_length]
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def _describe_error(error: BaseException) -> str:
    """Return an error as one line; the type is named unless the message is written for the user."""
    message = " ".join(str(error).split())
    return message if isinstance(error, UserError) else f"{type(error).__name__}: {message}"
