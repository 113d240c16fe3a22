"""Where a completion ends, whatever pieces its tokens are."""

import json
import random

import pytest

from calibadv_jax.core.errors import UserError
from calibadv_jax.sampler.stop_rule import StopRule, end_of_text_ids

STOP = ("</search>", "</answer>")
PIECES = ["<eos>", "<im_end>", *"abcdefghijklmnopqrstuvwxyz</> \n", ">\n", "</", "</search>", "rch>x", "é"]
PIECES += ["x>", "<think>", "</think>", "<search>", "\ufffd"]


class PieceTokenizer:
    eos_token_id = 0

    def __len__(self):
        return len(PIECES)

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=True):
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        return "".join(PIECES[i] for i in ids)


RULE = StopRule(PieceTokenizer(), [0, 1])


def ids(*pieces):
    return [PIECES.index(piece) for piece in pieces]


def letters(text):
    return ids(*text)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], None),
        (letters("go on </search"), None),
        (letters("x</search>"), (10, "stop")),
        (letters("x</search>yz"), (10, "stop")),
        (letters("</answer></search>"), (9, "stop")),
        (letters("<</search>"), (10, "stop")),
        (ids("a", "</search>", "b"), (2, "stop")),
        ([*ids("</"), *letters("sea"), *ids("rch>x", "b")], (5, "stop")),  # the token stays whole
        ([*letters("</search"), *ids(">\n", "b")], (9, "stop")),
        (ids("a", "<eos>"), (2, "eos")),
        (ids("a", "<im_end>", "b", "<eos>"), (2, "eos")),
        ([*letters("</search>"), *ids("<eos>")], (9, "stop")),
        ([*ids("<eos>"), *letters("</search>")], (1, "eos")),
        ([*letters("</sea"), *ids("<eos>"), *letters("rch>")], (6, "eos")),
    ],
)
def test_completion_ends_at_its_first_end(tokens, expected):
    assert RULE.find(tokens, STOP) == expected
    if expected:
        assert RULE.find(tokens[: expected[0] - 1], STOP) is None
        assert RULE.find(tokens[: expected[0]], STOP) == expected
    without_stops = StopRule(PieceTokenizer(), 1).find(tokens, ())  # one end-of-text token
    assert without_stops == ((tokens.index(1) + 1, "eos") if 1 in tokens else None)


def test_completion_without_stop_strings_ends_at_end_of_text_only():
    assert RULE.find(letters("</search>"), ()) is None
    rule = StopRule(PieceTokenizer(), PIECES.index("<im_end>"))
    assert rule.find(ids("<eos>", "<im_end>"), ()) == (2, "eos")


def test_missing_parts_of_stop_strings():
    assert RULE.remainders(letters("a </sea"), STOP) == ["rch>"]
    assert sorted(RULE.remainders(letters("a </"), STOP)) == ["answer>", "search>"]
    assert RULE.remainders(letters("a </search> b"), STOP) == []
    assert RULE.remainders([], STOP) == []
    assert RULE.remainders(letters("aba"), ("abac", "bad")) == ["bac", "c", "d"]


def test_tokens_that_may_end_a_completion():
    ending = {piece for token, piece in enumerate(PIECES) if RULE.may_end(token, STOP)}
    assert ending == {"<eos>", "<im_end>", ">", ">\n", "</search>", "rch>x"}
    assert RULE.may_end(PIECES.index("\ufffd"), ("fin é",))  # a part of a character may complete it


def test_part_of_a_character_may_end_only_where_it_completes_a_stop_string():
    part = PIECES.index("\ufffd")
    assert RULE.may_end(part, ("fin é",))
    assert not RULE.may_end(part, STOP)


def test_every_token_that_ends_may_end():
    rng, ends = random.Random(0), 0
    for _ in range(3000):
        start = letters(rng.choice(["</search", "</answer", "</sea", "<"]))
        tokens = [*start, *rng.choices(range(len(PIECES)), k=3)]
        end = RULE.find(tokens, STOP)
        if end:
            ends += 1
            assert RULE.may_end(tokens[end[0] - 1], STOP)
    assert ends > 300


def test_every_end_of_text_token_of_a_policy(tmp_path):
    tokenizer = PieceTokenizer()
    for hf_config in ({}, {"eos_token_id": 0}, {"eos_token_id": None}):
        assert (
            end_of_text_ids("", hf_config, tokenizer) == end_of_text_ids(tmp_path, hf_config, tokenizer) == 0
        )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 1]}))
    assert end_of_text_ids(tmp_path, {"eos_token_id": 3}, tokenizer) == [0, 1, 3, 5]
    assert end_of_text_ids(tmp_path, {"eos_token_id": [3, 4], "vocab_size": 5}, tokenizer) == [0, 1, 3, 4]
    for text in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match="generation_config.json: .* JSON.*; fix or remove it"):
            end_of_text_ids(tmp_path, {}, tokenizer)
