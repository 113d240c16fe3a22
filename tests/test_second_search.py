"""benchmarks.second_search: which way the advantages push a decision between two ways that pay."""

import numpy as np
import pytest

from benchmarks import second_search
from benchmarks.evidence_arms import SHORT
from benchmarks.second_search import BELIEVE, World, draw_group, push
from calibadv_jax.advantages.registry import compute_advantages
from calibadv_jax.config import AdvantageConfig, load_config
from calibadv_jax.errors import UserError
from calibadv_jax.record.writer import RolloutWriter

GRPO, CALIBADV = AdvantageConfig(name="grpo"), AdvantageConfig()
WORLD = World(truth=0.6, quoted=1.0)


def mean_push(found, config, world=WORLD, number=400):
    rng = np.random.default_rng(0)
    groups = [draw_group(rng, world, found) for _ in range(number)]
    return push(groups, world.share, config).mean()


def test_grpo_follows_what_is_earned():
    assert mean_push(0.1, GRPO) < -0.05
    assert mean_push(0.9, GRPO) > 0.05
    always = World(truth=1.0, quoted=0.5)
    assert mean_push(0.5, GRPO, always) == pytest.approx(0, abs=0.02)


def test_calibadv_pushes_on_where_searching_again_earns_less_but_not_where_it_earns_nothing():
    assert mean_push(0.35, GRPO) < -0.02 < 0.02 < mean_push(0.35, CALIBADV)
    assert mean_push(0.0, CALIBADV) < 0


def test_lambda_moves_the_decision():
    low, middle, high = (mean_push(0.35, AdvantageConfig(target_ratio=one)) for one in (0.5, 1.0, 2.0))
    assert low < 0 < middle < high


def test_the_table_has_a_row_for_each_arm(capsys):
    second_search.main(["--groups", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(second_search.ARMS)
    assert len(lines[2].split()) == 1 + 2 * len(second_search.CHANCES)


def keep(run, step, groups):
    config = load_config(SHORT.config)
    unknown = [[None] * len(group.trajectories) for group in groups]
    RolloutWriter(run, config, step).write(
        step, groups, compute_advantages(groups, config.advantage).credits, unknown, 0
    )


def test_kept_steps_get_credit_from_every_arm(tmp_path, capsys):
    rng = np.random.default_rng(1)
    steps = [[draw_group(rng, WORLD, 0.35) for _ in range(30)] for _ in range(3)]
    failed = steps[0][0].trajectories[0]  # it counts for nothing
    failed.error, failed.turns, failed.answer_score = "retriever: away", failed.turns[:1], 0.0
    for number, groups in enumerate(steps, 1):
        keep(tmp_path / "run", number, groups)
    second_search.main(["--runs", str(tmp_path / "run"), "--steps", "2"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("60 groups; ") and f" of {2 * 30 * 16 - 1} trajectories search again" in first
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert list(rows) == list(second_search.ARMS)
    groups = [group.finished() for step in steps[:2] for group in step]
    share = float(first.split()[2])
    expected = push(groups, share, AdvantageConfig()).mean()
    assert float(rows["calibadv"][0]) == pytest.approx(expected, abs=2e-3)  # the share is rounded
    assert rows["grpo"][3:] == ["+0.000", "±", "0.000"]
    assert float(rows["soft"][3]) > 3 * float(rows["soft"][5])


def test_kept_steps_without_a_decision_are_an_error(tmp_path):
    group = draw_group(np.random.default_rng(0), WORLD, 0.5)
    for one in group.trajectories:
        one.turns = list(BELIEVE)
    keep(tmp_path, 1, [group])
    with pytest.raises(UserError, match="all trajectories of these steps decide alike"):
        second_search.main(["--runs", str(tmp_path), "--steps", "1"])
