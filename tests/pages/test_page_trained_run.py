"""Pages of runs that were trained, and questions to their policy: the real program, small."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from calibadv_jax import cli
from calibadv_jax.commands import train
from calibadv_jax.config import load_config
from calibadv_jax.config.trust import FLAG, Trust
from calibadv_jax.contrib.cli import ask
from calibadv_jax.contrib.worlds.world import write_world
from calibadv_jax.run.model import find_policy

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = [
    *("world.people=20", "world.cities=8", "world.companies=8", "world.train_questions=40"),
    *("world.eval_questions=6", "policy.path=", "policy.init.hidden_size=32"),
    *("policy.init.intermediate_size=32", "policy.init.num_hidden_layers=1", "policy.init.head_dim=16"),
    *("rollout.questions_per_step=4", "rollout.group_size=4", "rollout.max_turn_length=8"),
    *("rollout.max_length=64", "sampler.slots=16", "sampler.decode_chunk=8", "learner.pack_length=64"),
    *("learner.microbatch_rows=8", "learner.steps=2", "mesh.data=1", "mesh.fsdp=8", "log.backends=[]"),
]


def train_run(folder, config):
    """Train two steps; return the folder of the run."""
    config = load_config(ROOT / "configs" / config, [*TINY, f"run.dir={folder}"])
    write_world(config.world)
    train.run(config)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with three actions, with its checkpoint."""
    return train_run(tmp_path_factory.mktemp("trained") / "run", "actions.yaml")


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    """The folder of a run of plain GRPO."""
    return train_run(tmp_path_factory.mktemp("grpo") / "run", "quickstart_grpo.yaml")


def test_page_of_a_trained_run(trained, served, page):
    with served(trained) as address:
        page.goto(f"{address}/#step=1&group=0")
        page.wait_for_selector("#detail[data-ready='1/0']")
        assert page.inner_text("#count") == "32 trajectories in 8 groups"
        assert page.locator(".card").count() == 4
        assert page.locator(".token").count() > 4


def test_page_of_plain_grpo_has_no_softened_turn(grpo, served, page):
    with served(grpo) as address:
        page.goto(f"{address}/#step=2&group=1")
        page.wait_for_selector("#detail[data-ready='2/1']")
        assert page.inner_text("#count") == "32 trajectories in 8 groups"
        assert "softened" not in page.inner_text("#detail")


def test_report_of_trained_runs(trained, grpo, page, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        cli.calibadv(["report", str(trained), str(grpo), "--output", str(tmp_path / "report.html")])
    assert end.value.code == 0
    page.goto((tmp_path / "report.html").as_uri())
    keys = page.locator("figure").evaluate_all("all => all.map((one) => one.id)")
    assert {"lengths", "endings", "phases", "tokens_per_second"} <= set(keys)
    text = page.inner_text("body")
    assert "calibadv" in text and "grpo" in text


def test_question_to_its_policy(trained):
    output = []
    logs = {path: path.stat().st_mtime_ns for path in trained.glob("*.log")}
    trust = Trust("ask", is_given=True)  # this run's config names a function of its own
    config = load_config(ask.run_config(find_policy(trained)), trust=trust)
    ask.ask(config, find_policy(trained), ["who is it?"], output.append)
    assert output and output[-1].startswith(("answer", "no answer"))
    assert logs and logs == {path: path.stat().st_mtime_ns for path in trained.glob("*.log")}


def test_its_service_runs_until_a_signal(trained):
    """Port in use, answer, SIGTERM."""
    environment = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    serve = [sys.executable, "-m", "calibadv_jax", "serve", "mesh.fsdp=1", "--policy", str(trained), FLAG]
    with subprocess.Popen([*serve, "--port", "0"], **environment) as process:
        url = process.stdout.readline().strip().removesuffix("/")
        assert url, process.stderr.read()
        assert httpx.post(f"{url}/v1/chat/completions", json={}, timeout=250).status_code == 400
        model = httpx.get(f"{url}/health").json()["model"]
        body = {"model": model, "messages": [{"role": "user", "content": "who?"}]}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=250).json()
        assert reply["usage"]["completion_tokens"] > 0
        second = subprocess.run([*serve, "--port", url.rpartition(":")[2]], **environment)
        assert second.returncode == 75 and second.stderr.count("\n") <= 2
        assert "in use); choose another one with --port" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143 and "stopped" in process.stderr.read()
