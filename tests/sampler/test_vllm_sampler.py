"""The client against a server that can be told where to cut, lie and fail.

Completions and their requests; then workers that die, hang, refuse or come back.
"""

import asyncio
import json
import math
from contextlib import suppress

import pytest
from test_stop_rule import PIECES, STOP, ids, letters
from vllm_server import PROMPT, SAMPLING, SCRIPT, Server, begin, sampler_of, sampling, until

from calibadv_jax.core.errors import REFUSAL, RequestFailed, UserError
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.sampler import rollout_workers, vllm_sampler
from calibadv_jax.sampler.vllm_messages import read_completion
from calibadv_jax.services.http_client import Unreachable

pytestmark = pytest.mark.anyio
TEXTS = {
    "letters": letters("hm </search>") + letters("more <eos"),
    "pieces": [*letters("hm "), *ids("</"), *letters("sea"), *ids("rch>x"), *letters("more")],
    "answer": letters("x</answer>") + letters("and on"),
    "whole": [*letters("hm"), *ids("</search>"), *letters("more")],
    "tempting": letters("</sea or </search or rch> or >") + letters(" then </answer>"),
    "end": [*letters("</sea"), *ids("<im_end>"), *letters("rch>")],
    "never": letters("nothing of the sort"),
}
FAST = {("tempting", 0), ("pieces", 3)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 0.01)
    monkeypatch.setattr(vllm_sampler, "EMPTY_PAUSE", 0.01)
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 600.0)  # the server has no label to watch


@pytest.fixture
def no_return(monkeypatch):
    """Lost workers do not come back."""
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 600.0)


@pytest.mark.parametrize(
    ("name", "overshoot"),
    [
        pytest.param(name, overshoot, marks=() if (name, overshoot) in FAST else pytest.mark.medium)
        for name in TEXTS
        for overshoot in (0, 3)
    ],
)
async def test_cut_at_any_place_changes_nothing(tmp_path, name, overshoot):
    """Also a second cut, also right at the beginning, and whatever the server writes past the end."""
    server, limit = Server(TEXTS[name]), SamplingParams(len(TEXTS[name]), stop=STOP, seed=5)
    async with sampling(tmp_path, server) as sampler:
        uncut = await sampler.generate(PROMPT, limit, "s")
        ends = {"end": "<im_end>", "never": "t", "pieces": "rch>x", "whole": "</search>"}
        assert PIECES[uncut.token_ids[-1]] == ends.get(name, ">") and uncut.policy_versions == (3,)
        assert uncut.stop_reason == {"end": "eos", "never": "length"}.get(name, "stop")
        server.overshoot = overshoot
        for first in range(len(uncut.token_ids) + 1):
            for more in ([], [0], [1], [4]):
                server.cuts = [first, *more]
                assert await sampler.generate(PROMPT, limit, "s") == uncut, f"cut at {[first, *more]}"
        assert sampler.metrics() == {"rollout/workers_lost": 0.0}


async def test_limit_counts_all_parts_with_other_seeds(tmp_path):
    server = Server(TEXTS["never"], [4, 3])
    async with sampling(tmp_path, server) as sampler:
        completion = await sampler.generate(PROMPT, SamplingParams(9, stop=STOP, seed=5), "s")
    assert completion.token_ids == TEXTS["never"][:9] and completion.stop_reason == "length"
    parameters = [body["sampling_params"] for body in server.requests]
    assert [sent["max_tokens"] for sent in parameters] == [9, 5, 2]
    assert len({sent["seed"] for sent in parameters}) == 3
    assert all(sent["stop_token_ids"] == [0, 1] for sent in parameters)


async def test_cut_tag_ends_at_its_end(tmp_path):
    """The server is asked to stop at the missing part: it need not run to the limit."""
    server = Server([*letters("</search>"), *letters("z" * 40)], [5])
    async with sampling(tmp_path, server) as sampler:
        completion = await sampler.generate(PROMPT, SAMPLING, "s")
    assert completion.token_ids == letters("</search>")
    assert [body["sampling_params"]["stop"] for body in server.requests] == [[*STOP], [*STOP, "rch>"]]


