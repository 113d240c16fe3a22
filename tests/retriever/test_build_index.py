"""``python -m retriever.build_index``."""

import pytest

pytest.importorskip("faiss")

from retriever.build_index import main
from retriever.corpus.passages import load_corpus
from retriever.search.opening import open_index


def test_it_builds_what_the_options_say(tmp_path, files, capsys):
    arguments = ["--corpus_path", str(files[0]), "--index_path", str(tmp_path / "i"), "--kind", "jax"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"16 passages indexed in {tmp_path / 'i'}\n"
    assert open_index(tmp_path / "i", load_corpus(files[0])).manifest["kind"] == "jax"
    assert main(["--corpus_path", str(tmp_path / "no"), "--index_path", str(tmp_path / "i")]) == 2
    assert "error: " in capsys.readouterr().err
