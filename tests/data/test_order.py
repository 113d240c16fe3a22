"""The order of questions: the file's, or one that the seed decides."""

from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.pipeline import QuestionIterator
from calibadv_jax.data.questions import load_questions, write_questions

QUESTIONS = [Question(f"q{number}", "?", ("a",), "nq") for number in range(20)]


def drawn(seed, shuffle, count=40):
    iterator = QuestionIterator(QUESTIONS, seed, shuffle)
    return [int(next(iterator).id[1:]) for _ in range(count)]


def test_unshuffled_questions_come_in_the_order_of_the_file_again_and_again():
    assert drawn(0, False) == list(range(20)) * 2 == drawn(1, False)


def test_the_seed_decides_the_order():
    assert drawn(0, True) == drawn(0, True)
    assert len({tuple(drawn(seed, True, 20)) for seed in range(5)} | {tuple(range(20))}) == 6


def test_no_epoch_repeats_the_order_of_another():
    order = drawn(0, True, 6 * 20)
    epochs = [order[start : start + 20] for start in range(0, 120, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6


def test_blank_lines_end_nothing(tmp_path):
    path = tmp_path / "q.jsonl"
    write_questions(path, QUESTIONS[:2])
    first, second = path.read_text().splitlines()
    path.write_text(f"\n{first}\n  \n\n{second}\n\n")
    assert load_questions(path) == QUESTIONS[:2]
