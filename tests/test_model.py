"""What a run's model is put together from."""

import json

import pytest
from tiny_policy import SHAPE
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from calibadv_jax.config import Config, MeshConfig
from calibadv_jax.data.word_tokenizer import build_word_tokenizer
from calibadv_jax.model import Model, build_model


@pytest.mark.parametrize(("generation", "expected"), [(None, [1, 5]), ({"eos_token_id": [9, 5]}, [1, 5, 9])])
def test_every_end_of_text_token_goes_into_the_runs_config(tmp_path, generation, expected):
    """From there exports, snapshots and a later evaluation have them, without the folder they came from."""
    build_word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"eos_token_id": 5}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    model = build_model(Config(mesh=MeshConfig(data=1, fsdp=8)), str(tmp_path))
    assert model.tokenizer.eos_token_id == 1
    assert model.hf_config["eos_token_id"] == expected


def test_a_vocabulary_is_known_by_its_words_and_their_ids(tmp_path):
    """Workers and a resumed run compare it: the same words under other ids are another vocabulary."""

    def hash_of(name, words):
        tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
        return Model(None, {}, fast, tmp_path / name, None).tokenizer_hash

    words = ["<unk>", "<eos>", "a", "b"]
    assert hash_of("one", words) == hash_of("two", words)
    others = (["<unk>", "<eos>", "b", "a"], [*words, "c"], ["<unk>", "<eos>", "a", "c"])
    assert len({hash_of(str(n), other) for n, other in enumerate((words, *others))}) == 4
