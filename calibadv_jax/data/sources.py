"""Where questions come from: files, patterns of them, files of a dataset repository on the hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from calibadv_jax.core import hub
from calibadv_jax.core.errors import UserError

Sources = str | Path | Sequence[str | Path] | Mapping[str, str | Path]

SPLITS = ("train", "training", "dev", "validation", "valid", "val", "test", "eval")
# Names that the data sets have in files, and the data_source that Search-R1, FlashRAG and the paper use.
KNOWN = {
    "nq": "nq",
    "natural": "nq",
    "triviaqa": "triviaqa",
    "trivia": "triviaqa",
    "popqa": "popqa",
    "hotpotqa": "hotpotqa",
    "hotpot": "hotpotqa",
    "2wiki": "2wikimultihopqa",
    "2wikimultihop": "2wikimultihopqa",
    "2wikimultihopqa": "2wikimultihopqa",
    "musique": "musique",
    "bamboogle": "bamboogle",
}
_SUFFIXES = re.compile(r"(\.(jsonl?|parquet|tsv|csv|gz))+$", re.IGNORECASE)


def find_files(sources: Sources, default_source: str = "") -> Iterator[tuple[Path, str]]:
    """Yields every file and the data_source of its rows that name none.

    Args:
        sources: a file, a list of files, or data_source -> file. A file is a path, a pattern such as
            ``train-*.parquet``, ``hf://datasets/OWNER/NAME[@REVISION]/FILE`` or ``OWNER/NAME``, the
            only data file of a dataset repository.
        default_source: data_source where `sources` does not say; empty: the file's name tells it.

    Raises:
        UserError: nothing is named, a pattern matches nothing, or the hub has no such file.
    """
    if isinstance(sources, Mapping):
        named = [(str(file), name) for name, file in sources.items()]
    else:
        named = [(str(file), "") for file in ([sources] if isinstance(sources, str | Path) else sources)]
    if not named or not all(file for file, _ in named):
        raise UserError("no question file: set data.train and data.eval")
    for file, source in named:
        for path in _expand(file):
            yield path, source or default_source or source_of(path)


def _expand(name: str) -> list[Path]:
    if name.startswith(hub.DATASETS):
        return hub.fetch_data(name)
    path = Path(name)
    if path.exists():
        return [path]
    if glob.has_magic(name):
        found = [Path(one) for one in sorted(glob.glob(name))]
        if not found:
            raise UserError(f"{name}: no file matches; correct data.train or data.eval")
        return found
    if hub.is_repository(name):
        return hub.fetch_data(f"{hub.DATASETS}{name}")
    return [path]


def source_of(path: Path) -> str:
    """The data_source that the name of a file or of its folder tells: nq of ``nq/test.jsonl``."""
    stem = _SUFFIXES.sub("", path.name)
    for name in (stem, path.parent.name):
        for word in re.split(r"[^a-z0-9]+", name.lower()):
            if word in KNOWN:
                return KNOWN[word]
    words = re.split(r"[^a-z0-9]+", stem.lower())
    return (path.parent.name or stem) if words[0] in SPLITS else stem
