"""The embedded sampler against the learner's own forward pass."""

import asyncio
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_rig import EOS, CharTokenizer, learner_logprobs, make_sampler
from tiny_policy import NARROW, WIDER, row_logits, tiny

from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.policy.adapters import Adapters, merge_params
from calibadv_jax.policy.transformer import Policy
from calibadv_jax.policy.weights import flatten
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.stop_rule import StopRule

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def policy():
    return tiny(WIDER | {"vocab_size": 19})


@pytest.fixture(scope="module")
def params(policy):
    params = jax.jit(policy.init)(jax.random.key(3))
    params["embed"]["embedding"] *= 20.0  # far from uniform
    return params


@pytest.fixture(scope="module")
def sampler(policy, params):
    """Of the default shape, compiled once; every test releases the sessions it began."""
    return make_sampler(policy, params)


@pytest.fixture(scope="module")
def recompute(policy, params):
    """Tokens, temperature -> [T - 1] log-probabilities of the successors, as the learner computes them."""
    logprobs_of = jax.jit(partial(learner_logprobs, policy, params))

    def padded(tokens):  # to one length, so that it compiles once: attention is causal
        return jnp.asarray([[*tokens, *[0] * (96 - len(tokens))]], jnp.int32)

    return lambda tokens, temperature: np.asarray(logprobs_of(padded(tokens), temperature))[: len(tokens) - 1]


async def test_logprobs_equal_the_learners(sampler, recompute):
    """Over more trajectories of several turns than there are slots."""

    async def trajectory(index):
        tokens, spans = [1, 2, 3 + index], []
        for turn in range(3):
            sampling = SamplingParams(12, 0.8, seed=100 * index + turn, stop=("</j>",))
            done = await sampler.generate(tokens, sampling, f"t{index}")
            spans.append((len(tokens), done))
            tokens = tokens + done.token_ids + [4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5][: 3 + 4 * turn]
        sampler.release(f"t{index}")
        return tokens, spans

    for tokens, spans in await asyncio.gather(*map(trajectory, range(7))):
        expected = recompute(tokens, 0.8)
        for start, done in spans:
            span = expected[start - 1 : start - 1 + len(done.token_ids)]
            np.testing.assert_allclose(done.logprobs, span, atol=1e-3)
            assert done.policy_versions == (7,)


async def generated(sampler, tokens, *sampling, **more):
    """A completion in a session of its own."""
    try:
        return await sampler.generate(tokens, SamplingParams(*sampling, **more), "own")
    finally:
        sampler.release("own")


async def test_seeds_are_read_whole(sampler):
    first, again, other = [
        (await generated(sampler, [1, 2, 3], 20, 1.0, seed=seed)).token_ids for seed in (5, 5, 2**31 + 5)
    ]
    assert first == again != other


async def test_seed_gives_the_same_tokens_in_a_full_batch(sampler):
    async def tokens_of(prompt, seed, session):
        completion = await sampler.generate(prompt, SamplingParams(20, 1.0, seed=seed), session)
        sampler.release(session)
        return completion.token_ids

    alone = await tokens_of([1, 2, 3], 5, "alone")
    others = [tokens_of([4, 5, seed], seed, f"other{seed}") for seed in range(3)]
    *_, in_batch = await asyncio.gather(*others, tokens_of([1, 2, 3], 5, "in batch"))
    assert in_batch == alone
    assert await tokens_of([1, 2, 3], 6, "another seed") != alone


async def test_greedy_token_is_the_argmax_of_the_learner(sampler, policy, params):
    prompt = [1, 2, 3]
    completion = await generated(sampler, prompt, 9, 0.0)
    row = jnp.asarray([[*prompt, *completion.token_ids]], jnp.int32)
    best = np.asarray(row_logits(policy, params, row)[0].argmax(-1))
    assert completion.token_ids == best[len(prompt) - 1 : -1].tolist()


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
            table = jnp.zeros((19, 19)).at[list(script), list(script.values())].set(50.0)
            return hidden @ table

    class ScriptedPolicy(Policy):
        def merge(self, params):
            return Scripted(super().merge(params))

    return ScriptedPolicy(policy.architecture, policy.numerics)


def test_token_that_holds_a_stop_string_stays_whole(policy, params):
    pieces = CharTokenizer.pieces
    forced = [pieces.index(piece) for piece in ("<", "/", "j", ">\n")]
    sampler = make_sampler(scripted(policy, dict(zip([3, *forced[:-1]], forced, strict=True))), params)
    done = asyncio.run(generated(sampler, [1, 3], 30, stop=("</j>",)))
    assert (done.token_ids, done.stop_reason) == (forced, "stop")


@pytest.fixture
def chunk_sizes(monkeypatch):
    """Number of rows of every chunk that the embedded samplers decode."""
    sizes = []
    decode_chunk = JaxSampler._chunk

    def noted(sampler, requests):
        sizes.append(len(requests))
        decode_chunk(sampler, requests)

    monkeypatch.setattr(JaxSampler, "_chunk", noted)
    return sizes


