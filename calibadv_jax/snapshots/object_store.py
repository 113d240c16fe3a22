"""Objects of a store under one address: conditional creation, and waits that end."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

import fsspec

from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.files import replacing
from calibadv_jax.metrics.console import Console

STALLED = 60  # seconds without progress after which a store is given up
NOTED = 15  # seconds between two lines about a wait
# At most 64 MiB are on their way before they are written: progress within STALLED seconds at 1 MiB/s.
SMALL, PARALLEL = {"default_block_size": 4 * 2**20, "max_concurrency": 4}, {"batch_size": 4}
STORES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "file": "", "local": ""}  # and their extras

T = TypeVar("T")


class ObjectStore:
    """The objects whose names begin with one address; names are relative to it.

    Args:
        url: ``s3://bucket/path``, ``gs://bucket/path`` or a folder.
        key: the config key that names it, for messages.

    Raises:
        UserError: no conditional put is known for this kind of store, or it lacks its package.
    """

    def __init__(self, url: str, key: str, console: Console):
        self._name, self._console = f"{key}={url}", console
        kind, colon, _ = url.partition("://")
        extra = STORES.get(kind if colon else "file")
        try:
            if extra is None:
                raise ValueError(f"no conditional put is known for {kind}://")
            self._files, root = fsspec.core.url_to_fs(url, **(SMALL if extra == "s3" else {}))
        except (ImportError, ValueError) as error:
            way_out = f"pip install 'calibadv-jax[{extra}]'" if extra else "use s3://, gs:// or a folder"
            raise UserError(f"{self._name}: {one_line(error)}; {way_out}") from error
        self._root = root.rstrip("/")
        self.folder = None if extra else Path(self._root)
        if self.folder:
            self._files.auto_mkdir = True

    def call(self, what: str, work: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
        """Return what `work` returns, as long as `progress` changes within STALLED seconds.

        Raises:
            UserError: for whatever `work` raises, or (EnvironmentFailure) if the store does not answer.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # whatever it is, the one who waits must know
                result.set_exception(error)

        threading.Thread(target=run, name=what, daemon=True).start()
        idle, before = 0, progress()
        while not wait([result], timeout=1.0).done:
            now = progress()
            idle, before = 0 if now != before else idle + 1, now
            if idle >= STALLED:
                raise EnvironmentFailure(
                    f"{self._name} has not answered for {idle} s ({what}); start again when it does"
                )
            if idle and idle % NOTED == 0:
                self._console.note(f"waiting for {self._name} ({what})")
        try:
            return result.result()
        except UserError:
            raise
        except Exception as error:  # every store has errors of its own
            kind = UserError if isinstance(error, FileNotFoundError | PermissionError) else EnvironmentFailure
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            way_out = "make room" if is_full else "check the address and the credentials"
            raise kind(f"{self._name} cannot be used ({what}: {one_line(error)}); {way_out}") from error

    def create(self, name: str, data: bytes) -> bool:
        """Create an object as a whole; return False, and change nothing, where it exists."""
        link = Path(f"{self._root}/.{uuid.uuid4().hex}")
        try:
            if self.folder is None:
                self._files.pipe_file(f"{self._root}/{name}", data, mode="create")
                return True
            Path(f"{self._root}/{name}").parent.mkdir(parents=True, exist_ok=True)
            with replacing(link) as file:
                file.write_bytes(data)
            os.link(link, f"{self._root}/{name}")
            return True
        except OSError as error:
            code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
            if isinstance(error, FileExistsError) or code == "PreconditionFailed":
                return False
            raise
        finally:
            if self.folder:
                link.unlink(missing_ok=True)

    def add(self, folder: str, number: int, data: bytes) -> bool:
        """Create a version in a folder, delete the older ones; return False if it or a newer one exists."""
        is_created = self.create(f"{folder}/{number:08}", data)
        names = self.names(folder)
        if not is_created or names[-1] != f"{number:08}":  # a version that was deleted may be created again
            return False
        self.remove([f"{folder}/{name}" for name in names[:-1]])
        return True

    def newest(self, folder: str) -> tuple[int, bytes]:
        """Return the number and content of the newest version in a folder; 0 if there is none."""
        names = self.names(folder)
        if not names:
            return 0, b""
        try:
            return int(names[-1]), self.read(f"{folder}/{names[-1]}")
        except FileNotFoundError:
            if self.names(folder) == names:
                raise
            return self.newest(folder)  # a newer one has replaced it

    def names(self, folder: str) -> list[str]:
        """Return the names within a folder, sorted."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rpartition("/")[2] for path in paths)

    def has(self, name: str) -> bool:
        return bool(self._files.exists(f"{self._root}/{name}"))

    def read(self, name: str) -> bytes:
        return bytes(self._files.cat_file(f"{self._root}/{name}"))

    def put(self, files: Mapping[str, Path]) -> list[int]:
        """Upload files, by the names of their objects; return the sizes of the objects."""
        paths = [f"{self._root}/{name}" for name in files]
        if paths:
            self._files.put([str(file) for file in files.values()], paths, **PARALLEL)
        self._files.invalidate_cache()
        return list(self._files.sizes(paths))

    def get(self, files: Mapping[str, Path]) -> None:
        if files:
            self._files.get(
                [f"{self._root}/{name}" for name in files], [str(file) for file in files.values()]
            )

    def remove(self, names: Collection[str]) -> None:
        if names:
            self._files.rm([f"{self._root}/{name}" for name in names])


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
