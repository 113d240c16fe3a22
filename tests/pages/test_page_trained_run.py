"""Pages of runs that were trained, and a question to their policy: the real program, small."""

from pathlib import Path

import pytest

from calibadv_jax import cli
from calibadv_jax.commands import train
from calibadv_jax.config import load_config
from calibadv_jax.contrib import asking
from calibadv_jax.contrib.commands import ask
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
    *("rollout.max_length=64", "sampler.slots=16", "sampler.decode_chunk=8", "learner.row_length=64"),
    *("learner.microbatch_rows=8", "learner.steps=2", "mesh.data=1", "mesh.fsdp=8", "log.backends=[]"),
]


def make_run(folder, config):
    config = load_config(ROOT / "configs" / config, [*TINY, f"run.dir={folder}"])
    write_world(config.world)
    train.run(config)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two steps with three actions, with its checkpoint."""
    return make_run(tmp_path_factory.mktemp("trained") / "run", "actions.yaml")


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("grpo") / "run", "quickstart_grpo.yaml")


def test_its_page(trained, served, page):
    with served(trained) as address:
        page.goto(f"{address}/#step=1&group=0")
        page.wait_for_selector("#detail[data-ready='1/0']")
        assert page.inner_text("#count") == "32 trajectories in 8 groups"
        assert page.locator(".card").count() == 4 and page.locator(".token").count() > 4


def test_page_of_plain_grpo(grpo, served, page):
    with served(grpo) as address:
        page.goto(f"{address}/#step=2&group=1")
        page.wait_for_selector("#detail[data-ready='2/1']")
        assert page.inner_text("#count") == "32 trajectories in 8 groups"
        assert "softened" not in page.inner_text("#detail")


def test_report_of_both(trained, grpo, page, tmp_path):
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
    config = load_config(asking.run_config(find_policy(trained)))
    logs = {path: path.stat().st_mtime_ns for path in trained.glob("*.log")}
    ask.ask(config, find_policy(trained), ["who is it?"], 0.0, output.append)
    assert output and output[-1].startswith(("answer", "no answer"))
    assert logs
