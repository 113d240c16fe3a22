"""Converts corpora of any known layout: streamed, checked, and complete when the file appears."""

from __future__ import annotations

import glob
import hashlib
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from retriever.corpus.layouts import KNOWN_COLUMNS, Columns, Passage, read_passages
from retriever.corpus.offsets import CACHED_FROM, Offsets, save_offsets, scan
from retriever.errors import RetrieverError
from retriever.files import atomic_write


@dataclass
class PreparedPassages:
    """Numbers of passages: read, written, written without a title, and dropped by reason."""

    read: int = 0
    written: int = 0
    untitled: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def prepare_corpus(
    inputs: Sequence[str],
    output: Path,
    number_ids: bool = False,
    drop_duplicates: bool = False,
    progress: bool = True,
    columns: Columns = KNOWN_COLUMNS,
) -> PreparedPassages:
    """Write the passages of all inputs as ``{"id", "contents"}`` (and ``"url"`` if a row has one).

    The result is read once more before it gets its name; its offsets are kept beside it.

    Args:
        inputs: Files or patterns of files.
        output: The ``.jsonl`` file to write.
        number_ids: Replace ids by numbers.
        drop_duplicates: Keep only the first of equal contents; takes about 100 bytes of memory a passage.
        progress: Show a progress bar on a terminal.
        columns: Fields of the rows that the user names.

    Returns:
        How many passages were read, written and dropped.

    Raises:
        RetrieverError: A file is missing or a row malformed, an id occurs twice, no passage is left, or the
            output cannot be written.
    """
    if output.suffix != ".jsonl":
        raise RetrieverError(f"{output}: the output must end in .jsonl")
    counts = PreparedPassages()
    with ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            partial = stack.enter_context(atomic_write(output))
            file = stack.enter_context(partial.open("wb"))
        except OSError as error:
            raise RetrieverError(f"{output}: cannot be written ({error.strerror})") from error
        with file:
            files = find_inputs(inputs)
            passages = _read_files(files, progress, columns)
            for passage in _select_passages(passages, drop_duplicates, number_ids, counts):
                file.write(passage.to_line())
        if not counts.written:
            raise RetrieverError(f"{output}: no passage is left of {counts.read}; see docs/data.md")
        offsets = _check(partial)
    if output.stat().st_size >= CACHED_FROM:
        save_offsets(output, offsets)
    return counts


def find_inputs(inputs: Sequence[str]) -> list[Path]:
    """Return the files that names and patterns stand for.

    Args:
        inputs: Files or patterns of files; an existing file is no pattern, whatever its name.

    Returns:
        The files in the order given, those of a pattern sorted by name.

    Raises:
        RetrieverError: A pattern matches nothing.
    """
    files: list[Path] = []
    for name in inputs:
        is_pattern = glob.has_magic(name) and not Path(name).exists()
        matches = sorted(glob.glob(name)) if is_pattern else [name]
        if not matches:
            raise RetrieverError(f"{name}: no file matches; correct the pattern")
        files += [Path(match) for match in matches]
    return files


def _read_files(files: Sequence[Path], progress: bool, columns: Columns) -> Iterator[tuple[str, Passage]]:
    for path in files:
        yield from read_passages(path, progress, columns)


def _select_passages(
    passages: Iterable[tuple[str, Passage]],
    drop_duplicates: bool,
    number_ids: bool,
    counts: PreparedPassages,
) -> Iterator[Passage]:
    """Yield the passages to write, and count all of them in `counts`."""
    seen: set[bytes] = set()  # hashes of contents
    for where, passage in passages:
        counts.read += 1
        if not passage.contents:
            counts.dropped["no text"] += 1
            continue
        if drop_duplicates:
            digest = hashlib.blake2b(passage.contents.encode(), digest_size=16).digest()
            if digest in seen:
                counts.dropped["duplicate"] += 1
                continue
            seen.add(digest)
        if passage.id is None and not number_ids:
            raise RetrieverError(
                f"{where}: no id; --number_ids gives every passage its number, --id KEY names its key"
            )
        passage_id = str(counts.written) if number_ids else passage.id
        counts.written += 1
        counts.untitled += not passage.has_title
        yield Passage(passage_id, passage.contents, passage.url)


def _check(path: Path) -> Offsets:
    """Return the offsets of the result; raise RetrieverError for a repeated id."""
    try:
        with path.open("rb", 2**20) as lines, mmap.mmap(lines.fileno(), 0, access=mmap.ACCESS_READ) as text:
            return scan(lines, text, "the result")
    except RetrieverError as error:
        raise RetrieverError(
            f"{error}; --number_ids gives every passage its number, --id KEY names the key of its id"
        ) from error
