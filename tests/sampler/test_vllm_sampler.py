"""The client against a server that speaks vLLM's routes and can be told where to cut, lie and fail."""

import asyncio
import contextlib

import pytest
from aiohttp import web
from test_stop_rule import PIECES, RULE, STOP, ids, letters

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.sampler import vllm_sampler
from calibadv_jax.sampler.vllm_sampler import VllmSampler

PROMPT = letters("ab")
TEXTS = {
    "letters": letters("hm </search>") + letters("more <eos"),
    "pieces": [*letters("hm "), *ids("</"), *letters("sea"), *ids("rch>x"), *letters("more")],
    "answer": letters("x</answer>") + letters("and on"),
    "whole": [*letters("hm"), *ids("</search>"), *letters("more")],
    "tempting": letters("</sea or </search or rch> or >") + letters(" then </answer>"),
    "end": [*letters("</sea"), *ids("<im_end>"), *letters("rch>")],
    "never": letters("nothing of the sort"),
}


class Server:
    """Writes `script` after PROMPT; each request is cut after as many tokens as `cuts` says next.

    As vLLM does, it looks for stop strings in what this request has written only, and says "stop" for them;
    end-of-text ends where the request names it. `overshoot` tokens follow a stop string, as they can.
    """

    def __init__(self, script, cuts=(), overshoot=0):
        self.script, self.cuts, self.overshoot = script, list(cuts), overshoot
        self.requests, self.label = [], ""
        self.reply = None  # instead of a completion: status and body

    async def generate(self, request):
        body = await request.json()
        self.requests.append(body)
        if self.reply is not None:
            return web.json_response(self.reply[1], status=self.reply[0])
        context, sampling = body["token_ids"], body["sampling_params"]
        assert context[: len(PROMPT)] == PROMPT
        done = len(context) - len(PROMPT)
        assert context[len(PROMPT) :] == self.script[:done]
        limit, reason, stop = sampling["max_tokens"], "length", None
        if self.cuts and self.cuts[0] < limit:
            limit, reason = self.cuts[0], "abort"
        self.cuts[:1] = []
        written = []
        for token in self.script[done : done + limit]:
            written.append(token)
            text = RULE.text(written)
            stops = [stop for stop in sampling["stop"] if stop in text]
            if stops or token in sampling["stop_token_ids"]:
                reason, stop = "stop", stops[0] if stops else token
                break
        written += self.script[done + len(written) :][: self.overshoot if stop else 0]
        choice = {
            "token_ids": written,
            "finish_reason": reason,
            "stop_reason": stop,
            "logprobs": {"content": [{"logprob": -0.001 * (done + n)} for n in range(len(written))]},
            "weight_versions": [{"version": self.label}] if written else [],
        }
        return web.json_response({"choices": [choice]})

    async def control(self, request):
        if request.path == "/finish_weight_update" and request.can_read_body:
            self.label = (await request.json())["weight_version"]
        return web.json_response({})


@contextlib.asynccontextmanager
async def serving(server):
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.generate)
    app.router.add_post("/{route}", server.control)
    runner = web.AppRunner(app, shutdown_timeout=0.1)  # some requests never end
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def write(server, tmp_path, max_tokens=60, cuts=None, **config):
    """A completion for each entry of `cuts`, or one, and the sampler's counts."""
    sampling = SamplingParams(max_tokens, stop=STOP, seed=5)

    async def run():
        async with serving(server) as url:
            sampler = VllmSampler([url], SamplerConfig(**config), RULE, "a tokenizer")
            written = []
            try:
                await sampler.load_snapshot(tmp_path / "v000003")
                for places in cuts or [server.cuts]:
                    server.cuts = list(places)
                    written.append(await sampler.generate(PROMPT, sampling, "s"))
                return written if cuts else written[0], sampler.metrics()
            finally:
                await sampler.close()

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("name", "overshoot"),
    [
        ("tempting", 0),
        ("pieces", 3),
        *(
            pytest.param(name, overshoot, marks=pytest.mark.medium)
            for name in TEXTS
            for overshoot in (0, 3)
            if (name, overshoot) not in {("tempting", 0), ("pieces", 3)}
        ),
    ],
)
def test_a_cut_at_any_place_changes_nothing(tmp_path, name, overshoot):
    """Also a second cut, also right at the beginning, and whatever the server writes past the end."""
    script = TEXTS[name]
    uncut, _ = write(Server(script), tmp_path, len(script))
    ends = {"end": "<im_end>", "never": "t", "pieces": "rch>x", "whole": "</search>"}
    assert PIECES[uncut.token_ids[-1]] == ends.get(name, ">") and uncut.policy_versions == (3,)
    assert uncut.stop_reason == {"end": "eos", "never": "length"}.get(name, "stop")
    cuts = [[first, *more] for first in range(len(uncut.token_ids) + 1) for more in ([], [0], [1], [4])]
    written, metrics = write(Server(script, (), overshoot), tmp_path, len(script), cuts)
    for places, got in zip(cuts, written, strict=True):
        assert got == uncut, f"cut at {places}"
    assert metrics == {"rollout/workers_lost": 0.0}


