"""``calibadv audit`` and ``calibadv replay``: kept steps against the truth, and computed again."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from config_rig import changed
from record_rig import keep, make_groups, scored, unknown

from calibadv_jax import cli
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import Config
from calibadv_jax.contrib.audit.evidence import GROUP, SEARCH, Evidence, EvidencePair, Variant
from calibadv_jax.contrib.audit.measures import MEASURES, VERDICTS
from calibadv_jax.contrib.audit.tables import verdict
from calibadv_jax.contrib.cli.audit import credit_again
from calibadv_jax.contrib.cli.replay import KeptPolicy, comparison_rows, equal_turns, kept_config
from calibadv_jax.contrib.cli.replay import replay as replay_step
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.registry import ESTIMATORS
from calibadv_jax.core.seeds import random_state
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout_store.reader import find_step, read_step
from calibadv_jax.rollout_store.writer import RolloutWriter

# The first question of the rig has the supporting passage d1, and silver d1 … d4; the second one has none.
# Its six searches: d1 is found by the first one of the best trajectory and of the wrong one. The wrong one's
# four, of three tokens each, have correctness 1/2, 0, 1/3 and 0.
GOOD_SPARED, USELESS_SPARED = 1 / 2, (1 / 3) / 3


def status_of(command, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.calibadv([command, *map(str, arguments)])
    return stop.value.code


def call(*arguments, capsys):
    return status_of("audit", *arguments), *capsys.readouterr()


def rows(out, measure):
    """The cells of a measure in each of the tables that were printed: "value (control)", with ranges."""
    lines = [line for line in out.splitlines() if line.startswith(f"{measure} ")]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()][1:] for line in lines]


def value(cell):
    return float(cell.partition(" ")[0])


def tables(out):
    """The lines above the verdict."""
    return out.partition("\n\nverdict (")[0].splitlines()


def totals(run):
    return run["settings"][0]["true"]["total"], run["settings"][0]["control"]["total"]


def test_table_of_a_run(tmp_path, capsys):
    keep(tmp_path)
    status, out, err = call(tmp_path, capsys=capsys)
    assert status == 0
    assert f"{tmp_path}: 1 kept steps, 1 groups, 3 trajectories, 6 searches" in out
    ((cell, meaning),) = rows(out, "blame/good_spared")
    assert value(cell) == GOOD_SPARED and meaning == MEASURES["blame/good_spared"]
    assert value(rows(out, "blame/useless_spared")[0][0]) == round(USELESS_SPARED, 3)
    row = tables(out)[-1].split()
    assert row[0] == "7-7" and row[9] == "0.500"
    assert "cannot say: truly good searches are blamed in 1 groups and useless ones in 1; at least 30" in out
    assert err == f"warning: {tmp_path}: 1 of 2 groups name no supporting passages and are left out\n"


def test_measures_of_a_run(tmp_path, capsys):
    keep(tmp_path)
    _, out, _ = call(tmp_path, capsys=capsys)
    assert out.splitlines()[0] == "in brackets: the control, with the rewards of each step shuffled (seed 0)"
    assert f"{tmp_path} over training, settings: of the run" in out.splitlines()
    measures = {
        "silver/precision": 0.25,
        "search/good_share": 0.333,
        "search/precision": 0.5,
        "search/recall": 1.0,
        "blame/good_blamed": 0.5,
        "blame/useless_spared": 0.111,
        "blame/spared_good_share": 0.6,
    }
    assert {name: value(rows(out, name)[0][0]) for name in measures} == measures


def test_changed_settings_stand_beside_the_own_ones(tmp_path, capsys):
    keep(tmp_path)
    _, out, _ = call("advantage.correctness=max", tmp_path, "reward.answer=em", capsys=capsys)
    assert "correctness=max reward.answer=em" in out.splitlines()[3]
    ((own, other, _),) = rows(out, "blame/useless_spared")
    assert (value(own), value(other)) == (0.111, 0.333)
    assert "over training, settings: advantage.correctness=max reward.answer=em" in out
    assert tables(out)[-1].split()[9] == "1.000"  # of the changed settings


def test_audit_shuffles_rewards_as_the_run_did(tmp_path, capsys):
    """With the seed of the step, which after a rollback is not the run's."""
    config = changed(reward={"shuffle": True})
    groups = score_groups(make_groups(), config.reward, random_state(14, 6, "reward"))
    credits = compute_advantages(groups, config.advantage).credits
    RolloutWriter(tmp_path, config, 7).write(7, groups, credits, unknown(groups), 14)
    status, _, err = call(tmp_path, capsys=capsys)
    assert status == 0 and "another advantage" not in err


