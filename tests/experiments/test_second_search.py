"""experiments.second_search: which way the advantages push a decision between two ways that pay."""

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig
from experiments import second_search
from experiments.second_search import World, draw_group, push

pytestmark = pytest.mark.medium  # of a benchmark's program

GRPO, CALIBADV = AdvantageConfig(name="grpo"), AdvantageConfig()
WORLD = World(truth=0.6, quoted=1.0)


def mean_push(chance, config, world=WORLD, number=400):
    rng = np.random.default_rng(0)
    groups = [draw_group(rng, world, chance) for _ in range(number)]
    return push(groups, compute_advantages(groups, config).credits, world.share).mean()


def test_grpo_follows_what_is_earned():
    assert mean_push(0.1, GRPO) < -0.05
    assert mean_push(0.9, GRPO) > 0.05
    always = World(truth=1.0, quoted=0.5)
    assert mean_push(0.5, GRPO, always) == pytest.approx(0, abs=0.02)


def test_calibadv_pushes_on_where_searches_earn_less():
    assert mean_push(0.35, GRPO) < -0.02 < 0.02 < mean_push(0.35, CALIBADV)
    assert mean_push(0.0, CALIBADV) < 0


def test_lambda_moves_the_decision():
    low, middle, high = (mean_push(0.35, AdvantageConfig(target_ratio=ratio)) for ratio in (0.5, 1.0, 2.0))
    assert low < 0 < middle < high


def test_table_has_a_row_for_each_arm(capsys):
    second_search.main(["--groups", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(second_search.ARMS)
    assert len(lines[2].split()) == 1 + 2 * len(second_search.CHANCES)
