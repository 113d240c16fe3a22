"""Addresses and places in a config: of the retriever, of the service's own files, of a run that was moved."""

import json
from pathlib import Path

import pytest

from calibadv_jax.config import dump_config, load_config
from calibadv_jax.core.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "url", ["http://h:8000/retrieve", "http://h:8000/retrieve/", ["http://h:1", "http://h:2/retrieve"]]
)
def test_a_route_in_the_retrievers_url_is_refused_with_the_url_that_is_meant(tmp_path, url):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"retriever": {"url": url}}))
    with pytest.raises(UserError, match=r"drop /retrieve, so that it is http://h:(8000|2)(?!\d|/)"):
        load_config(path)


def test_a_config_of_the_service_is_no_config_of_a_run():
    with pytest.raises(UserError) as error:
        load_config(ROOT / "configs/retriever.yaml")
    said = str(error.value)
    assert "options of the retrieval service (corpus_path, index_path, retriever_name)" in said
    assert said.endswith(f"scripts/launch_retriever.sh --config {ROOT}/configs/retriever.yaml")


def test_a_kept_config_follows_its_run(tmp_path):
    """Paths inside run.dir are those of the folder in which the config lies; others stay."""
    config = load_config(
        ROOT / "configs/quickstart.yaml",
        [
            "run.dir=old/run",
            "data.train={a: old/run/a.jsonl, b: old/running/b.jsonl}",
            "data.eval=[old/run/e.jsonl]",
        ],
    )
    folder = tmp_path / "moved"
    path = folder / "configs/3.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(dump_config(config))
    assert load_config(path).run.dir == "old/run"  # somebody's own file, of such a name
    path.with_suffix(".json").write_text("{}")
    moved = load_config(path, ["evaluate.output=old/run/mine.json"])
    assert moved.run.dir == str(folder) and moved.retriever.index == f"{folder}/index"
    assert moved.data.train == {"a": f"{folder}/a.jsonl", "b": "old/running/b.jsonl"}
    assert moved.data.eval == [f"{folder}/e.jsonl"] and moved.prompt == config.prompt
    assert moved.evaluate.output == "old/run/mine.json"