def test_a_completion_ends_at_the_limit_and_what_follows_a_cut_draws_other_numbers(tmp_path):
    server = Server(TEXTS["never"], [4, 3])
    completion, _ = write(server, tmp_path, max_tokens=9)
    assert completion.token_ids == TEXTS["never"][:9] and completion.stop_reason == "length"
    limits = [body["sampling_params"]["max_tokens"] for body in server.requests]
    assert limits == [9, 5, 2]
    assert len({body["sampling_params"]["seed"] for body in server.requests}) == 3
    assert all(body["sampling_params"]["stop_token_ids"] == [0, 1] for body in server.requests)


def test_a_cut_tag_is_not_written_on_past_its_end(tmp_path):
    """The server is asked to stop at what is missing of it: it need not run to the limit."""
    server = Server([*letters("</search>"), *letters("z" * 40)], [5])
    completion, _ = write(server, tmp_path)
    assert completion.token_ids == letters("</search>")
    assert [body["sampling_params"]["stop"] for body in server.requests] == [[*STOP], [*STOP, "rch>"]]


@pytest.mark.parametrize("status", [400, 422])
def test_a_refused_request_fails_by_itself(tmp_path, status):
    server = Server([])
    server.reply = status, {"error": {"message": "longer than the maximum model length"}}
    with pytest.raises(RequestFailed, match="refuses /inference/v1/generate: longer than") as caught:
        write(server, tmp_path)
    assert caught.value.service == "sampler" and len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "message"), [(404, "no such route"), (500, "refused by calibadv_jax: another run")]
)
def test_a_worker_that_is_none_of_this_run_ends_the_run(tmp_path, status, message):
    server = Server([])
    server.reply = status, {"error": {"message": message}}
    with pytest.raises(UserError, match="no such route|another run") as caught:
        write(server, tmp_path)
    assert not isinstance(caught.value, RequestFailed)


def test_a_request_that_loses_every_worker_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 0.01)
    server = Server([])
    server.reply = 500, {"error": {"message": "engine is dead"}}
    with pytest.raises(RequestFailed, match="5 vLLM workers were lost over one completion; the last: .*dead"):
        write(server, tmp_path)
    assert len(server.requests) == vllm_sampler.MAX_LOSSES


def test_lost_workers_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_sampler, "PROBE_PAUSE", 0.01)
    server = Server(TEXTS["whole"])
    good, label = server.generate, []

    async def foreign_at_first(request):
        label.append(server.label)
        if len(label) < 3:
            server.label = "another/3"
        return await good(request)

    server.generate = foreign_at_first
    completion, metrics = write(server, tmp_path)
    assert completion.token_ids[-1:] == ids("</search>") and metrics == {"rollout/workers_lost": 2.0}


def test_no_worker_for_as_long_as_the_patience_lasts(tmp_path):
    async def run():
        sampler = VllmSampler(["http://127.0.0.1:9"], SamplerConfig(patience=0.2), RULE, "a tokenizer")
        with pytest.raises(RequestFailed, match="no vLLM worker for 0.2 s"):
            await sampler.load_snapshot(tmp_path / "v000003")
        await sampler.close()

    asyncio.run(run())


def test_worker_without_weights_is_not_probed():
    async def run():
        sampler = VllmSampler(["http://127.0.0.1:9"], SamplerConfig(), RULE, "a tokenizer")
        try:
            return await sampler.prompt_logprobs([1, 2]), sampler.workers[0].reviving
        finally:
            await sampler.close()

    assert asyncio.run(run()) == ({}, None)  # nothing was asked, so that nothing failed
