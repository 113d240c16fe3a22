"""scripts/prepare_hotpotqa.py: HotpotQA of the hub as questions that name their passages."""

import io
import re

import pyarrow as pa
import pyarrow.parquet as pq
from hub_rig import running_hub, serve_hub, use_hub  # noqa: F401

from calibadv_jax.contrib.support_search import read_passages
from calibadv_jax.data.questions import load_questions
from scripts import prepare_hotpotqa


def hotpot(name, facts, context):
    supporting = {"title": facts, "sent_id": [0] * len(facts)}
    passages = {"title": list(context), "sentences": list(context.values())}
    question = {"id": name, "question": f"Who {name}?", "answer": "Ada", "type": "bridge"}
    return question | {"supporting_facts": supporting, "context": passages}


def parquet(*rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue()


def test_questions_name_their_unique_paragraphs(hub, tmp_path, capsys):
    ada, bo = {"Ada": ["Ada is. ", " She was."]}, {"Bo": ["Bo is."]}
    files = {
        "distractor/train-00000-of-00002.parquet": parquet(
            hotpot("a", ["Ada", "Bo", "Ada"], ada | bo), hotpot("b", ["Bo"], bo | {"Cy": ["Cy is."]})
        ),
        "distractor/train-00001-of-00002.parquet": b"not taken",
        "distractor/validation-00000-of-00001.parquet": parquet(
            hotpot("c", ["Cy"], {"Cy": ["Cy is."]}), hotpot("d", ["Di"], {"Di": ["Di is."]})
        ),
    }
    hub.add("datasets/hotpotqa/hotpot_qa", **{name.replace("/", "__"): data for name, data in files.items()})
    assert prepare_hotpotqa.main(["--output", str(tmp_path / "data"), "--test", "1"]) == 0
    assert capsys.readouterr().out.endswith("1 test questions, 2 train questions, 3 passages\n")
    first, second = load_questions(tmp_path / "data" / "train.jsonl")
    (tested,) = load_questions(tmp_path / "data" / "test.jsonl")
    named = {*first.supporting_ids, *second.supporting_ids, *tested.supporting_ids}
    passages = read_passages(tmp_path / "data" / "corpus.jsonl", named)
    assert [passages[name].title for name in first.supporting_ids] == ["Ada", "Bo"]
    assert passages[first.supporting_ids[0]].text == "Ada is. She was."
    assert [passages[name].title for name in tested.supporting_ids] == ["Cy"]
    assert first.supporting_ids[1] == second.supporting_ids[0]
    assert (first.golden_answers, first.data_source) == (("Ada",), "hotpotqa")


def test_missing_hub_leaves_no_file(tmp_path, monkeypatch, capsys):
    with serve_hub() as gone:
        pass
    use_hub(monkeypatch, gone, tmp_path / "cache")
    assert prepare_hotpotqa.main(["--output", str(tmp_path / "data")]) == 2
    assert re.fullmatch(r"error: hotpotqa/hotpot_qa \(dataset on.*\n", capsys.readouterr().err)
    assert not list((tmp_path / "data").glob("*.jsonl"))
