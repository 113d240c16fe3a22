"""Evaluations for the trajectory page: which files, in which order, and what of them."""

import json

import pytest

from calibadv_jax.config.kept import add_start
from calibadv_jax.contrib.pages.evaluations import Evaluations, evaluation_files, outcome
from calibadv_jax.contrib.pages.site import Site
from calibadv_jax.core.errors import UserError


def test_files_stand_in_the_order_of_the_training(tmp_path):
    for name in ("evaluation_after", "evaluation", "evaluation_step_50", "evaluation_before", "other"):
        (tmp_path / f"{name}.jsonl").write_text("")
    assert list(evaluation_files(tmp_path)) == ["before", "evaluation", "step_50", "after"]


def test_index_lists_every_question_of_every_file_without_transcripts(evaluated_run):
    index = Evaluations(evaluated_run).index()
    assert index["names"] == ["before", "after"]
    outcomes = [
        [result and result["outcome"] for result in question["results"]] for question in index["questions"]
    ]
    assert outcomes == [["wrong", "right"], ["wrong", None], ["right", "wrong"], [None, "wrong"]]
    question = index["questions"][2]
    assert (question["id"], question["source"], question["temperature"]) == ("q2", "two_hop", "0")
    assert question["results"][1] == {"outcome": "wrong", "f1": 0.0, "searches": 1.0, "answer": "bob"}
    assert "observation" not in json.dumps(index)


def test_question_has_its_transcripts(evaluated_run):
    evaluations = Evaluations(evaluated_run)
    question = evaluations.question(2)
    assert question["names"] == ["before", "after"]
    turns = question["answers"][0]["trajectories"][0]["turns"]
    assert [turn["kind"] for turn in turns] == ["search", "answer"]
    assert [part["document"] for part in turns[0]["observation"]] == [None, 0, 1, None]
    assert question["answers"][1]["trajectories"][0]["answer"] == "bob"
    assert evaluations.question(1)["answers"][1] is None
    assert evaluations.question(4) is None


def test_evaluation_under_way_is_read_again(evaluated_run):
    """Also with a last line that is not whole yet."""
    evaluations = Evaluations(evaluated_run)
    assert len(evaluations.index()["questions"]) == 4
    after = evaluated_run / "evaluation_after.jsonl"
    whole = after.read_text()
    first, _, rest = whole.partition("\n")
    after.write_text(f"{first}\n{rest[:30]}")
    assert len(evaluations.index()["questions"]) == 3
    after.write_text(whole)
    assert len(evaluations.index()["questions"]) == 4


def test_damaged_evaluation_is_named(evaluated_run):
    (evaluated_run / "evaluation_after.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="evaluation_after.jsonl:1: no temperature"):
        Evaluations(evaluated_run).index()


@pytest.mark.parametrize(
    ("scores", "expected"),
    [({}, "failed"), ({"em": 1.0}, "right"), ({"em": 0.25, "f1": 0.5}, "partly"), ({"f1": 0.0}, "wrong")],
)
def test_outcome_of_a_question(scores, expected):
    assert outcome(scores) == expected


def test_site_serves_evaluations_also_without_kept_steps(evaluated_run, tmp_path):
    site = Site(evaluated_run)
    assert json.loads(site.get("data/index.json"))["evaluations"] == ["before", "after"]
    assert len(json.loads(site.get("data/evaluations.json"))["questions"]) == 4
    assert json.loads(site.get("data/question_0.json"))["id"] == "q0"
    assert site.get("data/question_9.json") is None
    alone = tmp_path / "alone"
    alone.mkdir()
    (evaluated_run / "evaluation_after.jsonl").rename(alone / "evaluation_after.jsonl")
    add_start(alone, "log: {rollouts: none}\n", {})
    index = json.loads(Site(alone).get("data/index.json"))
    assert (index["steps"], index["evaluations"]) == ([], ["after"])


def test_new_evaluation_changes_the_tag_of_the_index(evaluated_run):
    site = Site(evaluated_run)
    before = site.index_tag()
    (evaluated_run / "evaluation_step_50.jsonl").write_text("")
    assert site.index_tag() != before
