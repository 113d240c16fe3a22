"""Commands of docs/paper_run.md and docs/hardware.md parse; the table is that of `calibadv plan`."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from plan_rig import planned

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.commands import prepare_data
from calibadv_jax.contrib.commands.plan import memory_verdict
from calibadv_jax.contrib.planning.hardware import FRACTION
from calibadv_jax.contrib.planning.memory import GIB, peak_memory

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/paper_run.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", "")
COMMANDS = re.findall(r"^calibadv (\w+) (?!.*--output)([^#\n]*)", BLOCKS, re.MULTILINE)
HARDWARE = (ROOT / "docs/hardware.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in HARDWARE.splitlines() if line.startswith("| [")]
RECIPES = re.findall(
    rf"(?m)^(?:{FRACTION}=(\S+) )?calibadv (\w+) ([^#\n]*)",
    "\n".join(re.findall(r"```bash\n(.*?)```", HARDWARE, re.DOTALL)),
)
PLANS = [(share, arguments) for share, name, arguments in RECIPES if name == "plan"]
PARSED = [*COMMANDS, *(recipe[1:] for recipe in RECIPES if recipe[1] != "plan")]


@pytest.mark.parametrize(("command", "arguments"), PARSED)
def test_every_command_parses(command, arguments, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        cli.calibadv([command, *shlex.split(arguments), "--dry-run"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("run:\n")


def test_questions_go_where_the_config_reads_them():
    assert {"doctor", "train", "evaluate", "export"} <= {command for command, _ in COMMANDS}
    paper = load_config(ROOT / "configs/paper/qwen2.5-3b.yaml").data
    outputs = []
    for line in re.findall(r"^calibadv prepare-data (.*)", BLOCKS, re.MULTILINE):
        parser = argparse.ArgumentParser(exit_on_error=False)
        prepare_data.add_arguments(parser)
        outputs.append(str(parser.parse_args(shlex.split(line)).output))
    assert outputs == [str(paper.train), str(paper.eval)]


@pytest.mark.parametrize(
    ("share", "arguments", "row"), [(*plan, row) for plan, row in zip(PLANS, ROWS[1:], strict=True)]
)
def test_table_has_the_planned_figures(share, arguments, row, monkeypatch):
    monkeypatch.delenv(FRACTION, raising=False)
    if share:
        monkeypatch.setenv(FRACTION, share)
    config, target, plan = planned(arguments)
    assert memory_verdict(plan, {})[1]  # it fits
    steps, memory = (
        config.learner.steps,
        f"{peak_memory(plan.estimate) / GIB:.1f} of {target.limit / GIB:.1f}",
    )
    hours = f"{steps * plan.seconds / 3600:.1f} h"
    assert row[2:] == [memory, f"{plan.seconds:.0f} s", str(steps), hours]
