"""A service as a child process that writes its port to a file once it is ready."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from calibadv_jax.core.errors import INPUT_STATUS, EnvironmentFailure, UserError

STOP_SECONDS = 20.0  # between SIGTERM to a child and SIGKILL
POLL_SECONDS = 0.05  # between two checks whether a child is ready
WATCH_SECONDS = 0.5  # between two checks whether a child that is kept alive has ended
FIRST_RESTART_PAUSE = 1.0  # seconds before the first restart; doubles up to LAST_RESTART_PAUSE
LAST_RESTART_PAUSE = 60.0  # seconds
INTERRUPT_STATUSES = (-signal.SIGINT, 128 + signal.SIGINT)
LONGEST_END = 10.0  # seconds that this process may take to end after a Ctrl-C
LONGEST_CAUSE = 300  # characters
LONGEST_LOG = 2**24  # bytes, about 100 starts of a vLLM server; a longer one is set aside at a start
# With it, the log has every line at once, and an error stands after the lines that led to it.
UNBUFFERED_OUTPUT = {"PYTHONUNBUFFERED": "1"}

_ERROR = re.compile(r"\b(?:\w+\.)*[A-Z]\w*Error: .+")
_HARMLESS = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b")  # vLLM's warnings name errors that have not happened


@dataclass
class ChildService:
    """A child process that serves HTTP: ready when the block begins, stopped when it ends.

    The command is started with ``--port 0 --port_file FILE --parent_pid PID`` added.

    Attributes:
        name: Name of the service in messages.
        command: Command line of the service.
        log_path: File to which its output is added. Other commands may write to it too.
        start_timeout: Seconds until the service must be ready.
        timeout_key: Config key of `start_timeout`, for messages.
        environment: Environment variables that differ from those of this process.
        key_of: By option of the command, the config key that sets it, for messages.
        url: Address of the service once it is ready.
        process: The child once it is started.
    """

    name: str
    command: Sequence[str]
    log_path: Path
    start_timeout: float
    timeout_key: str
    environment: Mapping[str, str] = field(default_factory=dict)
    key_of: Mapping[str, str] = field(default_factory=dict)
    url: str = field(default="", init=False)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    # Folder of the file to which the child writes its port.
    _folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory, init=False)
    _log_start: int = field(default=0, init=False)  # length of the log in bytes when the child was started

    def __enter__(self) -> ChildService:
        """Start the service and wait for it; raises as `wait`."""
        try:
            self.start()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, port: int = 0) -> None:
        """Start the child without waiting for it, so that several can start side by side.

        Args:
            port: Port to listen on; 0 for any free port.
        """
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._port_file = Path(self._folder.name, "port")
        self._port_file.unlink(missing_ok=True)
        arguments = ["--port", str(port), "--port_file", str(self._port_file)]
        arguments += ["--parent_pid", str(os.getpid())]
        rotate_log(self.log_path)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                [*self.command, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **UNBUFFERED_OUTPUT, **self.environment},
            )

    def wait(self) -> None:
        """Wait until the service is ready.

        Raises:
            UserError: The child refuses its input (INPUT_STATUS).
            EnvironmentFailure: The child ends with another status, or is not ready within `start_timeout`.
        """
        assert self.process is not None
        deadline = time.monotonic() + self.start_timeout
        while not self._port_file.is_file():
            status = self.process.poll()
            if status is not None:
                kind = UserError if status == INPUT_STATUS else EnvironmentFailure
                raise kind(f"{self._describe_end(status)}; see {self.log_path}")
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"{self.name} was not ready within {self.start_timeout:g} s; see {self.log_path} or raise"
                    f" {self.timeout_key}"
                )
            time.sleep(POLL_SECONDS)
        self.url = f"http://127.0.0.1:{self._port_file.read_text()}"

    def _with_keys(self, message: str) -> str:
        """Return a message of the child with config keys in place of its options."""
        for option, key in self.key_of.items():
            message = re.sub(rf"--{option}\b", key, message)
        return message

    def _describe_end(self, status: int) -> str:
        output = self.log_path.read_bytes()[self._log_start :].decode(errors="replace")
        return f"{self.name} ended with status {status}: {self._with_keys(_cause(output))}"

    @contextmanager
    def kept_alive(self, warn: Callable[[str], object]) -> Iterator[None]:
        """Within the block, start the child again on the same port whenever it has ended.

        Args:
            warn: Takes a line when the child has ended, and another when it answers again. A thread calls it.
        """
        is_over = threading.Event()
        watch = threading.Thread(
            target=self._restart_until, args=(is_over, warn), name=f"keep {self.name} alive", daemon=True
        )
        watch.start()
        try:
            yield
        finally:
            is_over.set()
            while watch.is_alive():  # a restart that waits for the child ends too
                if self.process is not None:
                    self.process.terminate()
                watch.join(POLL_SECONDS)

    def _restart_until(self, is_over: threading.Event, warn: Callable[[str], object]) -> None:
        """Restart the child after each of its ends; the pause before doubles while restarts fail."""
        pause = FIRST_RESTART_PAUSE
        assert self.process is not None
        while not is_over.wait(WATCH_SECONDS):
            status = self.process.poll()
            if status is None:
                continue
            # Ctrl-C reaches the child too: then this process may be about to end.
            is_interrupt = status in INTERRUPT_STATUSES
            if is_over.wait(LONGEST_END if is_interrupt else pause):
                return
            warn(f"{self._describe_end(status)}; starting it again; see {self.log_path}")
            pause = min(2 * pause, LAST_RESTART_PAUSE)
            try:
                self.start(int(self.url.rpartition(":")[2]))
                self.wait()
            except UserError as error:
                if not is_over.is_set():
                    warn(str(error))
                continue
            pause = FIRST_RESTART_PAUSE
            warn(f"{self.name} answers again")

    def stop(self) -> None:
        """End the child: with SIGTERM, and with SIGKILL after STOP_SECONDS."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()


def rotate_log(log: Path) -> None:
    """Rename a log that is longer than LONGEST_LOG to FILE.old, in place of an older one."""
    if log.is_file() and log.stat().st_size > LONGEST_LOG:
        log.replace(log.with_name(f"{log.name}.old"))


def _cause(output: str) -> str:
    """Return the first error that the output names, because later ones follow from it, or its last line."""
    lines = output.strip().splitlines() or ["no output"]
    cause = lines[-1].removeprefix("error: ")
    for line in lines:
        error = _ERROR.search(line)
        if error and not _HARMLESS.search(line):
            cause = error.group()
            break
    return cause.strip()[:LONGEST_CAUSE]