@pytest.mark.medium
def test_chunk_goes_on_after_tokens_that_end_nothing(policy, params, chunk_sizes):
    """The text "y>ay>a…" holds the last letter of "ja", which none of its tokens can complete."""
    first = CharTokenizer.pieces.index("y")
    second = CharTokenizer.pieces.index(">a")
    sampler = make_sampler(scripted(policy, {first: second, second: first}), params, decode_chunk=12)
    completion = asyncio.run(generated(sampler, [1, first], 12, 0.0, stop=("ja",)))
    assert len(completion.token_ids) == 12
    assert chunk_sizes == [1]


async def test_requests_that_come_one_after_another_begin_together(sampler, chunk_sizes):
    async def late(number):
        for _ in range(3 * number):
            await asyncio.sleep(0)
        await sampler.generate([1, 2, 3], SamplingParams(2, 0.0), f"late{number}")

    await asyncio.gather(*map(late, range(4)))
    for number in range(4):
        sampler.release(f"late{number}")
    assert chunk_sizes == [4]


@pytest.mark.parametrize("part", ["find", "_chunk"])
async def test_error_reaches_all_who_wait(sampler, monkeypatch, part):
    """And the next requests are served."""

    def fail(*_):
        raise OSError("broken")

    async def sampled(number):  # some run while others have ended or wait for a slot
        try:
            return await sampler.generate([1, 2, 3], SamplingParams(3 + 3 * number, 0.0), f"bad{number}")
        finally:
            sampler.release(f"bad{number}")

    with monkeypatch.context() as patch:
        patch.setattr(sampler.stops if part == "find" else sampler, part, fail)
        failed = await asyncio.gather(*map(sampled, range(6)), return_exceptions=True)
        await asyncio.gather(sampler._pump_task, return_exceptions=True)
    assert [str(error) for error in failed] == ["broken"] * 6
    assert len((await sampled(0)).token_ids) == 3


@pytest.mark.parametrize(
    ("program", "prompt"),
    [("_prefill", [1, 2, 3, 5, 6, 7]), ("_copy", [1, 2, 3, 5]), ("_decode", [1, 2, 3, 5])],
)
def test_device_error_after_the_cache_was_donated(policy, params, monkeypatch, program, prompt):
    """Nothing of the lost cache is read again, though the sessions before it go on."""
    sampler, fresh = make_sampler(policy, params), make_sampler(policy, params)
    engine = sampler._engine
    first = SamplingParams(6, 0.0)
    prompts = [[1, 2, 3, 4], prompt]  # the shorter one copies the columns of the first

    def fail(*arguments):
        for leaf in jax.tree.leaves(engine._cache):
            leaf.delete()  # as a program that has begun with it
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    async def run():
        begun = await sampler.generate(prompts[0], first, "a")
        with monkeypatch.context() as patch:
            patch.setattr(engine, program, fail)
            with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
                await sampler.generate(prompts[1], first, "b")
            await asyncio.gather(sampler._pump_task, return_exceptions=True)
        continued = [*prompts[0], *begun.token_ids, 7, 7]
        for session, tokens in (("a", continued), ("b", prompts[1]), ("c", prompts[0])):
            completion = await sampler.generate(tokens, first, session)
            expected = await fresh.generate(tokens, first, session)
            assert completion.token_ids == expected.token_ids
            np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=1e-5)

    asyncio.run(run())


async def test_ended_rows_return_while_others_are_decoded(sampler, monkeypatch):
    chunk, ended, chunks = sampler._chunk, threading.Event(), []

    def wait_for_the_first(requests):
        chunks.append(len(requests))
        if len(chunks) == 2:
            ended.wait()  # a chunk must not wait for the whole completion
        chunk(requests)

    monkeypatch.setattr(sampler, "_chunk", wait_for_the_first)

    async def sampled(tokens, session):
        done = await sampler.generate([1, 2, 3], SamplingParams(tokens, 0.0), session)
        ended.set()
        sampler.release(session)
        return len(done.token_ids)

    assert await asyncio.gather(sampled(3, "short"), sampled(9, "long")) == [3, 9]
    assert chunks == [2, 1]


def test_every_end_of_text_token_ends(policy, params):
    """In the middle of a chunk too, and beyond the tokenizer's own tokens."""
    tokenizer = type("Short", (CharTokenizer,), {"get_vocab": lambda _: {"f": 5}})()
    chain = scripted(policy, {1: 2, 2: 6, 6: 3, 3: EOS, EOS: 1})
    sampler = make_sampler(chain, params, stops=StopRule(tokenizer, [EOS, 6]))
    for start, expected in ((1, [2, 6]), (6, [3, EOS])):
        done = asyncio.run(generated(sampler, [start], 30, 0.0))
        assert (done.token_ids, done.stop_reason, len(done.logprobs)) == (expected, "eos", len(expected))


