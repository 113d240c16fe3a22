"""Find out the format of a file of rows: unpack it, read its Arrow table, or refuse it with a way out.

The first bytes of a file decide, not its name. Compressed files are read as streams, within a limit; nothing
is unpacked to disk. The modules calibadv_jax/data/containers and retriever/corpus/containers are equal
but for their error class, since neither package imports the other.
"""

from __future__ import annotations

import bz2
import codecs
import datetime
import decimal
import gzip
import io
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq

from retriever.errors import RetrieverError as ContainerError

# Number of first bytes that decide what a file is.
HEAD_BYTES = 4096
# Bytes that are unpacked at once.
BUFFER_BYTES = 2**16
# Rows of a table that are in memory at once.
BATCH_ROWS = 1024
# Characters of a line at most. A longer one is no row, but a file without line ends or a hostile one.
MAX_LINE = 2**27
# Bytes that a compressed file may unpack to: so many, and so many times its own size. Text rarely shrinks to
# a twentieth of its size.
UNPACKED_BYTES = 2**28
UNPACKED_RATIO = 200
# Names that an archive's message shows at most.
SHOWN_NAMES = 5
# Members of an archive that are no data: folders, notes, and what macOS adds.
NO_DATA = ("/", ".md", ".txt", ".pdf", ".DS_Store", "LICENSE", "README")

ZIP = b"PK\x03\x04"
PARQUET = b"PAR1"
ARROW_FILE = b"ARROW1"
ARROW_STREAM = b"\xff\xff\xff\xff"
ORC = b"ORC"
TABLES = (PARQUET, ARROW_FILE, ARROW_STREAM, ORC)


class Compression(NamedTuple):
    """A compression of a single file."""

    magic: bytes
    name: str
    unpack: Callable[[BinaryIO], Any]


class ForeignFormat(NamedTuple):
    """A format that is refused."""

    magic: bytes
    offset: int
    description: str
    advice: str


