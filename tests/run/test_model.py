"""What a run's model is put together from."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_policy import SHAPE, mesh_of, tiny
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calibadv_jax.config import Config, MeshConfig
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.learner.learner import init_params
from calibadv_jax.policy.adapters import Adapters
from calibadv_jax.run.model import (
    PROBES,
    AdapterBase,
    Model,
    build_model,
    changed_probe,
    find_policy,
    load_tokenizer,
    read_base,
)

ROOT = Path(__file__).resolve().parents[2]


def of_bytes(*normalizers_, decoder=True):
    """A byte-level tokenizer of one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = normalizers.Sequence(list(normalizers_))
    if decoder:
        tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def of_sentencepiece():
    """With a space before the first word, and bytes for letters without a token, as Llama 2's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"whorteincty"]
    words = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def of_whole_texts():
    """Every text is one unknown word."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def set_class(folder, name, **fields):
    """Change the tokenizer_class of a saved tokenizer."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name} | fields))


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (of_whole_texts, PROBES[0]),
        (of_bytes, None),
        (of_sentencepiece, None),
        (build_word_tokenizer, None),  # most words are unknown to it
        (lambda: of_bytes(normalizers.NFKC(), normalizers.Lowercase()), None),
        (lambda: of_bytes(normalizers.Replace(Regex(r"\s+"), " ")), None),
        (lambda: of_bytes(normalizers.Replace(" ", "")), PROBES[0]),
        (lambda: of_bytes(normalizers.Replace("\n", "")), PROBES[4]),
        (lambda: of_bytes(normalizers.Replace(Regex(r"\d"), "0")), PROBES[1]),
        (lambda: of_bytes(normalizers.NFD(), normalizers.StripAccents()), PROBES[2]),
        (lambda: of_bytes(normalizers.Replace(Regex(r"\p{Han}"), "")), PROBES[3]),
        (lambda: of_bytes(decoder=False), PROBES[0]),
    ],
)
def test_probe_that_decoding_changes_is_named(make, changed):
    result = changed_probe(make())
    assert (result and result[0]) == changed


def test_tokenizer_class_that_loses_spaces_is_refused(tmp_path):
    """GPT-2's class makes a byte-level tokenizer of the words of another kind of file."""
    build_word_tokenizer().save_pretrained(tmp_path)
    set_class(tmp_path, "GPT2Tokenizer")
    with pytest.raises(UserError) as refused:
        load_tokenizer(tmp_path)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path}: the tokenizer, read as GPT2Tokenizer, loses text: {PROBES[0]!r} ")
    assert "set tokenizer_class to TokenizersBackend in tokenizer_config.json there" in message
    set_class(tmp_path, "TokenizersBackend")
    assert load_tokenizer(tmp_path).encode("who") == build_word_tokenizer().encode("who")
    for normalizer, words in (
        (normalizers.Replace(Regex(r"\d"), ""), "loses text: '1291 .* becomes ' and '; .* policy.tokenizer"),
        (normalizers.Replace("<", "("), "the tokenizer cannot write <think>"),
    ):
        of_bytes(normalizer).save_pretrained(tmp_path / "other")
        with pytest.raises(UserError, match=words):
            load_tokenizer(tmp_path / "other")


CONFIG = Config(mesh=MeshConfig(data=1, fsdp=8))


def write_policy(folder, **shape):
    """Write a policy's folder without weights."""
    build_word_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(SHAPE | shape))


@pytest.mark.parametrize(("generation", "expected"), [(None, [1, 5]), ({"eos_token_id": [9, 5]}, [1, 5, 9])])
def test_end_of_text_tokens_are_kept_in_config(tmp_path, generation, expected):
    write_policy(tmp_path, eos_token_id=5)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    model = build_model(CONFIG, str(tmp_path))
    assert model.tokenizer.eos_token_id == 1
    assert model.hf_config["eos_token_id"] == expected


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tokenizer.json", {"model": 1}, "no tokenizer can be loaded: "),
        ("tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"}, "no tokenizer can be loaded: "),
        ("tokenizer_config.json", {"eos_token": None}, "the tokenizer has no eos_token"),
        (
            "config.json",
            {"vocab_size": 397},
            r"the tokenizer has the id 397 \(.*\), but .* vocab_size is 397",
        ),
        ("config.json", {"max_position_embeddings": 512}, r"config\.json: .* 512 .*max_length is 16384"),
    ],
)
def test_unusable_policy_folder_is_one_line(tmp_path, file, change, words):
    write_policy(tmp_path)
    path = tmp_path / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=f"{tmp_path}.*{words}") as refused:
        build_model(CONFIG, str(tmp_path))
    assert "\n" not in str(refused.value)


