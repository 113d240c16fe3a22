"""The commands of docs/hardware.md parse, and its table has what `calibadv plan` computes."""

import re
import shlex
from pathlib import Path

import pytest

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.commands.plan import make_plan, memory_verdict
from calibadv_jax.contrib.planning.hardware import FRACTION, find_target
from calibadv_jax.contrib.planning.memory import GIB, peak_memory

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/hardware.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| [")]
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL))
COMMANDS = re.findall(rf"(?m)^(?:{FRACTION}=(\S+) )?calibadv (\w+) ([^#\n]*)", BLOCKS)
PLANS = [(share, arguments) for share, name, arguments in COMMANDS if name == "plan"]


@pytest.mark.parametrize(("name", "arguments"), [command[1:] for command in COMMANDS if command[1] != "plan"])
def test_every_command_parses(name, arguments, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        cli.calibadv([name, *shlex.split(arguments), "--dry-run"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("run:\n")


@pytest.mark.parametrize(
    ("share", "arguments", "row"), [(*plan, row) for plan, row in zip(PLANS, ROWS[1:], strict=True)]
)
def test_table_has_the_planned_figures(share, arguments, row, monkeypatch):
    if share:
        monkeypatch.setenv(FRACTION, share)
    else:
        monkeypatch.delenv(FRACTION, raising=False)
    asked = cli.parse("calibadv plan", "", shlex.split(arguments), cli.OPTIONS["plan"])
    options = asked.options
    target = find_target(options["tpu"], options["gpu"], options["topology"])
    config = load_config([ROOT / path for path in asked.configs], asked.overrides)
    plan = make_plan(config, target, options["efficiency"], options["tokens"], options["sampled"])
    assert memory_verdict(plan, {})[1]  # it fits
    steps = config.learner.steps
    expected = [
        f"{peak_memory(plan.estimate) / GIB:.1f} of {target.limit / GIB:.1f}",
        f"{plan.seconds:.0f} s",
        str(steps),
        f"{steps * plan.seconds / 3600:.1f} h",
    ]
    assert row[2:] == expected