COMPRESSIONS = (
    Compression(b"\x1f\x8b", "gzip", lambda file: gzip.GzipFile(fileobj=file)),
    Compression(b"BZh", "bzip2", bz2.BZ2File),
    Compression(b"\xfd7zXZ\x00", "xz", lzma.LZMAFile),
    Compression(b"\x28\xb5\x2f\xfd", "zstd", lambda file: pa.CompressedInputStream(file, "zstd")),
    Compression(b"\x04\x22\x4d\x18", "lz4", lambda file: pa.CompressedInputStream(file, "lz4")),
)
_WORKBOOK = "save its sheet as CSV UTF-8"
_TO_PARQUET = "write its rows to parquet or JSON Lines"
FOREIGN_FORMATS = (
    ForeignFormat(
        b"version https://git-lfs", 0, "a Git LFS pointer, not the file", "run git lfs pull in its folder"
    ),
    ForeignFormat(b"\0ustar", 256, "a tar archive", "unpack it (tar -xf) and name its files"),
    ForeignFormat(b"7z\xbc\xaf\x27\x1c", 0, "a 7z archive", "unpack it and name its files"),
    ForeignFormat(b"Rar!\x1a", 0, "a RAR archive", "unpack it and name its files"),
    ForeignFormat(b"\x1f\x9d", 0, "a file of compress", "unpack it (uncompress)"),
    ForeignFormat(b"\xd0\xcf\x11\xe0", 0, "an old or encrypted Office file", _WORKBOOK),
    ForeignFormat(b"SQLite format 3", 0, "an SQLite database", "export its table as CSV"),
    ForeignFormat(b"\x89HDF", 0, "an HDF5 file", _TO_PARQUET),
    ForeignFormat(b"Obj\x01", 0, "an Avro file", _TO_PARQUET),
    ForeignFormat(b"FEA1", 0, "an old Feather file", _TO_PARQUET),
    ForeignFormat(b"\x93NUMPY", 0, "a NumPy array", _TO_PARQUET),
    ForeignFormat(b"%PDF", 0, "a PDF document", "convert it to text, a row for each passage or question"),
    ForeignFormat(b"<!doctype", 0, "an HTML page, perhaps one about the file", "download the file itself"),
    ForeignFormat(b"<html", 0, "an HTML page, perhaps one about the file", "download the file itself"),
    ForeignFormat(b"<?xml", 0, "an XML file", "convert it to JSON Lines"),
    *(
        ForeignFormat(bytes([0x80, protocol]), 0, "a Python pickle, which may run code", _TO_PARQUET)
        for protocol in range(2, 6)
    ),
)
# Beginning of a text -> its encoding, if not UTF-8. UTF-32 stands first: its mark begins as UTF-16's.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def data_files(path: Path, contents: str) -> list[Path]:
    """Return the files that a path holds: itself, or those of a folder of the library datasets.

    Args:
        path: A file, or a folder that ``Dataset.save_to_disk`` has written.
        contents: What the files should hold, for messages.

    Raises:
        ContainerError: There is no such file, or it is another folder.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ContainerError(f"{path}: no such file of {contents}; correct the path")
    splits = _json_list(path / "dataset_dict.json", "splits")
    if len(splits) == 1 and _is_file_name(splits[0]):
        return data_files(path / splits[0], contents)
    if splits:
        names = ", ".join(f"{path}/{split}" for split in splits[:SHOWN_NAMES])
        raise ContainerError(f"{path}: a folder of several splits; name one of {names}")
    state = path / "state.json"
    files = []
    for entry in _json_list(state, "_data_files"):
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not _is_file_name(name):
            raise ContainerError(f"{state}: {name!r:.80} is no name of a file in the folder; save it again")
        files.append(path / str(name))
    if _json_list(state, "_indices_data_files"):
        raise ContainerError(
            f"{path}: saved with a selection of rows; save it again with dataset.flatten_indices()"
        )
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise ContainerError(f"{missing[0]}: missing, though {state} names it; copy the folder again")
    if not files:
        raise ContainerError(
            f"{path}: a folder, but none that save_to_disk of the library datasets has written; "
            f"name its files, such as '{path}/*.jsonl'"
        )
    return files


def _json_list(path: Path, key: str) -> list[Any]:
    """Return the list of a key in a file of JSON; empty if there is no such file or list."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    value = content.get(key) if isinstance(content, dict) else None
    return value if isinstance(value, list) else []


def _is_file_name(name: Any) -> bool:
    """Return whether a name of an untrusted file stays inside its folder."""
    return isinstance(name, str) and name == Path(name).name and name not in ("", "..")


