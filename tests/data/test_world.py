"""The generated encyclopedia and its demonstrations: disjoint splits, true answers, no unknown word."""

import asyncio
import hashlib
import itertools
import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.words import POOLS, build_word_tokenizer
from calibadv_jax.contrib.worlds.world import (
    ASKERS,
    RUMOUR,
    generate_world,
    make_facts,
    make_passages,
    split_of,
    write_world,
)
from calibadv_jax.contrib.worlds.world_demonstrations import GENERATORS, imperfect
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.demonstrations import load_demonstrations
from calibadv_jax.data.questions import load_questions
from calibadv_jax.run.model import load_tokenizer
from examples.own_tool import Calculator

SMALL = WorldConfig(people=40, cities=12, companies=12, works=8, train_questions=300, eval_questions=200)
RUMOURS = WorldConfig(train_questions=600, eval_questions=50, comparison=0, rumour_truth=0.4, misread=0.7)
RUMOURS = replace(RUMOURS, one_hop=0.2, two_hop=0.2, rumour=0.6)
PAGES = WorldConfig(people=20, cities=8, companies=8, works=8, train_questions=60, eval_questions=20)
PAGES = replace(PAGES, one_hop=1, two_hop=0, comparison=0, pages=True)
AGES = replace(PAGES, age=1)
STATED = RUMOUR.removesuffix("{}")
COUNTS = {"person": 60, "city": 20, "company": 20, "work": 20}


@pytest.fixture(scope="module")
def world():
    return generate_world(SMALL)


def calculated(body):
    action = Calculator()
    return asyncio.run(action.call(action.parse(body))).text


def drawn(generator, seed, config, count):
    return list(itertools.islice(generator(seed, config), count))


def test_no_entity_is_in_two_splits(world):
    assert generate_world(SMALL) == world  # a function of its config
    titles = {passage.id: passage.title for passage in world.passages}
    assert {split_of(title) for title in titles.values()} == {"train", "eval"}
    for questions, split in ((world.train, "train"), (world.eval, "eval")):
        assert {split_of(titles[name]) for each in questions for name in each.supporting_ids} == {split}
    answers = [{each.golden_answers[0] for each in part} for part in (world.train, world.eval)]
    assert answers[0] & answers[1] == {"yes", "no"}
    assert not any(STATED in passage.text for passage in world.passages), "rumours only where they are asked"
    assert {question.data_source for question in world.train} == {"one_hop", "two_hop", "comparison"}


def test_every_word_occurs_in_every_split():
    for kind, (first, second) in POOLS.items():
        for split in ("train", "eval", "cold_start"):
            names = [f"{a} {b}" for a in first for b in second if split_of(f"{a} {b}") == split]
            assert {name.split()[0] for name in names} == set(first), (kind, split)
            assert {name.split()[1] for name in names} == set(second), (kind, split)


def test_no_entity_occurs_twice():
    facts = make_facts(SMALL, np.random.default_rng(0), COUNTS, "train")
    for kind, names in facts.entities.items():
        assert len(names) == len(set(names)) == COUNTS[kind]


@pytest.mark.parametrize(("kind", "hops"), [("one_hop", 1), ("two_hop", 2), ("comparison", 2)])
def test_every_step_to_an_answer_is_a_sentence_of_its_passage(kind, hops):
    rng = np.random.default_rng(1)
    facts = make_facts(SMALL, rng, COUNTS, "train")
    passages = dict(make_passages(facts, rng))
    for _ in range(300):
        drawn = ASKERS[kind](facts, rng)
        assert len(drawn.searches) == len(drawn.findings) == len(drawn.statements) == hops
        for title, finding, statement in zip(drawn.searches, drawn.findings, drawn.statements, strict=True):
            assert f"{statement}." in passages[title]
            assert statement.startswith(title) and statement.endswith(finding)
        if kind == "comparison":
            assert drawn.answer == ("yes" if drawn.findings[0] == drawn.findings[1] else "no")
            assert drawn.searches[0] != drawn.searches[1]
            assert all(name in drawn.text for name in drawn.searches)
        else:
            assert drawn.answer == drawn.findings[-1]
            assert drawn.searches[0] in drawn.text
            assert drawn.answer not in drawn.text, "nobody answers a question about himself"
        if kind == "two_hop":
            assert drawn.searches[1] == drawn.findings[0]


