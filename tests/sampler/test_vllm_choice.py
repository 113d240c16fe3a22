"""Which of several workers gets a completion, and that each is counted only while it is under way."""

import asyncio
import contextlib

import pytest
from test_stop_rule import RULE, STOP, letters
from test_vllm_sampler import PROMPT, Server, serving

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.errors import RequestFailed
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.sampler import vllm_sampler
from calibadv_jax.sampler.vllm_sampler import VllmSampler

SAMPLING = SamplingParams(60, stop=STOP, seed=5)
SCRIPT = letters("hm </search>")


class Gated(Server):
    """Answers when `gate` is open."""

    def __init__(self):
        super().__init__(SCRIPT)
        self.gate, self.waiting = asyncio.Event(), 0
        self.gate.set()

    async def generate(self, request):
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        return await super().generate(request)


@contextlib.asynccontextmanager
async def started(folder, servers):
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(server)) for server in servers]
        sampler = VllmSampler(urls, SamplerConfig(patience=5.0), RULE, "a tokenizer")
        try:
            await sampler.load_snapshot(folder / "v000003")
            yield sampler
        finally:
            await sampler.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_concurrent_completions_are_spread_over_the_workers(tmp_path):
    async def work():
        servers = [Gated(), Gated()]
        async with started(tmp_path, servers) as sampler:
            for server in servers:
                server.gate.clear()
            tasks = [
                asyncio.create_task(sampler.generate(PROMPT, SAMPLING, f"s{number}")) for number in range(6)
            ]
            while sum(server.waiting for server in servers) < 6:
                await asyncio.sleep(0.01)
            waiting = [server.waiting for server in servers]
            busy = [worker.busy for worker in sampler.workers]
            for server in servers:
                server.gate.set()
            await asyncio.gather(*tasks)
            return waiting, busy, [worker.busy for worker in sampler.workers]

    assert run(work()) == ([3, 3], [3, 3], [0, 0])


def test_a_session_stays_where_its_prefix_is_cached_until_it_is_released(tmp_path):
    async def work():
        servers = [Gated(), Gated()]
        async with started(tmp_path, servers) as sampler:
            servers[0].gate.clear()
            first = asyncio.create_task(sampler.generate(PROMPT, SAMPLING, "a"))  # both idle: the first one
            while not servers[0].waiting:
                await asyncio.sleep(0.01)
            await sampler.generate(PROMPT, SAMPLING, "b")  # the other one
            servers[0].gate.set()
            await first
            for _ in range(3):  # both are idle again
                await sampler.generate(PROMPT, SAMPLING, "b")
            stayed = [len(server.requests) for server in servers]
            sampler.release("b")
            await sampler.generate(PROMPT, SAMPLING, "b")
            return stayed, [len(server.requests) for server in servers]

    assert run(work()) == ([1, 4], [2, 4])


@pytest.mark.parametrize(
    ("status", "message"), [(400, "refuses"), (500, "5 vLLM workers were lost over one completion")]
)
def test_a_completion_that_fails_is_no_longer_under_way(tmp_path, monkeypatch, status, message):
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 0.01)

    async def work():
        server = Gated()
        server.reply = status, {"error": {"message": "no"}}
        async with started(tmp_path, [server]) as sampler:
            with pytest.raises(RequestFailed, match=message):
                await sampler.generate(PROMPT, SAMPLING, "s")
            return sampler.workers[0].busy

    assert run(work()) == 0


def test_a_completion_that_is_cancelled_is_no_longer_under_way(tmp_path):
    async def work():
        server = Gated()
        async with started(tmp_path, [server]) as sampler:
            server.gate.clear()
            task = asyncio.create_task(sampler.generate(PROMPT, SAMPLING, "s"))
            while not server.waiting:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.gate.set()
            return sampler.workers[0].busy

    assert run(work()) == 0
