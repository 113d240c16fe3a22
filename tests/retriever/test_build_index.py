"""``python -m retriever.build_index``."""

import os
import signal
import subprocess
import sys
import time

import pytest
from retriever_rig import people_corpus

pytest.importorskip("faiss")

from retriever import prepare_corpus, serve
from retriever.build_index import main
from retriever.corpus.passages import load_corpus
from retriever.encoders import HashedEncoder
from retriever.indexes.index import open_index


def test_it_builds_what_the_options_say(tmp_path, files, capsys):
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(tmp_path / "i"), "--kind", "jax"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"16 passages indexed in {tmp_path / 'i'}\n"
    assert open_index(tmp_path / "i", load_corpus(files[0])).manifest["kind"] == "jax"
    assert main(["--corpus_path", str(tmp_path / "no"), "--index_path", str(tmp_path / "i")]) == 2
    assert "error: " in capsys.readouterr().err


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "where", "kept"),
    [
        ("hashed", "retriever.indexes.index._begin", set()),
        ("hashed", "retriever.indexes.faiss.write_faiss", {"i.embeddings"}),
        ("hashed", "retriever.indexes.index.write_manifest", {"i.embeddings"}),
        ("bm25", "retriever.indexes.index.write_manifest", set()),
    ],
)
def test_ctrl_c_leaves_nothing_half_written(tmp_path, files, capsys, monkeypatch, name, where, kept):
    """Also an older index stays."""
    if name == "bm25":
        pytest.importorskip("bm25s")
    arguments = [
        "--corpus_path",
        str(files[0]),
        "--index_path",
        str(tmp_path / "i"),
        "--retriever_name",
        name,
    ]
    for index in (set(), {"i"}):
        with monkeypatch.context() as patch:
            patch.setattr(where, interrupt)
            assert main(arguments) == 130
        line = "interrupted; give the same command again: what was encoded is kept\n"
        assert capsys.readouterr().err == line
        assert set(os.listdir(tmp_path)) == index | kept
        assert main(arguments) == 0
        assert os.listdir(tmp_path) == ["i"]


def test_build_continues_after_ctrl_c(tmp_path, capsys, monkeypatch):
    people_corpus(tmp_path / "c.jsonl", 20)
    arguments = ["--corpus_path", str(tmp_path / "c.jsonl"), "--index_path", str(tmp_path / "i")]
    arguments += ["--shard_rows", "5", "--embeddings", str(tmp_path / "e")]
    encode, encoded = HashedEncoder.encode_passages, []

    def encode_two(self, rows):
        if len(encoded) == 2:
            raise KeyboardInterrupt
        encoded.append(rows[0]["id"])
        return encode(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(HashedEncoder, "encode_passages", encode_two)
        assert main(arguments) == 130
    shards = {"shard-00000.npy", "shard-00001.npy"}
    assert set(os.listdir(tmp_path / "e")) == shards | {"settings.json", "encoder.npz"}
    monkeypatch.setattr(
        HashedEncoder,
        "encode_passages",
        lambda self, rows: encoded.append(rows[0]["id"]) or encode(self, rows),
    )
    assert main(arguments) == 0 and encoded == ["0", "5", "10", "15"]


def test_ctrl_c_in_the_other_commands_is_one_line(tmp_path, files, capsys, monkeypatch):
    monkeypatch.setattr("retriever.corpus.prepare._check", interrupt)
    assert prepare_corpus.main([str(files[0]), "--output", str(tmp_path / "c.jsonl")]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written: give the same command again\n"
    assert not os.listdir(tmp_path)
    monkeypatch.setattr("retriever.service.server.run", interrupt)
    assert serve.main(["--corpus_path", str(files[0]), "--index_path", str(files[1])]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_reaches_processes(tmp_path, files):
    """While shards are written, and while a service answers."""
    people_corpus(tmp_path / "c.jsonl", 30_000)
    build = ["build_index", "--corpus_path", tmp_path / "c.jsonl", "--index_path", tmp_path / "i"]
    answer = ["serve", "--corpus_path", files[0], "--index_path", files[1], "--port", "0"]
    for (module, *arguments), sign in (
        ([*build, "--shard_rows", "1000"], tmp_path / "i.embeddings" / "shard-00001.npy"),
        ([*answer, "--port_file", tmp_path / "port"], tmp_path / "port"),
    ):
        command = [sys.executable, "-m", f"retriever.{module}", *map(str, arguments)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not sign.exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1].startswith("interrupted") and process.returncode == 130