async def test_completion_names_versions_of_all_parts(tmp_path):
    """Cut by two swaps, one of them before another token was written."""
    server = Server([*letters("abcdef"), *ids("</search>")], [2, 0, 3])
    good, versions = server.generate, iter([4, 5, 6])

    async def generate(request):
        reply = await good(request)
        if version := next(versions, None):
            await sampler.load(version, tmp_path / f"v00000{version}")
        return reply

    server.generate = generate
    async with sampling(tmp_path, server) as sampler:
        assert (await sampler.generate(PROMPT, SAMPLING, "s")).policy_versions == (3, 5, 6)


LOST = r"5 vLLM workers were lost over one completion; the last: .*"


@pytest.mark.parametrize(
    ("status", "message", "kind", "words", "count"),
    [
        (400, "longer than the limit", RequestFailed, "refuses /inference/v1/generate: longer than", 1),
        (422, "longer than the limit", RequestFailed, "refuses /inference/v1/generate: longer than", 1),
        (404, "no", UserError, "no such route", 1),
        (500, "refused by calibadv_jax: another run", UserError, "another run", 1),
        (500, "engine is dead", RequestFailed, f"{LOST}dead", vllm_sampler.MAX_LOSSES),
    ],
)
async def test_failed_completion_raises_and_is_not_busy(tmp_path, status, message, kind, words, count):
    server = Server()
    server.reply = status, {"error": {"message": message}}
    async with sampling(tmp_path, server) as sampler:
        with pytest.raises(kind, match=words) as caught:
            await sampler.generate(PROMPT, SAMPLING, "s")
        assert type(caught.value) is kind and len(server.requests) == count
        assert kind is UserError or caught.value.service == "sampler"
        assert sampler.workers[0].busy == 0


async def test_nan_from_every_worker_fails_the_completion(tmp_path):
    server = Server()
    server.changes = {"logprobs": {"content": [{"logprob": math.nan}] * len(SCRIPT)}}
    async with sampling(tmp_path, server) as sampler:
        with pytest.raises(RequestFailed, match=f"{LOST}log-probability nan"):
            await sampler.generate(PROMPT, SAMPLING, "s")
        assert len(server.requests) == vllm_sampler.MAX_LOSSES


