"""A service as a child process that writes its port to a file once it is ready."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from calibadv_jax.core.errors import INPUT_STATUS, EnvironmentFailure, UserError

STOP_SECONDS = 20.0  # between asking a child to end and killing it
LONGEST_CAUSE = 300  # characters
LONGEST_LOG = 2**24  # bytes, about 100 starts of a vLLM server; a longer one is set aside at a start
_ERROR = re.compile(r"\b(?:\w+\.)*[A-Z]\w*Error: .+")
_HARMLESS = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b")  # vLLM's warnings name errors that have not happened
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # the log has every line at once, and errors after what led to them


@dataclass
class ChildService:
    """A child process, ready when the block begins, stopped when it ends.

    The `command` is started with ``--port 0 --port_file FILE --parent_pid PID`` added, and its output is
    added to `log_path`; other commands may write there too.
    """

    name: str  # in messages
    command: Sequence[str]
    log_path: Path
    start_timeout: float  # seconds
    timeout_key: str  # config key of `start_timeout`, for messages
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that differ from this process's
    url: str = field(default="", init=False)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory, init=False)  # of the port
    _log_start: int = field(default=0, init=False)  # bytes of the log before this child's

    def __enter__(self) -> ChildService:
        """Start the service and wait for it; raise UserError if it ends or does not get ready in time."""
        try:
            self.start()
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start without waiting, so that several may start side by side."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._port_file = Path(self._folder.name, "port")
        arguments = ["--port", "0", "--port_file", str(self._port_file), "--parent_pid", str(os.getpid())]
        set_aside(self.log_path)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            command = [*self.command, *arguments]
            variables = os.environ | UNBUFFERED | dict(self.environment)
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)

    def wait(self) -> None:
        """Wait until it is ready; see `__enter__`."""
        assert self.process is not None
        deadline = time.monotonic() + self.start_timeout
        while not self._port_file.is_file():
            if (status := self.process.poll()) is not None:
                output = self.log_path.read_bytes()[self._log_start :].decode(errors="replace")
                kind = UserError if status == INPUT_STATUS else EnvironmentFailure
                raise kind(f"{self.name} ended with status {status}: {_cause(output)}; see {self.log_path}")
            if time.monotonic() > deadline:
                fault = f"{self.name} was not ready within {self.start_timeout:g} s"
                raise EnvironmentFailure(f"{fault}; see {self.log_path} or raise {self.timeout_key}")
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{self._port_file.read_text()}"

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()


def set_aside(log: Path) -> None:
    """Rename a log that is longer than LONGEST_LOG to FILE.old, in place of an older one."""
    if log.is_file() and log.stat().st_size > LONGEST_LOG:
        log.replace(log.with_name(f"{log.name}.old"))


def _cause(log: str) -> str:
    """Return the first line that names an error, as later ones follow from it, or else the last line."""
    lines = log.strip().splitlines() or ["no output"]
    errors = (_ERROR.search(line) for line in lines if not _HARMLESS.search(line))
    cause = next((error.group() for error in errors if error), lines[-1].removeprefix("error: "))
    return cause.strip()[:LONGEST_CAUSE]
