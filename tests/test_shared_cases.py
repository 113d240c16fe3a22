"""Small inputs made from public reports (``../shared/cases``): each behaves as its README says.

Skipped where the folder is absent. Every case also has a test beside the module it concerns, which makes its own
input, so that a public clone notices the same faults.
"""

from __future__ import annotations

import pytest

from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.architecture import architecture_from_hf
from calibadv_jax.policy.transformer import Numerics, Policy
from calibadv_jax.rollout.observation import decode, encode
from calibadv_jax.run.model import load_tokenizer
from calibadv_jax.snapshots.huggingface import check_weights, read_hf_config

# ---- models: tokenizers, chat templates, shapes of checkpoints ----


def test_llama_class_over_bytes_loses_nothing(shared):
    """transformers reads it right from 5.22 on; with an older one it is refused."""
    folder, text = shared / "cases/models/r1_distill_llama", "Who wrote it in 1291?\n <think> é 北京 </think>"
    try:
        tokenizer = load_tokenizer(folder)
    except UserError as error:
        assert "LlamaTokenizer" in str(error) and "loses spaces" in str(error)
        assert "set tokenizer_class to TokenizersBackend" in str(error)
    else:
        assert decode(tokenizer, encode(tokenizer, text)) == text


@pytest.mark.parametrize("name", ["qwen2_raises", "qwen3_thinking", "qwen3_no_head_dim"])
def test_tokenizers_that_keep_text_are_accepted(shared, name):
    assert load_tokenizer(shared / "cases/models" / name).eos_token == "<|im_end|>"


def test_qwen3_without_head_dim_has_128(shared):
    folder = shared / "cases/models/qwen3_no_head_dim"
    architecture = architecture_from_hf(read_hf_config(folder))
    assert architecture.head_dim == 128
    assert "tensors in 1 file(s)" in check_weights(folder, Policy(architecture, Numerics()))


# ---- lora: adapters of PEFT and verl ----


# ---- rows: layouts of question files ----


# ---- retriever: queries without a hit, indexes with their own ids ----


# ---- metrics: names with a slash ----


# ---- versions: bounds of dependencies ----
