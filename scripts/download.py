"""Download the published wiki-18 corpus and E5 index of Search-R1, as the retriever loads them.

    python scripts/download.py corpus --output /data/wiki18     # wiki-18.jsonl
    python scripts/download.py index --output /data/wiki18      # e5_Flat.index, 65 GB, joined from two parts

Needs `pip install huggingface_hub`. Files that are already in the folder (copied by hand where there is no
network) are used unchanged; a stopped download continues when started again.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from retriever.corpus.passages import load_corpus
from retriever.errors import RetrieverError
from retriever.files import atomic_write
from retriever.indexes.faiss_files import read_header

INDEX = ("PeterJinGo/wiki-18-e5-index", ("part_aa", "part_ab"), "e5_Flat.index")
CORPUS = ("PeterJinGo/wiki-18-corpus", ("wiki-18.jsonl.gz",), "wiki-18.jsonl")
UNPACKED = 4  # times the size of the packed corpus, at most
BLOCK = 2**24  # bytes copied at once


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("corpus", "index"))
    parser.add_argument("--output", type=Path, required=True, help="folder to download into")
    parser.add_argument("--remove_parts", action="store_true", help="delete what was joined or unpacked")
    arguments = parser.parse_args(argv)
    parts: tuple[str, ...]
    if arguments.what == "corpus":
        get, parts, unit = get_corpus, CORPUS[1], "passages"
    else:
        get, parts, unit = get_index, INDEX[1], "vectors"
    try:
        path, count = get(arguments.output)
    except RetrieverError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if arguments.remove_parts:
        for name in parts:
            (arguments.output / name).unlink(missing_ok=True)
    sys.stdout.write(f"{path}: {count:,} {unit}\n")
    return 0


def get_index(folder: Path) -> tuple[Path, int]:
    """Return the joined index and its number of vectors.

    Raises:
        RetrieverError: no network, no space, or the joined file is not as long as its header says.
    """
    repository, names, target = INDEX
    path = folder / target
    if not path.is_file():
        parts = [fetch(repository, name, folder) for name in names]
        size = sum(part.stat().st_size for part in parts)
        require_disk(folder, size, target)
        write_whole(path, (block for part in parts for block in blocks(part)), size)
    return path, read_header(path).documents


def get_corpus(folder: Path) -> tuple[Path, int]:
    """Return the unpacked corpus, whose offsets are written, and its number of passages.

    Raises:
        RetrieverError: no network, no space, a damaged file, or malformed rows.
    """
    repository, (name,), target = CORPUS
    path = folder / target
    if not path.is_file():
        packed = fetch(repository, name, folder)
        require_disk(folder, UNPACKED * packed.stat().st_size, target)
        try:
            with gzip.open(packed) as file:
                write_whole(path, pieces(file, "unpack"))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise RetrieverError(f"{packed}: damaged ({error}); delete it and start again") from error
    return path, len(load_corpus(path))


def fetch(repository: str, name: str, folder: Path) -> Path:
    """Download a file of a data set of the hub, unless it exists.

    Raises:
        RetrieverError: huggingface_hub is missing, or the hub cannot be reached.
    """
    path = folder / name
    if path.is_file():
        return path
    try:
        import httpx
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise RetrieverError(f"{error.name} is not installed: pip install huggingface_hub") from error
    folder.mkdir(parents=True, exist_ok=True)
    try:
        hf_hub_download(repository, name, repo_type="dataset", local_dir=folder)
    except (OSError, HfHubHTTPError, httpx.HTTPError) as error:
        raise RetrieverError(
            f"{name} of https://huggingface.co/datasets/{repository} cannot be downloaded"
            f" ({str(error).splitlines()[0][:160]}); check the network, set HF_ENDPOINT to a mirror, or copy"
            f" the file to {path}"
        ) from error
    return path


def require_disk(folder: Path, need: int, target: str) -> None:
    """Raise RetrieverError where the disk is too small."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise RetrieverError(
            f"{folder}: {target} needs up to {need:,} bytes more and {free:,} are free; use another --output"
        )


def write_whole(path: Path, content: Iterable[bytes], size: int | None = None) -> None:
    """Write the file and rename it into place.

    Raises:
        RetrieverError: its size is not the expected one.
    """
    with atomic_write(path) as partial:
        with partial.open("wb") as file:
            for block in content:
                file.write(block)
        if size is not None and partial.stat().st_size != size:
            raise RetrieverError(
                f"{path}: has {partial.stat().st_size:,} bytes and its parts {size:,}; start again"
            )


def blocks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        yield from pieces(file, f"join {path.name}")


def pieces(file: BinaryIO | Any, label: str) -> Iterable[bytes]:
    """Yield the file in blocks, with a progress bar."""
    from tqdm import tqdm

    with tqdm(desc=label, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        while block := file.read(BLOCK):
            yield block
            bar.update(len(block))


if __name__ == "__main__":
    sys.exit(main())
