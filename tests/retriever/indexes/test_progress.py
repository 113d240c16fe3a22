"""What a long build tells: how fast it is and how long it will take."""

import json
import re

import pytest

pytest.importorskip("faiss")

from retriever.backends import BuildOptions
from retriever.corpus.passages import load_corpus
from retriever.encoders import HashedEncoder
from retriever.indexes import backend as progress
from retriever.indexes import index as embeddings
from retriever.indexes.index import build_index

LINE = r"encode: (\d+) of 40 \((\d+\.\d) %\), +([\d.]+) passages/s, (\d\d:\d\d) left"


class Stopped(Exception):
    pass


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(progress, "LOG_SECONDS", 1e-9)
    monkeypatch.setattr(embeddings, "BLOCK", 4)


def test_a_log_has_lines_with_rate_and_time_left(tmp_path, often, monkeypatch, capsys):
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"id": i, "contents": f"text {i}"}) + "\n" for i in range(40)))
    corpus, encode, calls = load_corpus(path), HashedEncoder.encode_passages, []

    def stopping(self, rows):
        calls.append(len(rows))
        if len(calls) == 6:
            raise Stopped
        return encode(self, rows)

    monkeypatch.setattr(HashedEncoder, "encode_passages", stopping)
    with pytest.raises(Stopped):
        build_index(corpus, tmp_path / "i", BuildOptions(shard_rows=8))
    monkeypatch.setattr(HashedEncoder, "encode_passages", encode)
    capsys.readouterr()
    build_index(corpus, tmp_path / "i", BuildOptions(shard_rows=8))
    log = capsys.readouterr().err
    assert "\r" not in log
    found = [re.fullmatch(LINE, line) for line in log.splitlines() if line.startswith("encode")]
    counts = [int(one[1]) for one in found if one]
    assert counts and counts[0] >= 16 and counts == sorted(counts)  # two shards were there
    assert any(line.startswith("index: ") for line in log.splitlines())


def test_the_rate_is_that_of_this_start(often):
    with progress.progress_bar(1000, "encode", done=900) as bar:
        bar.update(50)
        state = bar.format_dict
    assert (state["n"], state["initial"]) == (950, 900)