def test_token_id_beyond_the_embedding_is_refused(tmp_path):
    """Although the tokenizer has fewer tokens than the embedding has rows: its ids have a gap."""
    write_policy(tmp_path, vocab_size=448)
    path = tmp_path / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    word = max(vocabulary, key=vocabulary.get)
    for token_id, message in (
        (448, "has the id 448 .* vocab_size is 448, so that this id has no embed"),
        (447, ""),
    ):
        vocabulary[word] = token_id
        for token in tokenizer["added_tokens"]:
            token["id"] = token_id if token["content"] == word else token["id"]
        path.write_text(json.dumps(tokenizer))
        if message:
            with pytest.raises(UserError, match=message):
                build_model(CONFIG, str(tmp_path))
        else:
            build_model(CONFIG, str(tmp_path))


def test_shared_case_of_token_id_beyond_the_embedding(shared):
    folder = shared / "cases/tokenizer_id_beyond_embedding"
    rollout = replace(CONFIG.rollout, max_length=4000)
    with pytest.raises(UserError, match=r"has the id 700 \('y'\), but .* vocab_size is 448"):
        build_model(replace(CONFIG, rollout=rollout), str(folder))


def test_vocabulary_of_random_policy_covers_every_id(shared):
    folder = shared / "cases/tokenizer_id_beyond_embedding"
    init = {name: value for name, value in SHAPE.items() if name != "vocab_size"}
    policy = replace(CONFIG.policy, init=init, tokenizer=str(folder))
    assert build_model(replace(CONFIG, policy=policy), "").policy.architecture.vocab_size == 701


def test_advice_on_too_long_trajectories_names_the_key(tmp_path):
    write_policy(tmp_path, max_position_embeddings=512)
    with pytest.raises(UserError, match=r"up to 512 .*rollout\.max_length is 16384; lower it"):
        build_model(CONFIG, str(tmp_path))


def test_yarn_extends_the_positions(tmp_path):
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    write_policy(tmp_path, max_position_embeddings=4096, rope_scaling=yarn)
    build_model(CONFIG, str(tmp_path))  # rollout.max_length is 16384
    write_policy(tmp_path, max_position_embeddings=4096, rope_scaling=yarn | {"factor": 2.0})
    with pytest.raises(UserError, match=r"up to 8192 .*rollout\.max_length is 16384; lower it, or stretch"):
        build_model(CONFIG, str(tmp_path))


def test_missing_policy_or_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    for path, words in ((tmp_path, "no tokenizer files there; set policy.tokenizer"), ("", "path is empty")):
        with pytest.raises(UserError, match=words):
            build_model(CONFIG, str(path))
    write_policy(tmp_path, max_position_embeddings=512)
    rollout = replace(CONFIG.rollout, max_length=512, max_prompt_length=64)
    build_model(replace(CONFIG, rollout=rollout), str(tmp_path))


def test_base_is_kept_beside_the_run(tmp_path):
    """Relative where it lies in the run, so that the run may move."""
    adapters, folder = Adapters(2, 4.0, ("q",), "float32"), tmp_path / "run/policy"
    folder.mkdir(parents=True)
    for place, kept in ((tmp_path / "run/sft", "../sft"), (tmp_path / "hf", str(tmp_path / "hf")), ("", "")):
        base = AdapterBase("name", str(place), "0" * 64, 3, adapters)
        base.write(folder)
        assert json.loads((folder / "base.json").read_text())["folder"] == kept
        assert read_base(folder) == base and (base.snapshot_metadata() is None) == (not place)
    policy, mesh = tiny(SHAPE, adapters), mesh_of(1)
    drawn, whole = base.params(policy, mesh), init_params(policy, mesh, 3)
    jax.tree.map(np.testing.assert_array_equal, drawn, policy.split(whole)[0])
    (folder / "base.json").write_text('{"name": "x"}')
    with pytest.raises(UserError, match="base.json: damaged"):
        read_base(folder)
    assert read_base(tmp_path) is None


