"""A real vLLM server whose weights are swapped while closing tags are being written, letter by letter."""

import asyncio
import random

import pytest
from chain_policy import (
    COUNT,
    FIRST_NUMBER,
    VOCABULARY,
    WIDTH,
    build_tokenizer,
    chain_params,
    completion_from,
)
from packages import need
from vllm_rig import QWEN2, Rig, running

from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.core.tags import STOP_STRINGS

need("vllm", "torch")
pytestmark = pytest.mark.slow

REQUESTS, SPACING = 64, 3  # at any moment of the count-down three requests are inside the tag
MOST_SWAPS = 25
ENOUGH = 6  # different places of a tag at which completions were cut


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": WIDTH // 32}
    config = QWEN2 | sizes | {"tie_word_embeddings": False}
    with running(Rig(tmp_path_factory.mktemp("chain"), config, tokenizer=build_tokenizer())) as rig:
        yield rig


def note_cuts(sampler, tag, cuts):
    """Add to `cuts` the number of the tag's letters before each cut inside of it."""
    ask = sampler._ask

    async def noting(worker, context, done, sampling):
        part = await ask(worker, context, done, sampling)
        if part.stop_reason == "abort":
            text = sampler.stops.text([*done, *part.token_ids])
            cuts.update(length for length in range(1, len(tag)) if text.endswith(tag[:length]))
        return part

    sampler._ask = noting


@pytest.mark.parametrize("tag", STOP_STRINGS)
def test_completion_cut_inside_a_closing_tag_ends_as_if_uncut(rig, tag):
    params = chain_params(rig.params(0), tag)
    draw, cuts = random.Random(0), set()
    sampling = SamplingParams(max_tokens=COUNT + 100, temperature=0.0, stop=STOP_STRINGS)
    first_version = 100 * STOP_STRINGS.index(tag) + 1

    async def swaps(sampler):
        note_cuts(sampler, tag, cuts)
        await sampler.load(first_version, rig.publish(first_version, params))
        for version in range(first_version + 1, first_version + MOST_SWAPS):
            snapshot = await asyncio.to_thread(rig.publish, version, params)
            starts = [SPACING * number + draw.randrange(SPACING) for number in range(REQUESTS)]
            tasks = []
            for start in starts:
                completion = sampler.generate([FIRST_NUMBER + start], sampling, f"{version}/{start}")
                tasks.append(asyncio.create_task(completion))
            while not any(task.done() for task in tasks):  # the shortest have ended: tags are being written
                await asyncio.sleep(0.02)
            await asyncio.sleep(draw.uniform(0, 0.5))
            await sampler.load(version, snapshot)
            for start, task in zip(starts, tasks, strict=True):
                completion = await task
                assert sampler.stops.text(completion.token_ids).endswith(f"0.{tag}" if start else tag)
                assert completion.token_ids == completion_from(start, tag)
                assert completion.stop_reason == "stop"
                assert len(completion.logprobs) == len(completion.token_ids)
                assert set(completion.policy_versions) <= {version - 1, version}
                sampler.release(f"{version}/{start}")
            if len(cuts) >= ENOUGH:
                return
        raise AssertionError(f"cut at {sorted(cuts)} only")

    rig.run(swaps)
