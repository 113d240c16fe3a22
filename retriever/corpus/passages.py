"""The corpus: JSON Lines of ``{"id", "contents": "\\"Title\\"\\ntext"}`` as wiki-18, mapped into memory."""

from __future__ import annotations

import io
import mmap
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from tqdm import tqdm

from retriever.corpus.containers import COMPRESSIONS, ZIP, open_text
from retriever.corpus.layouts import is_convertible, read_passages
from retriever.corpus.offsets import CACHED_FROM, Offsets, load_offsets, save_offsets, scan
from retriever.corpus.rows import parse_row, read_lines
from retriever.errors import RetrieverError
from retriever.interfaces import CorpusRow

# Bytes of an unpacked or converted corpus; all of them are held in memory.
GZIP_LIMIT = 2**30


class Corpus(Sequence[CorpusRow]):
    """The rows of a corpus in file order, parsed when they are asked for.

    Args:
        path: The file.
        text: All lines of the corpus, in memory or mapped.
        offsets: Where the rows lie in `text`.

    Attributes:
        path: The file, for messages.
        sha256: Hash of all ids and contents; an index belongs to the corpus of its hash.
    """

    def __init__(self, path: Path, text: bytes | mmap.mmap, offsets: Offsets):
        self.path = path
        self.sha256 = offsets.sha256
        self._text = text
        self._starts = offsets.starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> CorpusRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[CorpusRow]: ...
    def __getitem__(self, index: int | slice) -> CorpusRow | list[CorpusRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        number = index % len(self)
        line = self._text[self._starts[number] : self._starts[number + 1]]
        return parse_row(line, f"{self.path}:{number + 1}")


def split_contents(contents: str) -> tuple[str, str]:
    """Split the contents of a passage into title and text.

    Args:
        contents: A line with the title in quotes, then the text.

    Returns:
        The title without its quotes, and the text; the text is empty if there is one line only.
    """
    title, _, text = contents.partition("\n")
    return title.strip().removeprefix('"').removesuffix('"'), text


def load_corpus(path: Path, progress: bool = True) -> Corpus:
    """Map a ``.jsonl`` into memory, or read a small packed one or a file of another layout.

    Every row is checked the first time; the offsets of a large file are then kept in a file beside it.

    Args:
        path: The file.
        progress: Show a progress bar on a terminal.

    Returns:
        The rows of the file.

    Raises:
        RetrieverError: There is no such file, a row is malformed or an id repeated (with its place), or the
            corpus is too large to be held in memory.
    """
    if not path.exists():
        raise RetrieverError(f"{path}: no such corpus; set --corpus_path to a .jsonl, csv, tsv or .gz file")
    if is_convertible(path):
        return _converted(path, progress)
    if _is_packed(path):
        return _in_memory(path, _unpack(path))
    size = path.stat().st_size
    if not size:
        raise RetrieverError(f"{path}: no passages in it")
    with path.open("rb") as file:
        text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    is_cached = size >= CACHED_FROM
    offsets = load_offsets(path) if is_cached else None
    if offsets is None:
        offsets = scan(_lines(path, size, progress), text, path)
        if is_cached:
            save_offsets(path, offsets)
    return Corpus(path, text, offsets)


def _converted(path: Path, progress: bool) -> Corpus:
    """Convert a file of another layout in memory."""
    convert = f"python -m retriever.prepare_corpus {path} --output corpus.jsonl"
    lines = io.BytesIO()
    places = []
    has_titles = False
    for where, passage in read_passages(path, progress):
        if passage.id is None:
            raise RetrieverError(f"{where}: no id; {convert} --number_ids numbers the rows")
        if not passage.contents:
            raise RetrieverError(f"{where}: no text; {convert} drops it")
        lines.write(passage.to_line())
        places.append(where)
        has_titles = has_titles or passage.has_title
        if lines.tell() > GZIP_LIMIT:
            raise RetrieverError(
                f"{path}: more than {GZIP_LIMIT:,} bytes as JSON; {convert} makes a corpus that is mapped"
            )
    if places and not has_titles:
        sys.stderr.write(
            f"warning: {path}: no passage has a title; if a key holds it, {convert} --title KEY reads it\n"
        )
    return _in_memory(path, lines.getvalue(), places)


def _in_memory(path: Path, text: bytes, places: Sequence[str] | None = None) -> Corpus:
    offsets = scan(read_lines(io.BytesIO(text), path), text, path, places)
    return Corpus(path, text, offsets)


def _lines(path: Path, size: int, progress: bool) -> Iterator[bytes]:
    """Yield lines of the file rather than the mapping, whose pages would count as this process's memory."""
    is_disabled = None if progress else True  # None: disabled unless stderr is a terminal
    bar = tqdm(total=size, desc="corpus", unit="B", unit_scale=True, disable=is_disabled)
    with path.open("rb", buffering=2**20) as file, bar:
        for line in read_lines(file, path):
            yield line
            bar.update(len(line))


def _is_packed(path: Path) -> bool:
    """Return whether a file is compressed, or a zip archive."""
    magics = (ZIP, *(compression.magic for compression in COMPRESSIONS))
    with path.open("rb") as file:
        return file.read(max(map(len, magics))).startswith(magics)


def _unpack(path: Path) -> bytes:
    with open_text(path) as file:
        text = file.read(GZIP_LIMIT + 1)
    if len(text) > GZIP_LIMIT:
        raise RetrieverError(f"{path}: more than {GZIP_LIMIT:,} bytes; unpack it, then it is mapped")
    return text
