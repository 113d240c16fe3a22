"""A trajectory as a line of JSON."""

import json

from loop_fakes import DOCUMENT

from calibadv_jax.rollout.record import trajectory_to_json, write_rollouts
from calibadv_jax.trajectory import Group

SEARCH = "<think> a </think><search> ann </search>"
ANSWER = "<think> b </think><answer> Ann </answer>"


def test_a_trajectory_survives_json_with_all_a_reader_needs(loop):
    trajectory = loop(SEARCH, ANSWER, index=3)
    assert trajectory.seconds > 0
    trajectory.seconds = 1.23456
    trajectory.answer_score, trajectory.format_valid, trajectory.metrics = 0.5, True, {"f1": 0.5}
    row = json.loads(json.dumps(trajectory_to_json(trajectory)))
    search, answer = row.pop("turns")
    assert row == {
        "question": "Who?",
        "question_id": "q7",
        "data_source": "test",
        "golden_answers": ["Ann"],
        "index": 3,
        "error": None,
        "answer": "Ann",
        "answer_score": 0.5,
        "format_valid": True,
        "metrics": {"f1": 0.5},
        "policy_versions": [3, 4],
        "num_prompt_tokens": 15,
        "seconds": 1.235,
    }
    assert search == {
        "kind": "search",
        "text": SEARCH,
        "stop_reason": "stop",
        "query": "ann",
        "num_tokens": len(SEARCH),
        "documents": [{"id": "d1", "title": DOCUMENT.title, "text": DOCUMENT.text}],
        "observation": trajectory.turns[0].observation_text,
        "num_observation_tokens": len(trajectory.turns[0].observation_ids),
    }
    assert (answer["kind"], answer["text"], answer["documents"], answer["observation"]) == (
        "answer",
        ANSWER,
        [],
        "",
    )


def test_a_trajectory_that_failed_is_kept_with_its_error(loop, tmp_path):
    trajectory = loop(SEARCH, ANSWER)
    trajectory.error = "retriever: gone"
    write_rollouts(tmp_path / "rollouts/step_1.jsonl", [Group(trajectory.question, [trajectory])])
    row = json.loads((tmp_path / "rollouts/step_1.jsonl").read_text())
    assert row["error"] == "retriever: gone" and len(row["turns"]) == 2
