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
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import write_json
from calibadv_jax.core.locking import locked_run
from calibadv_jax.distributed.joining import alone
from calibadv_jax.evaluation.report import AVERAGE, unanswered
from calibadv_jax.metrics.console import Console, table
from calibadv_jax.run.folder import check_cold_start
from calibadv_jax.run.model import find_policy
from calibadv_jax.run.wiring import open_services


def run(config: Config) -> None:
    """Run the whole chain in `run.dir`; print a table and the paths of the outputs."""
    alone(config.distributed, "quickstart")
    if not config.world.dir:
        raise UserError("world.dir is empty: the quickstart generates its world there")
    console = Console(config.log.progress)
    seconds: dict[str, float] = {}
    begun = time.monotonic()

    def lap(name: str) -> None:
        seconds[name] = time.monotonic() - begun - sum(seconds.values())

    with locked_run(Path(config.run.dir), console.warn):
        write_world(config.world)
        lap("world")
        if (Path(config.sft.output) / "config.json").is_file():
            check_cold_start(config)
        else:
            sft.run(config)
        lap("cold start")
        with open_services(config, Path(config.sft.output)) as (retriever, workers):
            sampler = replace(config.sampler, urls=workers)
            running = replace(config, retriever=config.retriever.at(retriever), sampler=sampler)
            lap("services")
            before = evaluate_policy(_to(running, "before"), find_policy(Path(running.sft.output))).means
            lap("evaluation before")
            train.run(running, kept=config)
            lap("training")
            output = export.export(running)
            lap("export")
            after = evaluate_policy(_to(running, "after"), find_policy(output)).means
            lap("evaluation after")
        seconds["total"] = time.monotonic() - begun
        report = Path(config.run.dir) / "quickstart.json"
        write_json(report, {"before": before, "after": after, "seconds": seconds})
    for line in unanswered(after):
        console.warn(f"after training, {line}")
    rows = [
        [temperature, source, before[temperature][source]["f1"]]
        + [values[name] for name in ("f1", "format", "searches")]
        for temperature, sources in after.items()
        for source, values in sources.items()
        if source != AVERAGE
    ]
    console.say(table(rows, ["temperature", "questions", "F1 before", "F1 after", "format", "searches"]))
    console.say("  ".join(f"{name} {value:.0f} s" for name, value in seconds.items()))
    outputs = {"policy": output, "cold start": config.sft.output, "run": config.run.dir, "report": report}
    for label, path in outputs.items():
        console.say(f"{label:>10}  {path}")
    run_folder = shlex.quote(str(Path(config.run.dir).resolve()))
    policy = shlex.quote(str(output.resolve()))
    program = Path(sys.executable).with_name("calibadv")  # else the package is not installed, but on the path
    words = [str(program)] if program.is_file() else [sys.executable, "-m", "calibadv_jax"]
    calibadv = shlex.join(words)
    console.say("next:")
    console.say(f"  {calibadv} inspect {run_folder}   # every trajectory with the credit of each turn")
    console.say(f"  {calibadv} report {run_folder}   # one page with all curves")
    console.say(f"  {calibadv} ask --policy {policy}   # asks the trained policy")


def _to(config: Config, name: str) -> Config:
    output = str(Path(config.run.dir) / f"evaluation_{name}.json")
    return replace(config, evaluate=replace(config.evaluate, output=output))
