"""benchmarks.second_search: which way the advantages push a decision between two ways that pay."""

import numpy as np
import pytest

from benchmarks import second_search
from benchmarks.second_search import draw_group, push
from calibadv_jax.config import AdvantageConfig

GRPO, CALIBADV = AdvantageConfig(name="grpo"), AdvantageConfig()


def groups(found, number=300):
    rng = np.random.default_rng(0)
    return [draw_group(rng, 16, share=0.5, believed=0.5, found=found) for _ in range(number)]


def test_grpo_follows_what_is_earned():
    assert push(groups(0.2), GRPO) < -0.3
    assert push(groups(0.5), GRPO) == pytest.approx(0, abs=0.1)
    assert push(groups(0.8), GRPO) > 0.3


def test_calibadv_pushes_on_where_searching_again_earns_less_but_not_where_it_earns_nothing():
    drawn = groups(0.4)
    assert push(drawn, GRPO) < -0.1 < 0.1 < push(drawn, CALIBADV)
    assert push(groups(0.0), CALIBADV) < 0


def test_lambda_moves_the_decision():
    drawn = groups(0.35)
    low, middle, high = (push(drawn, AdvantageConfig(target_ratio=one)) for one in (0.5, 1.0, 2.0))
    assert low < -0.2 and low < middle < high and high > 0.2


def test_the_table_has_a_row_for_each_arm(capsys):
    second_search.main(["--groups", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(second_search.ARMS)
    assert len(lines[2].split()) == 1 + len(second_search.CHANCES)
