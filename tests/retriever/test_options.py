"""Options of both commands: on the command line, in a file, and wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retriever.contrib.web import PROVIDERS
from retriever.errors import RetrieverError
from retriever.options import WEB_SEARCHES, parse

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("retrieval_top: 3", [], "unknown key 'retrieval_top'; did you mean 'retrieval_topk'"),
        ("retrieval_topk: many", [], "retrieval_topk must be of type int, got 'many'"),
        ("faiss_gpu: 3", [], "faiss_gpu must be true or false, got 3"),
        ("cache_mode: keep", [], "cache_mode is 'keep'; known are use, replay"),
        ("- a", [], "expected keys and values"),
        ("port: 1", [], "--corpus_path is missing"),
        ("{corpus_path: c, index_path: i}", ["--max_queue", "0"], "--max_queue is 0"),
        ("{corpus_path: c, index_path: i}", ["--max_queries", "0"], "--max_queries is 0"),
        ("{corpus_path: c, index_path: i}", ["--threads", "-1"], "--threads is -1, but must be at least 1"),
    ],
)
def test_bad_options_are_one_line(tmp_path, text, arguments, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RetrieverError, match=message):
        parse(["--config", str(path), *arguments])


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("{corpus_path: c, index_path: i, retrieval_topk: 20, mmap: true}")
    options = parse(["--config", str(path), "--retrieval_topk", "5"])
    assert (options.retrieval_topk, options.mmap, str(options.corpus_path)) == (5, True, "c")


def test_web_searches_are_those_that_are_implemented():
    assert set(WEB_SEARCHES) == set(PROVIDERS)


def run_without(packages, *command):
    """Runs a module where these packages cannot be imported."""
    code = f"import runpy, sys; sys.modules.update(dict.fromkeys({packages}))\n"
    code += f"sys.argv = {list(command)}; runpy.run_module(sys.argv[0], run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", ["retriever.serve", "retriever.build_index"])
def test_help_needs_nothing_heavy_and_nothing_optional(module):
    packages = ["numpy", "scipy", "faiss", "jax", "fastapi", "uvicorn", "prometheus_client", "pydantic"]
    packages += ["bm25s", "qdrant_client", "sentence_transformers", "torch", "httpx", "tqdm"]
    answer = run_without(packages, module, "--help")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"usage: python -m {module}")


@pytest.mark.parametrize(
    ("module", "package"),
    [("retriever.serve", "fastapi"), ("retriever.serve", "uvicorn"), ("retriever.build_index", "scipy")],
)
def test_a_missing_extra_is_one_line(module, package):
    answer = run_without([package], module, "--corpus_path", "c", "--index_path", "i")
    assert answer.returncode == 2
    assert answer.stderr == f"error: {package} is not installed: pip install 'calibadv-jax[retriever]'\n"


def test_a_corpus_needs_no_optional_package(tmp_path):
    """scripts/download.py reads one where nothing but the base packages is installed."""
    code = "import sys; sys.modules.update(dict.fromkeys(['faiss', 'scipy', 'fastapi', 'bm25s', 'jax']))\n"
    code += "import retriever.corpus.passages, retriever.indexes.faiss"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60, env=dict(os.environ))


@pytest.mark.medium
def test_threads_win_over_the_environment(tmp_path):
    """Two searches at once then take a thread each. Left out, the environment's number stays."""
    code = "import os, sys; from retriever import serve; sys.argv = ['serve', *sys.argv[1:]]\n"
    code += "assert serve.main() == 2; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    command = [sys.executable, "-c", code, "--corpus_path", "none", "--index_path", "none", "--port", "0"]
    environment = dict(os.environ, OMP_NUM_THREADS="7", MKL_NUM_THREADS="7")
    for more, expected in (([], "7 7"), (["--threads", "2"], "1 1")):
        ended = subprocess.run(
            [*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
        assert ended.stdout.strip() == expected, ended.stderr
