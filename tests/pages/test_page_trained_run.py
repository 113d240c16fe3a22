"""The page of a run that was trained, and a question to its policy: the real program, small."""

from pathlib import Path

import pytest

from calibadv_jax import ask, train
from calibadv_jax.config import load_config
from calibadv_jax.data.world import write_world
from calibadv_jax.model import find_policy

pytest.importorskip("faiss")
pytest.importorskip("fastapi")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = [
    *("world.people=20", "world.cities=8", "world.companies=8", "world.train_questions=40"),
    *("world.eval_questions=6", "policy.path=", "policy.init.hidden_size=32"),
    *("policy.init.intermediate_size=32", "policy.init.num_hidden_layers=1", "policy.init.head_dim=16"),
    *("rollout.questions_per_step=4", "rollout.group_size=4", "rollout.max_turn_length=8"),
    *("rollout.max_length=64", "sampler.slots=16", "sampler.decode_chunk=8", "learner.row_length=64"),
    *("learner.microbatch_rows=8", "learner.steps=1", "mesh.data=1", "mesh.fsdp=8", "log.backends=[]"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of one step, with its checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = load_config(ROOT / "configs/quickstart.yaml", [*TINY, f"run.dir={folder}"])
    write_world(config.world)
    train.run(config)
    return folder


def test_its_page(trained, served, page):
    with served(trained) as address:
        page.goto(f"{address}/#step=1&group=0")
        page.wait_for_selector("#detail[data-ready='1/0']")
        assert page.inner_text("#count") == "16 trajectories in 4 groups"
        assert page.locator(".card").count() == 4 and page.locator(".token").count() > 4


def test_a_question_to_its_policy(trained):
    said = []
    config = load_config(ask.run_config(find_policy(trained)))
    logs = {path: path.stat().st_mtime_ns for path in trained.glob("*.log")}
    ask.ask(config, find_policy(trained), ["who is it?"], 0.0, said.append)
    assert said and said[-1].startswith(("answer", "no answer"))
    assert logs
