"""A world with pages: a passage has an address, only the page at it has the facts."""

import json
from dataclasses import replace
from itertools import islice

import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.demonstrations import imperfect
from calibadv_jax.contrib.worlds.words import build_word_tokenizer
from calibadv_jax.contrib.worlds.world import generate_world, write_world
from calibadv_jax.core.errors import UserError

SMALL = WorldConfig(
    people=20, cities=8, companies=8, works=8, train_questions=60, eval_questions=20, one_hop=1, two_hop=0,
    comparison=0, pages=True,
)  # fmt: skip


def test_a_search_alone_answers_nothing():
    world = generate_world(SMALL)
    passages = {one.id: one for one in world.passages}
    pages = {one.id: one for one in world.pages}
    assert len({page.address for page in world.pages}) == len(world.passages)
    for question in (*world.train, *world.eval):
        passage_id, page_id = question.supporting_ids
        passage, page, (answer,) = passages[passage_id], pages[page_id], question.golden_answers
        assert passage.title == page.title and answer in page.text and answer not in passage.text
        assert passage.text == f"the page of {page.title} is {page.address}."


def test_the_world_lies_on_disk_with_its_pages_and_words(tmp_path):
    write_world(replace(SMALL, dir=str(tmp_path / "world")))
    rows = [json.loads(line) for line in (tmp_path / "world/pages.jsonl").read_text().splitlines()]
    assert len(rows) == 88 and set(rows[0]) == {"url", "contents"}
    tokenizer, plain = build_word_tokenizer(pages=True), build_word_tokenizer()
    texts = [*(f"<access> {row['url']} </access> {row['contents']}" for row in rows), "the page of"]
    assert not any(tokenizer.unk_token_id in tokenizer.encode(text) for text in texts)
    vocabulary = plain.get_vocab()
    assert vocabulary == {word: tokenizer.get_vocab()[word] for word in vocabulary}


def test_demonstrations_read_the_page_or_guess():
    ways = {}
    for one in islice(imperfect(0, SMALL), 300):
        tags = tuple(turn.text.rpartition("</")[2].rstrip(">") for turn in one.turns)
        ways[tags] = ways.get(tags, 0) + 1
        if tags[-2:] == ("access", "answer"):
            (page,) = one.turns[-2].documents
            assert (
                one.question.golden_answers[0] in page.text and page.id == f"page {_address(one.turns[-2])}"
            )
    assert set(ways) >= {("answer",), ("search", "answer"), ("search", "access", "answer")}
    assert ways["search", "access", "answer"] < 150  # most do not read


def _address(turn):
    return turn.text.partition("<access> ")[2].removesuffix(" </access>")


def test_there_must_be_an_address_for_every_passage():
    with pytest.raises(UserError, match="there are 576 addresses"):
        generate_world(replace(SMALL, people=240, cities=50))
