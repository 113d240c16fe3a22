"""From nothing to a better search agent: ``calibadv quickstart --config FILE``."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

from calibadv_jax.commands import export, sft, train
from calibadv_jax.commands.evaluate import evaluate_policy
from calibadv_jax.config import Config
from calibadv_jax.contrib.cli import report as report_command
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.locking import locked_run
from calibadv_jax.distributed.joining import require_single_process
from calibadv_jax.evaluation.score_tables import AVERAGE, Means, unanswered_warnings
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.run.folder import check_cold_start
from calibadv_jax.run.model import find_policy
from calibadv_jax.run.wiring import open_services

NUM_STAGES = 6  # whose headings the console shows


def run(config: Config) -> None:
    """Run the whole chain in `run.dir`; print a table and the paths of the outputs.

    Raises:
        UserError: world.dir is empty, or a part of the chain cannot run.
    """
    require_single_process(config.distributed, "quickstart")
    if not config.world.dir:
        raise UserError("world.dir is empty: the quickstart generates its world there")
    console = Console(config.log.progress)
    seconds: dict[str, float] = {}
    start = time.monotonic()

    def lap(name: str) -> None:
        seconds[name] = time.monotonic() - start - sum(seconds.values())

    with locked_run(Path(config.run.dir), console.warn):
        console.heading(f"{_stage(1)}: world of {config.world.train_questions} training questions")
        write_world(config.world, config.rollout.protocol)
        lap("world")
        console.heading(f"{_stage(2)}: cold start, supervised on demonstrations")
        if (Path(config.sft.output) / "config.json").is_file():
            check_cold_start(config)
        else:
            sft.run(config)
        lap("cold start")
        console.heading(f"{_stage(3)}: index and retriever")
        with open_services(config, Path(config.sft.output)) as (retriever, workers):
            connected = replace(
                config,
                retriever=config.retriever.at(retriever),
                sampler=replace(config.sampler, urls=workers),
            )
            lap("services")
            console.heading(f"{_stage(4)}: evaluation of the cold start")
            cold_start = find_policy(Path(connected.sft.output))
            before = evaluate_policy(_writing_evaluation(connected, "before"), cold_start).means
            lap("evaluation before")
            method = f"{config.learner.steps} steps with {config.advantage.name}"
            console.heading(f"{_stage(5)}: reinforcement learning, {method}")
            train.run(connected, kept=config)
            lap("training")
            output = export.export(connected)
            lap("export")
            console.heading(f"{_stage(6)}: evaluation of the trained policy")
            trained = find_policy(output)
            after = evaluate_policy(_writing_evaluation(connected, "after"), trained).means
            lap("evaluation after")
        seconds["total"] = time.monotonic() - start
        report = Path(config.run.dir) / "quickstart.json"
        write_json(report, {"before": before, "after": after, "seconds": seconds})
    page = _write_report(config, console)
    console.heading("result")
    for line in unanswered_warnings(after):
        console.warn(f"after training, {line}")
    console.say(_scores_table(before, after))
    console.say("  ".join(f"{name} {value:.0f} s" for name, value in seconds.items()))
    outputs = {"policy": output, "cold start": config.sft.output, "run": config.run.dir, "scores": report}
    for label, path in outputs.items():
        console.say(f"{label:>10}  {path}")
    if page is not None:
        console.say(f"{'page':>10}  {page.resolve().as_uri()}   # the result first, then all curves")
    _print_next_commands(console, Path(config.run.dir), output, has_page=page is not None)


def _stage(number: int) -> str:
    return f"{number}/{NUM_STAGES}"


def _write_report(config: Config, console: Console) -> Path | None:
    """Write the report of the run into its folder; None where matplotlib is not installed."""
    if not report_command.is_installed():
        return None
    page = Path(config.run.dir) / "report.html"
    report_command.write_report([Path(config.run.dir)], page, console, is_trusted=True)
    return page


def _scores_table(before: Means, after: Means) -> str:
    """Return a table with a row for each temperature and each group of questions, without the average."""
    rows = []
    for temperature, sources in after.items():
        for source, scores in sources.items():
            if source == AVERAGE:
                continue
            f1_before = before[temperature][source]["f1"]
            rows.append([temperature, source, f1_before, scores["f1"], scores["format"], scores["searches"]])
    return table(rows, ["temperature", "questions", "F1 before", "F1 after", "format", "searches"])


def _print_next_commands(console: Console, run_dir: Path, policy_folder: Path, has_page: bool) -> None:
    """Print the commands that look at the run and ask its policy."""
    run_folder = shlex.quote(str(run_dir.resolve()))
    policy = shlex.quote(str(policy_folder.resolve()))
    program = Path(sys.executable).with_name("calibadv")
    if program.is_file():
        calibadv = shlex.quote(str(program))
    else:  # the package is on the path, but not installed
        calibadv = shlex.join([sys.executable, "-m", "calibadv_jax"])
    console.say("next:")
    console.say(f"  {calibadv} inspect {run_folder}   # every trajectory with the credit of each turn")
    if not has_page:
        install = "pip install 'calibadv-jax[report]'"
        console.say(
            f"  {calibadv} report {run_folder}   # one page with the result and all curves; {install}"
        )
    console.say(f"  {calibadv} ask --policy {policy}   # asks the trained policy")


def _writing_evaluation(config: Config, name: str) -> Config:
    """Return the config of an evaluation that writes evaluation_NAME.json into `run.dir`."""
    output = str(Path(config.run.dir) / f"evaluation_{name}.json")
    return replace(config, evaluate=replace(config.evaluate, output=output))
