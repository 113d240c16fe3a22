"""Tables and figures of experiments/evidence.md, from runs made by hand."""

import shutil
import statistics

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evidence_rig import FALLEN, STEADY, cells, make_run, words, write_evaluation

from calibadv_jax.contrib.report.runs import read_runs
from calibadv_jax.core.errors import UserError
from calibadv_jax.rollout_store.schema import SCHEMA, VERSION
from experiments import figures as evidence_figures
from experiments import measures
from experiments import report as evidence_report
from experiments import tables as evidence_tables
from experiments.results import cold_starts, held_out_f1, read_results

pytestmark = pytest.mark.medium  # of a benchmark's program

AT_1, ENTROPY = "eval__average__f1__temperature_1", "actor__entropy"


def entropy(from_step=41, value=0.0, steps=40):
    return {step: value if step >= from_step else 0.5 for step in range(1, steps + 1)}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """GRPO collapses with two of three seeds, CalibAdv with none, lambda 0.5 with its only one."""
    output = tmp_path_factory.mktemp("evidence")
    searches = {"rollout__searches__mean": {step: 1.0 + (step > 35) for step in range(1, 41)}}
    tied = {"group__tied": {step: float(step > 34) for step in range(1, 41)}}  # six of the last ten steps
    softened = "advantage__search__softened_share"
    warned = {ENTROPY: entropy(21, 0.9), softened: entropy(5, 0.0), AT_1: {20: 0.75, 40: 0.1}}
    hardly = {ENTROPY: entropy(31, 0.1), softened: entropy(21, 0.2)}
    for name, seed, reward, f1, metrics in (
        ("grpo", 3, FALLEN, 0.2, warned),
        ("grpo", 4, FALLEN, 0.3, tied | searches),
        ("grpo", 5, STEADY, 0.7, {}),
        ("calibadv", 3, STEADY, 0.8, {ENTROPY: entropy() | {7: 0.4, 8: 0.6}, softened: entropy()}),
        ("calibadv", 4, STEADY, 0.7, {}),
        ("calibadv", 5, STEADY, 0.6, {ENTROPY: entropy(1, 0.95)}),
        ("soft", 3, STEADY, 0.5, {ENTROPY: entropy(38, 0.7)} | searches),
        ("calibadv-lambda0.5", 3, FALLEN, 0.1, hardly | searches),
        ("short-calibadv", 3, STEADY, 0.9, searches),
        ("short-grpo", 3, STEADY, 0.9, searches),
    ):
        make_run(output, f"{name}-lr1.9e-3", seed, reward, f1, **metrics)
    # Not finished: no evaluation, that of an earlier step, and no run at all.
    (make_run(output, "calibadv-lr2.2e-3", 3, STEADY, 0.9) / "evaluation.json").unlink()
    make_run(output, "calibadv-lr2.2e-3", 4, STEADY, 0.9, step=20)
    (output / "runs/notes").mkdir()
    for seed, f1 in ((3, 0.2), (4, 0.3), (5, 0.25)):
        write_evaluation(output / f"cold/seed-{seed}", f1, None)
    return output


def test_page_has_the_numbers_of_runs(output):
    results = read_results(output)
    methods = ("grpo", "calibadv", "soft", "calibadv-lambda0.5")
    assert [arm.name for arm in results] == [f"{method}-lr1.9e-3" for method in methods]
    arms = cells(evidence_tables.arms_table(results))
    # collapsed, final F1, best F1, tied, searches, less GRPO's
    grpo = ["2 [0.09, 0.99]", "0.400 [-0.257, 1.057]", "0.583 [-0.029, 1.196]", "0.60", "1.50", "-"]
    assert arms["grpo-lr1.9e-3"] == ["3", *grpo]
    calibadv = ["0 [0.00, 0.71]", *["0.700 [0.452, 0.948]"] * 2, "-", "-", "+0.300 [-0.596, 1.196]"]
    assert arms["calibadv-lr1.9e-3"] == ["3", *calibadv]
    rewards = cells(evidence_tables.reward_table(results))
    assert rewards["grpo-lr1.9e-3"] == ["0.80", "0.80", "0.48", "0.48"]  # (0.32 + 0.32 + 0.8) / 3
    text = evidence_tables.page(results, cold_starts(output))
    assert "8 finished runs of 40 steps, seeds 3, 4, 5." in text
    assert "Cold starts: F1 0.250 [0.126, 0.374]: 0.200 (seed 3), 0.300 (seed 4), 0.250 (seed 5)." in text
    last = ["3", "29", "0.100", "0.100", "0.320", "0.100", "-", "1.500"]
    assert cells(text)["calibadv-lambda0.5-lr1.9e-3"] == last
    assert held_out_f1({"scores": {"1": {"all": {"f1": 0.6}, "one_hop": {"f1": 0.4}}}}) == 0.6


def test_only_finished_runs_count(output):
    seeds = {arm.name: [result.seed for result in runs] for arm, runs in read_results(output).items()}
    assert seeds == {
        "grpo-lr1.9e-3": [3, 4, 5],
        "calibadv-lr1.9e-3": [3, 4, 5],
        "soft-lr1.9e-3": [3],
        "calibadv-lambda0.5-lr1.9e-3": [3],
    }


