"""Objects in S3, Google Cloud Storage or a folder: created once, listed, and with limits on every wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import fsspec
from fsspec.implementations.dirfs import DirFileSystem

from calibadv_jax.core.errors import (
    FULL_DISK_ERRNOS,
    EnvironmentFailure,
    UserError,
    cause_text,
    storage_errno,
)
from calibadv_jax.core.files import atomic_write
from calibadv_jax.core.signals import start_daemon_thread

STALL_SECONDS = 60  # seconds without progress after which a store is given up
REPORT_SECONDS = 15  # seconds between two lines about a wait
# Options of s3fs with which at most 64 MiB are under way before they are written: at 1 MiB/s there is
# progress within STALL_SECONDS.
S3_TRANSFER_OPTIONS = {"default_block_size": 4 * 2**20, "max_concurrency": 4}

_FOLDER_KINDS = ("file", "local")
_KINDS = ("s3", "s3a", "gs", "gcs", *_FOLDER_KINDS)
T = TypeVar("T")


class ObjectStore:
    """A store that creates an object only where no object of its name exists.

    Args:
        url: ``s3://…``, ``gs://…`` or a folder.
        key: Name of the store in messages: ``key=value``.
        note: Takes a line about each wait.

    Raises:
        UserError: The kind of store has no conditional put, or its package is missing.
    """

    def __init__(self, url: str, key: str, note: Callable[[str], None]):
        self.key = key
        self._note = note
        kind = url.partition("://")[0] if "://" in url else "file"
        options: dict[str, Any] = {"use_listings_cache": False}
        if kind.startswith("s3"):
            options.update(S3_TRANSFER_OPTIONS)
        try:
            if kind not in _KINDS:
                raise ValueError(f"no conditional put is known for {kind}://")
            files, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"{key}: {error}; use a folder, s3:// or gs:// (pip install 'calibadv-jax[s3]' or"
                " 'calibadv-jax[gcs]')"
            ) from error
        self.folder = Path(root).resolve() if kind in _FOLDER_KINDS else None
        if self.folder:
            files.auto_mkdir = True
        self.files = DirFileSystem(root.rstrip("/"), files)

    def create(self, name: str, data: bytes) -> bool:
        """Create an object in one step.

        Args:
            name: Path of the object in the store.
            data: Its content.

        Returns:
            False, without any change, if an object of this name exists.
        """
        try:
            if self.folder is None:
                self.files.pipe_file(name, data, mode="create")
                return True
            self.files.mkdirs(name.rpartition("/")[0], exist_ok=True)
            with TemporaryDirectory(dir=self.folder, prefix=".") as folder:
                complete = Path(folder, "object")
                with atomic_write(complete) as file:
                    file.write_bytes(data)
                os.link(complete, self.folder / name)  # fails if the name exists
            return True
        except OSError as error:
            code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
            if isinstance(error, FileExistsError) or code == "PreconditionFailed":
                return False
            raise

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes in bytes of the objects in a folder of the store, by name, in the names' order."""
        with suppress(FileNotFoundError):
            entries = self.files.ls(folder)
            return dict(sorted((entry["name"].rpartition("/")[2], entry["size"]) for entry in entries))
        return {}

    def call(self, operation: str, work: Callable[[], T], progress: Callable[[], Any] = lambda: 0) -> T:
        """Do work on the store in a thread, and return its result.

        Args:
            operation: What the work does, for messages.
            work: Uses `files`.
            progress: Returns a value that changes whenever the work makes progress.

        Raises:
            UserError: The store refuses the work.
            EnvironmentFailure: The work fails for another reason, or makes no progress for STALL_SECONDS.
        """
        future = start_daemon_thread(work)
        idle_seconds = 0
        last_progress = progress()
        while not wait([future], REPORT_SECONDS).done:
            current_progress = progress()
            if current_progress == last_progress:
                idle_seconds += REPORT_SECONDS
            else:
                idle_seconds = 0
            last_progress = current_progress
            if idle_seconds >= STALL_SECONDS:
                raise EnvironmentFailure(
                    f"{self.key} has not answered for {idle_seconds} s ({operation}); try again later"
                )
            self._note(f"waiting for {self.key} ({operation})")
        try:
            return future.result()
        except UserError:
            raise
        except Exception as error:  # every store has errors of its own
            kind = UserError if isinstance(error, FileNotFoundError | PermissionError) else EnvironmentFailure
            advice = "check the address and the credentials"
            if storage_errno(error) in FULL_DISK_ERRNOS:
                advice = "make room"
            raise kind(f"{self.key} cannot be used ({operation}: {cause_text(error)}); {advice}") from error