def stated_rumour(passage):
    """The one sentence of a passage that may be false, without its opening words."""
    sentences = passage.removesuffix(".").split(". ")
    (rumour,) = [sentence for sentence in sentences if sentence.startswith(STATED)]
    return rumour.removeprefix(STATED)


@pytest.mark.parametrize("truth", [0.0, 0.4, 1.0])
def test_rumours_are_as_often_true_as_configured(truth):
    rng = np.random.default_rng(0)
    config = replace(RUMOURS, rumour_truth=truth)
    are_true = []
    for _ in range(10):
        facts = make_facts(config, rng, COUNTS, "train")
        passages = dict(make_passages(facts, rng))
        for _ in range(40):
            drawn = ASKERS["rumour"](facts, rng)
            name, bridge = drawn.searches
            assert f"{drawn.statements[0]}." in passages[name]
            assert f"{drawn.statements[1]}." in passages[bridge]
            stated = stated_rumour(passages[name])
            assert stated.startswith(bridge)
            are_true.append(stated == drawn.statements[1])
            assert drawn.answer not in drawn.text
            assert facts.rumours[name].object not in drawn.text
    assert np.mean(are_true) == pytest.approx(truth, abs=0.1)


def test_every_passage_has_a_rumour_that_answers_rumour_questions_alone():
    world = generate_world(RUMOURS)
    by_id = {passage.id: passage for passage in world.passages}
    for question in world.train:
        passages = [by_id[name] for name in question.supporting_ids]
        stated = stated_rumour(passages[0].text)
        if question.data_source == "rumour":
            assert stated.startswith(passages[1].title)
        if question.data_source == "two_hop":
            assert question.golden_answers[0] not in stated or not stated.startswith(passages[1].title)
    counts = Counter(question.data_source for question in world.train)
    shares = {kind: count / len(world.train) for kind, count in counts.items()}
    assert shares == pytest.approx({"one_hop": 0.2, "two_hop": 0.2, "rumour": 0.6}, abs=0.06)


def test_search_alone_answers_nothing_in_a_world_with_pages():
    world = generate_world(PAGES)
    passages = {passage.id: passage for passage in world.passages}
    pages = {page.id: page for page in world.pages.values()}
    assert len(pages) == len(world.pages) == len(world.passages)
    for question in (*world.train, *world.eval):
        passage_id, page_id = question.supporting_ids
        passage, page, (answer,) = passages[passage_id], pages[page_id], question.golden_answers
        assert passage.title == page.title
        assert answer in page.text and answer not in passage.text
        address = page_id.removeprefix("page ")
        assert passage.text == f"the page of {page.title} is {address}."
        assert world.pages[address] == page


def test_answers_follow_from_supporting_passages(world):
    by_id = {passage.id: passage for passage in world.passages}
    for question in world.train:
        passages = [by_id[name] for name in question.supporting_ids]
        first, last, (answer,) = passages[0], passages[-1], question.golden_answers
        assert first.title in question.text
        assert len(passages) == (1 if question.data_source == "one_hop" else 2)
        if question.data_source == "comparison":
            verb = "lives in" if "live in" in question.text else "works for"
            values = {p.text.split(f"{p.title} {verb} ")[1].split(".")[0] for p in passages}
            assert answer == ("yes" if len(values) == 1 else "no")
        else:
            assert answer in last.text
        if question.data_source == "two_hop":
            assert last.title in first.text and last.title not in question.text


