"""Copy a run's folder to an object store, from which another machine continues the run.

Objects never change. The marker names those that are the run's files. Each of its versions is a new object,
``marker/N``, which the store creates only if no other start has created this number (a conditional put).
So the older of two starts can neither name its objects nor delete any.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from pydantic import BaseModel

from calibadv_jax.config import Config
from calibadv_jax.config.kept import FOLDER as CONFIGS
from calibadv_jax.config.kept import run_hash
from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError, cause_text
from calibadv_jax.core.files import atomic_folder, atomic_write
from calibadv_jax.core.locking import locked_run
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.weights import summary
from calibadv_jax.services.object_store import ObjectStore
from calibadv_jax.snapshots.checkpoint import ROLLBACK, newest_step, read_rollback, saved_steps

MARKER, OBJECTS, OLD_MARKER = "marker", "objects", "mirror.json"  # in the store; the last of version 0.1
PINS, CHECKPOINTS = ".mirror", "checkpoints"  # in the run's folder
PAUSE = 10.0  # seconds between two tries to upload
PATIENCE, HURRY = 600.0, 120.0  # seconds for which an orderly end, and any other, waits for the last copy
TRIES = 5  # to start while other starts write
OBJECT = re.compile("[0-9a-f]{32}[.][0-9]+")  # pin and number
# A path in a run's folder: relative, without "..", no lock or other hidden file. The first group is its step.
FILE = re.compile(
    r"checkpoints/(0|[1-9]\d*)(?:/(?!\.\.?(?:/|\Z))[^/]+)+"
    r"|(?!(?:checkpoints|snapshots|sft_checkpoints)(?:/|\Z))(?!\.)[^/]+(?:/(?!\.)[^/]+)*",
    re.ASCII,
)
Entry = tuple[str, int, int]  # object, size in bytes, time of change in ns


def open_mirror(config: Config, console: Console) -> Mirror | None:
    """Return the mirror of the run's folder, None without run.mirror; raises as `Mirror`."""
    run = config.run
    return Mirror(run.mirror, Path(run.dir), config.checkpoint.keep, console) if run.mirror else None


def bring_newest(config: Config, console: Console) -> None:
    """Fetch the run from run.mirror, if it is set, for a command that reads the newest checkpoint."""
    mirror = open_mirror(config, console)
    if mirror and mirror.has_newer():
        with locked_run(mirror.folder, console.warn):
            mirror.fetch()


class TakenOver(UserError):
    """Another start of the run owns the marker."""


class _Version(BaseModel, frozen=True):
    number: int = 0
    owner: dict[str, Any] = {}
    run: str = ""  # hash of the run's first start: its config, questions, model and vocabulary
    rollbacks: int = 0
    steps: tuple[int, ...] = ()  # of complete checkpoints, ascending
    files: dict[str, Entry] = {}  # by path in the run's folder

    def up_to(self, last: int) -> _Version:
        """Return a copy without the checkpoints of steps after `last`."""
        steps = tuple(step for step in self.steps if step <= last)
        files = {path: entry for path, entry in self.files.items() if _step_of(path) in (None, *steps)}
        return self.model_copy(update={"steps": steps, "files": files})


