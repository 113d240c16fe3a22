"""A run's teacher: the tokens that it scores, its prompt, its vocabulary, and runs that it guides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trainer_rig
from config_rig import changed
from tiny_policy import Letters, row_logits, single_device, tiny
from trainer_rig import HF_CONFIG, QUESTIONS, ScriptedRollouts, make_config, make_state, resumed, rows, run

from calibadv_jax.config import LoraConfig
from calibadv_jax.contrib.cli.replay import kept_config, replay
from calibadv_jax.contrib.teacher import (
    Teacher,
    TeacherPrompts,
    check_teacher,
    describe_teacher,
    teacher_model,
)
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.rollout_store.reader import find_step, read_step
from calibadv_jax.run.model import Model
from calibadv_jax.run.state import RunState
from calibadv_jax.snapshots.huggingface import save_folder

pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("shared_programs")]

WORDS = build_word_tokenizer()
# The policy and a larger teacher of the same words.
STUDENT = HF_CONFIG | {"vocab_size": len(WORDS), "eos_token_id": 1, "max_position_embeddings": 512}
LARGER = STUDENT | {"hidden_size": 16, "num_hidden_layers": 2}
MODEL = Model(tiny(STUDENT), STUDENT, WORDS, Path("none"), single_device())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A HuggingFace folder of the larger policy, with the words' tokenizer."""
    return save_teacher(tmp_path_factory.mktemp("teacher"), WORDS)


def save_teacher(place, tokenizer, hf_config=LARGER):
    tokenizer.save_pretrained(place / "tokenizer")
    params = jax.jit(tiny(hf_config).init)(jax.random.key(7))
    # Large enough that the teacher's probabilities lie well apart.
    params = jax.tree.map(lambda leaf: 3 * leaf, params)
    return save_folder(params, hf_config, place / "hf", "float32", place / "tokenizer")


def config_of(place, teacher, **sections):
    policy = {"compute_dtype": "float32"} | sections.pop("policy", {})
    optimizer = replace(make_config(place).learner.optimizer, lr=0.01)
    learner = {"steps": 4, "optimizer": optimizer}
    return make_config(place, policy=policy, learner=learner, teacher=teacher, **sections)


def words_config(place, teacher, **sections):
    """A config whose prompts are short, for the tokenizer of words."""
    return config_of(place, teacher, prompt={"template": "{question}"}, **sections)


# --- What is scored ---


def make_group(prompt):
    """A right trajectory and two wrong ones, with an observation in their middle; one says nothing."""
    rng = np.random.default_rng(3)
    question = Question("q", "who is Ann", ("Bo", "Cy"), "toy", ("p1",))

    def turn(sampled, observed):
        ids = rng.integers(3, len(WORDS), sampled).astype(np.int32)
        observation = rng.integers(3, len(WORDS), observed).astype(np.int32)
        return Turn("search", ids, np.zeros(sampled, np.float32), observation_ids=observation)

    trajectories = [
        Trajectory(question, prompt, [turn(3, 2), turn(2, 0)], 0, answer_score=1.0),
        Trajectory(question, prompt, [turn(1, 4), turn(4, 1), turn(1, 0)], 1),
        Trajectory(question, prompt, [turn(0, 0)], 2),
    ]
    return Group(question, trajectories)


def alone(policy, params, prompt, response):
    """Log-probabilities of a response behind a prompt, [T], from one sequence by itself."""
    tokens = jnp.asarray([[*prompt, *response]], jnp.int32)
    table = np.asarray(jax.nn.log_softmax(row_logits(policy, params, tokens)[0].astype(jnp.float32)))
    start = len(prompt)
    return np.array([table[start + place - 1, token] for place, token in enumerate(response)])


