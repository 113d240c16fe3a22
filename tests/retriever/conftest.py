"""Real indexes over a few passages."""

from importlib.util import find_spec

import pytest
from retriever_rig import NAMES, opened, town_rows, write_rows

from retriever.corpus.passages import load_corpus

if find_spec("faiss") is None or find_spec("fastapi") is None:
    collect_ignore_glob = ["contrib/*", "indexes/*", "service/*", "test_*.py"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(corpus file, index folder) of sixteen passages."""
    rows = [
        {"id": str(n), "contents": f'"{name}"\n{name} lives in town {n}.'} for n, name in enumerate(NAMES)
    ]
    return build(tmp_path_factory.mktemp("names"), rows)


@pytest.fixture(scope="module")
def index(files):
    return opened(*files)


@pytest.fixture(scope="module")
def towns(tmp_path_factory):
    """An index of four passages."""
    return opened(*build(tmp_path_factory.mktemp("towns"), town_rows()))


def build(folder, rows):
    from retriever.indexes.build import build_index

    corpus = write_rows(folder / "corpus.jsonl", rows)
    build_index(load_corpus(corpus), folder / "index", progress=False)
    return corpus, folder / "index"
