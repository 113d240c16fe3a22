"""The shape of a tiny policy with the word tokenizer, and a tokenizer of letters."""

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 398,
    "tie_word_embeddings": True,
}


class Letters:
    """A tokenizer of one token a letter."""

    eos_token_id, all_special_tokens, chat_template = -1, (), None

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]

    def decode(self, ids, **_):
        return "".join(map(chr, ids))

    def get_added_vocab(self):
        return {}
