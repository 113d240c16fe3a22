"""Which questions an index can answer: the measures, the files, and the doctor's line."""

import asyncio
import json
from pathlib import Path

import pytest
from config_rig import changed
from disk_rig import refuses_full_disk
from rows_rig import write_rows
from shelf_rig import BY_ID, row, shelf_service, write_corpus

from calibadv_jax.config import Config
from calibadv_jax.contrib.commands import coverage
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.questions import load_questions, parse_question

QUESTIONS = [
    row("hop", "Where was the writer of Silent Garden born?", ["Oslo"], ["p0", "p1"], "two"),
    row("one", "In which city was Bo Dorn born?", ["Lima"], ["p3"], "one"),
    row("gone", "Who composed the anthem?", ["Zed"], ["p99"], "one"),
    row("yes", "Is Cy Emm a painter?", ["yes"], ["p4"], "one"),
    row("bare", "In which country is Oslo a city?", ["Norway"], [], "one"),
]


@pytest.fixture
def config(tmp_path):
    write_rows(tmp_path / "questions.jsonl", *QUESTIONS)
    write_corpus(tmp_path / "corpus.jsonl")
    return changed(
        run={"dir": str(tmp_path / "run")},
        data={"train": str(tmp_path / "questions.jsonl")},
        retriever={"corpus": str(tmp_path / "corpus.jsonl"), "topk": 1, "patience": 2.0},
    )


def run(config):
    with shelf_service() as url:
        coverage.run(changed(config, retriever={"url": url}))
    return json.loads((Path(config.run.dir) / "coverage" / "coverage.json").read_text())


def test_full_disk_is_refused(config, small_disk, capsys):
    config = changed(config, run={"dir": str(small_disk)})
    assert refuses_full_disk(small_disk, "coverage/train.jsonl", lambda: run(config), capsys)


def test_shares_by_data_source(config, capsys):
    report = run(config)
    # The question finds the first passage only, which does not name the city.
    measures = {"answer": 0.0, "passage": 1.0, "all_passages": 0.0, "answer_by_any": 1.0, "all_by_any": 1.0}
    assert report["train"]["two"] == {"questions": 1, **measures, "answerable": 1.0}
    shares = {name: report["train"]["one"][name] for name in ("questions", "answer", "passage", "answerable")}
    # Yes occurs by chance, and does not count; a question may name no passage.
    assert shares == pytest.approx({"questions": 4, "answer": 2 / 3, "passage": 2 / 3, "answerable": 3 / 4})
    assert report["train"]["all"]["questions"] == 5
    assert "answerable" in capsys.readouterr().out
    kept = load_questions(Path(config.run.dir) / "coverage" / "train.jsonl")
    assert [question.id for question in kept] == ["hop", "one", "yes", "bare"]
    assert kept[0].supporting_ids == ("p0", "p1")
    with pytest.raises(UserError, match="set data.train, data.eval or both"):
        run(changed(config, data={"train": ""}))


def test_more_documents_or_queries_cover_more(config):
    """Without a corpus the question is the only query; reranked documents count."""
    assert run(changed(config, retriever={"topk": 3}))["train"]["two"]["all_passages"] == 1.0
    blind = run(changed(config, retriever={"corpus": ""}))["train"]["two"]
    assert (blind["passage"], blind["all_by_any"]) == (1.0, 0.0)
    reranked = {"url": "http://h", "rerank_topk": 7, "retrieval_topk": 9}
    assert coverage.depth(changed(config, retriever=reranked)) == 7


def test_first_query_counts_among_any_query():
    """The question finds one passage and the answer, a title the other passage."""
    question = parse_question(row("1", "Who?", ["Oslo"], ["p1", "p2"]), "a row")
    first, others = [BY_ID["p1"]], [BY_ID["p2"]]
    covered = {"answer": True, "passage": True, "all_passages": False}
    covered |= {"answer_by_any": True, "all_by_any": True, "answerable": True}

    def find_by_query(config, url, questions, look, show):
        async def search(query):
            return first if query == question.text else others

        return [asyncio.run(look(item, search)) for item in questions]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "look_up_each", find_by_query)
        assert coverage.measure(Config(), "", [question], BY_ID) == [covered]