@pytest.mark.medium
def test_control_measures_chance(tmp_path, capsys):
    """The reward of 1 falls on one of five: two of the other group, the best, the wrong, the empty one.

    Then there is silver in 0, 0, 1, 1, 0 groups, and of the two good searches 0, 0, 1, 1, 2 are blamed.
    """
    for step in range(1, 41):
        keep(tmp_path, step=step)
    call(tmp_path, "--output", tmp_path / "audit.json", capsys=capsys)
    (run,) = json.loads((tmp_path / "audit.json").read_text())["runs"]
    true, control = totals(run)
    assert true["search/good_share"] == control["search/good_share"]
    assert true["silver/group_share"] == 1 and 0.25 < control["silver/group_share"] < 0.55
    assert true["blame/good_blamed"] == 0.5 and 0.25 < control["blame/good_blamed"] < 0.55
    steps = run["settings"][0]["control"]["steps"]
    assert {step["blame/good_blamed"] for step in steps} == {0, 0.5, 1}


def test_sweep_is_a_column_a_value(tmp_path, capsys):
    keep(tmp_path)
    arguments = ["--sweep", "advantage.correctness=max,fraction", "--sweep", "advantage.soft_penalty=false"]
    _, out, _ = call(tmp_path, *arguments, capsys=capsys)
    headers = out.splitlines()[3].split()
    assert headers == ["measure", "run", "correctness=max", "correctness=fraction", "soft_penalty=false"]
    assert [value(cell) for cell in rows(out, "blame/good_spared")[0]] == [0.5, 1, 0.5, 0]
    arguments = ["--sweep", "advantage.soft_penalty=true,false"]
    _, out, _ = call("advantage.correctness=max", tmp_path, *arguments, capsys=capsys)
    assert [value(cell) for cell in rows(out, "blame/good_spared")[0]] == [0.5, 1, 1, 0]
    assert tables(out)[-1].split()[9] == "1.000"  # over training: of the changed settings


def test_file_holds_every_step_of_each_side(tmp_path, capsys):
    for step in (1, 10):
        keep(tmp_path / "run", step=step)
    last = changed(advantage={"correctness": "max"})  # every step has its own settings
    keep(tmp_path / "run", last, step=12)
    override, file = "advantage.correctness=max", tmp_path / "audit.json"
    _, out, _ = call(tmp_path / "run", override, "--output", file, "--seed", 4, capsys=capsys)
    assert [line.split()[0] for line in tables(out)[-2:]] == ["1-10", "12-12"]
    audit = json.loads(file.read_text())
    (run,) = audit["runs"]
    assert (audit["seed"], run["run"]) == (4, str(tmp_path / "run"))
    own, other = run["settings"]
    assert (own["name"], own["overrides"]) == ("run", [])
    assert (other["name"], other["overrides"]) == ("correctness=max", [override])
    steps = [(each["step"], each["blame/good_spared"]) for each in own["true"]["steps"]]
    assert steps == [(1, GOOD_SPARED), (10, GOOD_SPARED), (12, 1)]
    assert [total["groups"] for total in totals(run)] == [3, 3]
    assert totals(run)[0]["blame/good_spared"] == pytest.approx((GOOD_SPARED + GOOD_SPARED + 1) / 3)
    assert own["true"]["steps"][0]["blame/useless_spared"] == pytest.approx(USELESS_SPARED)
    assert other["true"]["steps"][0]["blame/good_spared"] == 1
    assert own["control"]["steps"] != own["true"]["steps"]


