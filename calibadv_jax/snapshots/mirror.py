"""Copy a run's folder to an object store, from which another machine continues the run.

The copy has a marker (`mirror_marker`), which names the objects that are the run's files. A checkpoint is
copied in three steps: its files are pinned by hard links, so that they stay when the run deletes the
checkpoint; a thread uploads what has changed; the marker's next version names the new objects.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock, Thread

from calibadv_jax.config import Config
from calibadv_jax.config.kept import FOLDER as CONFIGS
from calibadv_jax.config.kept import run_hash
from calibadv_jax.core import hub
from calibadv_jax.core.errors import (
    FULL_DISK_ERRNOS,
    EnvironmentFailure,
    UserError,
    cause_text,
    storage_errno,
)
from calibadv_jax.core.files import atomic_folder, atomic_write
from calibadv_jax.core.locking import locked_run
from calibadv_jax.metrics.console import Console
from calibadv_jax.policy.weights import summarise_problems
from calibadv_jax.services.object_store import ObjectStore
from calibadv_jax.snapshots.checkpoint import ROLLBACK, newest_step, read_rollback, saved_steps
from calibadv_jax.snapshots.mirror_marker import OBJECTS, Entry, Marker, MarkerVersion, TakenOver
from calibadv_jax.snapshots.run_files import CHECKPOINTS, FileState, file_states, link_file, step_of

PINS = ".mirror"  # folder of the hard links in a run's folder
PAUSE = 10.0  # seconds between two tries to upload
PATIENCE = 600.0  # seconds for which the orderly end of a run waits for the last copy
HURRY = 120.0  # seconds for which any other end of a run waits for it
TRIES = 5  # tries to fetch or take over the copy while other starts write to it
FILES_AT_ONCE = 4  # files that are uploaded at the same time


class Damaged(UserError):
    """Files of the copy are lost, or have other contents than were sent.

    Attributes:
        paths: of the files, in the run's folder.
    """

    def __init__(self, key: str, paths: Iterable[str], fault: str):
        self.paths = sorted(paths)
        super().__init__(
            f"{key}: {summarise_problems(self.paths)} {fault}: damaged in the copy; restore the objects, or"
            " choose another run.mirror"
        )


def open_mirror(config: Config, console: Console) -> Mirror | None:
    """Return the mirror of the run's folder.

    Args:
        config: `run.mirror`, `run.dir` and `checkpoint.keep` are read.
        console: takes lines about the copy.

    Returns:
        None without run.mirror.

    Raises:
        UserError: as `Mirror`.
    """
    if not config.run.mirror:
        return None
    return Mirror(config.run.mirror, Path(config.run.dir), config.checkpoint.keep, console)


def fetch_newest(config: Config, console: Console) -> None:
    """Fetch the run from run.mirror, if it is set, for a command that reads the newest checkpoint.

    Args:
        config: as for `open_mirror`.
        console: takes lines about the copy.

    Raises:
        UserError: as `Mirror` and `Mirror.fetch`, or the run's folder is in use.
    """
    mirror = open_mirror(config, console)
    if mirror and mirror.has_newer():
        with locked_run(mirror.folder, console.warn):
            mirror.fetch()


class Mirror:
    """The copy of a run's folder in an object store.

    `put` begins to upload a checkpoint in a thread; the end of the block waits for the last upload.

    Attributes:
        folder: the run's folder.
    """

    def __init__(self, url: str, folder: Path, keep: int, console: Console):
        """Connect to a store; nothing is read yet.

        Args:
            url: ``s3://…``, ``gs://…`` or a folder.
            folder: the run's folder.
            keep: number of newest checkpoints that stay in the copy.
            console: takes lines about the copy.

        Raises:
            UserError: the store lacks conditional puts or its package, or one folder is inside the other.
        """
        self.folder = folder
        self._key = f"run.mirror={url}"
        self._keep = keep
        self._console = console
        self._store = ObjectStore(url, self._key, console.note)
        local = folder.resolve()
        remote = self._store.folder
        if remote and (remote.is_relative_to(local) or local.is_relative_to(remote)):
            raise UserError(
                f"{self._key} and run.dir={folder}: one is inside the other; choose a folder elsewhere"
            )
        self._marker = Marker(self._store, self._key, folder)
        # Steps by the folder of the hard links to their files: the step being uploaded, and the newest one.
        self._pins: dict[Path, int] = {}
        self._failure = ""  # why the last try to upload failed; "" if it did not
        self._thread: Thread | None = None  # uploads the newest pin
        self._committing = Lock()  # held while a version of the marker is made and written

    def has_newer(self) -> bool:
        """Return whether the store is ahead of the run's folder, also by a rollback.

        Raises:
            UserError: the store cannot be read, or holds another run.
        """
        version = self._store.call("reading its marker", self._marker.read)
        self._marker.version = version
        run = run_hash(self.folder)
        newest = newest_step(self.folder / CHECKPOINTS)
        holds_run = bool(run) or newest is not None
        if version.steps and holds_run and run != version.run:
            raise UserError(
                f"{self._key} holds another run than run.dir={self.folder}; change one of the two"
            )
        if not version.steps:
            return False
        if newest is None:
            return True
        rollbacks = read_rollback(self.folder).get("rollbacks", 0)
        return (version.rollbacks, version.steps[-1]) > (rollbacks, newest)

    # --- From the store ---

    @contextmanager
    def inputs(self, *paths: str) -> Iterator[int]:
        """Fetch missing inputs of the run, by which a start finds out whether this is its run.

        They are removed if the block fails before `fetch` has taken the store over.

        Args:
            *paths: files and folders that the config names. Those inside the run's folder are fetched, like
                the kept configs; "" is ignored.

        Yields:
            The number of fetched files.

        Raises:
            UserError: as `has_newer`, or a file cannot be fetched.
        """
        self.has_newer()
        home = self.folder.absolute()
        tops = [home / CONFIGS, home / hub.PINS_FILE]
        tops += [Path(path).absolute() for path in paths if path]
        places = {}
        for path in self._marker.version.files:
            place = home / path
            is_input = any(place.is_relative_to(top) for top in tops)
            if is_input and not place.exists():
                places[path] = place
        try:
            self._fetch_files(places)
            yield len(places)
        except BaseException:
            if self._marker.version.owner != self._marker.owner:
                for place in places.values():
                    place.unlink(missing_ok=True)
            raise

    def fetch(self, claim: bool = False) -> bool:
        """Fetch the run if the store is ahead.

        Args:
            claim: first make this start the only one that may write to the store.

        Returns:
            Whether the store was ahead; see `has_newer`.

        Raises:
            UserError: the store cannot be used, ignores conditional puts, or holds another or a damaged run.
        """
        tries_left = TRIES
        while True:
            is_newer = self.has_newer()
            try:
                if claim:
                    self._claim(is_newer)
                if is_newer:
                    self._fetch_changes()
                return is_newer
            except UserError as error:
                tries_left -= 1
                # Another start has written since `has_newer`.
                is_outdated = isinstance(error, TakenOver) or isinstance(error.__cause__, FileNotFoundError)
                if not is_outdated or tries_left == 0:
                    raise

    def _claim(self, is_newer: bool) -> None:
        """Write a version of the marker that names this start as its owner."""
        version = self._marker.rolled_back(self._marker.version)
        if not is_newer:
            version = version.up_to(newest_step(self.folder / CHECKPOINTS) or 0)
        version = version.model_copy(update={"owner": self._marker.owner})
        self._store.call("taking it over", lambda: self._marker.commit(version, self._pins, claims=True))

    def _fetch_changes(self) -> None:
        """Fetch what differs, and delete checkpoints that the store lacks.

        The newest checkpoint and the note of the last rollback, by which `has_newer` decides, come last.
        """
        version = self._marker.version
        states = file_states(self.folder)
        changed = [path for path in version.files if states.get(path) != version.state_of(path)]
        lost = self._lost_paths(version, changed)
        changed_steps = {step_of(path) for path in changed}
        total = 0
        for path in changed:
            _, size, _ = version.files[path]
            total += size
        newest = version.steps[-1]
        self._console.note(f"fetching step {newest} from {self._key} ({total / 2**30:.2f} GiB)")
        places = {path: self.folder / path for path in changed if step_of(path) is None}
        rollback = {}
        if ROLLBACK in places:
            rollback[ROLLBACK] = places.pop(ROLLBACK)
        self._fetch_whole_files(places, lost)
        whole_steps = self._fetch_checkpoints([step for step in version.steps if step in changed_steps], lost)
        kept_steps = set(version.steps).difference(changed_steps).union(whole_steps)
        for step in set(saved_steps(self.folder / CHECKPOINTS)).difference(kept_steps):
            shutil.rmtree(self.folder / CHECKPOINTS / str(step))
        if version.owner == self._marker.owner and len(kept_steps) < len(version.steps):
            whole = version.with_steps(tuple(sorted(kept_steps)))
            self._store.call(
                "leaving out damaged checkpoints", lambda: self._marker.commit(whole, self._pins)
            )
        self._fetch_files(rollback)  # until then the store is newer

    def _lost_paths(self, version: MarkerVersion, paths: Iterable[str]) -> set[str]:
        """Return the files whose objects are not in the store, or have another size there.

        Raises:
            FileNotFoundError: As the cause of a UserError: another start has written meanwhile.
        """
        entries = {path: version.files[path] for path in paths}
        if not entries:
            return set()
        sizes = self._store.call("listing its objects", lambda: self._store.sizes(OBJECTS))
        lost = _without_object(entries, sizes)
        if lost:
            current = self._store.call("reading its marker", self._marker.read)
            if current.number != version.number:
                raise UserError(f"{self._key} was written meanwhile; try again") from FileNotFoundError()
        return lost

    def _fetch_whole_files(self, places: Mapping[str, Path], lost: Collection[str]) -> None:
        """Fetch files that belong to no checkpoint; the damaged ones are named and left out."""
        whole = {path: place for path, place in places.items() if path not in lost}
        damaged = [path for path in places if path in lost]
        while True:
            try:
                self._fetch_files(whole)
                break
            except Damaged as error:
                damaged += error.paths
                whole = {path: place for path, place in whole.items() if path not in error.paths}
        if damaged:
            names = summarise_problems(sorted(damaged))
            self._console.warn(f"{self._key}: {names} lost or damaged in the copy, and left out")

    def _fetch_checkpoints(self, steps: list[int], lost: Collection[str]) -> list[int]:
        """Fetch checkpoints and return the steps of those that are whole; the others are named.

        Raises:
            UserError: All are damaged, and the folder has none of those that the store names.
        """
        whole_steps = []
        faults: list[Damaged] = []
        for step in steps:
            lost_of_step = [path for path in lost if step_of(path) == step]
            try:
                if lost_of_step:
                    raise Damaged(self._key, lost_of_step, "lost, or not as long as its marker says")
                self._fetch_checkpoint(step)
                whole_steps.append(step)
            except Damaged as error:
                faults.append(error)
        for fault in faults:
            self._console.warn(f"{fault}; its checkpoint is left out")
        other_steps = set(self._marker.version.steps).difference(steps)
        if faults and not whole_steps and not other_steps:
            raise UserError(f"{faults[-1]}: it holds no whole checkpoint")
        return whole_steps

    def _fetch_checkpoint(self, step: int) -> None:
        """Fetch all files of a checkpoint, in place of the checkpoint that is there."""
        with atomic_folder(self.folder / CHECKPOINTS / str(step)) as partial:
            places = {}
            for path in self._marker.version.files:
                if step_of(path) == step:
                    _, _, *parts = path.split("/")  # checkpoints/STEP/…
                    places[path] = partial.joinpath(*parts)
            self._fetch_files(places)

    def _fetch_files(self, places: Mapping[str, Path]) -> None:
        """Fetch files of the run, by their paths, to these places; each appears when all are complete."""
        files = self._marker.version.files
        with ExitStack() as stack:
            partials: dict[str, Path] = {}
            objects = []
            for path, place in places.items():
                partials[path] = stack.enter_context(atomic_write(place))
                object_name, _, _ = files[path]
                objects.append(f"{OBJECTS}/{object_name}")
            names = [str(partial) for partial in partials.values()]

            def get_files() -> None:
                try:
                    self._store.files.get(objects, names)
                except OSError as error:
                    # Reading a store fills no disk: it is the disk of the run's folder.
                    if storage_errno(error) in FULL_DISK_ERRNOS:
                        raise EnvironmentFailure(
                            f"run.dir={self.folder} cannot be written ({cause_text(error)}) while the run is"
                            f" fetched from {self._key}; make room there"
                        ) from error
                    raise

            def sizes() -> list[int]:
                return [os.path.getsize(name) if os.path.exists(name) else 0 for name in names]

            self._store.call("fetching", get_files, sizes)
            wrong = []
            for path, partial in partials.items():
                _, size, _ = files[path]
                if partial.stat().st_size != size:
                    wrong.append(path)
            if wrong:
                raise UserError(
                    f"{self._key}: {summarise_problems(wrong)} not as long as its marker says, when it was"
                    " fetched; try again"
                )
            self._check_digests(partials)
            for path, partial in partials.items():
                _, _, mtime_ns = files[path]
                os.utime(partial, ns=(mtime_ns, mtime_ns))

    def _check_digests(self, fetched: Mapping[str, Path]) -> None:
        """Raise Damaged if fetched files have other contents than were sent."""
        version = self._marker.version
        damaged = []
        for path, file in fetched.items():
            name, _, _ = version.files[path]
            if name in version.digests and _digest(file) != version.digests[name]:
                damaged.append(path)
        if damaged:
            raise Damaged(self._key, damaged, "with other contents than its marker says")

    # --- To the store ---

    def put(self, step: int) -> None:
        """Begin to copy the run with a complete checkpoint.

        Its files are pinned on return. Checkpoints that wait for an upload are not copied any more.

        Args:
            step: of the checkpoint.
        """
        links = self.folder / PINS / uuid.uuid4().hex
        version = self._marker.version
        for path, state in file_states(self.folder).items():
            file_step = step_of(path)
            is_changed = file_step is None and state != version.state_of(path)
            if file_step == step or is_changed:
                link_file(self.folder / path, links / path)
        self._pins[links] = step
        waiting = list(self._pins)[1:-1]  # the first pin is being uploaded, the last one is the new one
        for late in waiting:
            self._unpin(late)
        self._thread = Thread(target=self._work, args=(links, self._thread), daemon=True)
        self._thread.start()

    def drop_after(self, step: int) -> None:
        """Delete the copies of later checkpoints, before a rollback deletes the checkpoints themselves.

        If the store cannot be used, the next copy deletes them.

        Args:
            step: to which the run is rolled back; the note of the rollback has been written.
        """

        def drop() -> None:
            with self._committing:
                self._marker.commit(self._marker.read_owned(), self._pins)

        for links, pinned_step in list(self._pins.items()):
            if pinned_step > step:
                self._pins.pop(links, None)
        try:
            self._store.call("deleting checkpoints", drop)
        except UserError as error:
            if not self._marker.taken_over:
                self._console.warn(f"{error}; the next copy deletes the checkpoints after step {step}")

    def check(self) -> None:
        """Check that this start is still the one that may write.

        Raises:
            TakenOver: another start has become the writer.
        """
        if self._marker.taken_over is not None:
            raise self._marker.taken_over

    def __enter__(self) -> Mirror:
        """Begin to copy the newest checkpoint, if there is one."""
        shutil.rmtree(self.folder / PINS, ignore_errors=True)  # what a killed start left
        newest = newest_step(self.folder / CHECKPOINTS)
        if newest is not None:
            self.put(newest)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last checkpoint is copied, for PATIENCE or HURRY seconds at most."""
        seconds = PATIENCE if kind is None else HURRY
        steps = list(self._pins.values())
        try:
            if self._thread and steps:
                self._console.note(f"copying step {steps[-1]} to {self._key}, for at most {seconds:g} s")
                self._thread.join(seconds)
        finally:  # a signal may end the wait
            if self._pins and not self._marker.taken_over:
                reason = self._failure or "copying takes too long"
                self._console.warn(
                    f"{self._key} lacks the checkpoint of step {steps[-1]} ({reason}); the next start with"
                    f" run.dir={self.folder} copies it"
                )
            self._pins.clear()
            shutil.rmtree(self.folder / PINS, ignore_errors=True)
        if kind is None:
            self.check()

    def _work(self, links: Path, before: Thread | None) -> None:
        """Upload a pin after the one before, unless a newer one or a rollback takes its place."""
        if before:
            before.join()
        while self._is_newest_pin(links) and not self._marker.taken_over:
            failure = ""
            try:
                self._upload(self._pins[links], links)
            except Exception as error:  # every store has errors of its own; none of them ends a run
                failure = cause_text(error)
            if links in self._pins and not self._marker.taken_over:
                self._report(failure)
            if not failure:
                break
            time.sleep(PAUSE)
        self._unpin(links)

    def _is_newest_pin(self, links: Path) -> bool:
        pins = list(self._pins)
        return bool(pins) and pins[-1] == links

    def _report(self, failure: str) -> None:
        """Say when the store can no longer be written, and when it can be written again."""
        if failure and not self._failure:
            self._console.warn(f"{self._key} cannot be written ({failure}); the copy is tried again")
        if self._failure and not failure:
            self._console.note(f"{self._key} can be written again")
        self._failure = failure

    def _unpin(self, links: Path) -> None:
        self._pins.pop(links, None)
        shutil.rmtree(links, ignore_errors=True)

    def _upload(self, step: int, links: Path) -> None:
        """Upload what changed, then name it in the marker."""
        version = self._marker.read_owned()
        lost = self._lost_objects(version)
        for path in lost:
            if step_of(path) is None and not (links / path).exists():
                link_file(self.folder / path, links / path)
        states = file_states(links)
        changed = []
        for path, state in states.items():
            if path in lost or version.state_of(path) != state:
                changed.append(path)
        names = {path: f"{links.name}.{number}" for number, path in enumerate(changed)}
        sources = [str(links / path) for path in changed]
        objects = [f"{OBJECTS}/{names[path]}" for path in changed]
        self._store.files.put(sources, objects, batch_size=FILES_AT_ONCE)
        digests = {names[path]: _digest(links / path) for path in changed}
        for path, state in file_states(links).items():
            if path in names and state != states[path]:  # it grew, and may have done so before it was sent
                del digests[names[path]]
        with self._committing:
            if links not in self._pins:  # a rollback has dropped it
                return
            version = self._marker.read_owned().up_to(step)
            entries = self._entries(step, names, states)
            version = self._without_lost_steps(version, step, lost)
            version = self._with_step(version, step, entries, states)
            self._marker.commit(_with_digests(version, digests), self._pins)

    def _lost_objects(self, version: MarkerVersion) -> set[str]:
        """Return the copied files whose objects have vanished from the store, or have another size there.

        Args:
            version: that is in the store; if the store was emptied, it names no files.
        """
        return _without_object(self._marker.version.files | version.files, self._store.sizes(OBJECTS))

    def _without_lost_steps(self, version: MarkerVersion, step: int, lost: Collection[str]) -> MarkerVersion:
        """Return a version without checkpoints before `step` that have lost objects, which it says."""
        lost_steps = {step_of(path) for path in lost if path in version.files} - {None, step}
        if lost_steps:
            numbers = ", ".join(map(str, sorted(filter(None, lost_steps))))
            self._console.warn(
                f"{self._key} has lost objects of the checkpoints {numbers}, which it leaves out"
            )
        return version.with_steps(tuple(kept for kept in version.steps if kept not in lost_steps))

    def _entries(self, step: int, names: dict[str, str], states: dict[str, FileState]) -> dict[str, Entry]:
        """Return the marker's entries of uploaded files; raise OSError if one of the step is incomplete."""
        sizes = self._store.sizes(OBJECTS)
        entries = {}
        wrong = []
        for path, name in names.items():
            size = sizes.get(name, -1)  # -1: it is not in the store
            # Files that are appended to may have grown since, those of a checkpoint have not.
            if step_of(path) == step and size != states[path].size:
                wrong.append(path)
            entries[path] = (name, size, states[path].mtime_ns)
        if wrong:
            raise OSError(f"{summarise_problems(wrong)} not as long in the store as here")
        return entries

    def _with_step(
        self, version: MarkerVersion, step: int, entries: dict[str, Entry], states: dict[str, FileState]
    ) -> MarkerVersion:
        """Return a version with the uploaded entries, and without checkpoints and files that are gone."""
        steps = tuple(sorted({*version.steps, step})[-self._keep :])
        local = set(states)
        local.update(path for path in file_states(self.folder) if step_of(path) is None)
        files = {}
        for path, entry in version.files.items():
            if path in local or step_of(path) in steps[:-1]:
                files[path] = entry
        files.update(entries)
        return version.model_copy(update={"steps": steps, "files": files, "run": run_hash(self.folder)})


def _without_object(entries: Mapping[str, Entry], sizes: Mapping[str, int]) -> set[str]:
    """Return the paths whose objects are not among these sizes by name, or have another size there."""
    paths = set()
    for path, (name, size, _) in entries.items():
        if sizes.get(name) != size:
            paths.add(path)
    return paths


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file's contents in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _with_digests(version: MarkerVersion, digests: Mapping[str, str]) -> MarkerVersion:
    """Return a version with further digests, and without those of objects that it does not name."""
    all_digests = {**version.digests, **digests}
    kept = {}
    for name, _, _ in version.files.values():
        if name in all_digests:
            kept[name] = all_digests[name]
    return version.model_copy(update={"digests": kept})
