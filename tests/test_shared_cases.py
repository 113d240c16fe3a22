"""Small inputs made from public reports (``../shared/cases``): each behaves as its README says.

Skipped where the folder is absent. Every case also has a test beside the module it concerns, which makes its own
input, so that a public clone notices the same faults.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from retriever.corpus.passages import load_corpus
from retriever.corpus.prepare import prepare_corpus
from retriever.errors import RetrieverError
from retriever.indexing.builder import build_index
from retriever.indexing.options import BuildOptions
from retriever.search.opening import IndexOptions, open_index

# ---- models: tokenizers, chat templates, shapes of checkpoints ----


# ---- lora: adapters of PEFT and verl ----


# ---- rows: layouts of question files ----


# ---- retriever: queries without a hit, indexes with their own ids ----


@pytest.mark.parametrize("name", ["hashed", "bm25"])
def test_queries_match_their_passage_or_nothing(shared, tmp_path, name):
    pytest.importorskip("faiss")
    cases = [("en", "who noticed the mould?", "Penicillin"), ("zh_raw", "北京大学在哪个区？", "北京大学")]
    for file, query, title in cases:
        source = shared / f"cases/retriever/{file}.jsonl"
        prepare_corpus([str(source)], tmp_path / f"{file}.jsonl", progress=False)
        corpus = load_corpus(tmp_path / f"{file}.jsonl")
        build_index(corpus, tmp_path / file, BuildOptions(name), progress=False)
        (hit, *_), *others = open_index(tmp_path / file, corpus).search([query, "zzzz", "", "!!!"], 3)
        assert hit[0]["contents"].startswith(f'"{title}"') and hit[1] > 0
        assert others == [[]] * 3


def test_index_with_ids_from_one_is_refused(shared, monkeypatch):
    pytest.importorskip("faiss")
    folder = shared / "cases/retriever"
    encoder = SimpleNamespace(name="e5", model="m", dimension=384)
    monkeypatch.setattr("retriever.search.opening.make_encoder", lambda *_: encoder)
    with pytest.raises(RetrieverError, match="its ids are not the row numbers 0 … 4 of the corpus .*id 5"):
        open_index(folder / "idmap_from_one.index", load_corpus(folder / "en.jsonl"), IndexOptions("e5"))


# ---- metrics: names with a slash ----


# ---- versions: bounds of dependencies ----
