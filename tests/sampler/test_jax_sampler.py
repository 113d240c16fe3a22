"""The embedded sampler against the learner's own forward pass."""

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_policy import WIDER

from calibadv_jax.config import MeshConfig, SamplerConfig
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.logprobs import token_logprobs
from calibadv_jax.policy.sharding import make_mesh
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.stopping import StopRule

CHARACTERS = "abcdefghij<>/ "
EOS = len(CHARACTERS)


class CharTokenizer:
    """One token a character, and two that carry a tag's end together with another character."""

    eos_token_id = EOS
    pieces = [*CHARACTERS, "<eos>", ">a", ">\n", "x", "y"]

    def __len__(self):
        return len(self.pieces)

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=True):
        return "".join(self.pieces[i] for i in ids)


@pytest.fixture(scope="module")
def policy():
    return Policy(architecture_from_hf(WIDER | {"vocab_size": 19}), Numerics())


@pytest.fixture(scope="module")
def params(policy):
    params = jax.jit(policy.init)(jax.random.key(3))
    params["embed"]["embedding"] = params["embed"]["embedding"] * 20.0  # far from uniform
    return params


def make_sampler(policy, params, max_length=96, stops=None, **config):
    mesh = make_mesh(MeshConfig(fsdp=1), devices=jax.devices()[:1])
    defaults = {"slots": 4, "decode_chunk": 5, "prefill_chunk": 8}
    stops = stops or StopRule(CharTokenizer(), EOS)
    sampler = JaxSampler(policy, stops, SamplerConfig(**(defaults | config)), mesh, max_length)
    asyncio.run(sampler.load(7, params))
    return sampler


@pytest.fixture(scope="module")
def sampler(policy, params):
    """Of the default shape, compiled once; every test releases the sessions it began."""
    return make_sampler(policy, params)


@pytest.fixture(scope="module")
def forward(policy, params):
    """Tokens -> logits of the forward pass that the learner makes, [T, V] without the padding.

    Padded on the right to one length, so that it compiles once: attention is causal.
    """

    @jax.jit
    def logits_of(row):
        decoder = policy.merge(params)
        return decoder.logits(decoder(row, jnp.arange(row.shape[1])[None], jnp.ones_like(row)))[0]

    return lambda tokens: logits_of(padded(tokens))[: len(tokens)]


def padded(tokens, length=96):
    return jnp.asarray([[*tokens, *[0] * (length - len(tokens))]], jnp.int32)


@pytest.fixture(scope="module")
def recompute(policy, params):
    """Tokens, temperature -> [T - 1] log-probabilities of the successors, as the learner computes them."""

    @jax.jit
    def logprobs_of(row, temperature):
        decoder = policy.merge(params)
        hidden = decoder(row, jnp.arange(row.shape[1])[None], jnp.ones_like(row))
        targets = jnp.concatenate([row[:, 1:], row[:, :1]], axis=1)
        return token_logprobs(decoder, hidden, targets, temperature, 1024)[0][0]

    return lambda tokens, temperature: np.asarray(logprobs_of(padded(tokens), temperature))[: len(tokens) - 1]


def test_logprobs_equal_the_learners_over_multi_turn_trajectories(sampler, recompute):

    async def trajectory(index):
        tokens, spans = [1, 2, 3 + index], []
        for turn in range(3):
            sampling = SamplingParams(12, 0.8, seed=100 * index + turn, stop=("</j>",))
            done = await sampler.generate(tokens, sampling, f"t{index}")
            spans.append((len(tokens), done))
            tokens = tokens + done.token_ids + [4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5][: 3 + 4 * turn]
        sampler.release(f"t{index}")
        return tokens, spans

    async def everything():
        return await asyncio.gather(*(trajectory(i) for i in range(7)))  # more than there are slots

    for tokens, spans in asyncio.run(everything()):
        expected = recompute(tokens, 0.8)
        for start, done in spans:
            got = np.array(done.logprobs)
            np.testing.assert_allclose(got, expected[start - 1 : start - 1 + len(got)], atol=1e-3)
            assert done.policy_versions == (7,)


def test_seeds_are_read_whole(sampler):
    def sampled(seed):
        done = asyncio.run(sampler.generate([1, 2, 3], SamplingParams(20, 1.0, seed=seed), "s"))
        sampler.release("s")
        return done.token_ids

    assert sampled(5) == sampled(5) != sampled(2**31 + 5)


def test_greedy_is_the_argmax(sampler, forward):
    done = asyncio.run(sampler.generate([1, 2, 3], SamplingParams(9, 0.0), "g"))
    sampler.release("g")
    best = np.asarray(jnp.argmax(forward([1, 2, 3, *done.token_ids]), axis=-1))
    assert best[2:-1].tolist() == done.token_ids


