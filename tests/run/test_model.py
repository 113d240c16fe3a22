"""What a run's model is put together from."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_policy import SHAPE
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from calibadv_jax.config import Config, MeshConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.word_tokenizer import build_word_tokenizer
from calibadv_jax.run.model import Model, build_model, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]


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


def test_trajectories_longer_than_the_policy_knows_positions_for_are_refused(tmp_path):
    build_word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"max_position_embeddings": 512}))
    config = Config(mesh=MeshConfig(data=1, fsdp=8))
    with pytest.raises(
        UserError, match=r"config\.json: .* up to 512 .*rollout\.max_length is 16384; lower it"
    ):
        build_model(config, str(tmp_path))
    rollout = replace(config.rollout, max_length=512, max_prompt_length=64)
    build_model(replace(config, rollout=rollout), str(tmp_path))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_a_tokenizer_splits_alike_alone_and_beside_a_policy(tmp_path, model_type):
    """transformers has a class of its own for qwen2, which splits in another way."""
    build_word_tokenizer().save_pretrained(tmp_path)
    text = "<think> who founded Zürich in 1291 ? </think><search> city </search>"
    alone = load_tokenizer(tmp_path).encode(text)
    assert alone == build_word_tokenizer().encode(text)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": model_type}))
    assert load_tokenizer(tmp_path).encode(text) == alone


@pytest.mark.medium
def test_a_models_own_tokenizer_keeps_its_class(tmp_path):
    """As the models of the paper name it, which AutoTokenizer knows how to make."""
    build_word_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "qwen2"}))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert type(load_tokenizer(tmp_path)).__name__ == "Qwen2Tokenizer"


@pytest.mark.medium
def test_a_tokenizer_that_is_a_program_is_refused_and_nobody_is_asked(tmp_path, monkeypatch):
    """transformers would ask on the terminal whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    build_word_tokenizer().save_pretrained(tmp_path)
    path, ran = tmp_path / "tokenizer_config.json", tmp_path / "ran"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(UserError, match=r"its tokenizer is a program of its own \(auto_map in") as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value) and not ran.exists()


@pytest.mark.medium
def test_a_run_on_the_embedded_sampler_needs_no_torch(tmp_path):
    """Where it is installed, its import takes seconds."""
    build_word_tokenizer().save_pretrained(tmp_path)
    program = f"""
import sys
from calibadv_jax.tools import ask
from calibadv_jax.commands import evaluate
from calibadv_jax.commands import export
from calibadv_jax.run import model
from calibadv_jax.commands import sft
from calibadv_jax.commands import train
model.load_tokenizer({str(tmp_path)!r})
sys.stdout.write(" ".join({{"torch", "sympy", "scipy.stats"}} & sys.modules.keys()))
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (0, ""), answer.stderr


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
