"""What an evaluation remembers of its policy and its retriever, to tell whether they have changed."""

import os
from types import SimpleNamespace

import pytest
from http_rig import Handler, serving

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.config.sections.retriever import NO_RETRIEVER_URL
from calibadv_jax.run.fingerprints import describe_policy, describe_retriever
from calibadv_jax.run.model import PolicySource

pytest.importorskip("aiohttp")


def fail(line):
    raise AssertionError(line)


@pytest.fixture
def service():
    """A service with the `health` that is set."""
    state = SimpleNamespace(health={})

    class Healthy(Handler):
        def do_GET(self):
            assert self.path == "/health"
            self.reply(200, state.health)

    with serving(Healthy) as state.url:
        yield state


@pytest.mark.parametrize(
    ("health", "keeps_url"),
    [
        ({"identity": "a1", "status": "ready"}, False),
        ({"corpus_sha256": "c1", "encoder": "e5"}, False),
        ({"encoder": "e5"}, True),  # it names no corpus, so the address stands for it
        ({}, True),
    ],
)
def test_running_service_is_its_index_or_its_address(service, health, keeps_url):
    service.health = health
    description = describe_retriever(RetrieverConfig(url=service.url), fail)
    assert description.pop("url", None) == (service.url if keeps_url else None)
    assert description == {name: value for name, value in health.items() if name != "status"}


def test_nothing_is_searched_without_a_retriever():
    assert describe_retriever(RetrieverConfig(url=NO_RETRIEVER_URL, corpus="corpus.jsonl"), fail) == {}


def test_child_service_is_its_files(tmp_path):
    corpus, pages = tmp_path / "corpus.jsonl", tmp_path / "pages.jsonl"
    config = RetrieverConfig(corpus=str(corpus))
    assert describe_retriever(config, fail) == {"corpus": str(corpus)}  # it is written later
    for path, seconds in ((corpus, 7), (pages, 9)):
        path.write_text("{}")
        os.utime(path, (seconds, seconds))
    of_corpus = {"corpus": str(corpus), "modified": 7 * 10**9}
    assert describe_retriever(config, fail) == of_corpus
    config = RetrieverConfig(corpus=str(corpus), pages=str(pages))
    assert describe_retriever(config, fail) == of_corpus | {"pages": str(pages), "pages_modified": 9 * 10**9}


def touch(path, seconds):
    """A file or folder that was changed then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix:
        path.write_text("x")
    else:
        path.mkdir(exist_ok=True)
    os.utime(path, (seconds, seconds))


def test_policy_is_as_old_as_its_newest_weights(tmp_path):
    folder = tmp_path / "hf"
    touch(folder / "a.safetensors", 5)
    touch(folder / "b.safetensors", 8)
    touch(folder / "README.md", 9)  # no weights
    touch(folder, 3)
    source = PolicySource(folder, "huggingface")
    expected = {"kind": "huggingface", "path": str(folder), "step": None, "modified": 8 * 10**9}
    assert describe_policy(source) == expected
    touch(folder, 11)
    assert describe_policy(source) == expected | {"modified": 11 * 10**9}
    missing = tmp_path / "missing"
    assert describe_policy(PolicySource(missing, "huggingface")) == expected | {
        "path": str(missing),
        "modified": 0,
    }


def test_checkpoint_and_snapshot_are_described_with_their_step(tmp_path):
    checkpoints, snapshot = tmp_path / "checkpoints", tmp_path / "snapshots/v000004"
    touch(checkpoints / "12", 6)
    touch(checkpoints, 20)
    described = describe_policy(PolicySource(checkpoints, "checkpoint", 12))
    assert described == {"kind": "checkpoint", "path": str(checkpoints), "step": 12, "modified": 6 * 10**9}
    touch(snapshot, 2)
    described = describe_policy(PolicySource(snapshot, "snapshot"))
    assert (described["kind"], described["step"], described["modified"]) == ("snapshot", 4, 2 * 10**9)
