"""config.json of the paper's three models, as their authors publish them."""

import json

QWEN = json.loads(
    """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen2",
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "transformers_version":
    "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false}"""
)
PUBLISHED = {
    "qwen2.5-3b": QWEN
    | json.loads(
        """{"hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 32768,
    "max_window_layers": 36, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads":
    2, "sliding_window": 32768, "tie_word_embeddings": true, "vocab_size": 151936}"""
    ),
    "qwen2.5-7b": QWEN
    | json.loads(
        """{"hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
    "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads":
    4, "sliding_window": 131072, "tie_word_embeddings": false, "vocab_size": 152064}"""
    ),
    "llama-3.2-3b-instruct": json.loads(
        """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "hidden_act":
    "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads":
    24, "num_hidden_layers": 28, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
    "use_cache": true, "vocab_size": 128256}"""
    ),
}
