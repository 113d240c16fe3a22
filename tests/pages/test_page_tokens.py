"""A piece of text for each token: nothing is lost, whatever the bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibadv_jax.contrib.pages.transcript import Pieces
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.core.errors import UserError


@pytest.fixture(scope="module")
def pieces(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Pieces(folder)


def test_words_and_tags_keep_their_own_text(pieces, tokenizer):
    ids = tokenizer.encode("<think> basin cedar</think>").ids
    assert pieces.pieces(ids) == ["<think>", " basin", " cedar", "</think>"]


def test_character_of_several_tokens_belongs_to_the_last(pieces, tokenizer):
    ids = tokenizer.encode("aé日😀b").ids
    assert pieces.pieces(ids) == ["a", "", "é", "", "", "日", "", "", "", "😀", "b"]


def test_invalid_bytes_are_shown_and_lose_nothing(pieces, tokenizer):
    ids = tokenizer.encode("😀b").ids
    broken = [ids[0], ids[-1], ids[1], ids[2]]
    cut = pieces.pieces(broken)
    assert len(cut) == 4 and "".join(cut) == pieces.text(broken)
    assert "b" in "".join(cut) and "\ufffd" in cut[-1]


@settings(max_examples=200)
@given(data=st.data())
def test_any_tokens_make_their_whole_text(pieces, tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    cut = pieces.pieces(ids)
    assert len(cut) == len(ids)
    assert "".join(cut) == tokenizer.decode(ids, skip_special_tokens=False)


def test_tokenizer_that_puts_spaces_between_words(tmp_path):
    words = build_word_tokenizer()
    words.save_pretrained(tmp_path)
    ids = words.encode("<think> find maple optics </think>", add_special_tokens=False)
    assert Pieces(tmp_path).pieces(ids) == ["<think>", " find", " maple", " optics", " </think>"]


def test_no_tokens(pieces):
    assert pieces.pieces([]) == []


def test_missing_or_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="tokenizer.json: no such file"):
        Pieces(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        Pieces(tmp_path)