def test_several_runs_and_their_mean(tmp_path, capsys):
    keep(tmp_path / "a")
    keep(tmp_path / "b", changed(advantage={"correctness": "max"}))
    file, runs = tmp_path / "audit.json", [tmp_path / "a", tmp_path / "b", tmp_path / "a"]  # each counts once
    _, out, _ = call(*runs, "--output", file, "--seed", 3, capsys=capsys)
    # With seed 3 the reward falls on the trajectory without a turn: there is no silver, nothing is spared.
    controls = [totals(run)[1]["blame/good_spared"] for run in json.loads(file.read_text())["runs"]]
    assert controls == [0, 0]
    cells = [cells[0] for cells in rows(out, "blame/good_spared")]
    assert cells == ["0.500 (0.000)", "1.000 (0.000)", "0.750 [0.500, 1.000] (0.000)"]
    assert "mean of 2 runs [lowest, highest] (mean of the controls)" in out


def test_whom_estimators_praise_and_blame(tmp_path, capsys):
    """Of the six searches two are good: the best trajectory's first, and the wrong one's, half forgiven."""
    keep(tmp_path)
    names = "grpo,calibadv+rloo,querygroup,reinforce_plus_plus,gigpo,mt_grpo,stepsearch,igpo,a2tgpo,tips"
    _, out, _ = call(tmp_path, "--estimators", names, capsys=capsys)
    lines = tables(out.partition("whom estimators praise and blame\n")[2])
    table = {
        line.split()[0]: [float(each.split()[0]) for each in line.split("  ") if "(" in each]
        for line in lines
    }
    assert set(VERDICTS) <= {each.strip() for each in lines[0].split("  ")}
    assert set(table) >= {"calibadv", *names.split(",")}
    # 1 of 2 good ones blamed, 1 of 4 useless ones praised; of the blame of 12 tokens 3 lie on the good one.
    assert table["grpo"] == [0.5, 0.25, 0.25, 0.5, 1.0]
    # 3 × 1/2 on the good one; of the others' 9 those with correctness 1/3 lose 1.
    assert table["calibadv"] == table["calibadv+rloo"] == [0.5, 0.25, round(1.5 / 9.5, 3), 0.5, 1.0]
    assert table["querygroup"][:1] == [0.0]  # both good ones found silver documents


def test_control_permutes_rewards_over_the_step(tmp_path):
    keep(tmp_path)
    step_of_run = read_step(find_step(tmp_path, 7))
    config = kept_config(step_of_run, Path("step"))
    seen = set()
    for seed in range(20):
        credits = [credit_again(step_of_run, config, seed) for _ in "12"]
        permuted, again = (scores(credit.group for credit in of_seed) for of_seed in credits)
        assert permuted == again and sorted(permuted) == [0, 0, 0, 0, 1]
        seen.add(tuple(permuted))
    assert {(1, 0, 0, 0, 0), (0, 0, 0, 0, 1)} <= seen
    assert scores(step_of_run.groups) == [1, 0, 0, 0, 0]


def test_calibration_of_what_grpo_trained(tmp_path, capsys):
    keep(tmp_path, changed(advantage={"name": "grpo"}))
    _, out, _ = call(tmp_path, "advantage.name=calibadv", capsys=capsys)
    assert [value(cell) for cell in rows(out, "blame/good_spared")[0][:2]] == [0, 0.5]


def test_other_advantages_than_the_kept_ones_are_warned_of(tmp_path, capsys):
    groups, result = scored(Config())
    result.credits[0].turns[1][0] *= 1 + 1e-6  # more than rounding
    RolloutWriter(tmp_path, Config(), 7).write(7, groups, result.credits, unknown(groups), 3)
    status, _, err = call(tmp_path, capsys=capsys)
    assert status == 0 and "1 of 12 turns get another advantage than was kept" in err


def test_run_on_another_corpus_is_warned_of(tmp_path, capsys):
    groups, result = scored(Config())
    question = replace(groups[0].question, supporting_ids=("wiki-1",))
    groups[0].question = question
    for trajectory in groups[0].trajectories:
        trajectory.question = question
    RolloutWriter(tmp_path, Config(), 7).write(7, groups, result.credits, unknown(groups), 3)
    status, out, err = call(tmp_path, capsys=capsys)
    assert status == 0
    assert f"warning: {tmp_path}: no search ever showed a supporting passage; check that" in err
    assert value(rows(out, "search/good_share")[0][0]) == 0


