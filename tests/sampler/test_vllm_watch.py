"""Which servers are there: one that died or stopped is not waited for, one that works for long is."""

import asyncio

import pytest
from test_stop_rule import RULE
from test_vllm_choice import SAMPLING, SCRIPT, Gated, run, started
from test_vllm_sampler import PROMPT, serving

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.sampler import vllm_sampler, vllm_worker
from calibadv_jax.sampler.vllm_sampler import VllmSampler
from calibadv_jax.services.http_client import Unreachable


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 0.01)


class Ending(Gated):
    """As vLLM after SIGTERM with completions in flight: it keeps the connections and answers nothing more."""

    def __init__(self):
        super().__init__()
        self.info, self.is_ending = None, False

    async def generate(self, request):
        if self.is_ending:
            self.waiting += 1
            await asyncio.Event().wait()
        return await super().generate(request)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "there", [Unreachable("connection refused"), UserError("no /weight_info"), "another/3"], ids=repr
)
def test_completions_that_a_dead_server_holds_are_written_elsewhere(tmp_path, monkeypatch, there):
    """At its address is nothing, another program, or a successor, which is known by its label."""
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.05)
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 600.0)
    asked = []

    async def ask_label(http, url):
        asked.append(url)
        if url != ending or servers[0].waiting < 3:
            return f"{samplers[0].run}/3"
        if isinstance(there, Exception):
            raise there
        return there

    async def ask_alive(http, url):
        assert url == ending
        raise there

    monkeypatch.setattr(vllm_sampler, "ask_label", ask_label)
    monkeypatch.setattr(vllm_sampler, "ask_alive", ask_alive)
    samplers, servers, ending = [], [Ending(), Ending()], ""

    async def work():
        nonlocal ending
        async with started(tmp_path, servers) as sampler:
            samplers.append(sampler)
            ending, servers[0].is_ending = sampler.workers[0].url, True
            tasks = [asyncio.create_task(sampler.generate(PROMPT, SAMPLING, f"s{n}")) for n in range(6)]
            written = await asyncio.gather(*tasks)
            assert servers[0].waiting == 3
            return (
                [completion.token_ids for completion in written],
                sampler.lost_count,
                sampler.workers[0].busy,
            )

    assert run(work()) == ([SCRIPT] * 6, 1, 0)
    assert asked and set(asked) <= {samplers[0].workers[0].url, samplers[0].workers[1].url}


@pytest.mark.timeout(60)
def test_a_server_whose_engine_is_in_a_long_step_is_waited_for(tmp_path, monkeypatch):
    """Which weights it serves is answered between two steps only; that it lives is answered at any time."""
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.02)
    asked = []

    async def ask_label(http, url):
        asked.append(url)
        raise Unreachable("no whole reply in time")

    monkeypatch.setattr(vllm_sampler, "ask_label", ask_label)

    async def work():
        server = Gated()
        async with started(tmp_path, [server]) as sampler:
            server.gate.clear()
            task = asyncio.create_task(sampler.generate(PROMPT, SAMPLING, "s"))
            while len(asked) < 3:
                await asyncio.sleep(0.01)
            server.gate.set()
            return (await task).token_ids, sampler.lost_count

    assert run(work()) == (SCRIPT, 0)


@pytest.mark.timeout(60)
def test_a_stopped_server_does_not_hold_up_a_swap(tmp_path, monkeypatch):
    """After SIGSTOP the system still takes its connections; a request may take half an hour."""
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.05)
    monkeypatch.setattr(vllm_worker, "ASK_SECONDS", 0.2)

    async def silent(reader, writer):  # holds both: a writer that nobody has closes the connection
        await asyncio.sleep(600)

    async def work():
        stopped = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with serving(Gated()) as url:
            urls = [f"http://127.0.0.1:{stopped.sockets[0].getsockname()[1]}", url]
            sampler = VllmSampler(urls, SamplerConfig(), RULE, "a tokenizer")
            await sampler.load_snapshot(tmp_path / "v000003")
            states = [(worker.version, worker.lost) for worker in sampler.workers]
            written = await sampler.generate(PROMPT, SAMPLING, "s")
            await sampler.close()
            return states, written.token_ids

    states, written = run(work())
    assert states == [(None, "/init_weight_transfer_engine: no whole reply in time"), (3, "")]
    assert written == SCRIPT


def test_a_long_load_of_a_server_that_lives_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.02)

    async def work():
        server, asked = Gated(), []
        good = server.control

        async def control(request):
            if request.path == "/update_weights":
                await asyncio.sleep(0.2)
            return await good(request)

        async def ask_alive(http, url):
            asked.append(url)
            await alive(http, url)

        alive = vllm_sampler.ask_alive
        monkeypatch.setattr(vllm_sampler, "ask_alive", ask_alive)
        server.control = control
        async with started(tmp_path, [server]) as sampler:
            return sampler.workers[0].version, len(asked), sampler.lost_count

    version, asked, lost = run(work())
    assert (version, lost) == (3, 0) and asked > 1


@pytest.mark.timeout(60)
def test_completions_that_were_lost_before_a_worker_came_back_are_asked_again(tmp_path):
    """One request has noticed that the server is gone; another still waits on its old connection."""

    async def work():
        server = Ending()
        async with started(tmp_path, [server]) as sampler:
            server.is_ending = True
            waiting = asyncio.create_task(sampler.generate(PROMPT, SAMPLING, "s"))
            while not server.waiting:
                await asyncio.sleep(0.01)
            server.is_ending = False  # from now on its successor answers
            sampler._lose(sampler.workers[0], "connection refused")
            return (await waiting).token_ids

    assert run(work()) == SCRIPT
