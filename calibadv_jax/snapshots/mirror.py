"""Copy a run's folder to an object store, from which another machine continues the run.

Objects never change. The marker says which of them are the run's files. Each of its versions is a new object,
``marker/N.json``, which the store creates only if no other start has created this number (a conditional put).
So the older of two starts can neither name its objects nor delete any.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from calibadv_jax.config import Config
from calibadv_jax.config.kept import FOLDER as CONFIGS
from calibadv_jax.config.kept import run_hash
from calibadv_jax.core import hub
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.files import read_json, replacing, replacing_folder
from calibadv_jax.core.locking import locked_run
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.weights import summary
from calibadv_jax.snapshots.checkpoint import has_checkpoint, newest_step
from calibadv_jax.snapshots.object_store import ObjectStore, one_line
from calibadv_jax.snapshots.pins import CHECKPOINTS, FILE, PINS, Pin, state_of, step_of

MARKER, OBJECTS, OLD_MARKER = "marker", "objects", "mirror.json"  # in the store; the last of an older format
ROLLBACK = "rollback.json"  # in the run's folder: the last one
SLOWEST = 60.0  # seconds between two tries to upload
PATIENCE, HURRY = 600.0, 120.0  # seconds for which an orderly end, and any other, waits for the last copy
TRIES = 5  # to start while other starts write
OBJECT = re.compile("[0-9a-f]{32}[.][0-9]+")  # pin and number
Entry = tuple[str, int, int]  # object, size in bytes, time of change in ns


def open_mirror(config: Config, console: Console) -> Mirror | None:
    """Return the mirror of run.mirror, if it is set."""
    run = config.run
    return Mirror(run.mirror, Path(run.dir), config.checkpoint.keep, console) if run.mirror else None


def bring_newest(config: Config, console: Console) -> None:
    """Fetch the run from run.mirror, if it is set, for a command that reads the newest checkpoint."""
    mirror = open_mirror(config, console)
    if mirror and mirror.has_newer():
        with locked_run(mirror.folder, console.warn):
            mirror.fetch()


class _Taken(UserError):
    """Another start of the run owns the marker."""


@dataclass(frozen=True)
class _Version:
    """A version of the marker."""

    number: int = 0
    owner: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""  # hash of the run's first start: its config, questions, model and vocabulary
    rollbacks: int = 0
    steps: tuple[int, ...] = ()  # of complete checkpoints, ascending
    files: Mapping[str, Entry] = field(default_factory=dict)  # by path in the run's folder

    @property
    def text(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    def after(self, step: int) -> _Version:
        """Return the next version, without the checkpoints of later steps."""
        steps = tuple(one for one in self.steps if one <= step)
        files = {path: entry for path, entry in self.files.items() if step_of(path) in (None, *steps)}
        return replace(self, number=self.number + 1, steps=steps, files=files)


class Mirror:
    """The store's side of a run's folder.

    Args:
        url: ``s3://bucket/path``, ``gs://bucket/path`` or a folder.
        folder: of the run.
        keep: newest checkpoints that stay in the store.

    Raises:
        UserError: see `ObjectStore`; or one folder lies in the other.
    """

    def __init__(self, url: str, folder: Path, keep: int, console: Console):
        self.url, self.folder, self.keep, self.console = url, folder, keep, console
        self._store = ObjectStore(url, "run.mirror", console)
        if self._store.folder:
            there, here = self._store.folder.resolve(), folder.resolve()
            if there.is_relative_to(here) or here.is_relative_to(there):
                raise UserError(
                    f"run.mirror={url} and run.dir={folder} lie in one another; choose a folder elsewhere"
                )
        self._owner = {"token": uuid.uuid4().hex, "host": socket.gethostname(), "process": os.getpid()}
        self._version = _Version()  # that was read or written last
        self._inputs: dict[str, Path] = {}
        self._pins: list[Pin] = []  # that is being uploaded, and the newest
        self._failure: str | None = None  # why the last try failed
        self._warned: str | None = None
        self._taken: _Taken | None = None
        self._changed, self._committing = threading.Condition(), threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="copy to run.mirror", daemon=True)

    def has_newer(self) -> bool:
        """Return whether the store's newest checkpoint is newer than the folder's.

        Each rollback makes all that follows newer than what was before it.

        Raises:
            UserError: the store cannot be read, or holds another run.
        """
        version, here = self._read(), newest_step(self.folder / CHECKPOINTS)
        if not version.steps or here is None:
            return bool(version.steps)
        return (version.rollbacks, version.steps[-1]) > (_rollbacks(self.folder), here)

    @contextmanager
    def inputs(self, *paths: str) -> Iterator[int]:
        """Fetch missing configs and files of `paths`, by which a start finds out whether this is its run.

        Yields their number. They are removed if the block fails before `fetch`.
        """
        version, home = self._read(), self.folder.absolute()
        tops = [home / CONFIGS, home / hub.PINS, *(Path(path).absolute() for path in paths if path)]
        places = {path: home / path for path in version.files}
        self._inputs = {
            path: place
            for path, place in places.items()
            if not place.exists() and any(map(place.is_relative_to, tops))
        }
        try:
            self._get(version, self._inputs)
            yield len(self._inputs)
        except BaseException:
            for place in self._inputs.values():
                place.unlink(missing_ok=True)
            raise

    def fetch(self, claim: bool = False) -> bool:
        """Fetch the run if the store's newest checkpoint is newer than the folder's; return whether it was.

        Args:
            claim: first make this start the only one that writes there.

        Raises:
            UserError: the store cannot be used, has no conditional put, or holds another run or a cut copy.
        """
        for tries_left in reversed(range(TRIES)):
            is_newer, version = self.has_newer(), self._version
            try:
                if claim:
                    last = version.steps[-1] if is_newer else newest_step(self.folder / CHECKPOINTS) or 0
                    version = replace(version.after(last), owner=self._owner)
                    self._store.call("taking it over", partial(self._claim, version))
                self._inputs = {}
                if is_newer:
                    self._bring(version)
                break
            except UserError as error:  # another start has written meanwhile
                is_late = isinstance(error, _Taken) or isinstance(error.__cause__, FileNotFoundError)
                if not tries_left or not is_late:
                    raise
        return is_newer

    def _claim(self, version: _Version) -> None:
        self._commit(version)
        if self._store.add(MARKER, version.number, version.text):
            raise UserError(
                f"run.mirror={self.url}: the store ignores conditional puts (If-None-Match); use one that has"
                " them, or a folder"
            )

    def _read(self) -> _Version:
        version = self._version = self._store.call("reading its marker", self._newest)
        run = run_hash(self.folder)
        is_used = bool(run) or has_checkpoint(self.folder / CHECKPOINTS)
        if version.steps and is_used and run != version.run:
            raise UserError(
                f"run.mirror={self.url} holds another run than run.dir={self.folder}; change one of the two"
            )
        return version

    def _bring(self, version: _Version) -> None:
        """Fetch what differs, the newest checkpoint last; then delete checkpoints that the store lacks."""
        new = [path for path, entry in version.files.items() if state_of(self.folder / path) != entry[1:]]
        gib = sum(version.files[path][1] for path in new) / 2**30
        self.console.note(f"fetching step {version.steps[-1]} from {self.url} ({gib:.2f} GiB)")
        with ExitStack() as stack:
            places = {path: self.folder / path for path in new if step_of(path) is None}
            for place in places.values():
                place.parent.mkdir(parents=True, exist_ok=True)
            self._get(version, {path: stack.enter_context(replacing(at)) for path, at in places.items()})
        for step in [step for step in version.steps if step in map(step_of, new)]:
            with replacing_folder(self.folder / CHECKPOINTS / str(step)) as at:
                paths = [path for path in version.files if step_of(path) == step]
                self._get(version, {path: at.joinpath(*path.split("/")[2:]) for path in paths})
        for path in (self.folder / CHECKPOINTS).iterdir():
            if path.name.isdecimal() and int(path.name) not in version.steps:
                shutil.rmtree(path)
        self.console.note(f"the run was brought from {self.url}")

    def _get(self, version: _Version, places: Mapping[str, Path]) -> None:
        for place in places.values():
            place.parent.mkdir(parents=True, exist_ok=True)
        self._store.get({f"{OBJECTS}/{version.files[path][0]}": place for path, place in places.items()})
        cut = [path for path, place in places.items() if place.stat().st_size != version.files[path][1]]
        if cut:
            raise UserError(f"{self.url}: {summary(cut)} not as long as its marker says; remove the copy")
        for path, place in places.items():
            os.utime(place, ns=(version.files[path][2],) * 2)

    def put(self, step: int) -> None:
        """Begin to copy the run's folder with this checkpoint, which is complete.

        An upload that is under way goes on; of those that wait for it only the newest stays.
        """
        pin = Pin(self.folder, step)
        pin.add({path: entry[1:] for path, entry in self._version.files.items()})
        with self._changed:
            late, self._pins[1:] = self._pins[1:], [pin]
            self._changed.notify_all()
        for older in late:
            older.remove()

    def drop_after(self, step: int) -> None:
        """Delete the copies of later checkpoints, before a rollback deletes the checkpoints themselves."""
        with self._changed:
            self._pins = [pin for pin in self._pins if pin.step <= step]
        try:
            self._store.call("deleting checkpoints", partial(self._drop_after, step))
        except _Taken as error:
            self._taken = error  # for `check`
        except EnvironmentFailure as error:
            self.console.warn(f"{error}; the next copy deletes the checkpoints after step {step}")

    def _drop_after(self, step: int) -> None:
        with self._committing:
            self._commit(replace(self._owned().after(step), rollbacks=_rollbacks(self.folder)))

    def check(self) -> None:
        """Report how the copying goes; called between the steps.

        Raises:
            UserError: another start of this run writes there.
        """
        if self._taken is not None:
            raise self._taken
        failure, warned, self._warned = self._failure, self._warned, self._failure
        if failure is not None and warned is None:
            self.console.warn(f"run.mirror={self.url} cannot be written ({failure}); the copy is tried again")
        elif failure is None and warned is not None:
            self.console.note(f"{self.url} can be written again")

    def __enter__(self) -> Mirror:
        shutil.rmtree(self.folder / PINS, ignore_errors=True)  # of a start that was killed
        self._thread.start()
        newest = newest_step(self.folder / CHECKPOINTS)
        if newest is not None:
            self.put(newest)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last checkpoint is copied, but not for ever."""
        seconds = PATIENCE if kind is None else HURRY
        with self._changed:
            try:
                if self._pins:
                    step = self._pins[-1].step
                    self.console.note(f"copying step {step} to {self.url}, for at most {seconds:g} s")
                self._changed.wait_for(lambda: self._taken or not self._pins, seconds)
            finally:  # a signal may end the wait
                self._is_over = True
                self._changed.notify_all()
                if self._pins and not self._taken:
                    self.console.warn(
                        f"run.mirror={self.url} lacks the checkpoint of step {self._pins[-1].step}"
                        f" ({self._failure or 'copying takes too long'});"
                        f" the next start with run.dir={self.folder} copies it"
                    )
                shutil.rmtree(self.folder / PINS, ignore_errors=True)
        if kind is None and self._taken is not None:
            raise self._taken

    def _work(self) -> None:
        seconds = 1.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._pins)
                if self._is_over:
                    return
                pin = self._pins[0]
            failure = None
            try:
                self._upload(pin)
            except _Taken as error:
                self._taken = error
            except Exception as error:  # every store has errors of its own; none of them ends a run
                failure = one_line(error)
            with self._changed:
                self._failure = failure
                if failure:
                    self._changed.wait_for(lambda: self._is_over, seconds)
                seconds = min(2 * seconds, SLOWEST) if failure else 1.0
                if not failure or self._pins[-1:] != [pin]:  # a newer one takes the place of one that failed
                    self._pins = [one for one in self._pins if one is not pin]
                    pin.remove()
                self._changed.notify_all()
                if self._taken is not None:
                    return

    def _upload(self, pin: Pin) -> None:
        """Upload what changed, then name it in the marker."""
        known = self._owned().files
        new = [path for path, state in pin.files.items() if known.get(path, ("",))[1:] != state]
        names = {path: f"{pin.name}.{number}" for number, path in enumerate(new)}
        links = {f"{OBJECTS}/{names[path]}": pin.link(path) for path in new}
        # Files that are appended to may have grown since they were pinned; those of a checkpoint have not.
        try:
            sizes = dict(zip(new, self._store.put(links), strict=True))
        except FileNotFoundError:
            self._owned()  # a start that has taken the run over removes unnamed objects
            raise
        if cut := [path for path in new if step_of(path) is not None and sizes[path] != pin.files[path][0]]:
            raise OSError(f"{summary(cut)} not as long in the store as here")
        with self._committing:
            if pin in self._pins:  # not dropped by a rollback
                after = self._owned().after(pin.step)
                steps = tuple(sorted({*after.steps, pin.step})[-self.keep :])
                stay = [path for path in after.files if path in pin.files or step_of(path) in steps[:-1]]
                files = {path: after.files[path] for path in stay}
                files |= {path: (names[path], sizes[path], pin.files[path][1]) for path in new}
                run, rollbacks = run_hash(self.folder), _rollbacks(self.folder)
                self._commit(replace(after, run=run, rollbacks=rollbacks, steps=steps, files=files))

    def _owned(self) -> _Version:
        """Return the newest version; raise _Taken if it is of another start."""
        version = self._newest()
        if version.owner.get("token") != self._owner["token"]:
            raise _Taken(
                f"run.mirror={self.url} was taken over by another start of this run (process"
                f" {version.owner.get('process')} on {version.owner.get('host')}); this one ends, so that the"
                " two do not mix"
            )
        return version

    def _newest(self) -> _Version:
        number, text = self._store.newest(MARKER)
        if not number and self._store.has(OLD_MARKER):
            raise UserError(
                f"run.mirror={self.url} holds a copy in an older format ({OLD_MARKER}); choose another place:"
                " all of run.dir is copied there"
            )
        try:
            version = TypeAdapter(_Version).validate_json(text) if number else _Version()
            version = replace(version, number=number)
        except ValidationError as error:
            raise UserError(f"{self.url}/{MARKER}: not a run's copy; choose another run.mirror") from error
        for path, (name, _, _) in version.files.items():
            if not FILE.fullmatch(path) or not OBJECT.fullmatch(name):
                raise UserError(f"{self.url}: {path!r} is no file of a run; choose another run.mirror")
        return version

    def _commit(self, version: _Version) -> None:
        """Create a version unless another start has; then delete the objects that it does not name."""
        names = self._store.names(OBJECTS)  # before, so that no upload of a newer start is among them
        if not self._store.add(MARKER, version.number, version.text) and self._owned() != version:
            raise OSError("the answer to an earlier write was lost")  # the next try knows of it
        self._version = version
        used = {name for name, _, _ in version.files.values()}
        busy = {pin.name for pin in self._pins}
        gone = [f"{OBJECTS}/{one}" for one in names if one not in used and one.partition(".")[0] not in busy]
        self._store.remove(gone)


def _rollbacks(folder: Path) -> int:
    path = folder / ROLLBACK
    return int(read_json(path, "remove it")["rollbacks"]) if path.is_file() else 0