def test_estimator_that_judges_no_search_is_warned_of(tmp_path, capsys):
    keep(tmp_path, changed(advantage={"name": "grpo"}))
    warning = f"warning: {tmp_path}: grpo judges no search; add advantage.name=calibadv"
    _, out, err = call(tmp_path, capsys=capsys)
    assert warning in err
    assert value(rows(out, "blame/good_spared")[0][0]) == 0
    _, out, err = call(tmp_path, "advantage.name=calibadv", capsys=capsys)
    assert warning not in err
    own, calibrated, _ = rows(out, "blame/good_spared")[0]
    assert (value(own), value(calibrated)) == (0, GOOD_SPARED)


def test_mistakes_are_one_line(tmp_path, capsys):
    good, blind, torn = (tmp_path / name for name in ("good", "blind", "torn"))
    keep(good)
    (group, result) = make_groups()[1], scored(Config())[1]  # of the question without supporting passages
    RolloutWriter(blind, Config(), 7).write(7, [group], result.credits[1:], unknown([group]), 3)
    keep(torn)
    path = find_step(torn, 7)
    path.write_bytes(path.read_bytes()[:-9])
    for arguments, words in (
        (
            [tmp_path / "none"],
            "none: no trajectories are kept there; a run with log.rollouts=parquet keeps them",
        ),
        ([torn], f"{path}: cannot be read"),
        ([blind], f"{blind}: none of its questions names supporting passages (supporting_ids); audit a run"),
        ([good, torn], f"{path}: cannot be read"),
        (["advantage.correctness=max"], "no run among advantage.correctness=max"),
        ([good, "learner.steps=3"], "learner.steps=3: changes no credit of a kept step"),
        ([good, "--sweep", "rollout.group_size=3,4"], "rollout.group_size=3: changes no credit"),
        ([good, "advantage.lambda=2"], "unknown key 'advantage.lambda'"),
        ([good, "advantage.target_ratio=0"], "advantage.target_ratio: must be greater than 0"),
        ([good, "--sweep", "advantage.correctness"], "write it as key.path=VALUE,VALUE"),
        ([good, "--sweep", "advantage.target_ratio=1,,2"], "write it as key.path=VALUE,VALUE"),
        ([good, "--estimators", "rlo"], "advantage."),
        ([good, "--estimators", ""], "advantage."),
    ):
        status, out, err = call(*arguments, capsys=capsys)
        assert (status, out) == (2, ""), arguments
        (error,) = (line for line in err.splitlines() if not line.startswith("warning: "))
        assert error.startswith("error: ") and words in error, arguments


@pytest.mark.medium
@pytest.mark.parametrize("name", ["calibadv+calibadv", "no_such_module:function"])
def test_estimator_that_does_not_exist_is_one_line(tmp_path, capsys, name):
    keep(tmp_path)
    status, _, err = call(tmp_path, "--estimators", name, capsys=capsys)
    assert status == 2 and err.count("\n") == 1 and "advantage." in err


