"""`calibadv plan`: what it prints, writes and refuses; and beside a compiler's plan of the memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from jax.experimental import topologies
from plan_rig import overrides, small

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.cli import plan
from calibadv_jax.contrib.planning.hardware import find_target
from calibadv_jax.contrib.planning.memory import GIB, program_memory
from calibadv_jax.metrics.console import Console

pytestmark = pytest.mark.medium

ROOT = Path(__file__).resolve().parents[2]
PAPER = str(ROOT / "configs/paper/qwen2.5-7b.yaml")
COMPILER = Path(sys.prefix) / "cuda_compiler"  # where scripts/test.sh puts it
EIGHT = ["--gpu", "h100", "--topology", "1x1x8"]


def planned(capsys, *arguments):
    """Status, output and errors of the command."""
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["plan", *arguments])
    output, errors = capsys.readouterr()
    return end.value.code, " ".join(output.split()), errors


@pytest.fixture(autouse=True)
def share(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)


def test_estimate_prints_memory_work_and_hours(capsys, tmp_path):
    file = tmp_path / "plans/plan.json"
    expected = ["--tokens", "4000", "--sampled", "700", "--json", str(file)]
    status, printed, _ = planned(capsys, "--config", PAPER, *EIGHT, "--estimate", *expected)
    figures = json.loads(file.read_text())
    assert status == 0 and "8 H100 (1x1x8), mesh data 1 x fsdp 8 x tensor 1: qwen2, 7615.62M" in printed
    assert "estimated memory a device: 27.87 GiB" in printed  # the doctor's
    assert "2560 trajectories of 4000 tokens, 700 of them sampled" in printed
    assert figures["fits"] and figures["programs"] == {} and figures["devices"] == 8
    assert figures["device_hours"] == pytest.approx(205 * figures["seconds"] * 8 / 3600)
    assert figures["tokens_per_second"] == pytest.approx(2560 * 4000 / figures["seconds"])
    planned(capsys, "--config", PAPER, *EIGHT, "--estimate", *expected, "--efficiency", "0.2")
    assert json.loads(file.read_text())["seconds"] == pytest.approx(2 * figures["seconds"])


def test_estimate_prints_verdict_and_length_of_the_run(capsys):
    expected = ["--tokens", "4000", "--sampled", "700"]
    _, printed, _ = planned(capsys, "--config", PAPER, *EIGHT, "--estimate", *expected)
    assert "qwen2, 7615.62M parameters" in printed
    assert "fits 59.3 GiB of a device, by the formula" in printed
    assert (
        "at efficiency 0.4 (an assumption: nothing was measured near this size on such devices):" in printed
    )
    assert "205 steps:" in printed
    assert "not counted: retrieval" in printed


def test_misfit_names_the_limit_and_the_cheapest_remedy(capsys):
    status, printed, _ = planned(capsys, "--config", PAPER, *EIGHT, "--estimate", "policy.remat=none")
    assert status == 1
    assert "does not fit 59.3 GiB of a device" in printed
    assert "would fit: policy.remat=attention (31.0 GiB by the formula)" in printed


def test_run_that_no_change_fits_names_other_ways_out(capsys):
    status, printed, _ = planned(capsys, "--config", PAPER, "--tpu", "v5e:2x4", "--estimate")
    assert status == 1
    assert "take more devices" in printed


def test_share_of_filled_rows_is_printed(capsys):
    many = ["--tpu", "v5p:4x8x8", "mesh.fsdp=256", "learner.microbatch_rows=256", "sampler.name=jax"]
    arguments = ["--config", PAPER, *many, "--estimate", "--tokens", "4000"]
    status, printed, _ = planned(capsys, *arguments)
    assert status == 0
    assert "which fill 33% of the update's rows" in printed
    fewer = [*arguments, "mesh.fsdp=64", "mesh.tensor=4", "learner.microbatch_rows=64"]
    _, printed, _ = planned(capsys, *fewer)
    share = int(printed.partition("which fill ")[2].partition("%")[0])
    assert share > 90


@pytest.mark.parametrize(
    ("config", "devices", "changes"),
    [
        ("own_data", ["--gpu", "h100", "--topology", "1x1x1"], []),
        ("paper/qwen2.5-3b", ["--tpu", "v5e:2x4"], ["sampler.name=jax"]),
        ("paper/qwen2.5-7b", EIGHT, ["policy.remat=none"]),
    ],
)
def test_misfit_exits_1_and_its_remedy_fits(capsys, config, devices, changes):
    arguments = ["--config", str(ROOT / f"configs/{config}.yaml"), *devices, "--estimate", *changes]
    status, printed, _ = planned(capsys, *arguments)
    assert status == 1 and "does not fit " in printed
    proposal = printed.partition("would fit: ")[2].partition(" (")[0].split()
    assert proposal
    status, printed, _ = planned(capsys, *arguments, *proposal)
    assert status == 0 and "fits" in printed, proposal


def test_config_for_several_hosts_is_checked(capsys):
    two = ["--gpu", "h100", "--topology", "1x2x8", "mesh.fsdp=16", "learner.microbatch_rows=16", "--estimate"]
    three = ["sampler.workers=3", "sampler.worker_devices=[]"]
    status, _, errors = planned(capsys, "--config", PAPER, *two, *three)
    assert status == 2 and "sampler.workers is 3, for 2 processes" in errors
    for more in ([], ["sampler.name=jax"]):
        assert planned(capsys, "--config", PAPER, *two, *more)[0] == 0


@pytest.mark.parametrize(
    ("platform", "named"),
    [
        (["--tpu", "v5e:2x4"], r"pip install --no-deps --target compiler 'libtpu"),
        (EIGHT, "--target compiler 'jax-cuda13-plugin==" + jax.__version__),
    ],
)
def test_missing_compiler_is_named_with_installation(capsys, monkeypatch, platform, named):
    monkeypatch.setattr(topologies, "get_topology_desc", Mock(side_effect=NotImplementedError))
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    status, printed, errors = planned(capsys, "--config", PAPER, *platform)
    assert "estimated memory a device: " in printed and os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert status == 2 and named in line and "PYTHONPATH=compiler" in line and "--estimate" in line


def test_compilers_refusal_is_no_fit(tmp_path):
    run_plan = plan.make_plan(small(tmp_path), find_target(gpu="h100", topology="1x1x4"), 0.4)
    programs = {"apply": {"arguments": 1.0, "peak": 1.0, "needed": 1.0}}
    assert plan.memory_verdict(run_plan, programs)[1]
    lines, fits = plan.memory_verdict(run_plan, programs | {"update": {"refused": "RESOURCE_EXHAUSTED"}})
    assert not fits and lines[1].startswith("does not fit ") and lines[1].endswith(": update")
    assert lines[2].startswith("would fit: learner.optimizer.offload=host (")


def test_remedy_passes_over_a_change_that_is_refused(tmp_path, monkeypatch):
    run_plan = plan.make_plan(small(tmp_path), find_target(gpu="h100", topology="1x1x4"), 0.4)
    savers = plan.memory_savers
    refused = {"learner.microbatch_rows": 0}
    monkeypatch.setattr(plan, "memory_savers", lambda *arguments: [refused, *savers(*arguments)])
    lines, _ = plan.memory_verdict(run_plan, {"update": {"refused": "RESOURCE_EXHAUSTED"}})
    assert lines[2].startswith("would fit: learner.optimizer.offload=host (")


@pytest.mark.parametrize(("hosts", "is_beside"), [(1, False), (2, True)])
def test_learners_base_lies_beside_sampler_that_has_copy(monkeypatch, hosts, is_beside):
    """One process' sampler computes with the base itself, each of several with a copy on its own devices."""
    keys = ["sampler.name=jax", "policy.lora.rank=8", "learner.microbatch_rows=16", f"mesh.fsdp={8 * hosts}"]
    target = find_target(gpu="h100", topology=f"1x{hosts}x8")
    run_plan = plan.make_plan(load_config(PAPER, keys), target, 0.4)
    monkeypatch.setattr(plan.compiled, "topology_mesh", lambda *_: None)
    monkeypatch.setattr(plan.compiled, "lowered_program", lambda *_: None)
    monkeypatch.setattr(plan.compiled, "compiled_figures", lambda _, beside: {"beside": beside})
    programs = plan.compile_programs(run_plan, Console(progress=False))
    held = ("parameters", "optimizer", *(["base"] if is_beside else []))
    assert programs["decode"]["beside"] == sum(run_plan.estimate[name] for name in held)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        *[(PAPER, ["--efficiency", value], "efficiency") for value in ("-0.5", "1.5", "much")],
        ("run.yaml", [], "policy.path is some/where, where no config.json is"),
    ],
)
def test_bad_argument_or_shape_is_named(capsys, tmp_path, monkeypatch, config, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("policy: {path: some/where}\nlearner: {microbatch_rows: 8}\n")
    status, _, errors = planned(capsys, "--config", config, *EIGHT, "--estimate", *arguments)
    assert status == 2 and message in errors


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER.is_dir(), reason="no compiler for CUDA; scripts/test.sh installs it")
def test_memory_is_what_the_compiler_plans(tmp_path):
    """In a process of its own: the compiler's packages must not stand beside those of torch."""
    small(tmp_path)
    options = ["--gpu", "h100", "--topology", "1x1x4", "--json", "plan.json"]
    arguments = ["--config", "small.yaml", *overrides(sampler__name="vllm"), *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, COMPILER)))}
    command = [sys.executable, "-m", "calibadv_jax", "plan", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "needed, with all that lies beside it" in done.stdout
    result = json.loads((tmp_path / "plan.json").read_text())
    assert sorted(result["programs"]) == ["apply", "log-probabilities", "update"]
    expected = program_memory(result["memory"])
    for name in ("update", "apply"):
        ratio = expected[name] / GIB / result["programs"][name]["peak"]
        assert 1 / 1.15 < ratio < 1.15, (name, ratio)
    assert 1 / 1.15 < result["peak"] / GIB / result["programs"]["update"]["peak"] < 1.15
