"""A server that speaks vLLM's routes and can be made to wait, cut, lie and fail."""

import asyncio
import contextlib
import itertools

from aiohttp import web
from test_stop_rule import RULE, STOP, letters

from calibadv_jax.config import SamplerConfig
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.sampler.vllm_sampler import VllmSampler

PROMPT, SCRIPT = letters("ab"), letters("hm </search>")
SAMPLING = SamplingParams(60, stop=STOP, seed=5)


class Server:
    """Writes `script` after PROMPT; each request is cut after as many tokens as `cuts` says next.

    As vLLM does, it looks for stop strings in the tokens of this request only, and says "stop" for them;
    end-of-text ends where the request names it. `overshoot` tokens follow a stop string, as they can.

    Attributes:
        gate: requests for completions wait while it is closed; `waiting` counts them.
        reply: status and body instead of a completion.
        changes: fields of a completion that are replaced.
        errors: by route, messages of replies with status 500.
        holds: by route, a coroutine function that is awaited before a reply.
    """

    def __init__(self, script=SCRIPT, cuts=(), overshoot=0):
        self.script, self.cuts, self.overshoot = script, list(cuts), overshoot
        self.requests, self.routes, self.label = [], [], ""
        self.gate, self.waiting = asyncio.Event(), 0
        self.gate.set()
        self.reply, self.changes, self.errors, self.holds = None, {}, {}, {}

    def fail(self, route, message, times=None):
        self.errors[route] = itertools.repeat(message, *([] if times is None else [times]))

    async def generate(self, request):
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        body = await request.json()
        self.requests.append(body)
        if self.reply is not None:
            return web.json_response(self.reply[1], status=self.reply[0])
        context, sampling = body["token_ids"], body["sampling_params"]
        done = len(context) - len(PROMPT)
        assert context == [*PROMPT, *self.script[:done]]
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
        return web.json_response({"choices": [choice | self.changes]})

    async def control(self, request):
        self.routes.append(request.path)
        if request.path in self.holds:
            await self.holds[request.path]()
        if message := next(self.errors.get(request.path, iter(())), None):
            return web.json_response({"error": {"message": message}}, status=500)
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


def sampler_of(*urls, patience=5.0):
    return VllmSampler(urls, SamplerConfig(patience=patience), RULE, "a tokenizer")


@contextlib.asynccontextmanager
async def sampling(folder, *servers, more_urls=()):
    """A sampler over the servers, with version 3 of the weights."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(server)) for server in servers]
        sampler = sampler_of(*more_urls, *urls)
        stack.push_async_callback(sampler.close)
        await sampler.load(3, folder / "v000003")
        yield sampler


def begin(sampler, *sessions):
    """Tasks of a completion in each session."""
    return [asyncio.create_task(sampler.generate(PROMPT, SAMPLING, name)) for name in sessions]


async def until(condition):
    while not condition():  # bounded by pytest's limit
        await asyncio.sleep(0.01)
