"""Objects in S3, Google Cloud Storage or a folder: created once, listed, and never waited for without end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from calibadv_jax.core.errors import EnvironmentFailure, UserError, cause_text, storage_errno
from calibadv_jax.core.files import atomic_write
from calibadv_jax.core.stopping import start_daemon_thread

STALLED, NOTED = 60, 15  # seconds without progress until a store is given up; between lines about a wait
# At most 64 MiB are on their way before they are written: progress within STALLED seconds at 1 MiB/s.
SMALL = {"default_block_size": 4 * 2**20, "max_concurrency": 4}
FULL = (errno.ENOSPC, errno.EDQUOT)
T = TypeVar("T")


class ObjectStore:
    """A store (``s3://…``, ``gs://…`` or a folder) that creates objects only where none of their name exists.

    `key` names it in messages, as ``key=value``; `note` takes a line about each wait. Raises UserError if the
    kind of store lacks conditional puts, or its package is missing.
    """

    def __init__(self, url: str, key: str, note: Callable[[str], None]):
        self.key, self._note = key, note
        kind = url.partition("://")[0] if "://" in url else "file"
        try:
            if kind not in ("s3", "s3a", "gs", "gcs", "file", "local"):
                raise ValueError(f"no conditional put is known for {kind}://")
            options = {"use_listings_cache": False} | (SMALL if kind.startswith("s3") else {})
            files, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            packages = "pip install 'calibadv-jax[s3]' or 'calibadv-jax[gcs]'"
            raise UserError(f"{key}: {error}; use a folder, s3:// or gs:// ({packages})") from error
        self.folder = Path(root).resolve() if kind in ("file", "local") else None
        if self.folder:
            files.auto_mkdir = True
        self.files = DirFileSystem(root.rstrip("/"), files)

    def create(self, name: str, data: bytes) -> bool:
        """Create an object as a whole; return False, and change nothing, where it exists."""
        try:
            if self.folder is None:
                self.files.pipe_file(name, data, mode="create")
                return True
            self.files.mkdirs(name.rpartition("/")[0], exist_ok=True)
            with TemporaryDirectory(dir=self.folder, prefix=".") as folder:
                with atomic_write(Path(folder, "object")) as file:
                    file.write_bytes(data)
                os.link(Path(folder, "object"), self.folder / name)
            return True
        except OSError as error:
            code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
            if isinstance(error, FileExistsError) or code == "PreconditionFailed":
                return False
            raise

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the objects in a folder of the store, by name and sorted by it."""
        with suppress(FileNotFoundError):
            entries = self.files.ls(folder)
            return dict(sorted((entry["name"].rpartition("/")[2], entry["size"]) for entry in entries))
        return {}

    def call(self, operation: str, work: Callable[[], T], progress: Callable[[], Any] = lambda: 0) -> T:
        """Return the result of `work` or raise UserError, also after STALLED seconds without `progress`."""
        future, idle, before = start_daemon_thread(work), 0, progress()
        while not wait([future], NOTED).done:
            last, before = before, progress()
            idle = idle + NOTED if before == last else 0
            if idle >= STALLED:
                fault = f"{self.key} has not answered for {idle} s ({operation})"
                raise EnvironmentFailure(f"{fault}; try again later")
            self._note(f"waiting for {self.key} ({operation})")
        try:
            return future.result()
        except UserError:
            raise
        except Exception as error:  # every store has errors of its own
            kind = UserError if isinstance(error, FileNotFoundError | PermissionError) else EnvironmentFailure
            way_out = "make room" if storage_errno(error) in FULL else "check the address and the credentials"
            raise kind(f"{self.key} cannot be used ({operation}: {cause_text(error)}); {way_out}") from error
