"""What workers must not do to a run: nonsense in replies, replies without tokens, refusals, sudden ends."""

import asyncio
import json
import math

import pytest
from aiohttp import web
from test_stop_rule import RULE, STOP, ids, letters
from test_vllm_choice import SAMPLING, SCRIPT, Gated, run, started
from test_vllm_sampler import PROMPT, Server, serving, write

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.errors import REFUSAL, RequestFailed, UserError
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.sampler import vllm_sampler
from calibadv_jax.sampler.vllm_sampler import VllmSampler, read_completion

VOCABULARY = 400


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 0.01)
    monkeypatch.setattr(vllm_sampler, "EMPTY_PAUSE", 0.01)


def choice(**changes):
    good = {
        "token_ids": [5, 6],
        "finish_reason": "length",
        "stop_reason": None,
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": 0.0}]},
        "weight_versions": [{"version": "7"}],
    }
    return {"choices": [good | changes]}


def read(reply):
    return read_completion(json.loads(json.dumps(reply)), int, 2, VOCABULARY)


def values(*numbers):
    return {"logprobs": {"content": [{"logprob": number} for number in numbers]}}


def test_a_good_reply_passes():
    completion = read(choice())
    assert completion.token_ids == [5, 6] and completion.logprobs == [-0.5, 0.0]
    assert completion.policy_versions == (7,) and completion.stop_reason == "length"
    assert read(choice(**values(-9998.0, 1e-6))).logprobs == [-9998.0, 1e-6]  # rounding above 0
    assert read(choice(token_ids=[0, VOCABULARY - 1])).token_ids == [0, VOCABULARY - 1]


