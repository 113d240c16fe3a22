"""A retrieval service that is away when a run starts is waited for; what is no service is not."""

import asyncio

import pytest
from http_rig import replying

from calibadv_jax.config import RetrieverConfig
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.services import retriever_client
from calibadv_jax.services.retriever_client import check_running, open_retriever


def test_service_answers_inside_a_running_event_loop():
    async def ask():
        with replying((200, {"status": "ready"})) as (url, _):
            return retriever_client.RetrieverClient(RetrieverConfig(), url).health()

    assert asyncio.run(ask()) == {"status": "ready"}


def test_service_that_is_loading_is_waited_for(tmp_path):
    state, messages = {"status": "loading", "stage": "reading the index"}, []
    with replying((503, state), (503, state), (200, state)) as (url, requests):
        config = RetrieverConfig(url=url, patience=60.0)
        with open_retriever(config, tmp_path / "log", messages.append) as urls:
            assert urls == url
    assert [path for path, _ in requests] == ["/health"] * 3
    assert len(messages) == 1 and "reading the index" in messages[0]
    assert messages[0].startswith(f"waiting up to 60 s for retriever {url} (")
    assert "otherwise start it with scripts/launch_retriever.sh or set retriever.url" in messages[0]


def test_service_that_never_comes_ends_the_start():
    config = RetrieverConfig(url=["http://127.0.0.1:9", "http://127.0.0.1:10"], patience=0.3)
    with pytest.raises(
        EnvironmentFailure,
        match=r"retriever http://127.0.0.1:9, http://127.0.0.1:10: cannot be reached \(.*\); start it with",
    ):
        check_running(config, print)


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:port", "ftp://a"])
def test_invalid_url_is_not_waited_for(url):
    messages = []
    with pytest.raises(UserError, match="not a URL; give one such as"):
        check_running(RetrieverConfig(url=url, patience=600.0), messages.append)
    assert messages == []
