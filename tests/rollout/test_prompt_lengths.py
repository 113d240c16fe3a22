"""Prompts that are too long are known before the first question is asked."""

from copy import deepcopy

import pytest
from tokenizers import normalizers

from calibadv_jax.config import PromptConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question
from calibadv_jax.rollout.prompts import BATCH, build_prompt, drop_overlong, most_tokens, prompt_lengths

SHORT = PromptConfig(template="short")
LIGATURE = "\ufdfa"  # one letter, eighteen where Unicode is normalised to its plainest form


def ask(*texts):
    return [Question(f"q{n}", text, ("x",), "test") for n, text in enumerate(texts)]


class Counting:
    """A tokenizer that notes how many texts it is given."""

    def __init__(self, inner):
        self.inner, self.given = inner, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, texts, **options):
        self.given += len(texts)
        return self.inner(texts, **options)


def test_they_are_those_that_the_loop_would_refuse(byte_tokenizer):
    """More than one batch of them, in any script."""
    letters = ("a", "é", "字", "<think>", LIGATURE)
    questions = ask(*(letters[n % 5] * (n % 97) for n in range(2 * BATCH)))
    lengths = prompt_lengths(questions, byte_tokenizer, SHORT, 100)
    expected = {}
    for place, question in enumerate(questions):
        count = len(build_prompt(question, byte_tokenizer, SHORT, 10**6))
        if count > 100:
            expected[place] = count
    assert lengths == expected and 0 < len(lengths) < len(questions)


def test_short_ones_are_known_by_their_letters(byte_tokenizer):
    tokenizer = Counting(byte_tokenizer)
    questions = ask(*["who wrote it?"] * 5000, "x" * 500)
    assert prompt_lengths(questions, tokenizer, SHORT, 100) == {5000: 511}
    assert tokenizer.given == 1


@pytest.mark.parametrize("form", [normalizers.NFKD(), normalizers.NFKC(), normalizers.NFC()], ids=repr)
def test_the_bound_holds_where_a_tokenizer_writes_letters_out(byte_tokenizer, form):
    tokenizer = deepcopy(byte_tokenizer)
    tokenizer.backend_tokenizer.normalizer = form
    for text in (LIGATURE * 9, "ﬃ½Å" * 7, "한국어" * 5, "plain", "\u0344" * 8):
        assert len(tokenizer.encode(text, add_special_tokens=False)) <= most_tokens(text)


def test_they_are_refused_or_left_out():
    questions = ask("a", "b", "c")
    assert drop_overlong(questions, {}, 9, "refuse", "data.train") == (questions, "")
    kept, message = drop_overlong(questions, {0: 12, 2: 40}, 9, "leave_out", "data.train")
    assert kept == questions[1:2]
    words = (
        "data.train: the prompts of 2 of 3 questions are longer than rollout.max_prompt_length=9, the longest"
        " has 40 tokens (question 'q2')"
    )
    assert message == f"{words}: they are left out"
    with pytest.raises(UserError) as refused:
        drop_overlong(questions, {0: 12, 2: 40}, 9, "refuse", "data.train")
    way_out = "raise it, or leave them out with data.overlong_prompts=leave_out"
    assert str(refused.value) == f"{words}: {way_out}"
    with pytest.raises(UserError, match="of 3 of 3 questions .*: none is left; raise it"):
        drop_overlong(questions, {0: 12, 1: 10, 2: 40}, 9, "leave_out", "data.train")