@pytest.mark.parametrize("hint", ["", " it is {answer}"])
@pytest.mark.parametrize("shares", [False, True])
def test_scores_are_those_of_the_teacher_alone(folder, tmp_path, hint, shares):
    """Behind the policy's prompt, and behind a longer one for which rows must be wider."""
    config = words_config(tmp_path, {"policy": str(folder), "hint": hint})
    config = changed(config, learner={"share_prefixes": shares, "pack_length": 16})
    prompt = np.asarray(WORDS.encode("who is Ann", add_special_tokens=False), np.int32)
    group = make_group(prompt)
    teacher = Teacher(config, MODEL, [group.question])
    (scored,), metrics = teacher.with_logprobs(None, None, [group])
    teachers_prompt = prompt
    if hint:
        teachers_prompt = WORDS.encode("who is Ann it is Bo", add_special_tokens=False)
        assert len(teachers_prompt) == len(prompt) + 3
    larger = tiny(LARGER)
    for trajectory in scored.trajectories[:2]:
        expected = alone(larger, teacher.params, teachers_prompt, trajectory.response_ids.tolist())
        start = 0
        for turn in trajectory.turns:
            end = start + len(turn.token_ids)
            assert turn.teacher_logprobs.shape == turn.token_ids.shape
            np.testing.assert_allclose(turn.teacher_logprobs, expected[start:end], atol=1e-4)
            start = end + len(turn.observation_ids)
    assert scored.trajectories[2].turns[0].teacher_logprobs is None
    lengths = [len(trajectory.response_ids) for trajectory in group.trajectories[:2]]
    assert metrics["teacher/tokens"] == sum(lengths) + 2 * len(teachers_prompt)
    assert metrics["teacher/trajectory_share"] == pytest.approx(2 / 3)


def test_failed_trajectories_alone_are_scored(folder, tmp_path):
    config = words_config(tmp_path, {"policy": str(folder), "guides": "failed"})
    group = make_group(np.arange(3, 6, dtype=np.int32))
    (scored,), metrics = Teacher(config, MODEL, []).with_logprobs(None, None, [group])
    has_scores = [trajectory.turns[0].teacher_logprobs is not None for trajectory in scored.trajectories]
    assert has_scores == [False, True, False]
    assert metrics["teacher/trajectory_share"] == pytest.approx(1 / 3)
    right = replace(group, trajectories=group.trajectories[:1])
    _, metrics = Teacher(config, MODEL, []).with_logprobs(None, None, [right])
    assert metrics == {"teacher/tokens": 0.0, "teacher/trajectory_share": 0.0}


def test_tokens_beyond_the_teachers_embeddings_are_left_out(folder, tmp_path):
    """A policy with more rows in its embedding than tokens may sample an id that the teacher lacks."""
    config = words_config(tmp_path, {"policy": str(folder)})
    group = make_group(np.arange(3, 6, dtype=np.int32))
    group.trajectories[1].turns[1].token_ids[0] = len(WORDS)
    (scored,), _ = Teacher(config, MODEL, []).with_logprobs(None, None, [group])
    assert scored.trajectories[1].turns[0].teacher_logprobs is None
    assert scored.trajectories[0].turns[0].teacher_logprobs is not None


# --- The prompt ---


def prompts_of(tmp_path, hint, questions, corpus=(), **prompt):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in corpus))
    config = changed(
        make_config(tmp_path),
        teacher={"policy": "initial", "hint": hint},
        retriever={"corpus": str(path)},
        prompt={"template": "Question: {question}\n"} | prompt,
    )
    return TeacherPrompts(config, Letters(), questions)


def read(prompts, question):
    plain = Trajectory(question, np.array([ord("?")], np.int32))
    return "".join(map(chr, prompts.prompt_ids(plain)))


CORPUS = [{"id": 1, "contents": '"Ann (novel)"\nA text.'}, {"id": "2", "title": "Bo", "text": "T."}]


def test_hint_stands_behind_the_question(tmp_path):
    question = Question("q", "Who?", ("Ann", "Bo"), "toy", ("2", "1", "lost"))
    other = Question("r", "Where?", ("Cy",), "toy")
    prompts = prompts_of(tmp_path, " Hint: {answer}, see {titles}.", [question, other], CORPUS)
    assert read(prompts, question) == "Question: Who? Hint: Ann, see Bo; Ann (novel).\n"
    assert read(prompts, other) == "?"  # without passages: the policy's own prompt
    marked = prompts_of(tmp_path, " ({answer})", [question], question_mark=True)
    assert read(marked, replace(question, text="Who")) == "Question: Who? (Ann)\n"
    assert read(prompts_of(tmp_path, "", []), question) == "?"


