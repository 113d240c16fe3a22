"""The commands, their options and exit statuses; files that appear whole or not at all."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from retriever_rig import people_corpus, refuses

from retriever import prepare_corpus
from retriever.build_index import main
from retriever.corpus.passages import load_corpus
from retriever.errors import RetrieverError, Unavailable, status_of
from retriever.files import atomic_folder, atomic_write
from retriever.indexes.index import open_index
from retriever.options import parse, read_token

ROOT = Path(__file__).parents[2]


def interrupt(*_, **__):
    raise KeyboardInterrupt


def test_build_follows_its_options(tmp_path, files, capsys):
    folder = tmp_path / "i"
    options = ["--corpus_path", str(files[0]), "--index_path", str(folder)]
    assert main([*options, "--kind", "jax"]) == 0
    assert capsys.readouterr().out == f"16 passages indexed in {folder}\n"
    assert open_index(folder, load_corpus(files[0])).manifest["kind"] == "jax"


def test_build_without_a_corpus_is_an_error(tmp_path, capsys):
    options = ["--corpus_path", str(tmp_path / "none"), "--index_path", str(tmp_path / "i")]
    assert main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'none'}: no such corpus")


@pytest.mark.parametrize(
    ("name", "place", "kept"),
    [
        ("hashed", "encoders.hashed.HashedEncoder.save", set()),
        ("hashed", "indexes.faiss.write_faiss", {"i.embeddings"}),
        ("hashed", "indexes.build.checksums", {"i.embeddings"}),
        ("bm25", "indexes.build.checksums", set()),
    ],
)
def test_ctrl_c_leaves_nothing_half_written(tmp_path, files, capsys, monkeypatch, name, place, kept):
    if name == "bm25":
        pytest.importorskip("bm25s")
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(tmp_path / "i")]
    arguments += ["--retriever_name", name]
    for index in (set(), {"i"}):
        with monkeypatch.context() as patch:
            patch.setattr(f"retriever.{place}", interrupt)
            assert main(arguments) == 130
        line = "interrupted; give the same command again: what was encoded is kept\n"
        assert capsys.readouterr().err == line
        assert set(os.listdir(tmp_path)) == index | kept
        assert main(arguments) == 0
        assert os.listdir(tmp_path) == ["i"]


def test_ctrl_c_leaves_no_converted_corpus(tmp_path, files, capsys, monkeypatch):
    monkeypatch.setattr("retriever.corpus.prepare._check", interrupt)
    assert prepare_corpus.main([str(files[0]), "--output", str(tmp_path / "c.jsonl")]) == 130
    assert capsys.readouterr().err == "interrupted; nothing was written: give the same command again\n"
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_ctrl_c_reaches_processes(tmp_path, files):
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("retrieval_top: 3", "unknown key 'retrieval_top'; did you mean 'retrieval_topk'"),
        ("retrieval_topk: many", "retrieval_topk must be of type int, got 'many'"),
        ("faiss_gpu: 3", "faiss_gpu must be true or false, got 3"),
        ("cache_mode: keep", "cache_mode is 'keep'; known are use, replay"),
        ("- a", "expected keys and values"),
        ("port: 1", "--corpus_path is missing"),
        ("retrieval_topk: [", "not valid YAML"),
        *[(f"{name}: 0", f"--{name} is 0, but must be") for name in ("max_queue", "max_queries")],
        ("threads: -1", "--threads is -1, but must be at least 0"),
        *[(f"request_seconds: {value}", "must be above 0") for value in ("0", "-1", ".nan")],
    ],
)
def test_invalid_options_are_named(tmp_path, text, message):
    (tmp_path / "r.yaml").write_text(text)
    paths = [] if text == "port: 1" else ["--corpus_path", "c", "--index_path", "i"]
    refuses(message, parse, ["--config", str(tmp_path / "r.yaml"), *paths])


def test_token_is_of_the_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RETRIEVER_TOKEN", " of the environment\n")
    options, file = ["--corpus_path", "c", "--index_path", "i"], tmp_path / "token"
    assert read_token(parse(options)) == "of the environment"
    given = parse([*options, "--token_file", str(file)])
    refuses("token: no such file; correct --token_file", read_token, given)
    file.write_text(" \n")
    refuses("token: is empty; write a token", read_token, given)
    file.write_text(" secret\n")
    assert read_token(given) == "secret"


def test_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("{corpus_path: c, index_path: i, retrieval_topk: 20, mmap: true}")
    options = parse(["--config", str(path), "--retrieval_topk", "5"])
    assert (options.retrieval_topk, options.mmap, options.corpus_path) == (5, True, Path("c"))
    refuses("none.yaml: no such config file", parse, ["--config", str(tmp_path / "none.yaml")])


def run_without(packages, *command):
    """Runs a module where these packages cannot be imported."""
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({packages}))\n"
    code += f"sys.argv = {list(command)}; runpy.run_module(sys.argv[0], run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("name", ["serve", "build_index", "prepare_corpus"])
def test_help_needs_no_optional_package(name):
    module = f"retriever.{name}"
    packages = {"serve": ["fastapi", "uvicorn"], "build_index": ["scipy"]}.get(name, [])
    heavy = ["numpy", "scipy", "faiss", "jax", "fastapi", "uvicorn", "prometheus_client", "pydantic", "tqdm"]
    heavy += ["bm25s", "qdrant_client", "sentence_transformers", "torch", "httpx", "pyarrow"]
    answer = run_without(heavy, module, "--help")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"usage: python -m {module}")
    for package in packages:
        answer = run_without([package], module, "--corpus_path", "c", "--index_path", "i")
        assert answer.returncode == 2
        message = f"error: {package} is not installed: pip install 'calibadv-jax[retriever]'\n"
        assert answer.stderr == message


def test_corpus_needs_no_optional_package():
    """scripts/download.py reads one where nothing but the base packages is installed."""
    for module in ("retriever.corpus.passages", "retriever.indexes.faiss_files"):
        assert run_without(["faiss", "scipy", "fastapi", "bm25s", "jax"], module).returncode == 0


@pytest.mark.medium
def test_threads_win_over_the_environment():
    """Two searches at once then take a thread each. Left out, the environment's number stays."""
    code = "import os, sys; from retriever import serve; sys.argv = ['serve', *sys.argv[1:]]\n"
    code += "assert serve.main() == 2; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    command = [sys.executable, "-c", code, "--corpus_path", "none", "--index_path", "none", "--port", "0"]
    call = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "7"}}
    for more, expected in (([], "7 7"), (["--threads", "2"], "1 1")):
        ended = subprocess.run([*command, *more], capture_output=True, text=True, timeout=250, **call)
        assert ended.stdout.strip() == expected, ended.stderr
        assert re.fullmatch("error: none: .*\n", ended.stderr)  # a failed loading ends the service


