"""Questions to the policy of a run that was trained: the real program, small."""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from calibadv_jax.commands import train
from calibadv_jax.config import load_config
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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two steps with three actions, with its checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = load_config(ROOT / "configs/actions.yaml", [*TINY, f"run.dir={folder}"])
    write_world(config.world)
    train.run(config)
    return folder


def test_question_to_its_policy(trained):
    output = []
    logs = {path: path.stat().st_mtime_ns for path in trained.glob("*.log")}
    config = load_config(ask.run_config(find_policy(trained)))
    ask.ask(config, find_policy(trained), ["who is it?"], output.append)
    assert output and output[-1].startswith(("answer", "no answer"))
    assert logs and logs == {path: path.stat().st_mtime_ns for path in trained.glob("*.log")}


def test_its_service_runs_until_a_signal(trained):
    """Port in use, answer, SIGTERM."""
    environment = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    serve = [sys.executable, "-m", "calibadv_jax", "serve", "mesh.fsdp=1", "--policy", str(trained)]
    with subprocess.Popen([*serve, "--port", "0"], **environment) as process:
        url = process.stdout.readline().strip().removesuffix("/")
        assert url, process.stderr.read()
        assert httpx.post(f"{url}/v1/chat/completions", json={}, timeout=30).status_code == 400
        model = httpx.get(f"{url}/health").json()["model"]
        body = {"model": model, "messages": [{"role": "user", "content": "who?"}]}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert reply["usage"]["completion_tokens"] > 0
        second = subprocess.run([*serve, "--port", url.rpartition(":")[2]], **environment)
        assert second.returncode == 75 and second.stderr.count("\n") <= 2
        assert "in use); choose another one with --port" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143 and "stopped" in process.stderr.read()