def measured(true, control, count=40, spread=0.0):
    """A run of `count` groups, each with blame 1 on good and on useless searches.

    `true`, `control`: the blame that is spared; one group in two has `spread` more, the other one less.
    """
    pair = []
    for good, useless in (true, control):
        groups = np.zeros(count, GROUP)
        groups["good_blame"] = groups["useless_blame"] = 1
        groups["good_spared"] = good + spread * (-1.0) ** np.arange(count)
        groups["useless_spared"] = useless + spread * (-1.0) ** (np.arange(count) // 2)
        pair.append(Evidence(groups, np.zeros(0, SEARCH)))
    return Variant("run", steps={1: EvidencePair(*pair)})


LEAD = "the lead is 0.700 [0.700, 0.700], with shuffled rewards (control) 0.300 [0.300, 0.300]"


@pytest.mark.parametrize(
    ("true", "control", "more", "words"),
    [
        ((0.8, 0.1), (0.7, 0.4), {}, f"better than chance: {LEAD}"),
        ((0.1, 0.8), (0.4, 0.7), {}, "worse than chance: the lead is -0.700"),
        ((0.8, 0.1), (0.8, 0.1), {}, "cannot say whether it is better than chance: "),
        ((0.55, 0.5), (0.5, 0.5), {"spread": 0.4}, "cannot say whether it is better than chance: "),
        ((0.55, 0.5), (0.5, 0.5), {"spread": 0.4, "count": 4000}, "better than chance: "),
        ((0.8, 0.1), (0.7, 0.4), {"count": 29}, "cannot say: truly good searches are blamed in 29 groups"),
    ],
)
def test_verdict_compares_leads(true, control, more, words):
    assert verdict([measured(true, control, **more)]).startswith(words)


def test_verdict_pools_runs():
    pooled = verdict([measured((0.8, 0.1), (0.7, 0.4), 20)] * 2)  # each alone would be too few
    assert pooled == f"better than chance: {LEAD}"


def test_every_measure_is_explained():
    page = (Path(__file__).parents[2] / "docs/audit.md").read_text(encoding="utf-8")
    assert [name for name in MEASURES if f"`{name}`" not in page] == []


def scores(groups):
    return [trajectory.answer_score for group in groups for trajectory in group.trajectories]


def shown(out):
    """Metric -> its cells, of the table that was printed."""
    cells = [line.split() for line in out.splitlines() if "/" in line]
    return {name: values for name, *values in cells}


def test_same_settings_give_the_kept_advantages(tmp_path, capsys):
    keep(tmp_path)
    assert status_of("replay", tmp_path, "--step", "7") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"step 7 of {tmp_path}: 2 groups, 6 trajectories"
    assert "replayed: 12 of 12 turns have the advantage that was kept, bit for bit" in out
    assert shown(out)["advantage/answer/ratio_after"] == ["1"] and "≠" not in out
    # Another lambda changes the replayed step.
    assert status_of("replay", tmp_path, "advantage.target_ratio=2", "--step", "7") == 0
    out = capsys.readouterr().out
    assert shown(out)["advantage/answer/ratio_after"] == ["1", "2", "≠"]
    assert shown(out)["reward/mean"] == [shown(out)["reward/mean"][0]] * 2  # not marked
    marked = [line.split()[0] for line in out.splitlines() if line.endswith("≠")]
    assert f"\n{len(marked)} of " in out
    assert all(name.startswith(("advantage/", "actor/")) for name in marked)
    # Only the answer turn of the group's one winner is rescaled.
    assert "advantage.target_ratio=2: 1 of 12 turns get another advantage" in out


MEDIUM = [pytest.param(name, marks=pytest.mark.medium) for name in ESTIMATORS if name != "grpo"]


@pytest.mark.parametrize("name", ["grpo", *MEDIUM, "examples.own_advantage:by_rank"])
def test_step_is_kept_and_replayed_under_every_estimator(tmp_path, capsys, name):
    config = changed(advantage={"name": name})
    _, result, _ = keep(tmp_path, config)
    kept = read_step(find_step(tmp_path, 7))
    for credit, before in zip(kept.credits, result.credits, strict=True):
        assert [turns.tolist() for turns in credit.before] == [turns.tolist() for turns in before.before]
    assert (
        status_of("replay", tmp_path, "--trust-run", "advantage.name=calibadv", f"advantage.base={name}") == 0
    )
    assert "replayed: 12 of 12 turns have the advantage that was kept, bit for bit" in capsys.readouterr().out


def test_kept_step_stays_as_it_is(tmp_path):
    keep(tmp_path)
    kept = read_step(find_step(tmp_path, 7))
    other = kept_config(kept, Path("step"), ["reward.format=false", "reward.answer=cover_em"])
    replayed = replay_step(kept, other)
    replayed.groups[0].trajectories[0].answer_score = 0.5
    assert scores(kept.groups) == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("factor", "status", "words"),
    [
        (1 + 1e-6, 1, "replayed: 11 of 12 turns have the advantage that was kept"),
        (1 + 2**-52, 0, "that was kept, 11 of them bit for bit, the others within 1e-09"),
    ],
    ids=["changed", "rounded"],
)
def test_changed_advantage_exits_1(tmp_path, capsys, factor, status, words):
    config = Config()
    groups, result, learner = keep(tmp_path, config)
    result.credits[0].turns[1][0] *= factor
    RolloutWriter(tmp_path, config, 7).write(7, groups, result.credits, learner, 3)
    assert status_of("replay", tmp_path) == status
    assert words in capsys.readouterr().out