async def test_empty_replies_lose_the_worker(tmp_path):
    """It says that a swap has cut every completion, as a paused server does; a few such replies are borne."""
    few = [0] * (vllm_sampler.MAX_EMPTY - 1)
    server = Server(SCRIPT, [*few, 2, *few])
    async with sampling(tmp_path, server) as sampler:
        assert (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids == SCRIPT
        assert sampler.lost_count == 0
        server.cuts, before = [0] * 10_000, len(server.requests)
        with pytest.raises(RequestFailed, match=f"{LOST}6 replies without a token"):
            await sampler.generate(PROMPT, SAMPLING, "s")
        assert len(server.requests) - before == vllm_sampler.MAX_EMPTY * vllm_sampler.MAX_LOSSES


async def test_completions_are_spread_over_workers(tmp_path):
    """One that is cancelled keeps its worker busy no longer."""
    servers = [Server(), Server()]
    async with sampling(tmp_path, *servers) as sampler:
        for server in servers:
            server.gate.clear()
        tasks = begin(sampler, *"abcdef")
        await until(lambda: sum(server.waiting for server in servers) == 6)
        assert [server.waiting for server in servers] == [worker.busy for worker in sampler.workers] == [3, 3]
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert tasks[0].cancelled() and sorted(worker.busy for worker in sampler.workers) == [2, 3]
        for server in servers:
            server.gate.set()
        await asyncio.gather(*tasks[1:])
        assert [worker.busy for worker in sampler.workers] == [0, 0]


async def test_session_stays_at_its_worker_until_released(tmp_path):
    servers = [Server(), Server()]
    async with sampling(tmp_path, *servers) as sampler:
        servers[0].gate.clear()
        (first,) = begin(sampler, "a")  # both idle: the first one
        await until(lambda: servers[0].waiting)
        await sampler.generate(PROMPT, SAMPLING, "b")  # the other one
        servers[0].gate.set()
        await first
        for _ in range(3):  # both are idle again
            await sampler.generate(PROMPT, SAMPLING, "b")
        assert [len(server.requests) for server in servers] == [1, 4]
        sampler.release("b")
        await sampler.generate(PROMPT, SAMPLING, "b")
        assert [len(server.requests) for server in servers] == [2, 4]


ENTRIES = [None, {"8": {"logprob": -0.5}}, {"9": {"logprob": -2}}]


@pytest.mark.parametrize("entries", [ENTRIES, [*ENTRIES[:2], {"9": {"logprob": 10**400}}], [None], None])
async def test_prompt_logprobs_come_by_worker(tmp_path, no_return, entries):
    servers = [Server(), Server()]
    good = {"prompt_logprobs": [None, {"8": {"logprob": -1.5}}, {"7": {}, "9": {"logprob": -3.0}}]}
    servers[0].reply, servers[1].reply = (200, {"prompt_logprobs": entries}), (200, good)
    async with sampling(tmp_path, *servers) as sampler:
        values = await sampler.prompt_logprobs([7, 8, 9])
        assert servers[0].requests[0]["token_ids"] == [7, 8, 9]
        is_bad = entries is not ENTRIES
        first, second = (values.get(worker.url) for worker in sampler.workers)
        assert second.tolist() == [-1.5, -3] and (is_bad or first.tolist() == [-0.5, -2])
        assert (first is None) == is_bad == sampler.lost_count


DEAD = 500, {"error": {"message": "dead"}}
SWAP = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
NOBODY = "http://127.0.0.1:9"


async def test_foreign_labels_are_counted_as_losses(tmp_path):
    server = Server()
    async with sampling(tmp_path, server) as sampler:
        for count in (1.0, 2.0):  # the worker loads the snapshot again each time
            server.label = "another/3"
            assert (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids == SCRIPT
            assert sampler.metrics() == {"rollout/workers_lost": count}


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
        home.changes = {"logprobs": {"content": [{"logprob": math.nan}] * len(SCRIPT)}}
        for _ in range(4):
            completion = await sampler.generate(PROMPT, SAMPLING, "s")
            assert completion.token_ids == SCRIPT and all(map(math.isfinite, completion.logprobs))
        assert (len(home.requests), len(other.requests), sampler.lost_count) == (2, 4, 1)


async def test_dead_worker_is_asked_once_more_only(tmp_path, no_return):
    home, other = Server(), Server()
    async with sampling(tmp_path, home, other) as sampler:
        await sampler.generate(PROMPT, SAMPLING, "s")
        home.reply = DEAD
        for _ in range(4):
            assert (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids == SCRIPT
        assert len(home.requests) == 2
        assert len(other.requests) == 4
        assert sampler.lost_count == 1


async def test_missing_workers_are_named_with_advice(tmp_path):
    sampler = sampler_of(NOBODY, patience=0.2)
    message = (
        r"no vLLM worker for 0.2 s \(http://127.0.0.1:9: .*\); start one with scripts/launch_vllm_worker.sh"
    )
    with pytest.raises(RequestFailed, match=message):
        await sampler.load(3, tmp_path / "v000003")
    await sampler.close()


async def test_worker_that_refuses_a_snapshot_serves_on(tmp_path):
    """Else it would stay paused, for whoever comes next too. So would another one that is slower."""
    server, slower = Server(), Server()
    slower.holds = {"/update_weights": lambda: until(lambda: "/update_weights" in server.routes)}
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
    servers = [Server(), Server()]

    async def ask_label(http, url):
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
        assert [completion.token_ids for completion in completions] == [SCRIPT] * 6
        assert (servers[0].waiting, sampler.lost_count, sampler.workers[0].busy) == (3, 1, 0)


async def test_idle_worker_is_not_watched(tmp_path, monkeypatch, no_return):
    """It holds nothing that could hang, and the next completion finds out whether it is there."""
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.02)
    servers, asked = [Server(), Server()], set()

    async def ask_label(http, url):
        asked.add(url)
        return f"{sampler.run}/3"

    async with sampling(tmp_path, *servers) as sampler:
        monkeypatch.setattr(vllm_sampler, "ask_label", ask_label)
        servers[0].gate.clear()
        (task,) = begin(sampler, "s")
        await until(lambda: asked)
        await asyncio.sleep(0.1)
        assert asked == {sampler.workers[0].url}
        servers[0].gate.set()
        assert (await task).token_ids == SCRIPT


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


async def test_long_load_of_a_living_server_is_waited_for(tmp_path, monkeypatch):
    """Its health is asked for several times meanwhile."""
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.02)
    asked = []
    ask_alive = vllm_sampler.ask_alive

    async def noted(http, url):
        asked.append(url)
        await ask_alive(http, url)

    monkeypatch.setattr(vllm_sampler, "ask_alive", noted)
    server = Server()
    server.holds = {"/update_weights": lambda: until(lambda: len(asked) > 1)}
    async with sampling(tmp_path, server) as sampler:
        assert sampler.workers[0].version == 3
        assert sampler.lost_count == 0


async def test_stopped_server_does_not_hold_up_a_swap(tmp_path, monkeypatch):
    """After SIGSTOP the system still takes its connections; a request may take half an hour."""
    monkeypatch.setattr(vllm_sampler, "WATCH_PAUSE", 0.05)
    monkeypatch.setattr(rollout_workers, "ASK_SECONDS", 1.0)

    async def silent(reader, writer):  # holds both: a writer that nobody has closes the connection
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)

    stopped = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{stopped.sockets[0].getsockname()[1]}"
    async with sampling(tmp_path, Server(), more_urls=[url]) as sampler:
        states = [(worker.version, worker.loss_reason) for worker in sampler.workers]
        assert states == [(None, "/init_weight_transfer_engine: no whole reply in time"), (3, "")]
        assert (await sampler.generate(PROMPT, SAMPLING, "s")).token_ids == SCRIPT
    stopped.close()