def test_answers_and_titles_forge_nothing(tmp_path):
    """Neither tags nor places: they are untrusted."""
    question = Question("q", "Who?", ("{titles}<answer>x</answer>",), "toy", ("2",))
    prompts = prompts_of(tmp_path, " {answer} {titles}", [question], CORPUS)
    text = read(prompts, question)
    assert "{titles}" in text and text.endswith(" Bo\n") and "<answer>" not in text


def test_titles_that_no_passage_has_are_refused(tmp_path):
    question = Question("q", "Who?", ("Ann",), "toy", ("lost",))
    with pytest.raises(UserError, match=r"names \{titles\}, but no question .* holds: leave \{titles\} out"):
        prompts_of(tmp_path, "{titles}", [question], CORPUS)


# --- The vocabulary ---


def test_other_vocabulary_is_refused(folder, tmp_path):
    config = words_config(tmp_path, {"policy": str(folder)})
    assert teacher_model(config, MODEL).policy.architecture.num_layers == 2
    words = build_word_tokenizer(ages=True)
    other = save_teacher(tmp_path, words, LARGER | {"vocab_size": len(words)})
    config = changed(config, teacher={"policy": str(other)})
    with pytest.raises(UserError, match=r"hf: its vocabulary differs .* in \d+ tokens, such as .* tokenizer"):
        check_teacher(config, MODEL)
    config = changed(config, teacher={"policy": str(tmp_path / "lost")})
    with pytest.raises(UserError, match=r"teacher.policy=.*lost"):
        check_teacher(config, MODEL)


def test_damaged_weights_are_refused_at_the_start(folder, tmp_path):
    other = save_teacher(tmp_path, WORDS)
    hf_config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(hf_config | {"num_hidden_layers": 3}))
    config = words_config(tmp_path, {"policy": str(other)})
    with pytest.raises(UserError, match="layers"):
        check_teacher(config, MODEL)
    config = words_config(tmp_path, {"policy": str(folder)})
    assert check_teacher(config, MODEL) == MODEL


# --- Runs ---


def final(rollouts):
    return rollouts.loaded[-1][1]


@pytest.mark.parametrize(
    "teacher",
    [
        {"policy": "initial", "acts_on": "loss"},
        {"policy": "initial", "reward_weight": 0.5, "coef_steps": 8},
        {"policy": "current", "hint": "{answer}", "guides": "failed"},
    ],
    ids=str,
)
def test_run_with_an_own_teacher_resumes_bit_for_bit(tmp_path, teacher):
    sections = {"prompt": {"template": "{question}"}}
    whole = config_of(tmp_path / "whole", teacher, **sections)
    expected = run(whole, ScriptedRollouts(), tmp_path / "whole")
    parts = config_of(tmp_path / "parts", teacher, **sections)
    second = resumed(parts, tmp_path / "parts", 3 * 2 + 1)
    np.testing.assert_equal(final(second), final(expected))
    written = rows(tmp_path / "whole")
    assert rows(tmp_path / "parts") == written
    coefs = [row["teacher/coef"] for row in written]
    assert coefs == ([1.0, 0.875, 0.75, 0.625] if teacher.get("coef_steps") else [1.0] * 4)
    share = 2 / 3 if teacher.get("guides") else 1.0
    assert all(row["teacher/trajectory_share"] == pytest.approx(share) for row in written)
    # The policy itself teaches nothing in the first step, but the hint does.
    is_hinted = "hint" in teacher
    assert bool(abs(written[0]["teacher/kl"]) > 1e-4) == is_hinted
    assert all(abs(row["teacher/kl"]) > 1e-5 for row in written[1:])


def test_run_with_a_folder_as_teacher_resumes_and_learns_it(folder, tmp_path, monkeypatch):
    """From the teacher alone: the divergence to it falls. Its weights are loaded anew by the second start."""
    monkeypatch.setattr(trainer_rig, "MODEL", MODEL)
    teacher = {"policy": str(folder), "reward_weight": 0.0}
    whole = config_of(tmp_path / "whole", teacher)
    expected = run(whole, ScriptedRollouts(), tmp_path / "whole")
    second = resumed(config_of(tmp_path / "parts", teacher), tmp_path / "parts", 3 * 2 + 1)
    np.testing.assert_equal(final(second), final(expected))
    before, after = (at_step(config_of, tmp_path, teacher, expected, version) for version in (0, 4))
    assert after < before


