"""Workers that die, hang, refuse or come back: completions go elsewhere, swaps go on, losses are counted."""

import asyncio
import math
from contextlib import suppress

import pytest
from aiohttp import ClientTimeout
from vllm_server import PROMPT, SAMPLING, SCRIPT, Server, begin, sampler_of, sampling, until

from calibadv_jax.core.errors import REFUSAL, RequestFailed, UserError
from calibadv_jax.sampler import vllm_sampler, vllm_worker
from calibadv_jax.services.http_client import Unreachable

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
DEAD = 500, {"error": {"message": "dead"}}
SWAP = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 0.01)


@pytest.fixture
def no_return(monkeypatch):
    """Lost workers do not come back."""
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 600.0)


async def test_worker_with_nan_is_lost(tmp_path):
    servers = [Server(), Server()]
    servers[0].changes = {"logprobs": {"content": [{"logprob": math.nan}] * len(SCRIPT)}}
    async with sampling(tmp_path, *servers) as sampler:
        completion = await sampler.generate(PROMPT, SAMPLING, "s")
        assert completion.token_ids == SCRIPT and all(map(math.isfinite, completion.logprobs))
        assert servers[0].requests and servers[1].requests and sampler.lost_count == 1


async def test_foreign_labels_are_counted_as_losses(tmp_path):
    server = Server()
    good, replies = server.generate, []

    async def foreign_at_first(request):
        replies.append(server.label)
        if len(replies) < 3:
            server.label = "another/3"
        return await good(request)

    server.generate = foreign_at_first
    async with sampling(tmp_path, server) as sampler:
        assert (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids == SCRIPT
        assert sampler.metrics() == {"rollout/workers_lost": 2.0}


async def test_worker_dying_in_its_swap_counts_once(tmp_path):
    server = Server()
    async with sampling(tmp_path, server, Server()) as sampler:
        assert sampler.lost_count == 0
        server.fail("/update_weights", "killed")
        await sampler.load(4, tmp_path / "v000004")
        await until(lambda: server.routes.count("/update_weights") > 3)  # it is tried again meanwhile
        assert sampler.lost_count == 1


async def test_worker_that_never_came_is_not_counted(tmp_path):
    async with sampling(tmp_path, Server(), more_urls=[NOBODY]) as sampler:
        await sampler.generate(PROMPT, SAMPLING, "s")
        assert sampler.lost_count == 0
    alone = sampler_of(NOBODY, patience=0.2)
    with pytest.raises(RequestFailed, match="no vLLM worker for 0.2 s"):
        await alone.load(3, tmp_path / "v000003")
    await alone.close()


async def test_lost_worker_gives_its_sessions_to_others(tmp_path, no_return):
    home, other = Server(), Server()
    async with sampling(tmp_path, home, other) as sampler:
        await sampler.generate(PROMPT, SAMPLING, "s")
        home.reply = DEAD
        for _ in range(4):
            assert (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids == SCRIPT
        assert (len(home.requests), len(other.requests), sampler.lost_count) == (2, 4, 1)


async def test_worker_that_refuses_a_snapshot_serves_on(tmp_path):
    """Else it would stay paused, for whoever comes next too. So would another one that is slower."""
    server, slower = Server(), Server()
    slower.delays = dict.fromkeys(SWAP, 0.1)
    async with sampling(tmp_path, server, slower) as sampler:
        server.routes.clear()
        server.fail("/update_weights", f"{REFUSAL}damaged snapshot")
        with pytest.raises(UserError, match="refuses .*v000004: damaged snapshot"):
            await sampler.load(4, tmp_path / "v000004")
        assert server.routes == [route for route in SWAP if route != "/finish_weight_update"]
        assert sampler.workers[1].version == 4


async def test_rollback_begins_another_session(tmp_path):
    """Workers take no old versions. The swap before it was broken off in the middle."""
    server = Server()
    async with sampling(tmp_path, server) as sampler:
        first = server.label
        server.routes.clear()
        server.fail("/start_weight_update", "an update is already active", times=1)
        await sampler.load(3, tmp_path / "v000003")
        assert first != server.label and first[-2:] == server.label[-2:] == "/3"
        assert (sampler.workers[0].version, sampler.lost_count) == (3, 0)
    start, finish = "/start_weight_update", "/finish_weight_update"
    again = [start, finish, start, "/update_weights", finish]
    assert server.routes == ["/init_weight_transfer_engine", "/pause", *again, "/resume"]


async def test_refusal_of_all_workers_ends_completions(tmp_path):
    """While one of them may come back the others are waited for, and the next snapshot may be good."""
    first, second = servers = Server(), Server()
    async with sampling(tmp_path, *servers) as sampler:
        for server in servers:  # both are lost; the first refuses when it is back, the second comes back
            server.reply = DEAD
        first.fail("/update_weights", f"{REFUSAL}damaged snapshot")
        (task,) = begin(sampler, "s")
        await until(lambda: sampler.workers[0].refusal)
        second.reply = None
        assert (await task).token_ids == SCRIPT and sampler.workers[0].refusal is not None
        second.reply = DEAD
        second.fail("/update_weights", f"{REFUSAL}damaged snapshot")
        with pytest.raises(UserError, match="refuses .*v000003: damaged snapshot"):
            await sampler.generate(PROMPT, SAMPLING, "s")
        for server in servers:
            server.reply, server.errors = None, {}
        await sampler.load(4, tmp_path / "v000004")
        assert (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids == SCRIPT
        assert [worker.refusal for worker in sampler.workers] == [None, None]


@pytest.mark.parametrize(
    "successor", [Unreachable("connection refused"), UserError("no /weight_info"), "another/3"], ids=repr
)
async def test_dead_server_gives_its_completions_away(tmp_path, monkeypatch, no_return, successor):
    """As vLLM after SIGTERM, it keeps the connections and answers nothing more.

    At its address is nothing, another program, or a successor, which has another label.
    """
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.05)
    servers, asked = [Server(), Server()], []

    async def ask_label(http, url):
        asked.append(url)
        if url != sampler.workers[0].url or servers[0].waiting < 3:
            return f"{sampler.run}/3"
        if isinstance(successor, Exception):
            raise successor
        return successor

    async def ask_alive(http, url):
        assert url == sampler.workers[0].url
        raise successor

    async with sampling(tmp_path, *servers) as sampler:
        monkeypatch.setattr(vllm_sampler, "ask_label", ask_label)
        monkeypatch.setattr(vllm_sampler, "ask_alive", ask_alive)
        servers[0].gate.clear()
        completions = await asyncio.gather(*begin(sampler, *"abcdef"))
        assert (
            servers[0].waiting == 3 and [completion.token_ids for completion in completions] == [SCRIPT] * 6
        )
        assert (sampler.lost_count, sampler.workers[0].busy) == (1, 0)
        assert asked and set(asked) <= {worker.url for worker in sampler.workers}


async def test_server_in_a_long_step_is_waited_for(tmp_path, monkeypatch):
    """Its label is answered between two steps of the engine only; its health at any time."""
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.02)
    server, asked = Server(), []

    async def ask_label(http, url):
        asked.append(url)
        raise Unreachable("no whole reply in time")

    async with sampling(tmp_path, server) as sampler:
        monkeypatch.setattr(vllm_sampler, "ask_label", ask_label)
        server.gate.clear()
        (task,) = begin(sampler, "s")
        await until(lambda: len(asked) > 2)
        server.gate.set()
        assert (await task).token_ids == SCRIPT and sampler.lost_count == 0


async def test_stopped_server_does_not_hold_up_a_swap(tmp_path, monkeypatch):
    """After SIGSTOP the system still takes its connections; a request may take half an hour."""
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.05)
    monkeypatch.setitem(vllm_worker.OWN_CONNECTION, "timeout", ClientTimeout(0.2))

    async def silent(reader, writer):  # holds both: a writer that nobody has closes the connection
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)

    stopped = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{stopped.sockets[0].getsockname()[1]}"
    async with sampling(tmp_path, Server(), more_urls=[url]) as sampler:
        states = [(worker.version, worker.lost) for worker in sampler.workers]
        assert states == [(None, "/init_weight_transfer_engine: no whole reply in time"), (3, "")]
        assert (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids == SCRIPT
    stopped.close()


async def test_long_load_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.02)
    server, asked, alive = Server(), [], vllm_sampler.ask_alive

    async def ask_alive(http, url):
        asked.append(url)
        await alive(http, url)

    monkeypatch.setattr(vllm_sampler, "ask_alive", ask_alive)
    server.delays["/update_weights"] = 0.2
    async with sampling(tmp_path, server) as sampler:
        assert (sampler.workers[0].version, sampler.lost_count) == (3, 0) and len(asked) > 1


async def test_requests_of_a_lost_worker_are_sent_again(tmp_path):
    """One request has noticed that the server is gone; another still waits on its old connection."""
    server = Server()
    async with sampling(tmp_path, server) as sampler:
        server.gate.clear()
        (task,) = begin(sampler, "s")
        await until(lambda: server.waiting)
        server.gate = asyncio.Event()  # from now on its successor answers
        server.gate.set()
        sampler._lose(sampler.workers[0], "connection refused")
        assert (await task).token_ids == SCRIPT