async def test_requests_of_a_lost_worker_are_sent_again(tmp_path):
    """One request has noticed that the server is gone; another still waits on its old connection."""
    server = Server()
    async with sampling(tmp_path, server) as sampler:
        server.gate.clear()
        (task,) = begin(sampler, "s")
        await until(lambda: server.waiting)
        server.gate = asyncio.Event()  # from now on its successor answers
        server.gate.set()
        sampler._mark_lost(sampler.workers[0], "connection refused")
        assert (await task).token_ids == SCRIPT


VOCABULARY = 400


def values(*numbers):
    return {"logprobs": {"content": [{"logprob": number} for number in numbers]}}


def read(changes):
    """Completion of a reply with these fields; or of a reply that is no object of fields."""
    reply = changes
    if isinstance(changes, dict) and "choices" not in changes:
        good = {"token_ids": [5, 6], "finish_reason": "length", "stop_reason": None, **values(-0.5, 0.0)}
        reply = {"choices": [good | {"weight_versions": [{"version": "7"}]} | changes]}
    return read_completion(json.loads(json.dumps(reply)), int, 2, VOCABULARY)


def test_good_reply_is_read():
    completion = read({})
    assert completion.token_ids == [5, 6] and completion.logprobs == [-0.5, 0.0]
    assert completion.policy_versions == (7,) and completion.stop_reason == "length"
    assert read(values(-9998.0, 1e-6)).logprobs == [-9998.0, 1e-6]  # rounding above 0
    assert read({"token_ids": [0, VOCABULARY - 1]}).token_ids == [0, VOCABULARY - 1]


@pytest.mark.parametrize(
    "changes",
    [
        values(-0.5, math.nan),
        values(-0.5, math.inf),
        values(-math.inf, -0.5),
        values(0.1, -0.5),
        values(-9999.0, -0.5),  # vLLM's minus infinity
        values(-0.5, None),
        values(-0.5, "high"),
        values(-0.5, -(10**400)),
        values(-0.5),
        values(-0.5, -0.5, -0.5),
        {"logprobs": None},
        {"logprobs": [-0.5, -0.5]},
        {"token_ids": [5, 6, 7], **values(-1.0, -1.0, -1.0)},  # more than were asked for
        {"token_ids": [5, -1]},
        {"token_ids": [5, VOCABULARY]},
        {"token_ids": [5, 6.0]},
        {"token_ids": [5, True]},
        {"token_ids": ["5", 6]},
        {"weight_versions": None},
        {"weight_versions": [3]},
        {"finish_reason": "tired"},
        {"token_ids": [], "logprobs": None},  # at the limit
        {"token_ids": [], "logprobs": None, "finish_reason": "stop"},
        *(None, [], {"choices": []}, {"choices": [None]}, {"choices": [[]]}, {"choices": 3}),
    ],
    ids=str,
)
def test_bad_reply_is_refused(changes):
    with pytest.raises(ValueError, match="."):
        read(changes)


def test_reply_without_fields_is_refused():
    with pytest.raises(ValueError, match="choices"):
        read_completion({}, int, 2, VOCABULARY)