def test_table_of_arms_names_its_columns(output):
    rows = cells(evidence_tables.arms_table(read_results(output)))
    assert rows["arm"] == [
        "seeds",
        "collapsed",
        "final F1",
        "best F1",
        "tied",
        "searches",
        "final F1 - GRPO's",
    ]


def test_arm_of_one_seed_has_no_interval_of_its_means(output):
    rows = cells(evidence_tables.arms_table(read_results(output)))
    seeds, collapsed, final, best, _, _, difference = rows["calibadv-lambda0.5-lr1.9e-3"]
    assert (seeds, final, best, difference) == ("1", "0.100", "0.100", "-0.100")
    assert collapsed.startswith("1 [")


def test_table_of_rewards_names_its_steps(output):
    rows = cells(evidence_tables.reward_table(read_results(output)))
    assert rows["arm"] == ["1-10", "11-20", "21-30", "31-40"]


def test_page_says_what_is_in_brackets(output):
    text = evidence_tables.page(read_results(output), cold_starts(output))
    assert "8 finished runs of 40 steps, seeds 3, 4, 5. In brackets 95 % intervals" in text


def test_lines_of_the_page_are_short(output):
    text = evidence_tables.page(read_results(output), cold_starts(output))
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 110


def test_held_out_f1_counts_every_kind_of_question_the_same():
    scores = {"all": {"f1": 0.6}, "average": {"f1": 0.5}, "one_hop": {"f1": 0.4}}
    assert held_out_f1({"scores": {"1": scores}}) == 0.5


def test_table_of_warnings_names_arm_and_quantity(output):
    runs = [run for arm_runs in read_results(output).values() for run in arm_runs]
    table = evidence_tables.warnings_table(evidence_tables.warnings(runs)).splitlines()
    names, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    rows = [dict(zip(names, line, strict=True)) for line in lines]
    assert [(row["arm"], row["seed"], row["collapse"], row["entropy"]) for row in rows] == [
        ("grpo-lr1.9e-3", "3", "29", "23 above (6)"),
        ("grpo-lr1.9e-3", "4", "29", "-"),
        ("calibadv-lambda0.5-lr1.9e-3", "3", "29", "33 below"),
    ]


def test_first_warnings_have_step_side_and_lead(output):
    runs = [run for arm_runs in read_results(output).values() for run in arm_runs]
    collapsed, healthy = evidence_tables.warnings(runs), evidence_tables.controls(runs)
    rows = cells(evidence_tables.summary_table(collapsed, healthy))
    assert rows["entropy"] == ["1 of 2", "1 above, 0 below", "6", "1 of 2"]
    # GRPO softens nothing, so that its share of 0 is no warning.
    assert rows["softened share"] == ["1 of 1", "0 above, 1 below", "6", "0 of 0"]
    assert rows["perplexity"] == ["0 of 0", "-", "-", "0 of 0"]
    lines = evidence_tables.warnings_table(collapsed).splitlines()[2:]
    shown = [line.split(" | ")[1:4] for line in lines]  # seed, collapse, entropy
    assert shown == [["3", "29", "23 above (6)"], ["4", "29", "-"], ["3", "29", "33 below"]]


def test_unlike_runs_share_no_table(tmp_path):
    with pytest.raises(UserError, match="no finished run in .*/runs; bash experiments/evidence.sh makes"):
        read_results(tmp_path)
    make_run(tmp_path, "grpo-lr1.9e-3", 3, STEADY, 0.7)
    make_run(tmp_path, "grpo-lr1.9e-3", 4, STEADY, 0.7, "policy.attention_chunk=64")
    text = evidence_tables.page(read_results(tmp_path), {})
    assert "2 finished runs" in text and "No run collapsed." in text and "Cold starts" not in text
    for overrides, steps, key in (
        (["advantage.name=calibadv"], 40, "advantage.name=grpo"),
        (["rollout.group_size=4"], 40, "rollout.group_size"),
        ([], 20, "learner.steps"),
    ):
        folder = make_run(tmp_path, "grpo-lr1.9e-3", 5, STEADY[:steps], 0.7, *overrides)
        with pytest.raises(UserError, match=rf"grpo-lr1.9e-3/seed-5: other settings .*{key}.*; move it"):
            read_results(tmp_path)
        shutil.rmtree(folder)


@pytest.mark.parametrize("faster", ["policy.attention_chunk=64", "learner.microbatch_rows=2"])
def test_keys_that_only_make_runs_faster_may_differ(tmp_path, faster):
    make_run(tmp_path, "grpo-lr1.9e-3", 3, STEADY, 0.7)
    make_run(tmp_path, "grpo-lr1.9e-3", 4, STEADY, 0.7, faster)
    assert [len(runs) for runs in read_results(tmp_path).values()] == [2]


