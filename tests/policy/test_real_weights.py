"""Pretrained models on real text, beside transformers: log-probabilities, greedy text, tokens, exports."""

import asyncio
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from packages import need
from real_rig import real_model
from tiny_policy import single_device, tiny

from calibadv_jax.config import Config, LearnerConfig, SamplerConfig
from calibadv_jax.core.interfaces import SamplingParams
from calibadv_jax.core.tags import STOP_STRINGS, TAGS, format_documents
from calibadv_jax.core.tokens import encode
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.learner.batching import Sample
from calibadv_jax.learner.learner import Learner, LearnerOptions
from calibadv_jax.learner.step import sample_logprobs
from calibadv_jax.rollout.observation import Observations, make_neutraliser
from calibadv_jax.rollout.prompts import open_prompt
from calibadv_jax.run.model import load_tokenizer
from calibadv_jax.sampler.jax_sampler import JaxSampler
from calibadv_jax.sampler.stop_rule import StopRule
from calibadv_jax.snapshots.huggingface import load_params, read_hf_config, save_folder

need("torch")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (50, 80, 130, 240, 1000)  # tokens of the prompts; with --all-cases fifty
MANY_LENGTHS = tuple(np.geomspace(50, 1500, 50).astype(int).tolist())
WIDTH = 1536  # of a row: more than one block of attention
ASKED = ("Who wrote Romeo and Juliet?", "What is the capital of France?", "How many days has a week?")


@pytest.fixture(scope="module", params=["smollm2-135m", "qwen2.5-0.5b"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(name):
    return load_tokenizer(real_model(name))


@pytest.fixture(scope="module")
def weights():
    """Folder of a model whose weights are compared."""
    return real_model("qwen2.5-0.5b")


@pytest.fixture(scope="module")
def original(weights):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def policy(weights):
    return tiny(read_hf_config(weights))


@pytest.fixture(scope="module")
def params(weights, policy):
    return load_params(weights, policy, single_device())


@pytest.fixture(scope="module")
def lengths(request):
    return MANY_LENGTHS if request.config.getoption("--all-cases") else LENGTHS


@pytest.fixture(scope="module")
def prompts(weights, lengths):
    """Texts of the documentation after the protocol's prompt, of many lengths: int32 [N] each."""
    tokenizer = load_tokenizer(weights)
    texts = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    start = open_prompt(Question("1", ASKED[0], ("x",), "test"), tokenizer, Config().prompt, 2048)[0]
    written = encode(tokenizer, texts[: 30 * sum(lengths)])
    pieces = np.split(written, np.cumsum(lengths))[: len(lengths)]
    prompts = [np.concatenate([start, piece]).astype(np.int32)[-len(piece) :] for piece in pieces]
    assert [len(ids) for ids in prompts] == list(lengths)
    return prompts


@pytest.fixture(scope="module")
def expected(original, prompts):
    """Log-probabilities float32 [N - 1] of each prompt's tokens, by transformers."""
    import torch

    values = []
    for ids in prompts:
        tokens = torch.tensor(ids, dtype=torch.long)
        with torch.no_grad():
            rows = torch.log_softmax(original(tokens[None]).logits[0, :-1].float(), -1)
        values.append(rows[torch.arange(len(ids) - 1), tokens[1:]].numpy())
    return values


def logprobs(policy, params, prompts, width=WIDTH):
    """The same by the policy, in rows of as many prompts as they hold, as the learner packs them."""

    learner = Learner(policy, optax.sgd(1.0), single_device(), LearnerOptions(1, logprob_chunk=256))
    nothing = [np.zeros(len(ids), np.float32) for ids in prompts]
    samples = [Sample(ids, zeros == 0, zeros, zeros) for ids, zeros in zip(prompts, nothing, strict=True)]
    config = LearnerConfig(pack_length=width, row_widths=1)
    return [values[1:] for values in sample_logprobs(learner, params, samples, config)]


def test_log_probabilities_are_those_of_transformers(policy, params, prompts, expected):
    for ours, reference in zip(logprobs(policy, params, prompts), expected, strict=True):
        np.testing.assert_allclose(ours, reference, atol=2e-3)
    assert np.mean(np.concatenate(expected)) > -4.5  # it has read English: at random it would be -10.8


def test_bfloat16_stays_near(weights, params, prompts, expected):
    half = tiny(read_hf_config(weights), compute_dtype=jnp.bfloat16)
    few = slice(3)  # it is slow on a CPU without instructions for it
    values = logprobs(half, params, prompts[few], sum(map(len, prompts[few])))
    gaps = [np.abs(ours - reference) for ours, reference in zip(values, expected[few], strict=True)]
    assert np.mean(np.concatenate(gaps)) < 0.05
    assert np.mean(np.concatenate(gaps)) > 1e-4  # else it was no bfloat16


def test_saved_folder_is_loaded_by_transformers(weights, params, original, prompts, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    saved = save_folder(params, read_hf_config(weights), tmp_path / "saved", "float32", weights)
    again = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    tokens = torch.tensor(prompts[1], dtype=torch.long)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, original(tokens).logits, rtol=0, atol=0)


def test_chat_template_has_its_default_system_turn_or_the_datas(tokenizer):
    def applied(*messages):
        return tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)

    user, system = {"role": "user", "content": "Who?"}, {"role": "system", "content": "Be short."}
    default, own = applied(user), applied(system, user)
    assert default.count("<|im_start|>system") == own.count("<|im_start|>system") == 1
    assert own.count("<|im_start|>system\nBe short.<|im_end|>") == 1
    # The default names the model, in both of these templates.
    default_text = default.partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]
    assert default_text and default_text not in own


