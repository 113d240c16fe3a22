"""Chat templates written after public ones, and a small tokenizer with the control tokens of each."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from calibadv_jax.core.tool_calls import ToolSchema
from calibadv_jax.protocols.chat_template import ConversationTemplate
from calibadv_jax.protocols.formats import load_format

FOLDER = Path(__file__).with_name("chat_templates")
_CHATML = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
_MISTRAL = (
    *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[ARGS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[THINK]", "[/THINK]"),
)
_LLAMA = (
    *("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
_GPT_OSS = (
    *("<|endoftext|>", "<|startoftext|>", "<|start|>", "<|end|>", "<|message|>"),
    *("<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
)
# Name of a template -> its format, and the control tokens of its tokenizer: that of the end of a text first.
FAMILIES = {
    "qwen2_5": ("hermes", _CHATML),
    "qwen3": ("hermes", _CHATML),
    "forgetful": ("hermes", _CHATML),
    "qwen3_5": ("qwen_xml", _CHATML),
    "nemotron": ("qwen_xml", _CHATML),
    "llama3_1": ("llama_json", _LLAMA),
    "mistral": ("mistral", _MISTRAL),
    "magistral": ("mistral", _MISTRAL),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
}
SEARCH = ToolSchema(
    "search",
    "Searches the encyclopedia.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "a few words"},
            "top": {"type": "integer", "description": "number of passages", "minimum": 1},
        },
        "required": ["query"],
        "additionalProperties": False,
    },
)
OPEN_PAGE = ToolSchema(
    "open_page",
    "Opens a page.",
    {
        "type": "object",
        "properties": {"address": {"type": "string", "description": "of the page"}},
        "required": ["address"],
    },
)
TOOLS = (SEARCH, OPEN_PAGE)
# Words, digits, marks with the line breaks behind them, line breaks, spaces: as these models split texts.
_WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
# What the tokenizer's merges are learned from.
_CORPUS = (
    "Who painted the picture?\n\nThe painter lived in Paris, and painted it in 1889.\n",
    'user\nassistant\nsystem\nparameters {"name": "search", "arguments": {"query": "x"}}',
    "\n\n\n\n  functions to=functions.search commentary json final analysis \\n \\u00e9",
)


def template_text(name: str) -> str:
    """Return the text of a template."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")


def make_tokenizer(template: str, control_tokens: tuple[str, ...] = _CHATML, name: str = "test/model"):
    """Return a byte-level tokenizer with merges, control tokens and a chat template."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of_words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in control_tokens])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=control_tokens[0], bos_token=control_tokens[1]
    )
    wrapped.chat_template = template
    wrapped.name_or_path = name
    return wrapped


@cache
def family_tokenizer(name: str):
    """Return the tokenizer of a template in FAMILIES; do not change it."""
    _, control_tokens = FAMILIES[name]
    return make_tokenizer(template_text(name), control_tokens, f"test/{name}")


@cache
def family_template(name: str, **template_kwargs) -> ConversationTemplate:
    """Return what is derived from a template in FAMILIES."""
    tokenizer = family_tokenizer(name)
    call_format = load_format("auto", tokenizer, template_kwargs)
    return ConversationTemplate.derive(tokenizer, TOOLS, call_format, template_kwargs)
