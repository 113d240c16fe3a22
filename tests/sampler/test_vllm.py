"""Real vLLM servers: weights swapped from snapshots, and what happens when something fails."""

import asyncio
import re

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from packages import need
from tiny_policy import row_logits
from transformers import AutoTokenizer
from vllm_rig import GREEDY, LLAMA, MAX_LENGTH, QWEN2, Rig, gap_to_greedy, prompts, running

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.snapshots.huggingface import save_folder

need("vllm", "torch")
pytestmark = pytest.mark.slow

LONG = SamplingParams(max_tokens=MAX_LENGTH - 100, temperature=0.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two workers of one policy."""
    with running(Rig(tmp_path_factory.mktemp("pair"), QWEN2, num_workers=2)) as rig:
        yield rig


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """One worker of another layout, with a head of its own, in bfloat16."""
    with running(Rig(tmp_path_factory.mktemp("other"), LLAMA, "bfloat16")) as rig:
        yield rig


def learner_logprobs(rig, params, tokens):
    """Log-probabilities of all successors, float32 [T - 1, V], and of tokens 1 …, by the policy itself."""
    ids = jnp.asarray([tokens], jnp.int32)
    logprobs = jax.nn.log_softmax(row_logits(rig.policy, params, ids).astype(jnp.float32)[0, :-1])
    return logprobs, np.asarray(jnp.take_along_axis(logprobs, ids[0, 1:, None], axis=-1)[:, 0])


@pytest.mark.parametrize(("name", "tolerance", "logit_slack"), [("pair", 1e-3, 1e-3), ("other", 0.1, 0.5)])
def test_swaps_change_the_policy(request, name, tolerance, logit_slack):
    """Three swaps; after each, long prompts give what the learner's policy gives.

    In bfloat16 the two round differently: there each token may be a near tie of the best one.
    """
    rig, prompt, probe = request.getfixturevalue(name), prompts(1, 320)[0], prompts(1, 64, seed=1)[0]

    async def swaps(sampler):
        seen = []
        for version in (1, 2, 3):
            params = await rig.load(sampler, version)
            completion = await sampler.generate(prompt, GREEDY, "s")
            assert completion.policy_versions == (version,)
            assert len(completion.logprobs) == len(completion.token_ids)
            logprobs, chosen = learner_logprobs(rig, params, [*prompt, *completion.token_ids])
            from_best = logprobs.max(-1) - chosen
            assert from_best[len(prompt) - 1 :].max() <= logit_slack
            for values in (await sampler.prompt_logprobs(probe)).values():
                gap = np.abs(values - learner_logprobs(rig, params, probe)[1]).mean()
                assert gap <= tolerance, f"mean |difference| {gap}"
            seen.append(tuple(completion.token_ids))
        return seen

    assert len(set(rig.run(swaps))) == 3, "the swaps changed nothing"


@pytest.mark.parametrize(("name", "logit_slack"), [("pair", 1e-3), ("other", 0.5)])
def test_greedy_tokens_after_swaps_are_those_of_transformers(request, tmp_path, name, logit_slack):
    """Transformers has the weights that were exported; in bfloat16 a token may be a near tie of the best."""
    rig = request.getfixturevalue(name)
    prompt = prompts(1, 320)[0]

    async def swaps(sampler):
        for version in (4, 5, 6):
            params = await rig.load(sampler, version)
            completion = await sampler.generate(prompt, GREEDY, "s")
            exported = save_folder(
                params, rig.hf_config, tmp_path / "export", rig.dtype, rig.folder / "tokenizer"
            )
            assert gap_to_greedy(exported, prompt, completion.token_ids, rig.dtype) <= logit_slack

    rig.run(swaps)


def test_seeds_stops_and_reasons(pair):
    async def ask(sampler):
        await pair.load(sampler, 10)
        prompt = prompts(1, 30)[0]
        free = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
        first, second = [await sampler.generate(prompt, free, name) for name in ("a", "b")]
        assert first.token_ids == second.token_ids and first.logprobs == second.logprobs
        assert first.stop_reason in ("length", "eos")
        other = await sampler.generate(prompt, SamplingParams(max_tokens=40, seed=6), "c")
        assert other.token_ids != first.token_ids
        words = AutoTokenizer.from_pretrained(pair.model_folder).convert_ids_to_tokens(first.token_ids)
        stop = words[3]
        cut = await sampler.generate(prompt, SamplingParams(max_tokens=40, seed=5, stop=(stop,)), "d")
        place = words.index(stop)
        assert cut.stop_reason == "stop"
        assert cut.token_ids == first.token_ids[: place + 1]  # the stop string's own token is kept
        with pytest.raises(UserError, match="refuses /inference/v1/generate: .*maximum model length"):
            await sampler.generate(prompts(1, MAX_LENGTH + 100)[0], free, "e")

    pair.run(ask)


def test_many_long_seeded_prompts_at_once(pair):
    """More tokens than one step takes: on CPU a prompt prefilled in parts once killed the engine."""

    async def ask(sampler):
        await pair.load(sampler, 15)
        tasks = []
        for number, context in enumerate(prompts(48, 1000)):
            tasks += begin(sampler, [context], SamplingParams(max_tokens=4, seed=number), f"s{number}-")
        done = await asyncio.gather(*tasks)
        assert all(completion.token_ids for completion in done) and sampler.lost_count == 0

    pair.run(ask)


def label(url):
    return httpx.get(f"{url}/weight_info", timeout=60, trust_env=False).json()["weight_version"]


def test_bad_snapshot_leaves_the_old_weights(pair, tmp_path):
    prompt, urls = prompts(1, 30)[0], [worker.url for worker in pair.workers]

    async def ask(sampler):
        await pair.load(sampler, 20)
        before = await sampler.generate(prompt, GREEDY, "a")
        labels = [label(url) for url in urls]
        torn, unfinished = (pair.publish(version, pair.params(version)) for version in (21, 23))
        biggest = max((p for p in torn.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        data = bytearray(biggest.read_bytes())
        data[len(data) // 2] ^= 0xFF
        biggest.write_bytes(data)
        (unfinished / "manifest.json").unlink()
        foreign = Rig(tmp_path / "foreign", QWEN2 | {"rope_theta": 5e4})
        words = Rig(tmp_path / "words", QWEN2, tokenizer_hash="of another")
        other_model, other_words = (rig.publish(v, rig.params(0)) for v, rig in ((22, foreign), (24, words)))
        for version, snapshot, message in (
            (21, torn, "refuses .*v000021: .*damaged snapshot"),
            (22, other_model, "another model: rope_theta 50000.0 instead of 10000.0"),
            (23, unfinished, "not a complete snapshot"),
            (24, other_words, "another tokenizer"),
        ):
            with pytest.raises(UserError, match=message):
                await sampler.load(version, snapshot)
        assert [label(url) for url in urls] == labels
        parameters = {"max_tokens": 12, "temperature": 0.0}
        for url in urls:
            body = {"token_ids": prompt, "sampling_params": parameters}
            reply = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=60, trust_env=False)
            assert reply.json()["choices"][0]["token_ids"] == before.token_ids

    pair.run(ask)


def begin(sampler, contexts, sampling, name="s"):
    """Tasks of one completion each, in sessions of their own."""
    return [
        asyncio.create_task(sampler.generate(context, sampling, f"{name}{number}"))
        for number, context in enumerate(contexts)
    ]


async def generating(sampler, contexts):
    """Tasks of long completions, once every worker has written tokens of them."""

    def written(worker):
        text = httpx.get(f"{worker.url}/metrics", timeout=60, trust_env=False).text
        counts = re.findall(r"(?m)^vllm:generation_tokens_total.* (\S+)$", text)
        return sum(map(float, counts))

    async def all_written():
        return [await asyncio.to_thread(written, worker) for worker in sampler.workers]

    before = await all_written()
    tasks = begin(sampler, contexts, LONG)
    while any(now <= then for now, then in zip(await all_written(), before, strict=True)):
        assert not all(task.done() for task in tasks), "they ended before anything was seen of them"
    return tasks


def test_swap_cuts_completions_in_progress(pair):
    """They are cut, go on with the new weights, and say which versions wrote them."""
    snapshots = [pair.publish(version, pair.params(version)) for version in (30, 31, 32, 33)]

    async def ask(sampler):
        await sampler.load(30, snapshots[0])
        for version in (31, 32, 33):  # a starved server may see the swap when all is written: again then
            tasks = await generating(sampler, prompts(8, 40))
            await sampler.load(version, snapshots[version - 30])
            done = await asyncio.gather(*tasks)
            for completion in done:
                assert len(completion.token_ids) == len(completion.logprobs) == LONG.max_tokens
                assert set(completion.policy_versions) <= {version - 1, version}
            if (version - 1, version) in {completion.policy_versions for completion in done}:
                return
        raise AssertionError("no completion was cut by a swap")

    pair.run(ask)


def server_processes(worker):
    """vLLM's server and its engine, newest first; not the launcher."""
    return psutil.Process(worker.process.pid).children(recursive=True)[::-1]


def test_killed_worker_loses_no_trajectory_and_returns(pair):
    """SIGKILL during a rollout: the others take over; its launcher restarts it, the sampler swaps it."""

    async def ask(sampler):
        await pair.load(sampler, 40)
        processes = server_processes(pair.workers[1])
        for process in processes:
            process.suspend()  # so that nothing of it can be complete before it is killed
        tasks = begin(sampler, prompts(32, 40), GREEDY)
        while sum(task.done() for task in tasks) < 16:
            await asyncio.sleep(0.05)
        for process in processes:
            process.kill()
        done = await asyncio.gather(*tasks)
        assert all(completion.policy_versions == (40,) for completion in done)
        lost = sampler.workers[1]
        assert lost.version is None and sampler.lost_count == 1

        await pair.load(sampler, 41)  # without it
        while lost.version is None:
            await asyncio.sleep(0.5)
        assert lost.version == 41, lost.loss_reason
        assert label(lost.url) == f"{sampler.run}/41"
        done = await asyncio.gather(*begin(sampler, prompts(16, 40), GREEDY, "t"))
        assert all(completion.policy_versions == (41,) for completion in done)

    pair.run(ask)


def test_slow_worker_holds_up_its_own_completions_only(pair):
    """It stands still: new trajectories go to the other, and its own are finished, not lost or relabelled."""

    async def ask(sampler):
        await pair.load(sampler, 45)
        slow = sampler.workers[1]
        processes = server_processes(pair.workers[1])
        contexts = prompts(48, 40)
        for process in processes:
            process.suspend()
        try:
            first = begin(sampler, contexts, GREEDY, "a")
            while sum(task.done() for task in first) < 24:
                await asyncio.sleep(0.05)
            for burst in "bcd":
                await asyncio.gather(*begin(sampler, contexts[:20], GREEDY, burst))
            unfinished = sum(not task.done() for task in first)
            assert slow.busy == unfinished == 24
        finally:
            for process in processes:
                process.resume()
        done = await asyncio.gather(*first)
        assert all(completion.policy_versions == (45,) for completion in done)
        assert sampler.lost_count == 0

    pair.run(ask)


def test_worker_with_foreign_weights_is_brought_back(other):
    """Another run swaps the worker meanwhile: its label gives it away, and its replies are discarded."""
    prompt = prompts(1, 20)[0]

    async def ask(sampler):
        await other.load(sampler, 50)
        before = await sampler.generate(prompt, GREEDY, "a")
        intruder = other.sampler()
        await other.load(intruder, 51)
        await intruder.close()
        other.publish(50, other.params(50))
        again = await sampler.generate(prompt, GREEDY, "b")
        assert again.token_ids == before.token_ids
        assert again.policy_versions == (50,)
        assert sampler.lost_count == 1

    other.run(ask)
