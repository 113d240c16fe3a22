"""How runs were pushed to search again in their first steps, and whether they search again in the end.

    python -m experiments.second_search_runs RUN... [--steps 5] [--figure FILE.svg]

RUN is the folder of a run that keeps its trajectories, as those of evidence.sh do. Two tables:

- The groups of all runs together: what every arm would have made of the same trajectories. Shown are the mean
  over groups of the push (see second_search.py) and its difference from GRPO's, with standard errors.
- Each run: the push by its own advantages, and the searches of a trajectory in its last ten steps. --figure
  draws them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibadv_jax import cli
from calibadv_jax.advantages.credit import GroupCredit
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Group
from calibadv_jax.metrics.console import table
from calibadv_jax.metrics.metrics_writer import read_metrics
from calibadv_jax.rollout_store.reader import find_step, read_step
from experiments import figures as evidence_figures
from experiments.arms import METHODS, parse_name
from experiments.measures import SEARCHES, mean_at_the_end
from experiments.second_search import ARMS, credit_of, push, searches_again


@dataclass(frozen=True)
class Beginning:
    """The first steps of a run.

    Args:
        groups: their finished trajectories.
        credits: what the run made of them.
    """

    run: Path
    groups: list[Group]
    credits: list[GroupCredit]

    @property
    def method(self) -> str:
        """Return the method of METHODS if `runs` named the folder, else the folder's own name."""
        arm = parse_name(self.run.parent.name)
        return arm.method if arm else self.run.name

    @property
    def searches_at_the_end(self) -> float:
        """Return the searches of a trajectory, mean of the last ten steps.

        Raises:
            UserError: the run has not logged them.
        """
        path = self.run / "metrics.jsonl"
        searches = mean_at_the_end({row["step"]: row.get(SEARCHES) for row in read_metrics(path)})
        if searches is None:
            raise UserError(f"{path}: no step has {SEARCHES}; give the folder of a training run")
        return searches


def read_beginning(run: Path, num_steps: int) -> Beginning:
    """Read the first steps of a run; raises UserError if one is not kept."""
    kept = [read_step(find_step(run, step)) for step in range(1, num_steps + 1)]
    groups = [group for step in kept for group in step.groups]
    return Beginning(run, groups, [credit for step in kept for credit in step.credits])


def share_that_searches_again(groups: Sequence[Group]) -> float:
    """Return the share that searches again of those that have the choice.

    Raises:
        UserError: all of them decide alike.
    """
    decided = [searches_again(trajectory) for group in groups for trajectory in group.trajectories]
    share = statistics.fmean([decision for decision in decided if decision is not None] or [0])
    if share in (0, 1):
        raise UserError("all trajectories of these steps decide alike after their first search: no push")
    return share


def arms_table(groups: Sequence[Group]) -> str:
    """Return the table of every arm on the same trajectories."""
    share = share_that_searches_again(groups)
    earned = {
        which: [
            trajectory.answer_score
            for group in groups
            for trajectory in group.trajectories
            if searches_again(trajectory) is which
        ]
        for which in (False, True)
    }
    pushes = {name: push(groups, credit_of(name, groups), share) for name in ARMS}
    rows = [[name, _with_error(push), _with_error(push - pushes["grpo"])] for name, push in pushes.items()]
    return (
        f"{len(groups)} groups; {share:.2f} search again after the first search, and earn "
        f"{np.mean(earned[True]):.2f}; answering at once earns {np.mean(earned[False]):.2f}\n"
        + table(rows, ["arm", "push", "less GRPO's"])
    )


def own_pushes(beginnings: Sequence[Beginning]) -> list[np.ndarray]:
    """Return float64 [groups] for each run, by its own advantages."""
    return [
        push(beginning.groups, beginning.credits, share_that_searches_again(beginning.groups))
        for beginning in beginnings
    ]


def runs_table(beginnings: Sequence[Beginning], pushes: Sequence[np.ndarray]) -> str:
    rows = [
        [str(beginning.run), _with_error(own), f"{beginning.searches_at_the_end:.2f}"]
        for own, beginning in sorted(
            zip(pushes, beginnings, strict=True), key=lambda pair: float(pair[0].mean())
        )
    ]
    return table(rows, ["run", "push", "searches at the end"])


def _with_error(values: np.ndarray) -> str:
    return f"{values.mean():+.3f} ± {values.std(ddof=1) / math.sqrt(len(values)):.3f}"


def save_figure(beginnings: Sequence[Beginning], pushes: Sequence[np.ndarray], path: Path) -> None:
    methods = [beginning.method for beginning in beginnings]
    order = [method for method in dict.fromkeys((*METHODS, *methods)) if method in methods]
    points: dict[str, list[tuple[float, float]]] = {method: [] for method in order}
    for beginning, own in zip(beginnings, pushes, strict=True):
        points[beginning.method].append((float(own.mean()), beginning.searches_at_the_end))
    figure = evidence_figures.scatter(
        points, "push to search again in the first steps", "searches at the end"
    )
    evidence_figures.save(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument(
        "--steps", type=int, default=5, help="number of steps of each run (default: %(default)s)"
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="SVG file to draw the second table into")
    arguments = parser.parse_args(argv)
    beginnings = [read_beginning(run, arguments.steps) for run in arguments.runs]
    pushes = own_pushes(beginnings)
    sys.stdout.write(arms_table([group for beginning in beginnings for group in beginning.groups]) + "\n\n")
    sys.stdout.write(runs_table(beginnings, pushes) + "\n")
    if arguments.figure:
        save_figure(beginnings, pushes, arguments.figure)


if __name__ == "__main__":
    cli.run_and_exit(main)