def test_greedy_text_equals_transformers(policy, params, weights, original, prompts, all_cases):
    import torch

    tokenizer = load_tokenizer(weights)
    config = SamplerConfig(slots=4, decode_chunk=16, prefill_chunk=64)
    sampler = JaxSampler(policy, StopRule(tokenizer, tokenizer.eos_token_id), config, single_device(), 512)
    questions = [Question("1", text, ("x",), "t") for text in ASKED]
    prompted = [open_prompt(question, tokenizer, Config().prompt, 512)[0] for question in questions]
    if all_cases:
        prompted += [ids for ids in prompts if len(ids) < 512 - 64][:20]
    length = 64 if all_cases else 32

    async def completions():
        await sampler.load(0, params)
        sampling = SamplingParams(length, 0.0, 1.0, 0, 0, ())
        calls = (sampler.generate(ids.tolist(), sampling, str(n)) for n, ids in enumerate(prompted))
        return await asyncio.gather(*calls)

    for ids, completion in zip(prompted, asyncio.run(completions()), strict=True):
        tokens = torch.tensor(ids, dtype=torch.long)[None]
        with torch.no_grad():
            greedy = original.generate(tokens, max_new_tokens=length, do_sample=False)[0, len(ids) :]
        assert completion.token_ids == greedy.tolist()


@pytest.mark.parametrize("before", ["", " ", "Ada Berk ", "Ada Berk", "1999", "\n", "query<", "日本"])
@pytest.mark.parametrize("after", ["", " ", "\n", ">", "\n\n<think>", "."])
@pytest.mark.parametrize("stop", STOP_STRINGS)
def test_completion_ends_at_token_completing_a_tag(tokenizer, before, after, stop):
    ids = encode(tokenizer, f"<search>{before}{stop}{after}")
    rule = StopRule(tokenizer, tokenizer.eos_token_id)
    count, why = rule.find(ids, STOP_STRINGS)
    assert why == "stop"
    assert stop in rule.text(ids[:count])
    assert stop not in rule.text(ids[: count - 1])
    assert rule.may_end(ids[count - 1], STOP_STRINGS)
    for cut in range(1, count):  # as by a weight swap: the rest is looked for, too
        remainder = rule.text(ids[:count])[len(rule.text(ids[:cut])) :]
        remaining = (*STOP_STRINGS, *rule.remainders(ids[:cut], STOP_STRINGS))
        assert "\ufffd" in rule.text(ids[:cut]) or any(text in remainder for text in remaining)


def test_untrusted_text_makes_no_control_token(tokenizer):
    control = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    hostile = " ".join([*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), *TAGS])
    config = Config().prompt
    plain = open_prompt(Question("1", "Who?", ("x",), "t"), tokenizer, config, 4096)[0].tolist()
    prompted = open_prompt(Question("1", f"Who {hostile}?", ("x",), "t"), tokenizer, config, 4096)[0].tolist()
    count = sum(token in control for token in plain)
    assert count > 2  # the chat template's own
    assert sum(token in control for token in prompted) == count
    for tag in TAGS:
        assert tokenizer.decode(prompted).count(tag) == tokenizer.decode(plain).count(tag)
    shown = make_neutraliser(tokenizer).neutralise_documents([Document("1", hostile, hostile)])
    ids, _ = Observations(tokenizer, 4096, "").information(format_documents(shown))
    assert not control & set(ids.tolist())
    text = tokenizer.decode(ids)
    assert [text.count(tag) for tag in TAGS] == [tag.endswith("information>") for tag in TAGS]