class Mirror:
    """The copy of a run's folder, with its newest `keep` checkpoints, at ``s3://…``, ``gs://…`` or a folder.

    Raises UserError if the store lacks conditional puts or its package; or one folder lies in the other.
    """

    def __init__(self, url: str, folder: Path, keep: int, console: Console):
        self._key, self.folder, self._keep, self._console = f"run.mirror={url}", folder, keep, console
        self._store = ObjectStore(url, self._key, console.note)
        local, remote = folder.resolve(), self._store.folder
        if remote and (remote.is_relative_to(local) or local.is_relative_to(remote)):
            raise UserError(f"{self._key} and run.dir={folder} lie in one another; choose a folder elsewhere")
        self._owner = {"token": uuid.uuid4().hex, "host": socket.gethostname(), "process": os.getpid()}
        self._version = _Version()  # that was read or written last
        self._pins: dict[Path, int] = {}  # hard links to a step's files: of the upload, and of the newest
        self._failure = ""  # of the last try
        self._taken: TakenOver | None = None
        self._thread: Thread | None = None  # that uploads the newest pin
        self._committing = Lock()

    def has_newer(self) -> bool:
        """Return whether the store is ahead, also by a rollback; UserError if it holds another run."""
        version = self._version = self._store.call("reading its marker", self._newest)
        run, newest = run_hash(self.folder), newest_step(self.folder / CHECKPOINTS)
        if version.steps and (run or newest is not None) and run != version.run:
            fault = f"{self._key} holds another run than run.dir={self.folder}"
            raise UserError(f"{fault}; change one of the two")
        if not version.steps or newest is None:
            return bool(version.steps)
        rollbacks = read_rollback(self.folder).get("rollbacks", 0)
        return (version.rollbacks, version.steps[-1]) > (rollbacks, newest)

    @contextmanager
    def inputs(self, *paths: str) -> Iterator[int]:
        """Fetch missing configs and files of `paths`, by which a start finds out whether this is its run.

        Yields their number. They are removed if the block fails before `fetch` has claimed the store.
        """
        self.has_newer()
        home = self.folder.absolute()
        tops = [home / CONFIGS, home / hub.PINS, *(Path(path).absolute() for path in paths if path)]
        places = {path: home / path for path in self._version.files if not (home / path).exists()}
        places = {path: place for path, place in places.items() if any(map(place.is_relative_to, tops))}
        try:
            self._get(places)
            yield len(places)
        except BaseException:
            if self._version.owner != self._owner:
                for place in places.values():
                    place.unlink(missing_ok=True)
            raise

    def fetch(self, claim: bool = False, tries: int = TRIES) -> bool:
        """Fetch the run if `has_newer`, and return that; `claim`: first make this start the only writer.

        Raises UserError if the store cannot be used, ignores conditional puts, or holds another or a cut run.
        """
        is_newer = self.has_newer()
        try:
            if claim:
                version = self._rolled_back(self._version)
                if not is_newer:
                    version = version.up_to(newest_step(self.folder / CHECKPOINTS) or 0)
                self._store.call("taking it over", partial(self._commit, version, owner=self._owner))
            if is_newer:
                self._bring()
        except UserError as error:
            is_late = isinstance(error, TakenOver) or isinstance(error.__cause__, FileNotFoundError)
            if not is_late or tries == 1:  # late: another start has written meanwhile
                raise
            return self.fetch(claim, tries - 1)
        return is_newer

    def _bring(self) -> None:
        """Fetch what differs, and delete checkpoints that the store lacks.

        The newest checkpoint and the note of the last rollback, by which `has_newer` decides, come last.
        """
        files, steps, states = self._version.files, self._version.steps, _states(self.folder)
        changed = [path for path, entry in files.items() if states.get(path) != entry[1:]]
        gib = sum(files[path][1] for path in changed) / 2**30
        self._console.note(f"fetching step {steps[-1]} from {self._key} ({gib:.2f} GiB)")
        places = {path: self.folder / path for path in changed if _step_of(path) is None}
        rollback = {path: places.pop(path) for path in changed if path == ROLLBACK}
        self._get(places)
        for step in [step for step in steps if step in map(_step_of, changed)]:
            with atomic_folder(self.folder / CHECKPOINTS / str(step)) as place:
                paths = [path for path in files if _step_of(path) == step]
                self._get({path: place.joinpath(*path.split("/")[2:]) for path in paths})
        for step in set(saved_steps(self.folder / CHECKPOINTS)).difference(steps):
            shutil.rmtree(self.folder / CHECKPOINTS / str(step))
        self._get(rollback)  # until then the store is newer

    def _get(self, places: Mapping[str, Path]) -> None:
        """Fetch files of the run, by their paths, to these places; each appears when all are whole."""
        files = self._version.files
        with ExitStack() as stack:
            parts = {path: stack.enter_context(atomic_write(place)) for path, place in places.items()}
            names = [str(part) for part in parts.values()]
            get = partial(self._store.files.get, [f"{OBJECTS}/{files[path][0]}" for path in parts], names)
            self._store.call(
                "fetching", get, lambda: [os.path.exists(name) and os.path.getsize(name) for name in names]
            )
            wrong = [path for path, part in parts.items() if part.stat().st_size != files[path][1]]
            if wrong:
                fault = f"{self._key}: {summary(wrong)} not as long as its marker says"
                raise UserError(f"{fault}; remove the copy")
            for path, part in parts.items():
                os.utime(part, ns=(files[path][2],) * 2)

    def put(self, step: int) -> None:
        """Begin to copy the run with this complete checkpoint, in place of those that wait for an upload."""
        links, files = self.folder / PINS / uuid.uuid4().hex, self._version.files
        for path, state in _states(self.folder).items():
            if _step_of(path) == step or (_step_of(path) is None and state != files.get(path, ("",))[1:]):
                _link(self.folder / path, links / path)
        self._pins[links] = step
        for late in list(self._pins)[1:-1]:
            self._unpin(late)
        self._thread = Thread(target=self._work, args=(links, self._thread), daemon=True)
        self._thread.start()

    def drop_after(self, step: int) -> None:
        """Delete the copies of later checkpoints, before a rollback deletes the checkpoints themselves."""

        def drop() -> None:
            with self._committing:
                self._commit(self._owned())

        for links in [links for links, pinned in list(self._pins.items()) if pinned > step]:
            self._pins.pop(links, None)
        try:
            self._store.call("deleting checkpoints", drop)
        except UserError as error:
            if not self._taken:
                self._console.warn(f"{error}; the next copy deletes the checkpoints after step {step}")

    def check(self) -> None:
        """Raise TakenOver if another start has become the writer."""
        if self._taken is not None:
            raise self._taken

    def __enter__(self) -> Mirror:
        shutil.rmtree(self.folder / PINS, ignore_errors=True)  # of a start that was killed
        newest = newest_step(self.folder / CHECKPOINTS)
        if newest is not None:
            self.put(newest)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last checkpoint is copied, but not for ever."""
        seconds, steps = PATIENCE if kind is None else HURRY, list(self._pins.values())
        try:
            if self._thread and steps:
                self._console.note(f"copying step {steps[-1]} to {self._key}, for at most {seconds:g} s")
                self._thread.join(seconds)
        finally:  # a signal may end the wait
            if self._pins and not self._taken:
                lacks = f"{self._key} lacks the checkpoint of step {steps[-1]}"
                why = self._failure or "copying takes too long"
                self._console.warn(f"{lacks} ({why}); the next start with run.dir={self.folder} copies it")
            self._pins.clear()
            shutil.rmtree(self.folder / PINS, ignore_errors=True)
        if kind is None:
            self.check()

    def _work(self, links: Path, before: Thread | None) -> None:
        """Upload a pin after the one before, unless a newer one or a rollback takes its place."""
        if before:
            before.join()
        while links in list(self._pins)[-1:] and not self._taken:
            failure = ""
            try:
                self._upload(self._pins[links], links)
            except Exception as error:  # every store has errors of its own; none of them ends a run
                failure = cause_text(error)
            if links in self._pins and not self._taken:
                if failure and not self._failure:
                    self._console.warn(f"{self._key} cannot be written ({failure}); the copy is tried again")
                if self._failure and not failure:
                    self._console.note(f"{self._key} can be written again")
                self._failure = failure
            if not failure:
                break
            time.sleep(PAUSE)
        self._unpin(links)

    def _unpin(self, links: Path) -> None:
        self._pins.pop(links, None)
        shutil.rmtree(links, ignore_errors=True)

    def _upload(self, step: int, links: Path) -> None:
        """Upload what changed, then name it in the marker."""
        before, states = self._owned().files, _states(links)
        changed = [path for path, state in states.items() if before.get(path, ("",))[1:] != state]
        names = {path: f"{links.name}.{number}" for number, path in enumerate(changed)}
        objects = [f"{OBJECTS}/{name}" for name in names.values()]
        self._store.files.put([str(links / path) for path in changed], objects, batch_size=4)
        with self._committing:
            if links not in self._pins:  # dropped by a rollback
                return
            version, sizes = self._owned().up_to(step), self._store.sizes(OBJECTS)
            entries = {path: (name, sizes.get(name), states[path][1]) for path, name in names.items()}
            # Files that are appended to may have grown meanwhile, those of a checkpoint have not.
            of_step = [path for path in changed if _step_of(path) == step]
            if wrong := [path for path in of_step if entries[path][1:] != states[path]]:
                raise OSError(f"{summary(wrong)} not as long in the store as here")
            steps = tuple(sorted({*version.steps, step})[-self._keep :])
            local = states.keys() | {path for path in _states(self.folder) if _step_of(path) is None}
            stay = [path for path in version.files if path in local or _step_of(path) in steps[:-1]]
            files = {path: version.files[path] for path in stay} | entries
            self._commit(version, steps=steps, files=files, run=run_hash(self.folder))

    def _owned(self) -> _Version:
        """Return the newest version, rolled back; raise `_taken` if it is of another start."""
        version = self._newest()
        owner = version.owner
        if owner.get("token") != self._owner["token"]:
            other = f"another start of this run (process {owner.get('process')} on {owner.get('host')})"
            self._taken = TakenOver(f"{self._key} was taken over by {other}; this one ends")
            raise self._taken
        return self._rolled_back(version)

    def _rolled_back(self, version: _Version) -> _Version:
        """Return a version without the checkpoints that this run's last rollback deleted."""
        last = read_rollback(self.folder)
        if last.get("rollbacks", 0) <= version.rollbacks:
            return version
        return version.up_to(last["step"]).model_copy(update={"rollbacks": last["rollbacks"]})

    def _newest(self) -> _Version:
        names, way_out = list(self._store.sizes(MARKER)), "choose another place"
        if not names and OLD_MARKER in self._store.sizes(""):
            raise UserError(f"{self._key} holds a copy in an older format ({OLD_MARKER}); {way_out}")
        if not names:
            return _Version()
        try:
            version = _Version.model_validate_json(self._store.files.cat_file(f"{MARKER}/{names[-1]}"))
        except FileNotFoundError:
            if list(self._store.sizes(MARKER)) == names:
                raise
            return self._newest()  # a newer one has replaced it
        except ValueError as error:
            raise UserError(f"{self._key}: {MARKER} is not of a run's copy; {way_out}") from error
        for path, (name, _, _) in version.files.items():
            if not FILE.fullmatch(path) or not OBJECT.fullmatch(name):
                raise UserError(f"{self._key}: {path!r} is no file of a run; {way_out}")
        return version.model_copy(update={"number": int(names[-1])})

    def _commit(self, version: _Version, **changes: Any) -> None:
        """Create the next version unless another start has; then delete the objects that it does not name."""
        version = version.model_copy(update=changes | {"number": version.number + 1})
        objects = self._store.sizes(OBJECTS)  # before, so that no upload of a newer start is among them
        name, text = f"{version.number:08}", version.model_dump_json(indent=1).encode()
        is_created = self._store.create(f"{MARKER}/{name}", text)
        if is_created and "owner" in changes and self._store.create(f"{MARKER}/{name}", text):
            raise UserError(f"{self._key}: the store ignores conditional puts (If-None-Match); use another")
        *older, newest = self._store.sizes(MARKER)
        # A number whose object was deleted can be created again.
        if (not is_created or newest != name) and self._owned() != version:
            raise OSError("the answer to an earlier write was lost")  # the next try knows of it
        self._version, self._taken = version, None
        named = {name for name, _, _ in version.files.values()}
        uploading = {links.name for links in list(self._pins)}
        unused = [name for name in objects if name not in named and name[:32] not in uploading]
        if unused or older:
            obsolete = [f"{OBJECTS}/{name}" for name in unused] + [f"{MARKER}/{name}" for name in older]
            self._store.files.rm(obsolete)


def _states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change in ns, which change with a file, of the run's files by path."""
    states = {}
    for parent, _, names in os.walk(folder):  # folders and files may be removed meanwhile
        for place in [Path(parent, name) for name in names]:
            path = place.relative_to(folder).as_posix()
            with suppress(FileNotFoundError):
                if FILE.fullmatch(path) and place.is_file():
                    states[path] = place.stat().st_size, place.stat().st_mtime_ns
    return states


def _link(source: Path, link: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):  # removed meanwhile
        try:
            os.link(source.resolve(), link)
        except OSError:
            shutil.copy2(source, link)


def _step_of(path: str) -> int | None:
    file = FILE.fullmatch(path)
    return int(file[1]) if file and file[1] else None