def test_losses_of_all_batches_are_summed():
    """Batches of two widths, as rows are packed; the policy stays as it is, and no entropy is made up."""

    def loss(logprobs, entropies, batch, reference):
        assert reference is None and entropies.shape == logprobs.shape and not entropies.any()
        return logprobs.sum(), {"actor/pg_loss": 2 * logprobs.sum(), f"actor/{batch.name}": 1.0}

    batches = [
        SimpleNamespace(name="wide", old_logprobs=np.full((1, 4), -0.5, np.float32)),
        SimpleNamespace(name="narrow", old_logprobs=np.full((2, 2), -0.25, np.float32)),
    ]
    state, sums = KeptPolicy().update("state", batches, loss)
    assert state == "state"
    assert sums == {"actor/loss": -3.0, "actor/pg_loss": -6.0, "actor/wide": 1.0, "actor/narrow": 1.0}
    assert KeptPolicy().logprobs({}, batches[0]).tolist() == [[-0.5] * 4]


@pytest.mark.parametrize(
    ("before", "after", "mark"),
    [
        ({"reward/f1": 1.0}, 1.0 + 1e-6, "≠"),  # however little of it the four digits show
        ({"reward/f1": 1.0}, 1.0 + 1e-12, ""),
        ({}, 1.0, ""),
        ({"reward/f1": float("nan")}, float("nan"), ""),
    ],
)
def test_rows_that_differ_are_marked(before, after, mark):
    (row,) = comparison_rows({"replayed": before, "changed": {"reward/f1": after}})
    assert (row[0], row[-1]) == ("reward/f1", mark)


def test_rewards_are_shuffled_as_they_were(tmp_path):
    config = changed(reward={"shuffle": True})
    groups, of_seed_0 = (
        score_groups(make_groups(), config.reward, random_state(seed, 6, "reward")) for seed in (14, 0)
    )
    assert scores(groups) != scores(of_seed_0)
    result = compute_advantages(groups, config.advantage)
    RolloutWriter(tmp_path, config, 7).write(7, groups, result.credits, unknown(groups), 14)
    kept = read_step(find_step(tmp_path, 7))
    replayed = replay_step(kept, kept_config(kept, Path("step")))
    assert scores(replayed.groups) == scores(groups)
    assert equal_turns(kept.credits, replayed.advantages.credits) == (12, 12)


def test_newest_step_is_default_and_mistakes_are_refused(tmp_path, capsys):
    keep(tmp_path, step=3)
    keep(tmp_path, step=5)
    assert status_of("replay", tmp_path) == 0
    assert capsys.readouterr().out.startswith("step 5 of")
    for arguments, words in (
        (["--step", "4"], "step 4 is not kept; the nearest kept one is 3"),
        (["advantage.lambda=2"], "unknown key"),
        (["advantage.target_ratio=0"], "advantage.target_ratio: must be greater than 0"),
    ):
        assert status_of("replay", tmp_path, *arguments) == 2
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1
        assert tempfile.gettempdir() not in message.replace(str(tmp_path), "RUN")
    path = find_step(tmp_path, 3)
    kept = read_step(path)
    for config, words in (
        ('{"loss": {"clip_both": 0.2}}', "unknown key 'loss.clip_both'"),
        ("[1, 2", "not valid YAML"),
        ("[1, 2]", "expected a mapping of sections"),
    ):
        kept.metadata["config"] = config
        with pytest.raises(UserError, match=f"^{re.escape(str(path))}: {words}"):
            kept_config(kept, path)
