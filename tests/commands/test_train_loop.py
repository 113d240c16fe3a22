"""The training loop: its rows, what it leaves behind however it ends, the order of a start, its questions."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from orbax.checkpoint.checkpoint_manager import CheckpointManager
from tiny_policy import Letters
from trainer_rig import MODEL, QUESTIONS, ScriptedRollouts, checkpoints, make_config, make_state, rows

from calibadv_jax.commands import evaluate, train
from calibadv_jax.contrib.cli import doctor
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.signals import Stop
from calibadv_jax.core.trajectory import Message, Question
from calibadv_jax.data.questions import load_questions, write_questions
from calibadv_jax.distributed.process_group import ProcessGroup
from calibadv_jax.metrics import trackers
from calibadv_jax.metrics.console import Console
from calibadv_jax.metrics.metrics_writer import MetricsWriter
from calibadv_jax.rollout_store.schema import kept_steps
from calibadv_jax.rollout_store.writer import RolloutWriter
from calibadv_jax.run import trainer as trainer_module
from calibadv_jax.run.state import RunState
from calibadv_jax.run.wiring import check_inputs

pytestmark = pytest.mark.usefixtures("shared_programs")


class Broken(Exception):
    """Something in the middle of a step."""


def run(config, folder, rollouts=None, progress=False):
    with Stop() as stop, make_state(config, folder, rollouts, Console(progress)) as state:
        train.train(state, stop)
    return state


def left(folder):
    """Steps with a row, with trajectories, with a checkpoint."""
    return [row["step"] for row in rows(folder)], sorted(kept_steps(folder)), checkpoints(folder)


def broken(function, at, fault=None):
    """The function, which is broken, or calls `fault` first, when it is called the `at`-th time."""
    calls = count(1)

    def fail(*arguments):
        if next(calls) == at:
            if fault is None:
                raise Broken
            fault()
        return function(*arguments)

    return fail


@pytest.mark.parametrize(
    ("backend", "every", "steps"), [("wandb", 2, [2, 4]), ("wandb", 0, []), ("prometheus", 2, [])]
)
def test_trackers_with_tables_get_one_every_few_steps(tmp_path, monkeypatch, backend, every, steps):
    kept = []
    monkeypatch.setattr(trackers, "open_backends", lambda *_: [])
    monkeypatch.setattr(MetricsWriter, "write_table", lambda writer, step, *table: kept.append(step))
    run(make_config(tmp_path, log={"backends": [backend], "tables_every": every}), tmp_path)
    assert kept == steps


FAULTS = {  # what the second step, or the first of its successor, ends with
    "update": lambda patch: patch(trainer_module, "learn", broken(trainer_module.learn, 3)),
    "publication": lambda patch: patch(ScriptedRollouts, "load", broken(ScriptedRollouts.load, 3)),
    "evaluation": lambda patch: patch(evaluate, "validate", broken(evaluate.validate, 2)),
    "signal in the record": lambda patch: patch(
        RolloutWriter, "write", broken(RolloutWriter.write, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_interrupted_run_keeps_whole_steps_and_goes_on(tmp_path, monkeypatch, fault):
    monkeypatch.setattr(evaluate, "validate", lambda *_: {"0": {"all": {"f1": 0.5}}})
    config = make_config(tmp_path, evaluate={"every": 1}, checkpoint={"every": 0})
    with monkeypatch.context() as context, pytest.raises((Broken, SystemExit)) as ended:
        fault(context.setattr)
        run(config, tmp_path)
    assert ended.type is Broken or ended.value.code == 143
    assert left(tmp_path) == ([1, 2], [1, 2], [2])
    whole, cut = rows(tmp_path)
    assert whole.keys() - cut.keys() <= {name for name in whole if name.startswith("eval/")}
    again = run(config, tmp_path)
    assert [version for version, _ in again.rollouts.loaded] == [2, 3, 4]
    assert left(tmp_path) == ([1, 2, 3, 4], [1, 2, 3, 4], [2, 4])


@pytest.mark.medium
def test_failed_evaluation_is_left_to_the_next_due_step(tmp_path, monkeypatch):
    evaluated = []

    def validate(config, rollouts):
        evaluated.append(rollouts.loaded[-1][0])
        if len(evaluated) == 2:
            raise Broken
        return {"0": {"all": {"f1": 0.5}}}

    monkeypatch.setattr(evaluate, "validate", validate)
    config = make_config(tmp_path, evaluate={"every": 2}, checkpoint={"every": 0}, learner={"steps": 6})
    with pytest.raises(Broken):
        run(config, tmp_path)
    assert evaluated == [2, 4]
    assert left(tmp_path) == ([1, 2, 3, 4], [1, 2, 3, 4], [4])
    assert ["eval/all/f1/greedy" in row for row in rows(tmp_path)] == [False, True, False, False]
    run(config, tmp_path)
    assert evaluated == [2, 4, 6]


def test_run_without_publication_begins_nothing(tmp_path, monkeypatch):
    rollouts = ScriptedRollouts()
    monkeypatch.setattr(ScriptedRollouts, "load", broken(ScriptedRollouts.load, 1))
    with pytest.raises(Broken):
        run(make_config(tmp_path), tmp_path, rollouts)
    assert rollouts.begun == [] and rows(tmp_path) == []


@pytest.mark.medium
@pytest.mark.parametrize(("every", "saved"), [(0, [3]), (2, [2, 3]), (1, [2, 3]), (5, [3])])
def test_checkpoints_follow_every_and_last_step(tmp_path, every, saved):
    """Two are kept at most. A finished run trains nothing more."""
    config = make_config(tmp_path, learner={"steps": 3}, checkpoint={"every": every, "keep": 2})
    run(config, tmp_path)
    assert left(tmp_path)[2] == saved
    before, again = rows(tmp_path), run(config, tmp_path)
    assert [version for version, _ in again.rollouts.loaded] == [3] and again.rollouts.begun == []
    assert rows(tmp_path) == before and left(tmp_path)[2] == saved


@pytest.mark.parametrize("reason", ["donated", "out of step"])
def test_state_that_is_not_whole_is_not_saved(tmp_path, reason):
    """Its arrays were donated; or other processes are elsewhere, and a checkpoint is written by all."""
    state = make_state(make_config(tmp_path, learner={"steps": 3}, checkpoint={"every": 1}), tmp_path)
    with pytest.raises(Broken), state:
        state.save()
        state.checkpoints.wait()
        state.step = 1
        if reason == "donated":
            jax.tree.leaves(state.learner_state)[0].delete()
        else:
            state.process_group = ProcessGroup()
            state.process_group.can_save_together = False
        raise Broken
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]")) == ["0"]


@pytest.mark.parametrize("stopped_by", [Broken, None])
def test_failed_last_save_keeps_the_original_error(tmp_path, capsys, stopped_by):
    config = make_config(tmp_path)
    state = make_state(config, tmp_path, console=Console())

    def full():
        raise UserError("no room\nanywhere")

    state.save = full
    with pytest.raises(stopped_by or UserError), state:
        if stopped_by:
            raise stopped_by
    message = "step 0 could not be saved: no room anywhere" in capsys.readouterr().err
    assert message == bool(stopped_by)


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """`order`: which parts `calibadv train` makes, on the scripted `rollouts`; `folders` of these."""
    tokenizer, made = tmp_path / "tokenizer", SimpleNamespace(order=[], rollouts=None, folders=None)
    build_word_tokenizer().save_pretrained(tokenizer)
    model = replace(MODEL, tokenizer_folder=tokenizer)

    @contextmanager
    def opened(config, model, model_folder, snapshots, check, process_group):
        made.order.append("rollouts")
        made.folders = model_folder, snapshots
        try:
            yield made.rollouts
        finally:
            made.order.append("closed")

    monkeypatch.setattr(train, "build_model", lambda *_: made.order.append("model") or model)
    monkeypatch.setattr(train, "check_inputs", lambda *_: made.order.append("inputs"))
    monkeypatch.setattr(train, "open_rollouts", opened)
    return made


def test_start_checks_inputs_first_and_resumes(tmp_path, parts, monkeypatch, capsys):
    folder, parts.rollouts = tmp_path / "run", ScriptedRollouts(fails_at=4)
    compared: list[str] = []  # among processes
    monkeypatch.setattr(ProcessGroup, "assert_equal", lambda _, name, value: compared.append(name))
    fitting = {"rollout": {"max_prompt_length": 11}, "prompt": {"template": "{question}"}}
    config = make_config(folder, learner={"steps": 3}, **fitting)
    with pytest.raises(RuntimeError, match="the machine is gone"):
        train.run(replace(config, log=replace(config.log, progress=True)))
    assert parts.order == ["model", "inputs", "rollouts", "closed"]
    assert {"newest checkpoint in run.dir", "data.content", "policy.config"} <= set(compared)
    output = capsys.readouterr()
    assert "waiting for the retriever" in output.err and "soft penalty" in output.out
    assert (folder / "configs/0.yaml").is_file() and (folder / "policy/tokenizer.json").is_file()
    assert parts.folders == (folder / "policy", folder / "snapshots")
    parts.rollouts = ScriptedRollouts()
    train.run(config)
    assert [version for version, _ in parts.rollouts.loaded] == [2, 3]
    assert left(folder)[0] == [1, 2, 3]
    assert (folder / "configs/1.yaml").is_file()
    before = (folder / "metrics.jsonl").read_text()
    parts.order.clear()
    with pytest.raises(UserError, match="run.seed"):
        train.run(replace(config, run=replace(config.run, seed=5)))
    assert parts.order == ["model", "inputs"] and (folder / "metrics.jsonl").read_text() == before
    write_questions(folder / "train.jsonl", QUESTIONS[:-1])
    with pytest.raises(UserError, match="data.content|data.train"):
        train.run(config)


@pytest.mark.parametrize(
    ("sampler", "services"),
    [
        ({}, "the retriever"),
        ({"name": "vllm"}, "the retriever and vLLM workers (vllm_worker_*.log)"),
    ],
)
def test_start_says_what_it_waits_for(tmp_path, parts, capsys, sampler, services):
    parts.rollouts = ScriptedRollouts(fails_at=0)
    config = make_config(
        tmp_path / "run",
        sampler=sampler,
        rollout={"max_prompt_length": 11},
        prompt={"template": "{question}"},
        log={"backends": [], "progress": True},
    )
    with pytest.raises(RuntimeError, match="the machine is gone"):
        train.run(config)
    lines = capsys.readouterr().err.splitlines()
    begun = lines.index("7 questions; loading the policy")
    assert lines[begun + 1 : begun + 3] == [f"waiting for {services}", "loading the parameters"]


class SlowDisk(ScriptedRollouts):
    """Checkpoints are written when the policy of step 3 is there; the first save fails with `error`."""

    def __init__(self, monkeypatch, error=None):
        super().__init__()
        goes_on, errors, self.late = threading.Event(), [error] if error else [], None
        self.goes_on, finalize = goes_on, CheckpointManager._finalize

        def slow(manager, *arguments):
            goes_on.wait()
            if errors:
                manager._save_progress_tracker.set(False)
                raise errors.pop()
            finalize(manager, *arguments)

        monkeypatch.setattr(CheckpointManager, "_finalize", slow)

    def load(self, version, params):
        super().load(version, params)
        if version == 3:
            self.late = not self.goes_on.is_set()
            self.goes_on.set()


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path, monkeypatch, capsys):
    rollouts = SlowDisk(monkeypatch)
    run(make_config(tmp_path, learner={"steps": 4}, checkpoint={"every": 2}), tmp_path, rollouts, True)
    assert rollouts.late and rollouts.loaded[-1][0] == 4
    assert left(tmp_path)[2] == [2, 4]
    message = [line for line in capsys.readouterr().err.splitlines() if "checkpoint saved" in line]
    assert message == ["checkpoint saved at step 2", "checkpoint saved at step 4"]


def test_failed_asynchronous_checkpoint_ends_the_run_saved(tmp_path, monkeypatch):
    rollouts = SlowDisk(monkeypatch, OSError("no room"))
    with pytest.raises(
        UserError, match=r"step 2 cannot be saved; the older checkpoints are complete.*no room"
    ):
        run(make_config(tmp_path, learner={"steps": 9}, checkpoint={"every": 2}), tmp_path, rollouts)
    assert left(tmp_path)[2][-1] == rollouts.loaded[-1][0] < 9


def test_synchronous_checkpoint_completes_before_next_step(tmp_path):
    steps = []

    class Looking(ScriptedRollouts):
        def load(self, version, params):
            super().load(version, params)
            steps.append(left(tmp_path)[2])

    run(make_config(tmp_path, checkpoint={"every": 1, "asynchronous": False}), tmp_path, Looking())
    assert steps[:3] == [[], [], [1]]


class Counting(ScriptedRollouts):
    """A sampler that counts something."""

    def metrics(self):
        return {"rollout/workers_lost": float(len(self.begun))}


def test_step_counts_workers_and_tokens_a_search(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "validate", lambda *_: {"0": {"all": {"f1": 0.25}}})
    config = make_config(tmp_path, learner={"steps": 2, "pack_length": 16, "microbatch_rows": 8})
    config = replace(config, evaluate=replace(config.evaluate, every=2))
    run(config, tmp_path, Counting())
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [row["rollout/workers_lost"] for row in (first, second)] == [2.0, 4.0]
    assert "eval/all/f1/greedy" not in first and second["eval/all/f1/greedy"] == 0.25
    assert "timing_s/evaluate" in second
    assert "perf/remaining_seconds" not in first and second["perf/remaining_seconds"] == 0
    ratio = first["perf/sampled_tokens_per_second"] / first["perf/searches_per_second"]
    assert ratio == pytest.approx(6)  # a search and two turns of three tokens


class Reporting(Counting):
    """It has a worker, which computes log-probabilities of tokens 1 to 14 of the text."""

    def __init__(self):
        super().__init__()
        self.logprobs = {"http://worker": np.full(14, -3.0, np.float32)}


def test_every_part_of_a_step_reports(tmp_path, monkeypatch):
    """The evaluated policy is the one that the step made, once it was published."""
    evaluated = []

    def validate(config, rollouts):
        evaluated.append(rollouts.loaded[-1][0])
        return {"0": {"all": {"f1": 0.25}}}

    monkeypatch.setattr(evaluate, "validate", validate)
    learner = {"steps": 2, "pack_length": 16, "microbatch_rows": 8}
    run(make_config(tmp_path, learner=learner, evaluate={"every": 2}), tmp_path, Reporting())
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    expected = {
        "reward/mean",  # of the trajectories
        "rollout/sampled_perplexity",  # which the guards watch
        "guard/format_valid",  # their verdict
        "advantage/answer/ratio_before",
        "actor/grad_norm",
        "actor/lr",
        "rollout/probe_logprob_diff_mean",  # of the publication
        "timing_s/rollout",
        "timing_s/advantage",
        "timing_s/update",
        "timing_s/publish",
        "timing_s/step",
        "perf/tokens_per_second",
    }
    assert expected <= first.keys()
    assert evaluated == [2]


def test_file_shows_steps_and_checkpoints(tmp_path):
    stream = io.StringIO()
    learner = {"steps": 2, "pack_length": 16, "microbatch_rows": 8}
    state = make_state(make_config(tmp_path, learner=learner), tmp_path, console=Console(stream=stream))
    with Stop() as stop, state:
        train.train(state, stop)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2", "checkpoint saved at step 2"]


def test_parts_of_a_step_are_shown_in_their_order(tmp_path, monkeypatch):
    shown = []
    live = Console.live

    def noted(console, label, *arguments, **options):
        shown.append(label)
        return live(console, label, *arguments, **options)

    monkeypatch.setattr(Console, "live", noted)
    learner = {"steps": 1, "pack_length": 16, "microbatch_rows": 8}
    run(make_config(tmp_path, learner=learner), tmp_path)
    assert shown == [
        "publishing the policy",
        "rollouts",
        "rewards",
        "advantages",
        "update, compiling",
        "keeping the trajectories",
        "publishing the policy",
        "saving a checkpoint",
    ]


MIXED = [
    Question(f"{source}{n}", f"{source} {n}?", ("yes",), source) for source in ("a", "b") for n in range(6)
]


def configured(folder, weights, template="short", data=None, **sections):
    files = {"train": str(folder / "mixed.jsonl"), "eval": str(folder / "mixed.jsonl")}
    data = {"weights": weights} | files | (data or {})
    config = make_config(folder, data=data, prompt={"template": template}, **sections)
    write_questions(folder / "mixed.jsonl", MIXED)
    return config


@pytest.mark.medium
def test_training_draws_by_the_weights(tmp_path):
    config = configured(tmp_path / "run", {"a": 3.0, "b": 1.0})
    questions = load_questions(config.data.train)
    state = RunState(config, MODEL, questions, ScriptedRollouts(), tmp_path / "run", Console(False))
    drawn = Counter(question.data_source for question in islice(state.questions, 80))
    assert drawn == {"a": 60, "b": 20}


@pytest.mark.parametrize(
    ("weights", "template", "message"),
    [
        ({"a": 1.0}, "short", "data.weights names a, but data.train holds a, b"),
        ({}, "from_data", "question 'a0': prompt.template is 'from_data', but its row has no 'prompt'"),
    ],
)
def test_unfit_data_is_refused_before_anything_starts(tmp_path, weights, template, message):
    config = configured(tmp_path / "run", weights, template)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        train.run(config)
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(UserError, match=message):
        doctor.check_questions(config)
    if template == "from_data":
        check_inputs(config)
        with pytest.raises(UserError, match=message):
            check_inputs(replace(config, evaluate=replace(config.evaluate, every=1)))
    carried = [replace(question, prompt=(Message("user", ("Say: ", "")),)) for question in MIXED]
    carried[0] = replace(carried[0], golden_answers=("The",))
    fitting = configured(tmp_path / "fitting", {"a": 1.0, "b": 1.0}, "from_data")
    write_questions(tmp_path / "fitting/mixed.jsonl", carried)
    lines = doctor.check_questions(fitting)
    assert any("12 questions (a, b)" in line for line in lines)
    warned = [line for line in lines if "a golden answer that normalises to" in line]
    assert [line.split(": ")[:2] for line in warned] == [["warning", f"data.{n}"] for n in ("train", "eval")]


def test_refusal_of_an_overlong_prompt_names_limit_and_question(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "build_model", lambda *_: SimpleNamespace(tokenizer=Letters()))
    config = configured(tmp_path / "run", {}, rollout={"max_prompt_length": 15})
    overlong = replace(MIXED[0], id="long", text="why " * 9)
    write_questions(Path(config.data.train), [*MIXED, overlong])
    words = r"data.train: the prompts of 1 of 13 questions .*=15, .* has 47 tokens \(.*'long'\): raise it"
    with pytest.raises(UserError, match=words):
        train.run(config)


def test_overlong_prompts_are_refused_or_left_out(tmp_path, monkeypatch, capsys):
    """Prompts are "Question: a 0?" and a newline: 15 letters; the last question's is longer."""
    entered = []  # the questions of a run whose folder is entered: all that a start checks before has passed
    monkeypatch.setattr(train, "build_model", lambda *_: SimpleNamespace(tokenizer=Letters()))

    def enter(config, model, questions, say, mirror):
        entered.append(questions)
        raise Broken

    monkeypatch.setattr(train, "enter_run_folder", enter)
    odd = replace(MIXED[0], id="long", text="why " * 9, golden_answers=("Ada|Bo",))

    def start(error=Broken, message=None, **sections):
        config = configured(tmp_path / "run", {}, **sections)
        write_questions(Path(config.data.train), [*MIXED, odd])
        with pytest.raises(error, match=message):
            train.run(config)

    short = {"max_prompt_length": 15}
    start(UserError, "data.train: the prompts of 1 of 13 questions .* has 47 tokens", rollout=short)
    room = {"max_prompt_length": 47, "max_length": 60}
    start(rollout=room, learner={"pack_length": 60}, evaluate={"every": 5})
    assert "are left out" not in capsys.readouterr().err
    start(rollout=short, data={"overlong_prompts": "leave_out"}, evaluate={"every": 5})
    assert [len(questions) for questions in entered] == [13, 12] and odd not in entered[1]
    shown = " ".join(capsys.readouterr().err.split())
    for name in ("train", "eval"):
        assert f"data.{name}: the prompts of 1 of 13 questions" in shown
    assert shown.count("a separator in it, such as 'Ada|Bo") == 1


def test_chosen_step_is_traced(tmp_path):
    log = {"profile_step": 2}
    run(make_config(tmp_path, learner={"steps": 1}, log=log), tmp_path / "short")
    assert not (tmp_path / "short/profile").exists()
    run(make_config(tmp_path, learner={"steps": 2}, log=log), tmp_path / "long")
    (trace,) = (tmp_path / "long/profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
