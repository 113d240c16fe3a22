"""Control tokens whose rows of the output head are those of ids without a token."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from config_rig import changed
from hub_rig import running_hub  # noqa: F401
from rows_rig import write_rows
from tiny_policy import tiny
from tools_rig import POLICY, chat_tokenizer

from calibadv_jax.commands import sft, train
from calibadv_jax.config import SftPhase
from calibadv_jax.contrib.cli import doctor
from calibadv_jax.core.errors import UserError
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.run.model import build_model
from calibadv_jax.run.untrained_tokens import MOST_UNUSED, untrained_tokens
from calibadv_jax.snapshots.huggingface import save_folder

UNUSED_IDS = 5
CALL = ("<tool_call>", "</tool_call>")
REFUSAL = "<tool_call>, </tool_call>: never trained.*calibadv init-tokens"


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer().save_pretrained(folder)
    return folder


def write_policy(folder, tokenizer_folder, untrained=CALL, is_tied=False, unused=UNUSED_IDS):
    """A folder whose rows of these tokens are nearly those of `unused` ids beyond the tokenizer."""
    tokenizer = chat_tokenizer()
    num_tokens = len(tokenizer)
    hf_config = POLICY | {"vocab_size": num_tokens + unused, "eos_token_id": tokenizer.eos_token_id}
    hf_config["tie_word_embeddings"] = is_tied
    params = jax.device_get(jax.jit(tiny(hf_config).init)(jax.random.key(5)))
    head = params["embed"]["embedding"] if is_tied else params["lm_head"]["kernel"].T
    head = np.array(head)  # [V, D]
    ids = [*tokenizer.convert_tokens_to_ids(untrained), *range(num_tokens, num_tokens + unused)]
    if ids:
        noise = np.random.default_rng(0).normal(size=(len(ids), head.shape[1]))
        head[ids] = head[ids[0]] + 1e-3 * np.abs(head[ids[0]]).mean() * noise
    if is_tied:
        params["embed"]["embedding"] = head
    else:
        params["lm_head"]["kernel"] = np.ascontiguousarray(head.T)
    return save_folder(params, hf_config, folder, "float32", tokenizer_folder)


def config_of(folder, tmp_path, protocol="tool_calls", rank=4):
    write_rows(tmp_path / "train.jsonl", {"id": "1", "question": "who?", "golden_answers": ["ada"]})
    turns = "<think> x </think>\n<answer> ada </answer>"
    messages = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": turns}]
    write_rows(tmp_path / "demonstrations.jsonl", {"messages": messages})
    return changed(
        run={"dir": str(tmp_path / "run")},
        data={"train": str(tmp_path / "train.jsonl")},
        policy={"path": str(folder), "compute_dtype": "float32", "lora": {"rank": rank}},
        rollout={"protocol": protocol, "max_length": 2048, "max_prompt_length": 1024},
        prompt={"template": "paper"},
        learner={"pack_length": 2048, "steps": 1},
        sft={
            "init_from": str(folder),
            "demonstrations": str(tmp_path / "demonstrations.jsonl"),
            "phases": (SftPhase(steps=1),),
        },
        log={"backends": ()},
    )


def untrained_of(config):
    model = build_model(config, config.policy.path, Adapters.from_config(config.policy.lora))
    return untrained_tokens(config, model, config.policy.path)


@pytest.mark.parametrize("is_tied", [False, True])
def test_tokens_with_the_rows_of_unused_ids_are_found(tmp_path, tokenizer_folder, is_tied):
    folder = write_policy(tmp_path / "policy", tokenizer_folder, is_tied=is_tied)
    assert untrained_of(config_of(folder, tmp_path)) == ["<tool_call>", "</tool_call>"]
    closing = write_policy(tmp_path / "closing", tokenizer_folder, ["</tool_call>"], is_tied)
    assert untrained_of(config_of(closing, tmp_path)) == ["</tool_call>"]
    # More unused ids than are read, as in Qwen2.5, which has 271.
    large = write_policy(tmp_path / "large", tokenizer_folder, is_tied=is_tied, unused=MOST_UNUSED + 15)
    assert untrained_of(config_of(large, tmp_path)) == ["<tool_call>", "</tool_call>"]


def test_other_tokens_are_not_found(tmp_path, tokenizer_folder):
    """With tags none is needed; random rows differ; without unused ids there is nothing to compare."""
    folder = write_policy(tmp_path / "policy", tokenizer_folder)
    assert untrained_of(config_of(folder, tmp_path, protocol="tags")) == []
    thoughts = write_policy(tmp_path / "thoughts", tokenizer_folder, ["<think>"])
    assert untrained_of(config_of(thoughts, tmp_path)) == []
    alone = write_policy(tmp_path / "alone", tokenizer_folder, unused=0)
    assert untrained_of(config_of(alone, tmp_path)) == []
    empty = replace(config_of(folder, tmp_path).policy, path="", init=POLICY, tokenizer=str(tokenizer_folder))
    assert untrained_of(replace(config_of(folder, tmp_path), policy=empty)) == []


def test_weights_of_a_hub_are_fetched_for_it(tmp_path, tokenizer_folder, hub):
    hub.add("owner/policy", write_policy(tmp_path / "policy", tokenizer_folder))
    config = config_of("owner/policy", tmp_path)
    assert untrained_of(config) == ["<tool_call>", "</tool_call>"]


def test_tags_of_the_tokenizer_are_checked_too(tmp_path):
    tokenizer = chat_tokenizer(tokens=("<search>",))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    vocab_size = len(tokenizer) + 1
    params = jax.device_get(jax.jit(tiny(POLICY | {"vocab_size": vocab_size}).init)(jax.random.key(5)))
    kernel = np.array(params["lm_head"]["kernel"])
    kernel[:, -1] = kernel[:, tokenizer.convert_tokens_to_ids("<search>")]
    params["lm_head"]["kernel"] = kernel
    hf_config = POLICY | {"vocab_size": vocab_size, "eos_token_id": tokenizer.eos_token_id}
    folder = save_folder(params, hf_config, tmp_path / "policy", "float32", tmp_path / "tokenizer")
    assert untrained_of(config_of(folder, tmp_path, protocol="tags")) == ["<search>"]


def test_adapters_are_refused_and_a_full_cold_start_is_not(tmp_path, tokenizer_folder, monkeypatch):
    folder = write_policy(tmp_path / "policy", tokenizer_folder)
    config = config_of(folder, tmp_path)
    with pytest.raises(UserError, match=REFUSAL):
        sft.run(config)
    with pytest.raises(UserError, match=REFUSAL):
        train.run(config)

    class Reached(Exception):
        pass

    def reach(*_):
        raise Reached

    monkeypatch.setattr(sft, "_own_demonstrations", reach)
    with pytest.raises(Reached):
        sft.run(config_of(folder, tmp_path, rank=0))


@pytest.mark.parametrize(("rank", "status"), [(0, "warning: "), (4, "failed: ")])
def test_doctor_names_the_tokens(tmp_path, tokenizer_folder, rank, status):
    folder = write_policy(tmp_path / "policy", tokenizer_folder)
    config = config_of(folder, tmp_path, rank=rank)
    model = build_model(config, config.policy.path, Adapters.from_config(config.policy.lora))
    shapes, tokens = doctor.weight_lines(config, model)
    assert "have the policy's shapes" in shapes
    assert tokens.startswith(f"{status}{folder}: <tool_call>, </tool_call>: never trained")
