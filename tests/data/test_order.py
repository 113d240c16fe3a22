"""The order of questions: the file's, or one that the seed decides."""

from calibadv_jax.data.pipeline import QuestionIterator
from calibadv_jax.trajectory import Question

QUESTIONS = [Question(f"q{number}", "?", ("a",), "nq") for number in range(20)]


def drawn(seed, shuffle, count=40):
    iterator = QuestionIterator(QUESTIONS, seed, shuffle)
    return [int(next(iterator).id[1:]) for _ in range(count)]


def test_unshuffled_questions_come_in_the_order_of_the_file_again_and_again():
    assert drawn(0, False) == list(range(20)) * 2 == drawn(1, False)


def test_the_seed_decides_the_order():
    assert drawn(0, True) == drawn(0, True)
    assert len({tuple(drawn(seed, True, 20)) for seed in range(5)} | {tuple(range(20))}) == 6
