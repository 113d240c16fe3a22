"""Kept offsets are those of exactly this corpus: a file changed in place is noticed by its content."""

import json
import os

import numpy as np
import pytest

from retriever.corpus import passages as offsets
from retriever.corpus.passages import HEADER, cache_file, load_offsets, save_offsets, scan


@pytest.fixture
def corpus(tmp_path):
    """200 KiB: all of it is fingerprinted."""
    path = tmp_path / "corpus.jsonl"
    rows = (json.dumps({"id": number, "contents": f'"T"\n{number:0180}'}) + "\n" for number in range(900))
    path.write_text("".join(rows))
    with path.open("rb") as file:
        save_offsets(path, scan(file, path, lambda *_: {}))
    return path


def change(path, place):
    """One byte; size and time stay."""
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns


def test_a_change_anywhere_is_noticed(corpus):
    size = corpus.stat().st_size
    assert load_offsets(corpus).starts[-1] == size
    for place in [*range(0, size, 4000), size - 1]:
        change(corpus, place)
        assert load_offsets(corpus) is None, place
        change(corpus, place)
        assert load_offsets(corpus) is not None


def test_beginning_and_end_of_a_large_file_are_read(corpus, monkeypatch):
    monkeypatch.setattr(offsets, "PROBES", 3)  # as if the file were larger
    with corpus.open("rb") as file:
        save_offsets(corpus, scan(file, corpus, lambda *_: {}))
    size = corpus.stat().st_size
    for place in (0, size // 2, size - 1):
        change(corpus, place)
        assert load_offsets(corpus) is None, place
        change(corpus, place)
    assert load_offsets(corpus) is not None


@pytest.mark.parametrize("name", ["version", "size", "mtime_ns", "fingerprint"])
def test_each_part_of_the_identity_counts(corpus, name):
    path = cache_file(corpus)
    whole = path.read_bytes()
    state = json.loads(whole[:HEADER])
    state[name] = "another" if name == "fingerprint" else state[name] + 1
    path.write_bytes(json.dumps(state).encode().ljust(HEADER) + whole[HEADER:])
    assert load_offsets(corpus) is None


@pytest.mark.parametrize("cut", [8, 1])
def test_kept_offsets_that_were_cut_off_are_not_used(corpus, cut):
    path = cache_file(corpus)
    path.write_bytes(path.read_bytes()[:-cut])
    assert load_offsets(corpus) is None


def test_what_is_kept_is_what_was_found(corpus):
    lines = corpus.read_bytes().splitlines(keepends=True)
    np.testing.assert_array_equal(load_offsets(corpus).starts, np.cumsum([0, *map(len, lines)]))
