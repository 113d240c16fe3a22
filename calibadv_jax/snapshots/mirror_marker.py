"""The marker of a run's copy in an object store: which objects are the run's files, and which start owns it.

Objects never change. Each version of the marker is a new object, ``marker/N``, which the store creates only
if no other start has created this number (a conditional put). So the older of two starts can neither name its
objects nor delete any.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, Field

from calibadv_jax.core.errors import UserError
from calibadv_jax.services.object_store import ObjectStore
from calibadv_jax.snapshots.checkpoint import lowest_rollback, read_rollback
from calibadv_jax.snapshots.run_files import RUN_FILE, FileState, step_of

MARKER = "marker"  # folder of the marker's versions in the store
OBJECTS = "objects"  # folder of the run's files in the store
OLD_MARKER = "mirror.json"  # name of the marker that version 0.1 wrote
ID_LENGTH = 32  # hexadecimal digits of an upload's name
OBJECT = re.compile(f"[0-9a-f]{{{ID_LENGTH}}}[.][0-9]+")  # name of an object: its upload and a number
VERSION = re.compile("[0-9]{8,18}")  # name of a version of the marker; people may put other files beside it

Count = Annotated[int, Field(ge=0, lt=2**63)]
# name of the object, size in bytes, time of the last change in ns
Entry = tuple[str, Count, Annotated[int, Field(gt=-(2**63), lt=2**63)]]


class TakenOver(UserError):
    """Another start of the run owns the marker."""


class MarkerVersion(BaseModel, frozen=True):
    """What the marker says.

    Attributes:
        number: of the version; 0: the store holds none.
        owner: the start that may write: a random `token`, and its `host` and `process` for messages.
        run: hash of the run's first start: its config, questions, model and vocabulary.
        rollbacks: number of rollbacks of the run.
        steps: steps of the complete checkpoints, ascending.
        files: the run's files, by path in its folder.
        digests: SHA-256 in hexadecimal by the name of an object; without files that changed meanwhile, and
            those of earlier versions of this program.
    """

    number: int = 0
    owner: dict[str, Any] = {}
    run: str = ""
    rollbacks: Count = 0
    steps: tuple[Count, ...] = ()
    files: dict[str, Entry] = {}
    digests: dict[str, str] = {}

    def up_to(self, last: int) -> MarkerVersion:
        """Return a copy without the checkpoints of steps after `last`."""
        return self.with_steps(tuple(step for step in self.steps if step <= last))

    def with_steps(self, steps: tuple[int, ...]) -> MarkerVersion:
        """Return a copy with these checkpoints alone, and all files that belong to no checkpoint."""
        files = {}
        for path, entry in self.files.items():
            step = step_of(path)
            if step is None or step in steps:
                files[path] = entry
        return self.model_copy(update={"steps": steps, "files": files})

    def state_of(self, path: str) -> FileState | None:
        """Return the state in which a file was copied; None if it was not."""
        if path not in self.files:
            return None
        _, size, mtime_ns = self.files[path]
        return FileState(size, mtime_ns)


class Marker:
    """The marker of a run's copy, which this start reads, takes over and writes.

    Attributes:
        owner: names this start as the owner of versions.
        version: the version that was read or written last.
        taken_over: the error to raise if another start owns the marker; None: none does.
    """

    def __init__(self, store: ObjectStore, key: str, folder: Path):
        """Prepare a marker; nothing is read yet.

        Args:
            store: the store that holds it.
            key: names the store in messages, as ``key=value``.
            folder: the run's folder, whose note of the last rollback is read.
        """
        self._store = store
        self._key = key
        self._folder = folder
        self.owner = {"token": uuid.uuid4().hex, "host": socket.gethostname(), "process": os.getpid()}
        self.version = MarkerVersion()
        self.taken_over: TakenOver | None = None

    def read(self) -> MarkerVersion:
        """Return the newest version, an empty one if the store has none.

        Raises:
            UserError: it is not of a run's copy, or of an older format.
        """
        names = self._names()
        if not names and OLD_MARKER in self._store.sizes(""):
            raise UserError(
                f"{self._key} holds a copy in an older format ({OLD_MARKER}); choose another place"
            )
        if not names:
            return MarkerVersion()
        newest = names[-1]
        try:
            version = MarkerVersion.model_validate_json(self._store.files.cat_file(f"{MARKER}/{newest}"))
        except FileNotFoundError:
            if self._names() == names:
                raise
            return self.read()  # a newer version has replaced it meanwhile
        except ValueError as error:
            raise UserError(f"{self._key}: {MARKER} is not of a run's copy; choose another place") from error
        self._check_files(version)
        return version.model_copy(update={"number": int(newest)})

    def _names(self) -> list[str]:
        """Return the names of the marker's versions, in their order."""
        return sorted(filter(VERSION.fullmatch, self._store.sizes(MARKER)), key=int)

    def _check_files(self, version: MarkerVersion) -> None:
        """Refuse (UserError) a version that no start has written: foreign files, steps without files."""
        folders: set[str] = set()
        steps: set[int | None] = set()
        for path, (name, _, _) in version.files.items():
            if not RUN_FILE.fullmatch(path) or not OBJECT.fullmatch(name):
                raise UserError(f"{self._key}: {path!r} is no file of a run; choose another place")
            folders.update(str(folder) for folder in PurePosixPath(path).parents)
            steps.add(step_of(path))
        is_both = sorted(folders.intersection(version.files))
        if is_both:
            raise UserError(f"{self._key}: {is_both[0]!r} is both a file and a folder; choose another place")
        without_files = [step for step in version.steps if step not in steps]
        is_ascending = list(version.steps) == sorted(set(version.steps))
        if without_files or not is_ascending:
            raise UserError(
                f"{self._key}: its marker is damaged (steps {list(version.steps)}, without files:"
                f" {without_files}); choose another place"
            )

    def read_owned(self) -> MarkerVersion:
        """Return the newest version, without what the run's last rollback deleted.

        Raises:
            TakenOver: it is of another start.
            UserError: as `read`.
        """
        version = self.read()
        if version.number == 0 and self.version.number > 0:
            # The store was emptied. Nobody else has begun a copy there since, so this start begins another.
            number = self.version.number
            rollbacks = self.version.rollbacks
            return self.rolled_back(MarkerVersion(number=number, owner=self.owner, rollbacks=rollbacks))
        owner = version.owner
        if owner.get("token") != self.owner["token"]:
            self.taken_over = TakenOver(
                f"{self._key} was taken over by another start of this run (process {owner.get('process')} on"
                f" {owner.get('host')}); this one ends"
            )
            raise self.taken_over
        return self.rolled_back(version)

    def rolled_back(self, version: MarkerVersion) -> MarkerVersion:
        """Return a version without the checkpoints that rollbacks of this run have deleted since."""
        rollback = read_rollback(self._folder)
        lowest = lowest_rollback(rollback, version.rollbacks)
        if lowest is None:
            return version
        return version.up_to(lowest).model_copy(update={"rollbacks": rollback["rollbacks"]})

    def commit(self, version: MarkerVersion, uploads: Collection[Path], claims: bool = False) -> None:
        """Create the next version unless another start has; then delete the objects that it does not name.

        Args:
            version: what it says; its number is that of the version before.
            uploads: folders whose names are those of uploads in progress. Their objects are kept. They are
                looked up after the write.
            claims: whether this start takes the marker over; then it checks the store's conditional puts.

        Raises:
            TakenOver: another start owns the marker.
            UserError: the store ignores conditional puts.
            OSError: the answer to an earlier write was lost, and the next try knows of that write; or the
                store was emptied meanwhile, and the next try begins another copy.
        """
        version = version.model_copy(update={"number": version.number + 1})
        # Listed before the write, so that no upload of a newer start is among them.
        objects = self._store.sizes(OBJECTS)
        name = f"{version.number:08}"
        text = version.model_dump_json(indent=1).encode()
        is_created = self._store.create(f"{MARKER}/{name}", text)
        if is_created and claims and self._store.create(f"{MARKER}/{name}", text):
            raise UserError(f"{self._key}: the store ignores conditional puts (If-None-Match); use another")
        names = self._names()
        if not names:
            raise OSError("the store was emptied while the marker was written")
        *older, newest = names
        # A number whose object was deleted can be created again: then `newest` is another one.
        is_newest = is_created and newest == name
        if not is_newest and self.read_owned() != version:
            raise OSError("the answer to an earlier write was lost")
        self.version = version
        self.taken_over = None
        self._delete_obsolete(version, objects, older, uploads)

    def _delete_obsolete(
        self, version: MarkerVersion, objects: Collection[str], older: list[str], uploads: Collection[Path]
    ) -> None:
        """Delete objects that the version does not name, and older versions of the marker."""
        named = {name for name, _, _ in version.files.values()}
        uploading = {folder.name for folder in list(uploads)}
        obsolete = []
        for name in filter(OBJECT.fullmatch, objects):
            if name not in named and name[:ID_LENGTH] not in uploading:
                obsolete.append(f"{OBJECTS}/{name}")
        obsolete += [f"{MARKER}/{name}" for name in older]
        if obsolete:
            self._store.files.rm(obsolete)