@pytest.mark.parametrize(
    ("path", "kind", "step", "model_folder"),
    [
        ("run/snapshots/v000012", "snapshot", None, "run/policy"),
        ("run/checkpoints/3", "checkpoint", 3, "run/policy"),
        ("run/checkpoints", "checkpoint", None, "run/policy"),
        ("run", "checkpoint", None, "run/policy"),
        ("v3-small", "huggingface", None, "v3-small"),
        ("other/7", "huggingface", None, "other/7"),
    ],
)
def test_policy_is_known_by_its_place(tmp_path, monkeypatch, path, kind, step, model_folder):
    (tmp_path / "run/checkpoints/5").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    source = find_policy(Path(path))
    assert (source.kind, source.step, source.model_folder) == (kind, step, tmp_path / model_folder)
    pinned = 5 if kind == "checkpoint" and step is None else step
    assert source.at_step().step == pinned


def test_newest_checkpoint_stays_the_same_while_its_run_goes_on(tmp_path):
    for step in (3, 20):
        (tmp_path / f"checkpoints/{step}").mkdir(parents=True)
    newest = find_policy(tmp_path).at_step()
    (tmp_path / "checkpoints/21").mkdir()
    assert newest.step == 20
    assert newest.at_step() == newest


def test_tokenizer_splits_alike_beside_a_policy(tmp_path):
    """transformers has a class of its own for qwen2, which splits in another way."""
    write_policy(tmp_path, model_type="qwen2")
    text = "<think> who founded Zürich in 1291 ? </think><search> city </search>"
    assert load_tokenizer(tmp_path).encode(text) == build_word_tokenizer().encode(text)


@pytest.mark.parametrize("model_type", ["", "qwen3", "llama"])
def test_tokenizer_splits_alike_alone_and_beside_other_policies(tmp_path, model_type):
    build_word_tokenizer().save_pretrained(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": model_type}))
    text = "<think> who founded Zürich in 1291 ? </think><search> city </search>"
    assert load_tokenizer(tmp_path).encode(text) == build_word_tokenizer().encode(text)


@pytest.mark.medium
def test_tokenizer_class_is_kept_unless_own_code(tmp_path, monkeypatch):
    """transformers would ask on the terminal whether to run it."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    of_bytes().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "qwen2"}))
    set_class(tmp_path, "Qwen2Tokenizer")
    assert type(load_tokenizer(tmp_path)).__name__ == "Qwen2Tokenizer"
    (tmp_path / "config.json").unlink()  # else transformers takes the class of its model_type
    set_class(tmp_path, "Own", auto_map={"AutoTokenizer": [None, "own.Own"]})
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(UserError, match=r"its tokenizer is a program of its own \(auto_map\)") as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value) and not ran.exists()


@pytest.mark.medium
def test_embedded_sampler_imports_no_torch(tmp_path):
    build_word_tokenizer().save_pretrained(tmp_path)
    program = f"""
import sys
from calibadv_jax.contrib.cli import ask
from calibadv_jax.commands import evaluate, export, sft, train
from calibadv_jax.run import model
model.load_tokenizer({str(tmp_path)!r})
sys.stdout.write(" ".join({{"torch", "sympy", "scipy.stats"}} & sys.modules.keys()))
"""
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (0, ""), answer.stderr


def test_vocabulary_hash_covers_words_and_ids():
    def hash_of(*words):
        vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *words])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        return Model(None, {}, PreTrainedTokenizerFast(tokenizer_object=tokenizer), None, None).tokenizer_hash

    assert hash_of("a", "b") == hash_of("a", "b")
    assert len({hash_of(*words) for words in ("ab", "ba", "abc", "ac")}) == 4