def scripted(policy, script):
    """A policy whose next token is a fixed function of the last one."""

    class Scripted:
        def __init__(self, real):
            self.real = real

        def decode(self, tokens, *more, **options):
            return jax.nn.one_hot(tokens, 19), self.real.decode(tokens, *more, **options)[1]

        def embed_groups(self, tokens):
            return self.real.embed_groups(tokens)

        def logits(self, hidden):
            table = jnp.zeros((19, 19))
            for last, following in script.items():
                table = table.at[last, following].set(50.0)
            return hidden @ table

    class ScriptedPolicy(Policy):
        def merge(self, params):
            return Scripted(super().merge(params))

    return ScriptedPolicy(policy.architecture, policy.numerics)


def test_stops_inside_a_token_and_keeps_it(policy, params):
    """A stop string may end in the middle of a token; the token stays as it was sampled."""
    pieces = CharTokenizer.pieces
    forced = [pieces.index("<"), pieces.index("/"), pieces.index("j"), pieces.index(">\n")]
    sampler = make_sampler(scripted(policy, dict(zip([3, *forced[:-1]], forced, strict=True))), params)
    done = asyncio.run(sampler.generate([1, 3], SamplingParams(30, stop=("</j>",)), "s"))
    assert done.token_ids == forced
    assert done.stop_reason == "stop"


def counted(sampler, monkeypatch):
    """Numbers of the rows of every chunk that is decoded."""
    sizes, chunk = [], sampler._chunk
    monkeypatch.setattr(sampler, "_chunk", lambda requests: sizes.append(len(requests)) or chunk(requests))
    return sizes


@pytest.mark.medium
def test_a_chunk_goes_on_behind_tokens_that_end_nothing(policy, params, monkeypatch):
    """ "y>ay>a…" holds the last letter of "ja", which no token of it can complete."""
    y, more = CharTokenizer.pieces.index("y"), CharTokenizer.pieces.index(">a")
    sampler = make_sampler(scripted(policy, {y: more, more: y}), params, decode_chunk=12)
    sizes = counted(sampler, monkeypatch)
    done = asyncio.run(sampler.generate([1, y], SamplingParams(12, 0.0, stop=("ja",)), "s"))
    assert len(done.token_ids) == 12
    assert sizes == [1]


def test_rows_that_come_one_after_another_begin_together(sampler, monkeypatch):
    sizes = counted(sampler, monkeypatch)

    async def late(number):
        for _ in range(3 * number):
            await asyncio.sleep(0)
        return await sampler.generate([1, 2, 3], SamplingParams(2, 0.0), f"late{number}")

    async def everything():
        await asyncio.gather(*map(late, range(4)))

    asyncio.run(everything())
    for number in range(4):
        sampler.release(f"late{number}")
    assert sizes == [4]


@pytest.mark.parametrize("part", ["find", "_chunk"])
@pytest.mark.timeout(60)
def test_an_error_reaches_all_who_wait_and_the_next_ones_are_served(sampler, monkeypatch, part):
    def fail(*_):
        raise OSError("broken")

    async def sampled(
        number,
    ):  # of other lengths: some still run while others have ended; more than there are slots
        try:
            return await sampler.generate([1, 2, 3], SamplingParams(3 + 3 * number, 0.0), f"bad{number}")
        finally:
            sampler.release(f"bad{number}")

    async def everything():
        with monkeypatch.context() as patch:
            patch.setattr(sampler.stops if part == "find" else sampler, part, fail)
            failed = await asyncio.gather(*map(sampled, range(6)), return_exceptions=True)
            await asyncio.gather(sampler._pump_task, return_exceptions=True)
        return failed, await sampled(0)

    failed, served = asyncio.run(everything())
    assert [str(error) for error in failed] == ["broken"] * 6
    assert len(served.token_ids) == 3


def test_what_has_ended_is_handed_back_while_the_others_are_decoded(sampler, monkeypatch):
    chunk, ended, chunks = sampler._chunk, threading.Event(), []

    def wait_for_the_first(requests):
        chunks.append(len(requests))
        if len(chunks) == 2:
            assert ended.wait(10), "a chunk waits for it"
        chunk(requests)

    monkeypatch.setattr(sampler, "_chunk", wait_for_the_first)

    async def sampled(tokens, session):
        done = await sampler.generate([1, 2, 3], SamplingParams(tokens, 0.0), session)
        ended.set()
        sampler.release(session)
        return len(done.token_ids)

    async def both():
        return await asyncio.gather(sampled(3, "short"), sampled(9, "long"))

    assert asyncio.run(both()) == [3, 9]
    assert chunks == [2, 1]