async def test_row_released_in_a_chunk_leaves_nothing(sampler, recompute, monkeypatch):
    prompt, sampling = [1, 2, 3], SamplingParams(12, 0.8, seed=3)
    whole = await generated(sampler, prompt, 12, 0.8, seed=3)
    chunk, loop = sampler._chunk, asyncio.get_running_loop()
    released = asyncio.Event()

    async def release():
        sampler.release("gone")
        released.set()

    def release_first(requests):
        asyncio.run_coroutine_threadsafe(release(), loop).result()
        chunk(requests)

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "_chunk", release_first)
        task = asyncio.create_task(sampler.generate(prompt, sampling, "gone"))
        await released.wait()
        await sampler._pump_task
        task.cancel()
    context = [prompt[-1], *whole.token_ids[:3], 4]  # the chunk has left another beginning in the row
    done = await generated(sampler, context, 12, 0.8, seed=3)
    expected = recompute([*context, *done.token_ids], 0.8)[len(context) - 1 :]
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-3)


async def test_slot_released_at_its_end_is_reused(sampler, monkeypatch):
    chunk, loop = sampler._chunk, asyncio.get_running_loop()
    arguments, following = ([1, 2, 3], SamplingParams(2, 0.0)), loop.create_future()

    async def begin_next():
        monkeypatch.undo()
        sampler.release("gone")
        following.set_result(asyncio.create_task(sampler.generate(*arguments, "next")))
        await asyncio.sleep(0)  # it waits for a slot

    def begin_after(requests):
        chunk(requests)
        asyncio.run_coroutine_threadsafe(begin_next(), loop).result()

    monkeypatch.setattr(sampler, "_chunk", begin_after)
    gone = asyncio.create_task(sampler.generate(*arguments, "gone"))
    done = await (await following)
    gone.cancel()
    sampler.release("next")
    assert len(done.token_ids) == 2


async def test_refused_swap_leaves_the_completion_in_progress(sampler, params):
    running = asyncio.create_task(generated(sampler, [1, 2], 8))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="weights cannot be swapped while completions are in progress"):
        await sampler.load(8, params)
    completion = await running
    assert completion.token_ids
    assert completion.policy_versions == (7,)


async def test_released_session_does_not_block_a_swap(sampler, params, monkeypatch):
    """As when a trajectory runs out of time: its request counts no longer as one in progress."""
    rounds, reached, go_on = sampler._round, asyncio.Event(), asyncio.Event()

    async def wait(*rows):
        reached.set()
        await go_on.wait()
        return await rounds(*rows)

    monkeypatch.setattr(sampler, "_round", wait)
    task = asyncio.create_task(sampler.generate([1, 2, 3], SamplingParams(60, 0.0), "gone"))
    await reached.wait()
    with pytest.raises(RuntimeError, match="in progress"):
        await sampler.load(8, params)
    sampler.release("gone")
    try:
        await sampler.load(7, params)
    finally:
        go_on.set()
        task.cancel()
        await sampler._pump_task


def test_row_ends_at_the_longest_length(policy, params):
    sampler = make_sampler(policy, params, max_length=24)
    done = asyncio.run(generated(sampler, [1, 2, 3], 200, 1.0, seed=1))
    assert done.stop_reason == "eos" or len(done.token_ids) == 21
    with pytest.raises(ValueError, match="context of 24"):
        asyncio.run(generated(sampler, [1] * 24, 200))


NARROWER = NARROW | {"vocab_size": len(CharTokenizer.pieces), "hidden_size": 16, "tie_word_embeddings": True}


@pytest.mark.parametrize("adapters", [None, Adapters(2, 4.0, ("gate", "o", "v"), "float32")], ids=bool)
def test_swap_leaves_nothing_of_old_weights(adapters):
    """A session that goes on reads its whole context with the new ones."""
    policy = tiny(NARROWER, adapters)
    old, new = (jax.jit(policy.init)(jax.random.key(seed)) for seed in (0, 1))
    if adapters:
        base, trained = policy.split(old)
        new = merge_params(base, jax.tree.map(lambda leaf: leaf + 0.3, trained))
    old["embed"]["embedding"] = new["embed"]["embedding"] = old["embed"]["embedding"] * 20.0  # not uniform
    sampler = make_sampler(policy, old, max_length=32, slots=2)
    context = [0, 1, 2, 3, 4, 5]

    async def work():
        sampling = SamplingParams(4, seed=1)
        first = await sampler.generate(context, sampling, "s")
        await sampler.load(8, new)
        again = [*context, *first.token_ids, 6, 7]  # the same session: its row is still its own
        return first, again, await sampler.generate(again, sampling, "s")

    first, again, second = asyncio.run(work())
    assert first.policy_versions == (7,) and second.policy_versions == (8,)
    row = jnp.asarray([[*again, *second.token_ids]], jnp.int32)
    for params, is_right in ((new, True), (old, False)):
        expected = learner_logprobs(policy, params, row, 1.0)[len(again) - 1 : -1]
        assert np.allclose(second.logprobs, expected, atol=1e-4) == is_right
    held, (base, donated) = flatten(sampler._engine._params), map(flatten, policy.split(new))
    assert all(held[path] is leaf for path, leaf in base.items())  # no copy
    assert not any(held[path] is leaf for path, leaf in donated.items())