def at_step(config_of, tmp_path, teacher, rollouts, version):
    """Mean squared difference to the teacher under the policy of a step, on fixed tokens."""
    config = config_of(tmp_path / "probe", teacher)
    group = trainer_rig.write_group(0, QUESTIONS[0])
    (scored,), _ = Teacher(config, MODEL, []).with_logprobs(None, None, [group])
    params = dict(rollouts.loaded)[version]
    gaps = []
    for trajectory in scored.trajectories:
        own = alone(MODEL.policy, params, trajectory.prompt_ids.tolist(), trajectory.response_ids.tolist())
        taught = np.concatenate([turn.teacher_logprobs for turn in trajectory.turns])
        gaps.append(own[trajectory.mask] - taught)
    return float(np.mean(np.concatenate(gaps) ** 2))


def test_base_without_adapters_is_the_initial_teacher(tmp_path, monkeypatch):
    lora = LoraConfig(rank=2, alpha=4.0, targets=["q", "down"], base_dtype="float32")
    adapted = tiny(HF_CONFIG, Adapters.from_config(lora))
    monkeypatch.setattr(trainer_rig, "MODEL", replace(trainer_rig.MODEL, policy=adapted))
    config = config_of(tmp_path, {"policy": "initial"}, policy={"lora": lora})
    state = make_state(config, tmp_path)
    assert state.trainer.reference == {}
    rollouts = run(config, ScriptedRollouts(), tmp_path)
    kl = [row["teacher/kl"] for row in rows(tmp_path)]
    assert kl[0] == pytest.approx(0, abs=1e-5) and all(abs(value) > 1e-6 for value in kl[1:])
    assert rollouts.loaded


def test_teacher_is_recorded_and_replayed(tmp_path):
    teacher = {"policy": "current", "hint": "{answer}", "acts_on": "loss"}
    learner = {"steps": 1, "minibatch_size": 4}  # at the default rate, which moves the policy little
    config = make_config(tmp_path, prompt={"template": "{question}"}, learner=learner, teacher=teacher)
    run(config, ScriptedRollouts(), tmp_path)
    kept = read_step(find_step(tmp_path, 1))
    for group in kept.groups:
        for trajectory in group.trajectories:
            assert all(len(turn.teacher_logprobs) == len(turn.token_ids) for turn in trajectory.turns)
    row = rows(tmp_path)[0]
    metrics = replay(kept, kept_config(kept, Path("step"))).metrics
    for name in ("teacher/kl", "teacher/loss", "teacher/guided_share"):
        assert metrics[name] == pytest.approx(row[name], rel=1e-3), name


def test_without_weight_the_teacher_is_not_asked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_rig, "MODEL", MODEL)

    def refuse(*arguments):
        raise AssertionError("asked")

    config = config_of(tmp_path, {"policy": str(folder), "coef": 0.0})
    monkeypatch.setattr(Teacher, "with_logprobs", refuse)
    run(config, ScriptedRollouts(), tmp_path)
    assert [row["teacher/coef"] for row in rows(tmp_path)] == [0.0] * 4


def test_run_without_teacher_loads_none(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("loaded")

    monkeypatch.setattr(Teacher, "__init__", refuse)
    state = make_state(config_of(tmp_path, {}), tmp_path)
    assert isinstance(state, RunState) and state.trainer.teacher is None and state.trainer.reference is None
    assert describe_teacher(state.config) == []


def test_description_names_teacher_and_weights(tmp_path):
    teacher = {"policy": "initial", "coef_steps": 5, "guides": "failed", "failed_below": 0.5}
    (line,) = describe_teacher(config_of(tmp_path, teacher))
    assert "teacher initial: reads the policy's prompt" in line and "a score below 0.5" in line
    assert "weight 1 to 0 in 5 steps" in line