@pytest.mark.parametrize("pages", [True, False])
def test_age_is_the_difference_of_two_years(pages):
    world = generate_world(replace(AGES, pages=pages))
    texts = {document.title: document.text for document in world.pages.values() or world.passages}
    ages = [question for question in (*world.train, *world.eval) if question.data_source == "age"]
    assert 20 < len(ages) < 60
    for question in ages:
        (name,) = re.findall(r"how old did (.*) become\?", question.text)
        (born,) = re.findall(rf"{name} was born in (\d+)\.", texts[name])
        (died,) = re.findall(rf"{name} died in (\d+)\.", texts[name])
        assert question.golden_answers == (calculated(f"{died} - {born}"),)
        assert question.golden_answers[0] not in texts[name].replace(".", "").split()
        assert len(question.supporting_ids) == 1 + pages


@pytest.mark.parametrize("config", [SMALL, RUMOURS, AGES], ids=["plain", "rumours", "ages"])
def test_tokenizer_has_every_word(config):
    tokenizer, world = build_word_tokenizer(config.pages, config.age > 0), generate_world(config)
    texts = [f"{question.text} {question.golden_answers[0]}" for question in world.train + world.eval]
    texts += [f"{document.title} {document.text}" for document in [*world.passages, *world.pages.values()]]
    texts += [f"<access> {address} </access>" for address in world.pages]
    for make in GENERATORS.values():
        for demonstration in drawn(make, 0, config, 100):
            texts += [turn.text for turn in demonstration.turns]
            texts += [turn.observation for turn in demonstration.turns if turn.observation]
    texts.append(f'\n\n<information>Doc 1(Title: "{world.passages[0].title}") a</information>\n\n')
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.unk_token_id not in ids, text
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


