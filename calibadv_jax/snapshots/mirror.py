"""A copy of a run's folder in an object store: another machine goes on from it.

The folder itself stays local, where files are replaced as a whole and locked. What a start needs is copied
after every complete checkpoint, by a thread. `mirror.json` is written last: it names the checkpoints that are
complete there, and the start that writes there.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fsspec

from calibadv_jax.config import Config
from calibadv_jax.config.starts import FOLDER as CONFIGS
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import replacing, replacing_folder, write_json
from calibadv_jax.core.locking import locked_run
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.weights import summary
from calibadv_jax.snapshots.checkpoint import newest_step

MARKER = "mirror.json"
FORMAT = 1
CHECKPOINTS, ROLLOUTS = "checkpoints", "rollouts"
METADATA = "_CHECKPOINT_METADATA"  # Orbax': when the checkpoint was written, to the nanosecond
LEFT_OUT = (CHECKPOINTS, "snapshots", "sft_checkpoints")  # top folders; checkpoints are copied one by one
SLOWEST = 60.0  # seconds between two tries to reach the store
GONE_FOR_GOOD = 4  # tries in a row in which a file was missing, or the bucket
PATIENCE = 600.0  # seconds for which the end of a run waits for the last copy
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def open_mirror(config: Config, console: Console) -> Mirror | None:
    """That of run.mirror, if it is set."""
    run = config.run
    return Mirror(run.mirror, Path(run.dir), config.checkpoint.keep, console) if run.mirror else None


def bring_newest(config: Config, console: Console) -> None:
    """The run from run.mirror, if it is set, for a command that reads the newest checkpoint of run.dir."""
    mirror = open_mirror(config, console)
    if mirror and mirror.has_newer():
        with locked_run(mirror.folder, console.warn):
            mirror.fetch()


class _Taken(Exception):
    """Another start of the run writes to the store; says which."""


class Mirror:
    """The store's side of a run's folder.

    Args:
        url: what fsspec knows: ``s3://bucket/path``, ``gs://bucket/path``, a folder.
        folder: of the run.
        keep: newest checkpoints that stay in the store.

    Raises:
        UserError: the package that speaks to this kind of store is missing, or the one lies in the other.
    """

    def __init__(self, url: str, folder: Path, keep: int, console: Console):
        self.url, self.folder, self.keep, self.console = url, folder, keep, console
        try:
            self._store, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            extra = EXTRAS.get(url.partition("://")[0])
            way_out = f"pip install 'calibadv-jax[{extra}]'" if extra else "use s3://, gs:// or a folder"
            raise UserError(f"run.mirror={url}: {_line(error)}; {way_out}") from error
        self._is_folder = "file" in self._store.protocol
        if self._is_folder:
            self._store.auto_mkdir = True
            there, here = Path(self._root).resolve(), folder.resolve()
            if there.is_relative_to(here) or here.is_relative_to(there):
                raise UserError(
                    f"run.mirror={url} and run.dir={folder} lie in one another; choose a folder elsewhere"
                )
        self._token = uuid.uuid4().hex
        self._owner = {"token": self._token, "host": socket.gethostname(), "process": os.getpid()}
        self._copied: dict[str, tuple[int, int]] = {}  # file -> size and time of change when it was copied
        self._step = -1  # whose checkpoint is to be copied
        self._asked = self._done = 0  # how often that was asked for; the last time that it was done
        self._failure: str | None = None  # why the last try failed
        self._taken: str | None = None  # which other start writes there now
        self._told: str | None = None
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._work, name="copy to run.mirror", daemon=True)

    def has_newer(self) -> bool:
        """Whether the store's newest checkpoint is newer than the folder's.

        Raises:
            UserError: the store cannot be read.
        """
        with self._read():
            return bool(self._newer())

    def fetch(self) -> bool:
        """Brings the run here if the store's newest checkpoint is newer than the folder's; whether it did.

        Raises:
            UserError: the store cannot be read, or holds another run, or a copy that is not whole.
        """
        with self._read():
            if self._marker()["checkpoints"]:  # newer or not: the copy of another run is not written over
                self._check_same_run()
            checkpoints = self._newer()
            if not checkpoints:
                return False
            files = [path for path in self._names() if path.partition("/")[0] not in (*LEFT_OUT, MARKER)]
            self._get({path: self.folder / path for path in files})
            for step, sizes in checkpoints.items():
                self._get_checkpoint(step, sizes)
        self.console.note(
            f"the run was brought from {self.url}, with the checkpoint of step {max(checkpoints)}"
        )
        return True

    def _newer(self) -> dict[int, dict[str, int]]:
        """The store's checkpoints with the sizes of their files, if the newest is newer than the folder's."""
        found = {int(step): one["files"] for step, one in self._marker()["checkpoints"].items()}
        ours = newest_step(self.folder / CHECKPOINTS)
        is_newer = found and (ours is None or max(found) > ours)
        return dict(sorted(found.items())) if is_newer else {}

    def begin(self) -> None:
        """This start writes there from now on; other starts of the run are told so by the marker.

        Raises:
            UserError: the store cannot be written.
        """
        with self._read():
            self._write_marker(self._marker()["checkpoints"])
        self._thread.start()
        newest = newest_step(self.folder / CHECKPOINTS)
        if newest is not None:
            self.put(newest)

    def put(self, step: int) -> None:
        """Begins to copy the run's folder with this checkpoint, which is complete."""
        with self._changed:
            self._step = step
            self._asked += 1
            self._changed.notify_all()

    def check(self) -> None:
        """Tells the terminal how the copying goes; called between the steps.

        Raises:
            UserError: another start of this run writes there.
        """
        if self._taken is not None:
            raise UserError(
                f"run.mirror={self.url} was taken over by another start of this run ({self._taken}); this one"
                " ends, so that the two do not mix"
            )
        failure = self._failure
        if failure is not None and self._told is None:
            self.console.warn(
                f"run.mirror={self.url} cannot be written ({failure}); tried again until it can"
            )
        elif failure is None and self._told is not None:
            self.console.note(f"{self.url} can be written again")
        self._told = failure

    def __enter__(self) -> Mirror:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits until the last checkpoint is copied, but not for ever."""
        until = time.monotonic() + PATIENCE
        with self._changed:
            if self._is_behind():
                self.console.note(f"copying step {self._step} to {self.url}")
            while self._is_behind() and time.monotonic() < until:
                self._changed.wait(1.0)
            self._over = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)
        if self._is_behind():
            self.console.warn(
                f"run.mirror={self.url} lacks the checkpoint of step {self._step}"
                f" ({self._failure or 'copying takes too long'});"
                f" the next start with run.dir={self.folder} copies it"
            )
        elif kind is None:
            self.check()

    def _is_behind(self) -> bool:
        return self._taken is None and self._done != self._asked

    def _work(self) -> None:
        wait, gone = 1.0, 0
        while True:
            with self._changed:
                while not self._over and not self._is_behind():
                    self._changed.wait()
                if self._over:
                    return
                step, asked = self._step, self._asked
            try:
                self._copy(step)
            except _Taken as other:
                self._taken = str(other)
                with self._changed:
                    self._changed.notify_all()
                return
            except FileNotFoundError as error:
                # Trajectories that are no longer kept, or a replaced checkpoint: the next try knows it.
                gone += 1
                if gone >= GONE_FOR_GOOD:
                    self._failure = _line(error)
            except Exception as error:  # every store has errors of its own; none of them ends a run
                self._failure = _line(error)
            else:
                self._failure, wait, gone = None, 1.0, 0
                with self._changed:
                    self._done = asked
                    self._changed.notify_all()
                continue
            with self._changed:
                self._changed.wait_for(lambda: self._over, wait)
            wait = min(2 * wait, SLOWEST)

    def _copy(self, step: int) -> None:
        """Everything that changed, then the checkpoint, then the marker; then what nobody needs goes."""
        complete = self._own_checkpoints()
        self._put_changed(_files(self.folder))
        if complete.get(str(step), {}).get("made") != self._made(step):
            under = f"{CHECKPOINTS}/{step}"
            if str(step) in complete:  # of before a rollback: it must not be named while it is replaced
                del complete[str(step)]
                self._write_marker(complete)
            self._remove(self._names(under))
            sizes = {path: (self.folder / path).stat().st_size for path in _files(self.folder, under)}
            self._put(sizes)
            self._own_checkpoints()  # copying took its time
            complete[str(step)] = {"made": self._made(step), "files": sizes}
        newest = sorted(one for one in map(int, complete) if one <= step)[-self.keep :]
        kept = {str(one): complete[str(one)] for one in newest}
        self._write_marker(kept)
        self._remove(path for path in self._names(CHECKPOINTS) if path.split("/")[1] not in kept)
        rollouts = set(_files(self.folder, ROLLOUTS))
        self._remove(path for path in self._names(ROLLOUTS) if path not in rollouts)

    def _made(self, step: int) -> str:
        """What no other checkpoint of this step has."""
        return hashlib.sha256((self.folder / CHECKPOINTS / str(step) / METADATA).read_bytes()).hexdigest()

    def _own_checkpoints(self) -> dict[str, dict[str, Any]]:
        """What the marker names, if this start may still write there.

        Raises:
            _Taken: it may not.
        """
        marker = self._marker()
        owner = marker.get("owner", {})
        if owner.get("token") != self._token:
            raise _Taken(f"process {owner.get('process')} on {owner.get('host')}")
        found: dict[str, dict[str, Any]] = marker["checkpoints"]
        return found

    def _marker(self) -> dict[str, Any]:
        try:
            text = self._store.cat_file(f"{self._root}/{MARKER}")
        except FileNotFoundError:
            return {"format": FORMAT, "checkpoints": {}}
        try:
            marker = json.loads(text)
            known = marker["format"] == FORMAT and isinstance(marker["checkpoints"], dict)
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise UserError(
                f"{self.url}/{MARKER}: not a run's mirror of format {FORMAT}; choose another run.mirror"
            )
        return marker

    def _write_marker(self, checkpoints: Mapping[str, Mapping[str, Any]]) -> None:
        """In one replacement, as object stores write: a cut marker would hide every checkpoint."""
        marker = {"format": FORMAT, "owner": self._owner, "checkpoints": checkpoints}
        if self._is_folder:
            Path(self._root).mkdir(parents=True, exist_ok=True)
            write_json(Path(self._root) / MARKER, marker)
            return
        self._store.pipe_file(f"{self._root}/{MARKER}", json.dumps(marker, indent=2).encode())

    def _check_same_run(self) -> None:
        first = self.folder / CONFIGS / "0.yaml"
        if first.is_file():
            theirs = self._store.cat_file(f"{self._root}/{CONFIGS}/0.yaml")
            if theirs != first.read_bytes():
                raise UserError(
                    f"run.mirror={self.url} holds another run than run.dir={self.folder}; choose another of"
                    " the two"
                )

    def _get_checkpoint(self, step: int, sizes: Mapping[str, int]) -> None:
        place = self.folder / CHECKPOINTS / str(step)
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(place) as partial:
            here = {path: partial / Path(path).relative_to(f"{CHECKPOINTS}/{step}") for path in sizes}
            self._get(here)
            cut = [path for path, file in here.items() if file.stat().st_size != sizes[path]]
            if cut:
                raise UserError(f"{self.url}: {summary(cut)} not as long as {MARKER} says; remove the copy")

    def _names(self, under: str = "") -> list[str]:
        """Files in the store, relative to its root."""
        root = f"{self._root}/{under}".rstrip("/")
        self._store.invalidate_cache()
        try:
            found = self._store.find(root)
        except FileNotFoundError:
            return []
        return [path.removeprefix(f"{self._root}/") for path in found]

    def _put_changed(self, paths: Iterable[str]) -> None:
        state = {}
        for path in paths:
            stat = (self.folder / path).stat()
            state[path] = stat.st_size, stat.st_mtime_ns
        self._put(path for path, now in state.items() if self._copied.get(path) != now)
        self._copied = state

    def _put(self, paths: Iterable[str]) -> None:
        chosen = list(paths)
        if chosen:
            here = [str(self.folder / path) for path in chosen]
            self._store.put(here, [f"{self._root}/{path}" for path in chosen])

    def _get(self, paths: Mapping[str, Path]) -> None:
        """All of them, each whole or not at all.

        Raises:
            UserError: one would lie outside of the run's folder.
        """
        with ExitStack() as stack:
            partial = []
            for path, place in paths.items():
                if ".." in path.split("/"):
                    raise UserError(f"{self.url}: {path} is no path inside of a run; remove it from there")
                place.parent.mkdir(parents=True, exist_ok=True)
                partial.append(str(stack.enter_context(replacing(place))))
            if paths:
                self._store.get([f"{self._root}/{path}" for path in paths], partial)

    def _remove(self, paths: Iterable[str]) -> None:
        chosen = [f"{self._root}/{path}" for path in paths]
        if chosen:
            self._store.rm(chosen)

    @contextmanager
    def _read(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # every store has errors of its own
            raise UserError(
                f"run.mirror={self.url} cannot be used ({_line(error)}); check the address and the"
                " credentials"
            ) from error


def _files(folder: Path, under: str = "") -> list[str]:
    """Files relative to `folder`, with slashes: all `under` a folder in it, or all outside of checkpoints."""
    found = sorted(path.relative_to(folder) for path in (folder / under).rglob("*") if path.is_file())
    if not under:
        found = [path for path in found if path.parts[0] not in LEFT_OUT and not _is_hidden(path)]
    return [path.as_posix() for path in found]


def _is_hidden(path: Path) -> bool:
    """A lock, or a file that is being written."""
    return any(part.startswith(".") for part in path.parts)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
