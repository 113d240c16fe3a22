"""Commands of docs/paper_run.md and docs/hardware.md parse; figures are those of `calibadv plan`."""

import argparse
import re
import shlex
from pathlib import Path

import jax
import pytest
from plan_rig import planned

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.cli import prepare_data
from calibadv_jax.contrib.cli.plan import make_plan, memory_verdict
from calibadv_jax.contrib.planning.hardware import FRACTION, find_target
from calibadv_jax.contrib.planning.memory import GIB, estimate_memory, peak_memory
from calibadv_jax.policy.architecture import architecture_from_hf

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


def test_pages_show_every_command_of_a_run():
    assert len(COMMANDS) >= 8
    assert {"doctor", "train", "evaluate", "export"} <= {command for command, _ in COMMANDS}


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


def test_memory_seconds_and_hours_equal_the_plan():
    row = re.search(r"^\| trainer's memory on a GPU.*", TEXT, re.MULTILINE)[0]
    sizes = [float(number) for number in re.findall(r"([\d.]+) GiB", row)]
    table = {
        cells[0].strip("*"): [cell.strip("*") for cell in cells[1:]]
        for cells in (line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("|"))
    }
    target = find_target(gpu="h100", topology="1x1x8")
    for column, name in enumerate(("qwen2.5-3b", "llama-3.2-3b-instruct", "qwen2.5-7b")):
        config = load_config(ROOT / f"configs/paper/{name}.yaml")
        mesh = config.mesh.sizes_on(jax.device_count())
        estimate = estimate_memory(config, architecture_from_hf(config.policy.init), mesh)
        assert sizes[column] == round(peak_memory(estimate) / GIB, 1)
        plan = make_plan(config, target, 0.4, tokens=4000, sampled=700)
        for part in plan.step.parts:
            if part.name in table:
                assert (
                    table[part.name][column] == f"{part.seconds(target, plan.efficiency.of(part.name)):.0f}"
                ), part.name
        assert table["sum"][column] == f"{plan.seconds:.0f}"
        assert table["a step (`plan`'s estimate)"][column] == f"{plan.seconds:.0f} s"
        assert table["205 steps, one epoch, as the authors' loader ends"][column] == (
            f"{config.learner.steps * plan.seconds / 3600:.1f} h"
        )


def test_lora_learning_rates_match_the_configs():
    page = (ROOT / "docs/lora.md").read_text(encoding="utf-8")
    shown, times, paper, real_times = re.search(
        r"lr: (\S+)}\s+# (\d+) times the paper's (\S+); configs/real_lora.yaml: (\d+) times", page
    ).groups()
    rates = {
        name: load_config(ROOT / f"configs/{name}.yaml").learner.optimizer.lr
        for name in ("paper/qwen2.5-3b", "real", "real_lora")
    }
    assert float(paper) == rates["paper/qwen2.5-3b"]
    assert float(shown) == pytest.approx(float(times) * rates["paper/qwen2.5-3b"])
    assert rates["real_lora"] == pytest.approx(float(real_times) * rates["real"])


def test_data_files_of_configs_have_a_source():
    configs = sorted((ROOT / "configs").rglob("*.yaml"))
    comments = [line for path in configs for line in path.read_text("utf-8").splitlines() if line[:1] == "#"]
    sources = "\n".join([TEXT, *comments])
    files = set()
    for path in configs:
        if path.name != "retriever.yaml":
            data = load_config(path).data
            files |= {file for file in (data.train, data.eval) if str(file).startswith("data/")}
    assert files
    assert not [file for file in files if f"{Path(file).parent}/" not in sources]