def load_with_transformers(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize(
    "load",
    [load_tokenizer, pytest.param(load_with_transformers, marks=pytest.mark.medium)],  # its import is slow
)
def test_tokenizer_survives_saving(tmp_path, load):
    tokenizer = build_word_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    text = "<think> find adara almson </think>\n<search> adara almson </search>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.eos_token_id == tokenizer.eos_token_id


def test_more_words_move_no_token():
    plain, pages = build_word_tokenizer().get_vocab(), build_word_tokenizer(pages=True).get_vocab()
    ages = build_word_tokenizer(pages=True, ages=True).get_vocab()
    assert plain == {word: pages[word] for word in plain}
    words = {word: index for word, index in pages.items() if "access" not in word}
    assert words == {word: ages[word] for word in words}


@pytest.mark.medium
def test_no_demonstration_shows_a_whole_two_hop_solution():
    counts = Counter()
    for demonstration in drawn(imperfect, 1, SMALL, 3000):
        assert all(split_of(d.title) == "cold_start" for turn in demonstration.turns for d in turn.documents)
        if demonstration.question.data_source != "two_hop":
            continue
        learned = [turn for turn in demonstration.turns if turn.trained]
        searches = sum(bool(turn.documents) for turn in learned)
        is_right = f"<answer> {demonstration.question.golden_answers[0]} </answer>" in learned[-1].text
        assert not (searches == 2 and is_right)
        assert not (len(demonstration.turns) == 3 and is_right)
        counts["cut" if searches == 2 else "second half" if searches == 0 else "early"] += 1
    assert len(counts) == 3 and min(counts.values()) > 100, counts


def test_world_and_demonstrations_of_a_seed_stay():
    """Numbers of studies stand beside seeds; also notices changed shares of flaws, rumours and detours."""
    digest = hashlib.sha256()
    for config in (SMALL, RUMOURS, AGES):
        digest.update(repr(generate_world(config)).encode())
        for generator in GENERATORS.values():
            digest.update(repr(drawn(generator, 3, config, 400)).encode())
    assert digest.hexdigest()[:16] == "8f94415c8580c3af"


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_world_folder_is_written_once(tmp_path):
    config = replace(SMALL, dir=str(tmp_path / "world"))
    folder = write_world(config)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    write_world(config)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert len(load_questions(folder / "eval.jsonl")) == 200 and not (folder / "pages.jsonl").exists()
    contents = [row["contents"] for row in rows_of(folder / "corpus.jsonl")]
    assert all(text.startswith('"') and text.count("\n") == 1 for text in contents)
    for content in (b'{"seed": 0, "peo', (folder / "manifest.json").read_bytes()):
        (folder / "manifest.json").write_bytes(content)
        with pytest.raises(UserError, match="holds something other than this world"):
            write_world(replace(config, seed=5))
        assert (folder / "manifest.json").read_bytes() == content
    pages = rows_of(write_world(replace(PAGES, dir=str(tmp_path / "pages"))) / "pages.jsonl")
    assert len(pages) == 88 and set(pages[0]) == {"url", "contents"}


def test_demonstrations_show_the_whole_way(tmp_path):
    """Each look-up finds its supporting passage, each thought quotes it, and rewards take the answer."""
    config = replace(SMALL, dir=str(tmp_path / "world"), demonstrations=60)
    plain = rows_of(write_world(replace(SMALL, dir=str(tmp_path / "plain"))) / "train.jsonl")
    folder = write_world(config)
    assert rows_of(folder / "train.jsonl") == plain and not (tmp_path / "plain/demonstrations.jsonl").exists()
    demonstrations = load_demonstrations(folder / "demonstrations.jsonl")
    assert [each.question.id for each in demonstrations] == [row["id"] for row in plain[:60]]
    tokenizer = build_word_tokenizer()
    kinds = Counter()
    for demonstration in demonstrations:
        question = demonstration.question
        *searches, last = demonstration.turns
        assert len(searches) == len(question.supporting_ids)
        for turn, name in zip(searches, question.supporting_ids, strict=True):
            assert turn.documents[0].id == name and len(turn.documents) <= 3
            assert f"<search> {turn.documents[0].title} </search>" in turn.text
        assert last.text.endswith(f"<answer> {question.golden_answers[0]} </answer>")
        assert all(tokenizer.unk_token_id not in tokenizer.encode(turn.text) for turn in demonstration.turns)
        kinds[question.data_source, len(searches)] += 1
    assert set(kinds) == {("one_hop", 1), ("two_hop", 2), ("comparison", 2)}
    with pytest.raises(ValueError, match="demonstrations show searches alone"):
        replace(AGES, demonstrations=1)


def test_folder_that_is_older_than_a_key_is_the_same_world(tmp_path):
    config = WorldConfig(dir=str(tmp_path / "world"), people=40, train_questions=20, eval_questions=20)
    manifest = write_world(config) / "manifest.json"
    older = json.loads(manifest.read_text(encoding="utf-8"))
    del older["rumour"]
    manifest.write_text(json.dumps(older), encoding="utf-8")
    assert write_world(config) == manifest.parent


@pytest.mark.parametrize("content", [b"", b'{"seed": 0, "peo', b"[]", b"\xff"])
def test_folder_with_a_foreign_manifest_is_left_alone(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match="holds something other than this world"):
        write_world(replace(SMALL, dir=str(tmp_path)))
    assert (tmp_path / "manifest.json").read_bytes() == content


def test_too_large_world_is_refused():
    # The smallest one has a true object and one other, which every false rumour names.
    smallest = WorldConfig(people=2, cities=2, companies=2, works=1, one_hop=0, two_hop=0, rumour=1)
    assert len(generate_world(replace(smallest, comparison=0)).train) == smallest.train_questions
    with pytest.raises(UserError, match="5000 names of kind 'person' were asked for, but there are"):
        generate_world(WorldConfig(people=5000))
    with pytest.raises(UserError, match="there are 576 addresses"):
        generate_world(replace(PAGES, people=240, cities=50))
