"""A tokenizer with a chat template for tool calls, and conversations in it."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

END = "<|im_end|>"
START = "<|im_start|>"
# Written for the tests, in the manner of Qwen's templates: tools in the system message, JSON calls in tags.
TEMPLATE = """\
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- if tools or system -%}
{{- '<|im_start|>system\\n' + system -}}
{%- if tools -%}
{{- '\\n\\nTools:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\nWrite a call as <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in rest -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant' -}}
{%- if message.reasoning_content -%}
{{- '\\n<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- else -%}
{{- '\\n' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or rest[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or rest[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# The same, where the generation prompt begins a thought, and every message has one.
_GENERATION_PROMPT = "{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
_OPENS_THOUGHT = "{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"
_NO_THOUGHT = "{%- else -%}\n{{- '\\n' -}}"
_EMPTY_THOUGHT = "{%- else -%}\n{{- '\\n<think>\\n\\n</think>\\n\\n' -}}"
THINKING_TEMPLATE = TEMPLATE.replace(_GENERATION_PROMPT, _OPENS_THOUGHT).replace(_NO_THOUGHT, _EMPTY_THOUGHT)


def chat_tokenizer(template: str = TEMPLATE, tokens: tuple[str, ...] = ()):
    """One token a byte, the control tokens of the template, and further tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, extra_special_tokens=[START, "<|endoftext|>"]
    )
    fast.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>", *tokens])
    fast.chat_template = template
    return fast


def call_text(name: str = "search", **arguments: object) -> str:
    """A call as the policy writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


# Whole calls as tokens of their own, so that a policy without training calls tools.
CALL_TOKENS = tuple(call_text(query=query) for query in ("lives in", "founded by", "based in"))
# Logits that `write_policy` adds to some tokens.
FREQUENT = {**dict.fromkeys(CALL_TOKENS, 7.0), "a": 7.0, "b": 7.0, END: 8.0}
POLICY = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
POLICY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
POLICY |= {"tie_word_embeddings": False, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
POLICY |= {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0}


def write_policy(folder: Path, template: str = TEMPLATE) -> Path:
    """Write a HuggingFace folder of a random policy that calls the search and answers, now and then."""
    from tiny_policy import tiny

    from calibadv_jax.snapshots.huggingface import save_folder

    tokenizer = chat_tokenizer(template, CALL_TOKENS)
    source = folder.with_name(f"{folder.name}_tokenizer")
    tokenizer.save_pretrained(source)
    hf_config = POLICY | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    params = jax.device_get(jax.jit(tiny(hf_config).init)(jax.random.key(5)))
    # The first dimension is the same for all tokens, and the norm makes it the square root of the size.
    embedding = np.array(params["embed"]["embedding"])
    embedding[:, 0] = 10 * np.abs(embedding).max()
    kernel = np.array(params["lm_head"]["kernel"])
    kernel[0] = 0.0
    for token, logit in FREQUENT.items():
        kernel[0, tokenizer.convert_tokens_to_ids(token)] = logit / POLICY["hidden_size"] ** 0.5
    params["embed"]["embedding"] = embedding
    params["lm_head"]["kernel"] = kernel
    return save_folder(params, hf_config, folder, "float32", source)


def has_called(trajectory) -> float:
    """A reward of one's own: half for a call that was executed, half for an answer."""
    has_documents = any(turn.documents for turn in trajectory.turns)
    return 0.5 * has_documents + 0.5 * (trajectory.answer is not None)