def test_every_end_of_text_token_ends_it(policy, params):
    """In the middle of a chunk too, and beyond the tokenizer's own tokens."""
    tokenizer = type("Short", (CharTokenizer,), {"__len__": lambda _: 6})()
    chain = scripted(policy, {1: 2, 2: 6, 6: 3, 3: EOS, EOS: 1})
    sampler = make_sampler(chain, params, stops=StopRule(tokenizer, [EOS, 6]))
    for start, expected in ((1, [2, 6]), (6, [3, EOS])):
        done = asyncio.run(sampler.generate([start], SamplingParams(30, 0.0), "s"))
        sampler.release("s")
        assert (done.token_ids, done.stop_reason) == (expected, "eos")
        assert len(done.logprobs) == len(expected)


def test_a_row_released_while_it_is_decoded_holds_nothing_for_the_next_session(
    sampler, recompute, monkeypatch
):
    prompt, sampling = [1, 2, 3], SamplingParams(12, 0.8, seed=3)
    whole = asyncio.run(sampler.generate(prompt, sampling, "whole"))
    sampler.release("whole")
    chunk = sampler._chunk

    async def broken_off():
        loop, released = asyncio.get_running_loop(), threading.Event()

        def release():
            sampler.release("gone")
            released.set()

        def release_first(requests):
            loop.call_soon_threadsafe(release)
            assert released.wait(10)
            chunk(requests)

        with monkeypatch.context() as patch:
            patch.setattr(sampler, "_chunk", release_first)
            task = asyncio.create_task(sampler.generate(prompt, sampling, "gone"))
            while sampler._pump_task is None or not released.is_set():
                await asyncio.sleep(0.001)
            await sampler._pump_task
            task.cancel()

    asyncio.run(broken_off())
    context = [prompt[-1], *whole.token_ids[:3], 4]  # what the chunk believed to have left in the row
    done = asyncio.run(sampler.generate(context, sampling, "next"))
    sampler.release("next")
    expected = recompute([*context, *done.token_ids], 0.8)[len(context) - 1 :]
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-3)


def test_row_released_at_its_end_leaves_its_slot_to_the_next(sampler, monkeypatch):
    chunk, asked = sampler._chunk, ([1, 2, 3], SamplingParams(2, 0.0))

    async def work():
        loop, taken = asyncio.get_running_loop(), threading.Event()
        following = loop.create_future()

        def take():
            monkeypatch.undo()
            sampler.release("gone")
            following.set_result(asyncio.create_task(sampler.generate(*asked, "next")))
            loop.call_soon(taken.set)

        def take_after(requests):
            chunk(requests)
            loop.call_soon_threadsafe(take)
            assert taken.wait(10)

        monkeypatch.setattr(sampler, "_chunk", take_after)
        gone = asyncio.create_task(sampler.generate(*asked, "gone"))
        done = await asyncio.wait_for(await following, 30)
        gone.cancel()
        sampler.release("next")
        return done.token_ids

    assert len(asyncio.run(work())) == 2


def test_a_session_released_between_two_chunks_does_not_keep_the_next_policy_out(
    sampler, params, monkeypatch
):
    """As when a trajectory runs out of time: its request counts no longer as one in progress."""
    rounds = sampler._round

    async def abandon():
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def wait(*rows):
            reached.set()
            await go_on.wait()
            return await rounds(*rows)

        monkeypatch.setattr(sampler, "_round", wait)
        task = asyncio.create_task(sampler.generate([1, 2, 3], SamplingParams(60, 0.0), "gone"))
        await reached.wait()
        sampler.release("gone")
        try:
            await sampler.load(7, params)
        finally:
            go_on.set()
            task.cancel()
            await sampler._pump_task

    asyncio.run(abandon())


def test_length_limits(policy, params):
    sampler = make_sampler(policy, params, max_length=24)
    params_no_stop = SamplingParams(200, 1.0, seed=1, stop=())
    done = asyncio.run(sampler.generate([1, 2, 3], params_no_stop, "a"))
    assert done.stop_reason == "eos" or len(done.token_ids) == 21
    with pytest.raises(ValueError, match="context of 24"):
        asyncio.run(sampler.generate([1] * 24, params_no_stop, "b"))


def test_refuses_to_swap_weights_in_flight(sampler):
    async def swap():
        running = asyncio.ensure_future(sampler.generate([1, 2], SamplingParams(8), "a"))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="in progress"):
            await sampler.load(8, params)
        await running
        sampler.release("a")

    asyncio.run(swap())