def test_lengths_are_of_wrong_and_right_trajectories(tmp_path):
    folder = make_run(tmp_path, "grpo-lr1.9e-3", 3, STEADY, 0.7)
    first = [
        (0.0, None, [10, 5]),
        (0.0, None, [3]),
        (1.0, None, [2, 2, 2]),
        (0.5, None, [100]),  # neither
        (0.0, "retriever: gone", [50]),
        (0.0, None, []),
    ]
    (folder / "rollouts").mkdir()
    for step, kept in enumerate((first, [(0.0, None, [4]), (0.0, None, [8])]), 1):
        rows = [
            {"step": step, "answer_score": score, "error": error}
            | {"turns": [{"kind": "search", "token_ids": list(range(tokens))} for tokens in turns]}
            for score, error, turns in kept
        ]
        table = pa.Table.from_pylist(rows, schema=SCHEMA).replace_schema_metadata({"schema_version": VERSION})
        pq.write_table(table, folder / f"rollouts/step_{step}.parquet")
    (run,) = read_runs([folder])
    assert measures.lengths(run) == {"length/wrong": {1: 6.0, 2: 6.0}, "length/right": {1: 6.0}}


def test_report_writes_tables_and_figures(output, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    evidence_report.main([str(output), "--docs", str(tmp_path), "--name", "rumours"])
    figures = [f"rumours_{kind}.svg" for kind in ("frontier", "rewards", "searches", "lambda")]
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / name) for name in ["rumours_tables.md", *figures]
    ]
    assert all("grpo" in words(tmp_path / name) for name in figures)
    assert {"calibadv", "λ", "0.5", "1"} <= words(tmp_path / "rumours_lambda.svg")
    table, picture = evidence_report.write_short(output, ["short-calibadv-lr1.9e-3", "short-grpo-lr1.9e-3"])
    assert list(cells(table)) == ["arm", "short-grpo-lr1.9e-3", "short-calibadv-lr1.9e-3"]
    assert {"grpo", "calibadv", "searches"} <= words(picture)


def test_figures_show_their_arms_and_panels(output, tmp_path):
    pytest.importorskip("matplotlib")
    evidence_report.main([str(output), "--docs", str(tmp_path)])
    frontier, rewards, searches, lambdas = (
        words(tmp_path / f"evidence_{kind}.svg") for kind in ("frontier", "rewards", "searches", "lambda")
    )
    assert {"grpo", "calibadv", "soft", "5 updates a step", "1.9"} <= frontier
    assert {"grpo", "calibadv", "reward"} <= rewards
    assert {"grpo", "soft", "calibadv-lambda0.5", "searches"} <= searches
    assert {"learning rate 1.9e-3", "learning rate 1.9e-3: λ"} <= searches
    assert {"grpo", "calibadv", "λ", "0.5", "1"} <= lambdas


def lines_of(axes):
    """Name -> values of the lines of a drawing."""
    return {line.get_label(): line.get_ydata() for line in axes.lines}


def test_frontier_shows_shares_and_means(output):
    pytest.importorskip("matplotlib")
    shares, f1 = evidence_figures.figures(read_results(output))["frontier"].axes
    assert lines_of(shares)["grpo"] == pytest.approx([2 / 3])
    assert lines_of(shares)["calibadv"] == pytest.approx([0.0])
    assert lines_of(f1)["grpo"] == pytest.approx([0.4])
    assert lines_of(f1)["calibadv"] == pytest.approx([0.7])
    intervals = [sorted(line.get_ydata()) for line in f1.lines if len(line.get_ydata()) == 2]
    assert [pytest.approx([-0.257, 1.057], abs=1e-3), pytest.approx([0.452, 0.948], abs=1e-3)] == intervals


def test_lambda_sweep_has_1_where_calibadv_is(output):
    pytest.importorskip("matplotlib")
    shares, f1 = evidence_figures.figures(read_results(output))["lambda"].axes
    assert lines_of(f1)["calibadv"] == pytest.approx([0.1, 0.7])
    assert lines_of(f1)["grpo"] == pytest.approx([0.4, 0.4])
    assert lines_of(shares)["calibadv"] == pytest.approx([1, 0])
    assert [label.get_text() for label in f1.get_xticklabels()] == ["0.5", "1"]


def test_curves_of_rewards_are_means_with_bands_over_the_seeds(output):
    pytest.importorskip("matplotlib")
    results = {arm: runs for arm, runs in read_results(output).items() if arm.method == "grpo"}
    (axes,) = evidence_figures.curves({"": results}, "rewards").axes
    (band,) = axes.collections
    assert tuple(band.get_datalim(axes.transData).intervaly) == pytest.approx((0.32, 0.8))
    assert axes.lines[0].get_ydata()[-1] == pytest.approx(statistics.fmean([0.32, 0.32, 0.8]))


def test_same_figure_gives_the_same_file(output, tmp_path):
    pytest.importorskip("matplotlib")
    contents = []
    for _ in range(2):
        figure = evidence_figures.figures(read_results(output))["lambda"]
        evidence_figures.save(figure, tmp_path / "figure.svg")
        contents.append((tmp_path / "figure.svg").read_bytes())
    assert contents[0] == contents[1]
