"""The package without the repository: wheel, configs, quickstart, retriever and export in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    *("world.people=20", "world.cities=8", "world.companies=8", "world.works=8"),
    *("world.train_questions=40", "world.eval_questions=6", "data.eval_limit=4"),
    *("policy.init.hidden_size=32", "policy.init.intermediate_size=64", "policy.init.num_hidden_layers=1"),
    *("sft.phases=[{kind: imperfect, steps: 2}]", "learner.steps=1", "evaluate.temperatures=[1.0]"),
    *("rollout.questions_per_step=2", "rollout.group_size=2", "learner.minibatch_size=2"),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Environment in which the wheel comes before the repository, and an empty folder."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True, timeout=200)
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", folder / "site", wheel], check=True, timeout=200
    )
    (folder / "empty").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    return environment | {"PYTHONPATH": str(folder / "site")}, folder / "empty"


def run(installed, *arguments):
    environment, folder = installed
    command = [sys.executable, "-m", "calibadv_jax", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_wheel_has_everything_in_an_empty_folder(installed):
    environment, folder = installed
    pages = Path(environment["PYTHONPATH"], "calibadv_jax/contrib")
    assert (pages / "serving/static/page.js").is_file() and (pages / "pages/static/style.css").is_file()
    assert "paper/qwen2.5-3b" in run(installed, "configs")
    run(installed, "configs", "copy", "quickstart_grpo", "mine.yaml")
    assert "name: grpo" in run(installed, "train", "--config", "mine.yaml", "--dry-run")
    assert "--corpus_path" in run(installed, "retriever", "--help")
    run(installed, "quickstart", *SMALL)
    (output,) = folder.glob("runs/*/*/hf/model.safetensors")
    corpus = next(folder.glob("runs/*/*/world/corpus.jsonl"))
    run(installed, *f"build-index --corpus_path {corpus} --index_path index --retriever_name bm25".split())
    output.unlink()
    run(installed, "export", "--config", "quickstart", *SMALL)
    assert output.stat().st_size > 1000 and any((folder / "index").iterdir())


@pytest.mark.slow
def test_notebook_runs_in_an_empty_folder(installed, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.read(ROOT / "examples/quickstart.ipynb", as_version=4)
    book.cells = [cell for cell in book.cells if cell.metadata.get("tags") != ["install"]]
    for cell in book.cells:
        cell.source = cell.source.replace("--config small.yaml", "--config small.yaml --config tiny.yaml")
        cell.source = cell.source.replace("STEPS = 60", "STEPS = 1")
    OmegaConf.save(OmegaConf.from_dotlist(SMALL), tmp_path / "tiny.yaml")
    client = nbclient.NotebookClient(book, timeout=250, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=installed[0])
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    trained, _, asked = printed.partition("opening HuggingFace folder")
    assert "F1 before  F1 after" in trained and "error: " not in printed
    assert "answer" in asked.partition("golden answer: ")[0]
    curves, group, page = (output.data for output in outputs if "data" in output)
    assert "image/png" in curves and "→" in group["text/html"] and "<iframe" in page["text/html"]
