"""calibadv_jax.metrics.console: lines, bars and tables."""

from __future__ import annotations

import functools
import io
import itertools
import re

import jax
import numpy as np
import optax
import pytest
from tqdm import tqdm

from calibadv_jax.config import LossConfig, MeshConfig, RewardConfig
from calibadv_jax.learner.learner import Learner
from calibadv_jax.learner.losses import policy_gradient
from calibadv_jax.metrics.console import STEP_METRICS, Console, number, table
from calibadv_jax.metrics.summary import trajectory_metrics
from calibadv_jax.metrics.timing import Stopwatch
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.trajectory import Group, Question, Trajectory, Turn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_line_of_the_known_metrics():
    stream = io.StringIO()
    metrics = {"perf/tokens_per_second": 5612.3, "reward/mean": 0.52341, "unknown": 3.0}
    Console(stream=stream).step(12, 60, metrics)
    assert stream.getvalue() == "step 12/60 reward 0.5234 tok/s 5612\n"


def update_metrics() -> set[str]:
    """Names of what one update reports; traced, not compiled."""
    model = {
        "model_type": "qwen2",
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    mesh = make_mesh(MeshConfig(fsdp=1), devices=jax.devices()[:1])
    learner = Learner(Policy(architecture_from_hf(model), Numerics()), optax.sgd(1.0), mesh, rows=1)
    _, metrics = learner.lower_update(1, 8, policy_gradient(LossConfig(), on_policy=True)).out_info
    return set(metrics)


def rollout_metrics() -> set[str]:
    """Names of what a scored trajectory reports."""
    ids = np.zeros(1, np.int32)
    turn = Turn("answer", ids, np.zeros(1, np.float32), answer="Ada")
    question = Question("q", "Who?", ("Ada",), "toy")
    groups = [Group(question, [Trajectory(question, ids, [turn])])]
    score_groups(groups, RewardConfig(), prepend_think=False, rng=np.random.default_rng(0))
    return set(trajectory_metrics(groups))


def test_every_metric_of_the_line_exists():
    timing = set(Stopwatch().metrics(tokens=1))
    missing = set(STEP_METRICS.values()) - update_metrics() - rollout_metrics() - timing
    assert missing == {"sft/loss"}  # the cold start's name for actor/loss, given by its entry point


def test_without_progress_only_results_are_shown(capsys):
    stream = Terminal()
    console = Console(progress=False, stream=stream)
    console.step(1, 2, {"reward/mean": 1.0})
    console.note("working")
    with console.bar("rollout", 3) as advance:
        advance(1)
    console.say("written to runs/a")
    assert stream.getvalue() == ""
    assert capsys.readouterr().out == "written to runs/a\n"


def test_a_bar_counts_on_a_terminal(monkeypatch):
    """It is told how many are done in all, as often as that is asked for."""
    at_once = functools.partial(tqdm, mininterval=0)
    monkeypatch.setattr("calibadv_jax.metrics.console.tqdm", at_once)
    stream = Terminal()
    with Console(stream=stream).bar("rollout", 4) as show:
        for done in (1, 2, 2, 4):
            show(done)
    drawn = re.findall(r"rollout: +(\d+)%.*? (\d)/4", stream.getvalue())
    assert [count for count, _ in itertools.groupby(drawn)] == [
        ("0", "0"),
        ("25", "1"),
        ("50", "2"),
        ("100", "4"),
    ]


def test_in_a_file_a_line_now_and_then_instead_of_a_bar(monkeypatch):
    stream, clock = io.StringIO(), [0.0]
    monkeypatch.setattr("calibadv_jax.metrics.console.time.monotonic", lambda: clock[0])
    with Console(stream=stream).bar("rollout", 4) as show:
        for done, clock[0] in ((1, 1.0), (2, 31.0), (3, 40.0), (4, 70.0)):
            show(done)
    assert stream.getvalue() == "rollout 2/4\nrollout 4/4\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.52341, "0.5234"),
        (0.0, "0"),
        (5e-7, "5e-07"),
        (12345.6, "12346"),
        (-2.5, "-2.5"),
        (float("nan"), "nan"),
    ],
)
def test_number(value, shown):
    assert number(value) == shown


def test_table_aligns_text_left_and_numbers_right():
    text = table([["one-hop", 0.51234, 40], ["all", 1.0, 200]], ["questions", "F1", "n"])
    assert text.splitlines() == [
        "questions     F1    n",
        "---------  -----  ---",
        "one-hop    0.512   40",
        "all        1.000  200",
    ]


def test_table_without_rows():
    assert table([], ["a", "bb"]) == "a  bb\n-  --"


def test_table_refuses_a_row_of_another_length():
    with pytest.raises(ValueError, match="1 cells, the table has 2 columns"):
        table([["a"]], ["a", "b"])
