"""experiments.second_search: which way the advantages push a decision, in a model and in runs."""

import json

import numpy as np
import pytest

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import AdvantageConfig, load_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.rollout_store.writer import RolloutWriter
from experiments import figures as evidence_figures
from experiments import second_search, second_search_runs
from experiments.arms import METHODS, SHORT, parse_name
from experiments.second_search import ARMS, BELIEVE, World, credit_of, draw_group, push

pytestmark = pytest.mark.medium  # of a benchmark's program

WORLD = World(truth=0.6, quoted=1.0)
GRPO, CALIBADV = AdvantageConfig(name="grpo"), AdvantageConfig()


def make_run(folder, steps, searches=(1.0,) * 5 + (2.0,) * 10):
    """Steps of groups, as a run under the config of its arm keeps them."""
    config = load_config(SHORT.config, parse_name(folder.parent.name).overrides())
    writer = RolloutWriter(folder, config, 1)
    for number, groups in enumerate(steps, 1):
        credits = credit_of(parse_name(folder.parent.name).method, groups)
        writer.write(number, groups, credits, [[None] * len(group.trajectories) for group in groups], 0)
    rows = [{"step": step, "rollout/searches/mean": value} for step, value in enumerate(searches, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def draw_steps(seed, number=3, world=WORLD, groups=30):
    rng = np.random.default_rng(seed)
    return [[draw_group(rng, world, 0.35) for _ in range(groups)] for _ in range(number)]


def rows_of(lines):
    return {line.split()[0]: line.split()[1:] for line in lines}


def test_arms_give_credit_for_the_same_trajectories(tmp_path, capsys):
    steps = draw_steps(1)
    failed = steps[0][0].trajectories.pop(0)  # it counts for nothing
    failed.error, failed.turns, failed.answer_score = "retriever: away", failed.turns[:1], 0.0
    steps[0][0].failed.append(failed)
    run = make_run(tmp_path / "soft-lr1e-3/seed-3", steps)
    second_search_runs.main([str(run), "--steps", "2"])
    first, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    groups = [group for step in steps[:2] for group in step]
    decided = [len(trajectory.turns) == 3 for group in groups for trajectory in group.trajectories]
    assert len(decided) == 2 * 30 * 16 - 1
    share = np.mean(decided)
    assert first.startswith(f"60 groups; {share:.2f} search again")
    rows = rows_of(lines[2:])
    assert list(rows) == list(ARMS)
    expected = push(groups, credit_of("calibadv", groups), share)
    assert rows["calibadv"][:3] == [f"{expected.mean():+.3f}", "±", f"{expected.std(ddof=1) / 60**0.5:.3f}"]
    assert rows["grpo"][3:] == ["+0.000", "±", "0.000"]
    assert float(rows["soft"][3]) > 3 * float(rows["soft"][5])


def test_runs_have_the_push_of_their_advantages(tmp_path, capsys):
    steps = draw_steps(1, number=1)
    runs = [
        make_run(tmp_path / "calibadv-lr1e-3/seed-3", steps),
        make_run(tmp_path / "grpo-lr1e-3/seed-3", steps, searches=(2.0, *(1.0,) * 10)),
    ]
    figure = tmp_path / "pushes.svg"
    pytest.importorskip("matplotlib")
    second_search_runs.main([*map(str, runs), "--steps", "1", "--figure", str(figure)])
    arms, own = (rows_of(part.splitlines()) for part in capsys.readouterr().out.split("\n\n"))
    assert list(own)[-2:] == [str(runs[1]), str(runs[0])]  # by push: GRPO's is the smaller one
    for run, arm, searches in zip(runs, ("calibadv", "grpo"), ("2.00", "1.00"), strict=True):
        assert (own[str(run)][0], own[str(run)][-1]) == (arms[arm][0], searches)
    text = figure.read_text()
    assert "grpo" in text and "calibadv" in text and "push to search again" in text
    with pytest.raises(UserError, match="step 2 is not kept"):
        second_search_runs.main([str(runs[0]), "--steps", "2"])
    second_search.main(["--groups", "20"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == list(ARMS)


def test_table_has_a_push_and_its_error_for_each_chance(capsys):
    second_search.main(["--groups", "20"])
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines[2:]] == [1 + 2 * len(second_search.CHANCES)] * len(ARMS)


def test_steps_without_a_decision_are_refused(tmp_path):
    (step,) = draw_steps(0, number=1, groups=1)
    for trajectory in step[0].trajectories:
        trajectory.turns = list(BELIEVE)
    run = make_run(tmp_path / "grpo-lr1e-3/seed-3", [step])
    with pytest.raises(UserError, match="all trajectories of these steps decide alike"):
        second_search_runs.main([str(run), "--steps", "1"])


def test_run_that_has_not_logged_its_searches_is_named(tmp_path):
    run = make_run(tmp_path / "grpo-lr1e-3/seed-3", draw_steps(0, number=1), searches=())
    with pytest.raises(UserError, match=r"seed-3/metrics.jsonl: no step has rollout/searches/mean"):
        second_search_runs.main([str(run), "--steps", "1"])


def test_every_method_has_a_mark_of_its_own():
    pytest.importorskip("matplotlib")
    names = [*METHODS, "mine", "another"]
    (axes,) = evidence_figures.scatter({name: [(0.0, 1.0)] for name in names}, "x", "y").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names
    marks = {
        (tuple(mark.get_facecolor()[0]), mark.get_paths()[0].vertices.tobytes()) for mark in axes.collections
    }
    assert len(marks) == len(names)


def mean_push(chance, config, world=WORLD, number=400):
    rng = np.random.default_rng(0)
    groups = [draw_group(rng, world, chance) for _ in range(number)]
    return push(groups, compute_advantages(groups, config).credits, world.share).mean()


def test_advantages_push_by_what_searches_earn():
    assert mean_push(0.1, GRPO) < -0.05 and mean_push(0.9, GRPO) > 0.05
    assert mean_push(0.5, GRPO, World(truth=1.0, quoted=0.5)) == pytest.approx(0, abs=0.02)
    assert mean_push(0.35, GRPO) < -0.02 < 0.02 < mean_push(0.35, CALIBADV)
    assert mean_push(0.0, CALIBADV) < 0
    low, middle, high = (mean_push(0.35, AdvantageConfig(target_ratio=ratio)) for ratio in (0.5, 1.0, 2.0))
    assert low < 0 < middle < high
