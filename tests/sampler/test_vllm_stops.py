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
from vllm_rig import MODELS, SHAPE, Rig, running

from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.core.tags import STOP_STRINGS

need("vllm", "torch")
pytestmark = pytest.mark.slow

REQUESTS, SPACING = 64, 3  # at any moment of the count-down three requests are inside the tag
ROUNDS = 25
ENOUGH = 6  # different places of a tag


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    wide = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": WIDTH // SHAPE["head_dim"]}
    shape = SHAPE | MODELS["qwen2-untied"] | wide
    with running(Rig(tmp_path_factory.mktemp("chain"), shape, tokenizer=build_tokenizer())) as rig:
        yield rig


def note_cuts(sampler, tag, cuts):
    """Adds to `cuts` how much of the tag was written where a completion was cut inside it."""
    ask = sampler._ask

    async def noting(worker, context, done, sampling):
        part = await ask(worker, context, done, sampling)
        if part.stop_reason == "abort":
            text = sampler.stops.text([*done, *part.token_ids])
            cuts.update(length for length in range(1, len(tag)) if text.endswith(tag[:length]))
        return part

    sampler._ask = noting


@pytest.mark.parametrize("tag", STOP_STRINGS)
def test_cut_inside_a_closing_tag_changes_nothing(rig, tag):
    params = chain_params(rig.params(0), tag)
    draw, cuts = random.Random(0), set()
    sampling = SamplingParams(max_tokens=COUNT + 100, temperature=0.0, stop=STOP_STRINGS)
    first_version = 100 * STOP_STRINGS.index(tag) + 1

    async def swaps(sampler):
        note_cuts(sampler, tag, cuts)
        await sampler.load(first_version, rig.publish(first_version, params))
        for version in range(first_version + 1, first_version + ROUNDS):
            snapshot = await asyncio.to_thread(rig.publish, version, params)
            starts = [SPACING * number + draw.randrange(SPACING) for number in range(REQUESTS)]
            tasks = [
                asyncio.create_task(sampler.generate([FIRST_NUMBER + start], sampling, f"{version}/{start}"))
                for start in starts
            ]
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