BAD = {
    "not a number": values(-0.5, math.nan),
    "minus infinity": values(-math.inf, -0.5),
    "infinity": values(-0.5, math.inf),
    "positive": values(0.1, -0.5),
    "vLLM's minus infinity": values(-9999.0, -0.5),
    "true": values(-0.5, True),
    "null": values(-0.5, None),
    "words": values(-0.5, "high"),
    "too few log-probabilities": values(-0.5),
    "too many log-probabilities": values(-0.5, -0.5, -0.5),
    "no log-probabilities": {"logprobs": None},
    "a list of log-probabilities": {"logprobs": [-0.5, -0.5]},
    "more tokens than asked for": {"token_ids": [5, 6, 7], **values(-1.0, -1.0, -1.0)},
    "a token below the vocabulary": {"token_ids": [5, -1]},
    "a token beyond the vocabulary": {"token_ids": [5, VOCABULARY]},
    "a token that is no integer": {"token_ids": [5, 6.0]},
    "a token that is a boolean": {"token_ids": [5, True]},
    "a token that is text": {"token_ids": ["5", 6]},
    "no version": {"weight_versions": None},
    "versions that are a number": {"weight_versions": [3]},
    "another reason": {"finish_reason": "tired"},
    "nothing, and stopped": {"token_ids": [], "logprobs": None, "finish_reason": "stop"},
    "nothing, and at the limit": {"token_ids": [], "logprobs": None, "finish_reason": "length"},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_a_bad_reply_is_none(changes):
    with pytest.raises(ValueError, match="."):
        read(choice(**changes))


@pytest.mark.parametrize(
    "reply", [None, [], {}, {"choices": []}, {"choices": [None]}, {"choices": [[]]}, {"choices": 3}]
)
def test_what_is_no_completion_is_none(reply):
    with pytest.raises(ValueError, match="."):
        read(reply)


def spoil(server, is_bad, **changes):
    """The server's completions get other values while `is_bad()`."""
    good = server.generate

    async def generate(request):
        reply = json.loads((await good(request)).body)
        if is_bad():
            reply["choices"][0] |= changes
        return web.json_response(reply)

    server.generate = generate


def test_a_worker_that_sends_nan_is_lost_and_the_completion_is_written_elsewhere(tmp_path):
    async def work():
        servers = [Gated(), Gated()]
        spoil(servers[0], lambda: True, **values(*[math.nan] * len(SCRIPT)))
        async with started(tmp_path, servers) as sampler:
            completion = await sampler.generate(PROMPT, SAMPLING, "s")
            assert all(math.isfinite(value) for value in completion.logprobs)
            assert servers[0].requests and servers[1].requests
            return completion.token_ids, sampler.lost_count

    assert run(work()) == (SCRIPT, 1)


def test_nan_from_every_worker_is_a_failure_and_no_trajectory(tmp_path):
    server = Server(SCRIPT)
    spoil(server, lambda: True, **values(*[math.nan] * len(SCRIPT)))
    with pytest.raises(RequestFailed, match="5 vLLM workers were lost .*log-probability nan"):
        write(server, tmp_path)


@pytest.mark.timeout(60)
def test_a_worker_that_writes_nothing_is_not_asked_without_end(tmp_path):
    """It says that a swap has cut every completion, as a paused server does."""
    server = Server(SCRIPT, [0] * 10_000)
    with pytest.raises(RequestFailed, match="5 vLLM workers were lost .*6 replies without a token"):
        write(server, tmp_path)
    assert len(server.requests) == vllm_sampler.MAX_EMPTY * vllm_sampler.MAX_LOSSES


def test_a_few_replies_without_a_token_are_no_loss(tmp_path):
    cuts = [0] * (vllm_sampler.MAX_EMPTY - 1)
    completion, metrics = write(Server(SCRIPT, [*cuts, 2, *cuts]), tmp_path)
    assert completion.token_ids == SCRIPT and metrics == {"rollout/workers_lost": 0.0}


def test_a_worker_that_dies_in_its_swap_is_counted_once(tmp_path, monkeypatch):
    async def work():
        server, is_dead = Gated(), False
        good = server.control

        async def control(request):
            if is_dead and request.path == "/update_weights":
                return web.json_response({"error": {"message": "killed"}}, status=500)
            return await good(request)

        server.control = control
        async with started(tmp_path, [server, Gated()]) as sampler:
            counts = [sampler.lost_count]
            is_dead = True
            await sampler.load_snapshot(tmp_path / "v000004")
            await asyncio.sleep(0.1)  # it is tried again meanwhile
            counts.append(sampler.lost_count)
            return counts

    assert run(work()) == [0, 1]


def test_a_worker_that_never_came_is_not_counted_as_lost(tmp_path):
    async def work():
        async with serving(Gated()) as url:
            config = SamplerConfig(patience=5.0)
            sampler = VllmSampler([url, "http://127.0.0.1:9"], config, RULE, "a tokenizer")
            await sampler.load_snapshot(tmp_path / "v000003")
            await sampler.generate(PROMPT, SAMPLING, "s")
            await sampler.close()
            return sampler.metrics()

    assert run(work()) == {"rollout/workers_lost": 0.0}


def test_a_lost_worker_gives_its_sessions_to_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 600.0)  # it does not come back

    async def work():
        servers = [Gated(), Gated()]
        async with started(tmp_path, servers) as sampler:
            await sampler.generate(PROMPT, SAMPLING, "s")
            home, other = servers if servers[0].requests else servers[::-1]
            home.reply = 500, {"error": {"message": "dead"}}
            await sampler.generate(PROMPT, SAMPLING, "s")
            asked = len(home.requests)
            for _ in range(3):
                assert (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids == SCRIPT
            return asked, len(home.requests), len(other.requests), sampler.lost_count

    assert run(work()) == (2, 2, 4, 1)


def refusing(server, routes):
    """Refuses a snapshot as our engine does, and notes the routes."""
    good = server.control

    async def control(request):
        routes.append(request.path)
        if request.path == "/update_weights" and server.refuses:
            return web.json_response({"error": {"message": f"{REFUSAL}damaged snapshot"}}, status=500)
        if request.path == "/start_weight_update" and server.is_active:
            server.is_active = False
            return web.json_response({"error": {"message": "an update is already active"}}, status=500)
        return await good(request)

    server.control, server.refuses, server.is_active = control, False, False


def test_a_worker_that_refuses_a_snapshot_serves_on(tmp_path):
    """Else it would stay paused, for whoever comes next too. So would another one that is slower."""

    async def work():
        server, slower, routes = Gated(), Gated(), []
        refusing(server, routes)
        good = slower.control

        async def control(request):
            await asyncio.sleep(0.1)
            return await good(request)

        slower.control = control
        async with started(tmp_path, [server, slower]) as sampler:
            routes.clear()
            server.refuses = True
            with pytest.raises(UserError, match="refuses .*v000004: damaged snapshot"):
                await sampler.load_snapshot(tmp_path / "v000004")
            return routes, sampler.workers[1].version

    assert run(work()) == (["/pause", "/start_weight_update", "/update_weights", "/resume"], 4)


def test_rollback_begins_another_session(tmp_path):
    """Workers take no old versions. The swap before it was broken off in the middle."""

    async def work():
        server, routes = Gated(), []
        refusing(server, routes)
        async with started(tmp_path, [server]) as sampler:
            sessions = [server.label]
            del routes[:]
            server.is_active = True
            await sampler.load(3, tmp_path / "v000003")
            return [*sessions, server.label], list(routes), sampler.workers[0].version, sampler.lost_count

    (first, second), routes, version, lost = run(work())
    assert first != second and first[-2:] == second[-2:] == "/3" and (version, lost) == (3, 0)
    swap = ["/start_weight_update", "/finish_weight_update", "/start_weight_update", "/update_weights"]
    assert routes == [
        "/init_weight_transfer_engine", "/pause", *swap, "/finish_weight_update", "/resume"
    ]  # fmt: skip


def test_refusal_of_all_workers_ends_completions(tmp_path):
    async def work():
        server = Gated()
        refusing(server, [])
        async with started(tmp_path, [server]) as sampler:
            server.refuses = True
            server.reply = 500, {"error": {"message": "dead"}}  # it is lost, and refuses when it is back
            with pytest.raises(UserError, match="refuses .*v000003: damaged snapshot"):
                await sampler.generate(PROMPT, SAMPLING, "s")
            server.refuses, server.reply = False, None
            await sampler.load_snapshot(tmp_path / "v000004")  # the next one may be good
            return (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids, sampler.workers[0].refusal

    assert run(work()) == (SCRIPT, None)


@pytest.mark.parametrize("entries", [[None, {"8": {"logprob": -0.5}}, {"9": {"logprob": -2}}], [None], None])
def test_prompt_logprobs_are_those_of_each_worker(tmp_path, monkeypatch, entries):
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 600.0)

    async def work():
        servers = [Gated(), Gated()]
        good = {"prompt_logprobs": [None, {"8": {"logprob": -1.5}}, {"7": {}, "9": {"logprob": -3.0}}]}
        servers[0].reply, servers[1].reply = (200, {"prompt_logprobs": entries}), (200, good)
        async with started(tmp_path, servers) as sampler:
            values = await sampler.prompt_logprobs([7, 8, 9])
            assert servers[0].requests[0]["token_ids"] == [7, 8, 9]
            urls = [worker.url for worker in sampler.workers]
            return [values[url].tolist() for url in urls if url in values], sampler.lost_count

    is_good = entries is not None and len(entries) == 3
    assert run(work()) == ([[-0.5, -2.0], [-1.5, -3.0]][1 - is_good :], 1 - is_good)


def test_completion_needs_loaded_weights():
    with pytest.raises(RuntimeError, match="no weights"):
        run(VllmSampler([], SamplerConfig(), RULE, "a tokenizer").generate(PROMPT, SAMPLING, "s"))


def test_one_worker_that_refuses_does_not_end_the_wait_for_the_others(tmp_path):
    async def work():
        servers = [Gated(), Gated()]
        for server in servers:
            refusing(server, [])
        async with started(tmp_path, servers) as sampler:
            servers[0].refuses = True
            for server in servers:  # both are lost; the first will refuse, the second will be back
                server.reply = 500, {"error": {"message": "dead"}}
            task = asyncio.create_task(sampler.generate(PROMPT, SAMPLING, "s"))
            while sampler.workers[0].refusal is None:
                await asyncio.sleep(0.01)
            servers[1].reply = None
            return (await task).token_ids, sampler.workers[0].refusal is not None

    assert run(work()) == (SCRIPT, True)


def test_a_completion_names_the_versions_of_all_its_parts(tmp_path):
    """Cut by two swaps, one of them before another token was written."""

    async def work():
        server = Gated()
        script = [*letters("abcdef"), *ids("</search>")]
        server.script, server.cuts = script, [2, 0, 3]
        good, samplers = server.generate, []
        versions = iter(["v000004", "v000005", "v000006"])

        async def generate(request):
            reply = await good(request)
            if label := next(versions, None):
                await samplers[0].load_snapshot(tmp_path / label)
            return reply

        server.generate = generate
        async with started(tmp_path, [server]) as sampler:
            samplers.append(sampler)
            return await sampler.generate(PROMPT, SamplingParams(60, stop=STOP, seed=5), "s")

    completion = run(work())
    assert completion.policy_versions == (3, 5, 6)