def is_table(path: Path) -> bool:
    """Return whether a file is a table that Arrow reads: parquet, Arrow, Feather or ORC."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        if not head.startswith(ORC):
            return head.startswith(TABLES)
        # A table with a column "ORCID" begins in the same way; a file of ORC ends with its name too.
        file.seek(-min(path.stat().st_size, HEAD_BYTES), io.SEEK_END)
        return ORC in file.read()[-len(ORC) - 1 :]


@contextmanager
def open_text(path: Path) -> Iterator[BinaryIO]:
    """Open a text file, perhaps compressed or the only data file of a zip archive.

    Args:
        path: An existing file that is no table.

    Yields:
        Its text in UTF-8. Reading it raises ContainerError if it unpacks to too many bytes.

    Raises:
        ContainerError: The file is broken, is no text, or holds several files.
    """
    with path.open("rb") as packed:
        head = packed.read(HEAD_BYTES)
        packed.seek(0)
        compression = next((kind for kind in COMPRESSIONS if head.startswith(kind.magic)), None)
        if compression:
            with _packing_errors(path, compression.name), compression.unpack(packed) as stream:
                yield _as_utf8(_Limited(stream, path), path, is_packed=True)
        elif head.startswith(ZIP):
            with (
                _packing_errors(path, "zip"),
                zipfile.ZipFile(packed) as archive,
                archive.open(_only_member(archive, path)) as stream,
            ):
                yield _as_utf8(_Limited(stream, path), path, is_packed=True)
        else:
            yield _as_utf8(packed, path, is_packed=False)


@contextmanager
def _packing_errors(path: Path, name: str) -> Iterator[None]:
    """Turn errors of unpacking a file into one that names it."""
    broken = (EOFError, lzma.LZMAError, zipfile.BadZipFile, zlib.error, pa.ArrowException, OSError)
    try:
        yield
    except broken as error:
        if getattr(error, "errno", None) is not None:  # of the disk, not of the data
            raise
        raise ContainerError(f"{path}: broken {name} file ({error}); copy it again") from error
    except (NotImplementedError, RuntimeError) as error:  # of zipfile: an unknown method, or a password
        raise ContainerError(f"{path}: {name} file that cannot be read ({error}); unpack it") from error


def _only_member(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    """Return the only data file of an archive; names in it are never used as paths."""
    members = archive.infolist()
    names = [member.filename for member in members]
    if "[Content_Types].xml" in names or "content.xml" in names:
        raise ContainerError(f"{path}: a workbook or another Office file; {_WORKBOOK}")
    data = [
        member
        for member in members
        if not member.filename.endswith(NO_DATA) and not member.filename.startswith("__MACOSX/")
    ]
    if len(members) == 1 and not members[0].is_dir():
        data = members
    if len(data) != 1:
        shown = ", ".join(repr(member.filename) for member in data[:SHOWN_NAMES]) or "none"
        raise ContainerError(
            f"{path}: a zip archive of {len(data)} data files ({shown}), not of one; "
            "unpack it and name its files"
        )
    return data[0]


def _as_utf8(raw: Any, path: Path, is_packed: bool) -> BinaryIO:
    """Return a stream of UTF-8; raise ContainerError if its first bytes are those of no text."""
    stream = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw, BUFFER_BYTES)
    head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    folded = head.lstrip().lower()
    for foreign in FOREIGN_FORMATS:
        beginning = head[foreign.offset :]
        if beginning.startswith(foreign.magic) or (not foreign.offset and folded.startswith(foreign.magic)):
            raise ContainerError(f"{path}: {foreign.description}; {foreign.advice}")
    packed = (*TABLES, ZIP, *(compression.magic for compression in COMPRESSIONS))
    if is_packed and head.startswith(packed):
        raise ContainerError(f"{path}: a table or another packed file inside it; unpack it first")
    encoding = next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")
    if not encoding and b"\0" in head[:2]:
        encoding = "utf-16-be" if head[:1] == b"\0" else "utf-16-le"
    if not encoding:
        return cast(BinaryIO, stream)
    return cast(BinaryIO, io.BufferedReader(_Recoded(stream, encoding)))


class _Limited(io.RawIOBase):
    """A stream of unpacked bytes with a limit: a small file may unpack to terabytes."""

    def __init__(self, stream: Any, path: Path):
        self._stream = stream
        self._path = path
        self._limit = UNPACKED_BYTES + UNPACKED_RATIO * path.stat().st_size
        self._num_read = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer, and return their number."""
        content = self._stream.read(len(buffer))
        self._num_read += len(content)
        if self._num_read > self._limit:
            raise ContainerError(
                f"{self._path}: unpacks to more than {self._limit:,} bytes, which no text does; unpack it"
                " yourself if it is right"
            )
        buffer[: len(content)] = content
        return len(content)


