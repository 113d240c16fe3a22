"""Prompts of an evaluation that are too long: refused, left out, or RAG's, whose passages are cut."""

from __future__ import annotations

import json

import pytest
from evaluation_rig import QUESTIONS, Rig, Scripted, Shelf

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.evaluation.methods import METHODS


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Rig(tmp_path, monkeypatch)


LONG = Question("long", "why " * 40, ("yes",), "a")


def test_a_prompt_that_is_too_long_is_refused_before_anything_is_asked(run):
    run.questions = {"eval.jsonl": [*QUESTIONS, LONG]}
    sampler = Scripted()
    words = r"data.eval: the prompts of 1 of 9 questions are longer than .*=100, .* 171 tokens \(.*'long'\)"
    with pytest.raises(UserError, match=words):
        run(sampler, rollout={"max_prompt_length": 100})
    assert sampler.asked == sampler.loaded == []


def test_prompts_that_are_too_long_are_left_out_and_told(run, capsys):
    run.questions = {"eval.jsonl": [LONG, *QUESTIONS]}
    keys = {"rollout": {"max_prompt_length": 100}, "data": {"overlong_prompts": "leave_out"}}
    report, _ = run(**keys)
    assert report.means["0"]["all"]["questions"] == 8
    found = json.loads(run.file(".json").read_text())["overlong_prompts"]
    assert found.startswith("data.eval: the prompts of 1 of 9 questions") and found.endswith("are left out")
    assert found in " ".join(capsys.readouterr().err.split())
    assert run(**keys)[1].asked == []
    means, _ = run.validate(**keys)
    assert means["0"]["all"]["questions"] == 8


def test_passages_lose_their_end_where_the_prompt_would_be_too_long(run):
    """Two passages of a million letters, and room for 300 and the question."""
    run.shelf = Shelf()
    run.shelf.documents = [Document("1", "first", "word " * 200_000), Document("2", "second", "x")]
    config = {"max_prompt_length": 200, "max_observation_length": 400, "max_length": 4000}
    _, sampler = run(Scripted(searches=False), evaluate={"method": "rag"}, rollout=config)
    assert {len(prompt) for prompt in sampler.prompts} == {600}
    assert all('Passage 1: "first" word word' in prompt for prompt in sampler.prompts)
    assert not any("second" in prompt for prompt in sampler.prompts)
    assert [prompt.strip()[-3:] for prompt in sampler.prompts] == [one.text for one in QUESTIONS]


def test_a_question_that_leaves_no_room_for_passages_is_asked_without(run):
    bare = len(METHODS["rag"].template.format(question="Question: a 0"))
    config = {"max_prompt_length": bare - 10, "max_observation_length": 15, "max_length": 4000}
    _, sampler = run(Scripted(searches=False), evaluate={"method": "rag"}, rollout=config)
    assert {len(prompt) for prompt in sampler.prompts} == {bare + 5}
    config |= {"max_observation_length": 10}
    run.file(".jsonl").unlink()
    _, sampler = run(Scripted(searches=False), evaluate={"method": "rag"}, rollout=config)
    assert {len(prompt) for prompt in sampler.prompts} == {bare}