def test_failure_leaves_the_old_file_or_folder(tmp_path, monkeypatch):
    def failing(path, target, rename=Path.rename):
        if path.name.endswith(".unfinished"):
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    path = tmp_path / "a"
    for by_many in (False, True):
        path.write_text("old")
        with pytest.raises(OSError, match="full"), atomic_write(path, by_many) as partial:
            partial.write_text("ne")
            raise OSError(errno.ENOSPC, "full")
        assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    path.unlink()
    path.mkdir()
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="broken"), atomic_folder(path):
        pass
    assert list(tmp_path.iterdir()) == [path]


def test_two_processes_write_under_different_names(tmp_path, monkeypatch):
    with atomic_write(tmp_path / "a", by_many=True) as first:
        monkeypatch.setattr("retriever.files.os.getpid", lambda: 1)
        with atomic_write(tmp_path / "a", by_many=True) as second:
            second.write_text("second")
        first.write_text("first")
    assert (tmp_path / "a").read_text() == "first"


def test_files_are_renamed_in_one_module():
    renaming = re.compile(r"\.rename\(|os\.replace")
    paths = [path for path in (ROOT / "retriever").rglob("*.py") if renaming.search(path.read_text("utf-8"))]
    assert paths == [ROOT / "retriever/files.py"]


def test_exit_status_tells_input_from_environment(capsys):
    for error, cause, status in (
        (RetrieverError("a/b: cannot be written"), OSError(errno.ENOSPC, "full"), 75),
        (RetrieverError("a/b: cannot be written"), PermissionError(errno.EACCES, "no"), 2),
        (RetrieverError("--topk 0: at least 1"), None, 2),
        (Unavailable("Qdrant is away"), None, 75),
    ):

        def work(error=error, cause=cause):
            raise error from cause

        assert status_of(work) == status and capsys.readouterr().err == f"error: {error}\n"