class _Recoded(io.RawIOBase):
    """A stream of UTF-8, of a text in another encoding."""

    def __init__(self, stream: Any, encoding: str):
        self._text = io.TextIOWrapper(stream, encoding=encoding, newline="")
        self._pending = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer, and return their number."""
        if not self._pending:
            self._pending = self._text.read(HEAD_BYTES).encode(errors="replace")
        size = min(len(buffer), len(self._pending))
        buffer[:size] = self._pending[:size]
        self._pending = self._pending[size:]
        return size


def text_lines(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text with their ends, as `csv` wants them.

    Args:
        file: The text.
        path: Its file, for messages.

    Raises:
        ContainerError: A line is longer than MAX_LINE.
        UnicodeDecodeError: The text is not UTF-8.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    number = 0
    while line := text.readline(MAX_LINE):
        number += 1
        if len(line) == MAX_LINE:
            raise ContainerError(f"{path}:{number}: longer than {MAX_LINE:,} characters; it is no row")
        yield line


def table_delimiter(header: str, known_names: Sequence[str]) -> str:
    """Return the delimiter of a table, given its first line.

    Args:
        header: The first line.
        known_names: Names of columns in lower case. The delimiter that shows most of them wins, then the
            one with most columns.

    Returns:
        A tab if there is one; else a comma, a semicolon (Excel in much of Europe) or a vertical bar.
    """
    if "\t" in header:
        return "\t"

    def rank(delimiter: str) -> tuple[int, int]:
        cells = [cell.strip().strip('"').lower() for cell in header.split(delimiter)]
        return len(set(cells) & set(known_names)), len(cells)

    return max((",", ";", "|"), key=rank)


def table_batches(path: Path, choose: Callable[[list[str]], list[str]]) -> Iterator[tuple[list[str], Any]]:
    """Read a table of Arrow.

    Args:
        path: A file of parquet, of Arrow (which is Feather too, or a stream) or of ORC.
        choose: Returns the columns to read, given the names of all.

    Yields:
        The names of all columns; and at most BATCH_ROWS rows, each a dictionary of plain values.

    Raises:
        ContainerError: The file is broken.
    """
    with path.open("rb") as file:
        head = file.read(len(ARROW_FILE))
    try:
        for names, batch in _record_batches(path, head, choose):
            batch.validate(full=True)  # offsets of an untrusted file may lead anywhere
            for start in range(0, batch.num_rows, BATCH_ROWS):
                rows = batch.slice(start, BATCH_ROWS).to_pylist()
                yield names, [{name: _plain(value) for name, value in row.items()} for row in rows]
    except (pa.ArrowException, OSError) as error:
        kind = "parquet" if head.startswith(PARQUET) else "Arrow or ORC"
        reason = " ".join(str(error).split())[:300]
        raise ContainerError(f"{path}: broken {kind} file ({reason}); copy it again") from error
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date after the year 9999
        reason = " ".join(str(error).split())[:300]
        raise ContainerError(
            f"{path}: a value cannot be read ({reason}); write the column as text"
        ) from error


def _record_batches(
    path: Path, head: bytes, choose: Callable[[list[str]], list[str]]
) -> Iterator[tuple[list[str], Any]]:
    if head.startswith(PARQUET):
        with pq.ParquetFile(path) as parquet:
            names = parquet.schema_arrow.names
            for batch in parquet.iter_batches(BATCH_ROWS, columns=choose(names)):
                yield names, batch
    elif head.startswith(ORC):
        table = orc.ORCFile(path)
        names = table.schema.names
        for stripe in range(table.nstripes):
            yield names, table.read_stripe(stripe, columns=choose(names))
    elif head.startswith(ARROW_FILE):
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            names = reader.schema.names
            for number in range(reader.num_record_batches):
                yield names, reader.get_batch(number).select(choose(names))
    else:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                yield stream.schema.names, batch.select(choose(stream.schema.names))


def _plain(value: Any) -> Any:
    """Return a value of Arrow as JSON would hold it: dates and decimals as text or numbers, bytes as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime.datetime):
        is_date = value.time() == datetime.time() and value.tzinfo is None
        return value.date().isoformat() if is_date else value.isoformat(" ")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return str(value)
    if isinstance(value, decimal.Decimal):
        return _plain_decimal(value)
    if isinstance(value, bytes):
        return _decoded(value)
    return value


def _plain_decimal(value: decimal.Decimal) -> int | str | None:
    """Return a whole number, or the digits of another without zeros at their end; None for NaN."""
    if not value.is_finite():
        return None
    if value == value.to_integral_value():
        return int(value)
    return format(value, "f").rstrip("0")


def _decoded(value: bytes) -> str | bytes:
    """Return the text in UTF-8 that bytes hold; the bytes if they hold none, such as those of a picture."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
