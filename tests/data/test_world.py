"""The generated encyclopedia: questions, passages, rumours, pages, ages and demonstrations."""

import asyncio
import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.articles import write_passages
from calibadv_jax.contrib.worlds.asking import ask
from calibadv_jax.contrib.worlds.demonstrations import Flaws, drills, imperfect, lookups
from calibadv_jax.contrib.worlds.facts import RUMOUR, make_facts, split_of
from calibadv_jax.contrib.worlds.word_tokenizer import build_word_tokenizer
from calibadv_jax.contrib.worlds.words import POOLS
from calibadv_jax.contrib.worlds.world import generate_world, write_world
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.questions import load_questions
from examples.own_tool import Calculator

SMALL = WorldConfig(people=40, cities=12, companies=12, works=8, train_questions=300, eval_questions=200)


@pytest.fixture(scope="module")
def world():
    return generate_world(SMALL)


@pytest.fixture(scope="module")
def tokenizer():
    return build_word_tokenizer()


def test_same_config_same_world(world):
    assert generate_world(SMALL) == world


def test_no_entity_is_in_two_splits(world):
    titles = {passage.title for passage in world.passages}
    assert {split_of(title) for title in titles} == {"train", "eval"}
    by_id = {passage.id: passage for passage in world.passages}
    for questions, split in ((world.train, "train"), (world.eval, "eval")):
        supporting = {by_id[name].title for question in questions for name in question.supporting_ids}
        assert {split_of(title) for title in supporting} == {split}
    answers = [{q.golden_answers[0] for q in part} - {"yes", "no"} for part in (world.train, world.eval)]
    assert not answers[0] & answers[1]


def test_every_word_occurs_in_every_split():
    for kind, (first, second) in POOLS.items():
        for split in ("train", "eval", "cold_start"):
            names = [f"{a} {b}" for a in first for b in second if split_of(f"{a} {b}") == split]
            assert {name.split()[0] for name in names} == set(first), (kind, split)
            assert {name.split()[1] for name in names} == set(second), (kind, split)


def test_answers_follow_from_the_supporting_passages(world):
    by_id = {passage.id: passage for passage in world.passages}
    for question in world.train:
        passages = [by_id[name] for name in question.supporting_ids]
        answer = question.golden_answers[0]
        if question.data_source == "comparison":
            verb = "lives in" if "live in" in question.text else "works for"
            values = [p.text.split(f"{p.title} {verb} ")[1].split(".")[0] for p in passages]
            assert answer == ("yes" if values[0] == values[1] else "no")
        else:
            assert answer in passages[-1].text
            assert len(passages) == {"one_hop": 1, "two_hop": 2}[question.data_source]
        if question.data_source == "two_hop":
            assert passages[1].title in passages[0].text
            assert passages[1].title not in question.text


def test_tokenizer_covers_every_word(world, tokenizer):
    demonstrations = list(itertools.islice(imperfect(0, SMALL), 200))
    texts = [question.text for question in world.train + world.eval]
    texts += [f"{passage.title} {passage.text}" for passage in world.passages]
    texts += [turn.text for demonstration in demonstrations for turn in demonstration.turns]
    passage = world.passages[0]
    texts += [f'\n\n<information>Doc 1(Title: "{passage.title}") {passage.text}</information>\n\n']
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.unk_token_id not in ids, text
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


def test_saved_tokenizer_is_equal(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<think> find adara almson </think>\n<search> adara almson </search>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.eos_token_id == tokenizer.eos_token_id


@pytest.mark.medium
def test_no_demonstration_shows_a_complete_two_hop_solution():
    counts = {"early": 0, "cut": 0, "second half": 0}
    for demonstration in itertools.islice(imperfect(1, SMALL), 3000):
        assert all(split_of(d.title) == "cold_start" for turn in demonstration.turns for d in turn.documents)
        if demonstration.question.data_source != "two_hop":
            continue
        learned = [turn for turn in demonstration.turns if turn.trained]
        searches = sum(bool(turn.documents) for turn in learned)
        is_right = f"<answer> {demonstration.question.golden_answers[0]} </answer>" in learned[-1].text
        assert not (searches == 2 and is_right)
        assert not (len(demonstration.turns) == 3 and is_right)
        kind = "cut" if searches == 2 else "second half" if searches == 0 else "early"
        counts[kind] += 1
    assert min(counts.values()) > 100, counts


def test_look_ups_end_with_the_right_answer():
    for demonstration in itertools.islice(lookups(0, SMALL), 200):
        last = demonstration.turns[-1]
        assert f"<answer> {demonstration.question.golden_answers[0]} </answer>" in last.text


@pytest.mark.medium
def test_one_hop_guesses_are_as_frequent_as_said():
    drawn = [d for d in itertools.islice(imperfect(2, SMALL), 3000) if d.question.data_source == "one_hop"]
    share = sum(len(d.turns) == 1 for d in drawn) / len(drawn)
    assert share == pytest.approx(Flaws().guess, abs=0.06)


def test_world_folder_is_written_once(tmp_path):
    config = WorldConfig(**{**vars(SMALL), "dir": str(tmp_path / "world")})
    folder = write_world(config)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    write_world(config)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert len(load_questions(folder / "eval.jsonl")) == 200
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    assert all(row["contents"].startswith('"') and row["contents"].count("\n") == 1 for row in rows)
    other = WorldConfig(**{**vars(config), "seed": 5})
    with pytest.raises(UserError, match="holds something other than this world"):
        write_world(other)


@pytest.mark.parametrize("manifest", ["", '{"seed": 0, "peo', "[]", "\xff"])
def test_folder_with_foreign_manifest_is_refused(tmp_path, manifest):
    (tmp_path / "manifest.json").write_bytes(manifest.encode("latin-1"))
    with pytest.raises(UserError, match="holds something other than this world"):
        write_world(WorldConfig(**{**vars(SMALL), "dir": str(tmp_path)}))
    assert (tmp_path / "manifest.json").read_bytes() == manifest.encode("latin-1")


def test_too_many_entities_is_one_clear_line():
    with pytest.raises(UserError, match="5000 names of kind 'person' were asked for, but there are"):
        generate_world(WorldConfig(people=5000))


RUMOURS = WorldConfig(
    train_questions=600,
    eval_questions=50,
    one_hop=0.2,
    two_hop=0.2,
    comparison=0,
    rumour=0.6,
    rumour_truth=0.4,
    misread=0.7,
)
COUNTS = {"person": 60, "city": 20, "company": 20, "work": 20}
SAID = RUMOUR.removesuffix("{}")


@pytest.fixture(scope="module")
def rumour_world():
    return generate_world(RUMOURS)


def believed(passage):
    """The one sentence of a passage that may be false."""
    (sentence,) = [part for part in passage.removesuffix(".").split(". ") if part.startswith(SAID)]
    return sentence.removeprefix(SAID)


@pytest.mark.parametrize("truth", [0.0, 0.4, 1.0])
def test_rumours_are_as_often_true_as_asked_for(truth):
    rng = np.random.default_rng(0)
    right = []
    for _ in range(10):
        facts = make_facts(rng, COUNTS, "train", truth)
        passages = dict(write_passages(facts, rng))
        for _ in range(40):
            asked = ask(facts, "rumour", rng)
            name, bridge = asked.searches
            assert f"{asked.statements[0]}." in passages[name]
            assert f"{asked.statements[1]}." in passages[bridge]
            output = believed(passages[name])
            assert output.startswith(bridge)
            right.append(output == asked.statements[1])
            assert asked.answer not in asked.text and facts.rumours[name].said not in asked.text
    assert np.mean(right) == pytest.approx(truth, abs=0.1)


def test_every_passage_has_one_relevant_rumour(rumour_world):
    by_id = {passage.id: passage for passage in rumour_world.passages}
    kinds = dict.fromkeys(("one_hop", "two_hop", "rumour"), 0)
    for question in rumour_world.train:
        kinds[question.data_source] += 1
        passages = [by_id[name] for name in question.supporting_ids]
        output = believed(passages[0].text)
        if question.data_source == "rumour":
            assert output.startswith(passages[1].title)
        if question.data_source == "two_hop":
            assert question.golden_answers[0] not in output or not output.startswith(passages[1].title)
    shares = {kind: count / len(rumour_world.train) for kind, count in kinds.items()}
    assert shares == pytest.approx({"one_hop": 0.2, "two_hop": 0.2, "rumour": 0.6}, abs=0.06)


def test_world_without_rumour_questions_holds_none():
    plain = generate_world(WorldConfig(train_questions=50, eval_questions=50))
    assert not any(SAID in passage.text for passage in plain.passages)
    assert {question.data_source for question in plain.train} == {"one_hop", "two_hop", "comparison"}


def test_smallest_world_has_rumours():
    """One true object and one other, which every false rumour names."""
    config = WorldConfig(
        people=2, cities=2, companies=2, works=1, one_hop=0, two_hop=0, comparison=0, rumour=1
    )
    assert len(generate_world(config).train) == config.train_questions


def test_tokenizer_covers_rumours(rumour_world):
    tokenizer = build_word_tokenizer()
    for text in (passage.text for passage in rumour_world.passages):
        assert tokenizer.unk_token_id not in tokenizer.encode(text, add_special_tokens=False), text


@pytest.mark.medium
def test_demonstrations_believe_and_misread_at_configured_rates():
    credulous, misread = [], []
    for demonstration in itertools.islice(imperfect(0, RUMOURS), 3000):
        if demonstration.question.data_source != "rumour":
            continue
        assert all(turn.trained for turn in demonstration.turns)
        *searches, last = demonstration.turns
        shown = searches[-1].documents
        thought = last.text.partition("<think> ")[2].partition(" </think>")[0]
        answer = last.text.partition("<answer> ")[2].partition(" </answer>")[0]
        assert thought.endswith(answer) and any(f"{thought}." in document.text for document in shown)
        credulous.append(len(searches) == 1)
        if len(searches) == 1:
            assert thought == SAID + believed(shown[0].text)
        else:
            misread.append(demonstration.question.golden_answers[0] != answer)
    assert np.mean(credulous) == pytest.approx(Flaws().credulous, abs=0.05)
    assert np.mean(misread) == pytest.approx(RUMOURS.misread, abs=0.05)


def test_lookups_quote_rumours_only():
    drawn = list(itertools.islice(lookups(0, RUMOURS), 1000))
    kinds = {demonstration.question.data_source for demonstration in drawn}
    assert kinds == {"drill", "one_hop", "rumour"}  # no comparisons where none are asked
    rumours = [item for item in drawn if item.question.data_source == "rumour"]
    assert 0.2 < len(rumours) / len(drawn) < 0.4
    assert all(len(rumour.turns) == 2 and SAID in rumour.turns[-1].text for rumour in rumours)


def test_older_world_folder_is_accepted(tmp_path):
    config = WorldConfig(dir=str(tmp_path / "world"), people=40, train_questions=20, eval_questions=20)
    manifest = write_world(config) / "manifest.json"
    older = json.loads(manifest.read_text(encoding="utf-8"))
    del older["rumour"]
    manifest.write_text(json.dumps(older), encoding="utf-8")
    assert write_world(config) == manifest.parent


AGES = WorldConfig(
    people=20, cities=8, companies=8, works=8, train_questions=60, eval_questions=20, one_hop=1, two_hop=0,
    comparison=0, age=1, pages=True,
)  # fmt: skip


def calculated(body):
    """What the example's action brings."""
    action = Calculator()
    return asyncio.run(action.call(action.parse(body))).text


def is_age(demonstration):
    return demonstration.question.data_source == "age"


def tags_of(demonstration):
    return tuple(turn.text.rpartition("</")[2].rstrip(">") for turn in demonstration.turns)


@pytest.mark.parametrize("pages", [True, False])
def test_age_is_a_difference_found_in_no_text(pages):
    world = generate_world(replace(AGES, pages=pages))
    texts = {item.title: item.text for item in world.pages or world.passages}
    asked = [item for item in (*world.train, *world.eval) if item.data_source == "age"]
    assert 20 < len(asked) < 60
    for question in asked:
        (name,) = re.findall(r"how old did (.*) become\?", question.text)
        (born,) = re.findall(rf"{name} was born in (\d+)\.", texts[name])
        (died,) = re.findall(rf"{name} died in (\d+)\.", texts[name])
        assert question.golden_answers == (calculated(f"{died} - {born}"),)
        assert question.golden_answers[0] not in texts[name].replace(".", "").split()
        assert len(question.supporting_ids) == 1 + pages


def test_tokenizer_covers_ages_and_keeps_other_ids():
    tokenizer, of_pages = build_word_tokenizer(pages=True, ages=True), build_word_tokenizer(pages=True)
    world = generate_world(AGES)
    texts = [f"{passage.title} {passage.text}" for passage in (*world.passages, *world.pages)]
    texts += [f"{item.text} {item.golden_answers[0]}" for item in (*world.train, *world.eval)]
    for make in (imperfect, lookups, drills):
        for item in itertools.islice(make(0, AGES), 100):
            texts += [f"{turn.text} {turn.observation}" for turn in item.turns]
    assert [text for text in texts if tokenizer.unk_token_id in tokenizer.encode(text)] == []
    kept = {word: index for word, index in of_pages.get_vocab().items() if "access" not in word}
    assert kept == {word: tokenizer.get_vocab()[word] for word in kept}


def test_few_demonstrations_calculate_correctly():
    ways = Counter()
    for demonstration in itertools.islice(imperfect(0, AGES), 600):
        if not is_age(demonstration):
            continue
        ways[tags_of(demonstration)[-3:]] += 1
        if "calculate" in tags_of(demonstration):
            *_, page, turn, last = demonstration.turns
            (body,) = re.findall("<calculate> (.*) </calculate>", turn.text)
            assert all(year in page.documents[0].text for year in body.split(" - "))
            (answer,) = demonstration.question.golden_answers
            assert calculated(body) == turn.observation == answer and f"> {answer} <" in last.text
    assert set(ways) == {
        ("answer",), ("search", "answer"), ("search", "access", "answer"), ("access", "calculate", "answer"),
    }  # fmt: skip
    assert 0 < ways["access", "calculate", "answer"] < sum(ways.values()) / 4


def test_every_careful_demonstration_of_an_age_calculates():
    ways = {
        "calculate" in tags_of(demonstration)
        for demonstration in itertools.islice(lookups(0, AGES), 200)
        if is_age(demonstration)
    }
    assert ways == {True}


PAGES = WorldConfig(
    people=20, cities=8, companies=8, works=8, train_questions=60, eval_questions=20, one_hop=1, two_hop=0,
    comparison=0, pages=True,
)  # fmt: skip


def test_search_alone_answers_nothing():
    world = generate_world(PAGES)
    passages = {passage.id: passage for passage in world.passages}
    pages = {page.id: page for page in world.pages}
    assert len({page.address for page in world.pages}) == len(world.passages)
    for question in (*world.train, *world.eval):
        passage_id, page_id = question.supporting_ids
        passage, page, (answer,) = passages[passage_id], pages[page_id], question.golden_answers
        assert passage.title == page.title and answer in page.text and answer not in passage.text
        assert passage.text == f"the page of {page.title} is {page.address}."


def test_world_is_written_with_its_pages(tmp_path):
    write_world(replace(PAGES, dir=str(tmp_path / "world")))
    rows = [json.loads(line) for line in (tmp_path / "world/pages.jsonl").read_text().splitlines()]
    assert len(rows) == 88 and set(rows[0]) == {"url", "contents"}
    tokenizer, plain = build_word_tokenizer(pages=True), build_word_tokenizer()
    texts = [*(f"<access> {row['url']} </access> {row['contents']}" for row in rows), "the page of"]
    assert not any(tokenizer.unk_token_id in tokenizer.encode(text) for text in texts)
    vocabulary = plain.get_vocab()
    assert vocabulary == {word: tokenizer.get_vocab()[word] for word in vocabulary}


def test_demonstrations_read_the_page_or_guess():
    ways = {}
    for demonstration in islice(imperfect(0, PAGES), 300):
        tags = tuple(turn.text.rpartition("</")[2].rstrip(">") for turn in demonstration.turns)
        ways[tags] = ways.get(tags, 0) + 1
        if tags[-2:] == ("access", "answer"):
            (page,) = demonstration.turns[-2].documents
            assert (
                demonstration.question.golden_answers[0] in page.text
                and page.id == f"page {_address(demonstration.turns[-2])}"
            )
    assert set(ways) >= {("answer",), ("search", "answer"), ("search", "access", "answer")}
    assert ways["search", "access", "answer"] < 150  # most do not read


def _address(turn):
    return turn.text.partition("<access> ")[2].removesuffix(" </access>")


def test_there_must_be_an_address_for_every_passage():
    with pytest.raises(UserError, match="there are 576 addresses"):
        generate_world(replace(PAGES, people=240, cities=50))


SIZES = {"person": 40, "city": 12, "company": 12, "work": 12}


@pytest.fixture(scope="module")
def facts():
    return make_facts(np.random.default_rng(0), SIZES, "train")


@pytest.mark.parametrize(("kind", "hops"), [("one_hop", 1), ("two_hop", 2), ("comparison", 2)])
def test_every_statement_is_in_its_passage(facts, kind, hops):
    rng = np.random.default_rng(1)
    passages = dict(write_passages(facts, rng))
    for _ in range(300):
        asked = ask(facts, kind, rng)
        assert len(asked.searches) == len(asked.findings) == len(asked.statements) == hops
        for title, finding, statement in zip(asked.searches, asked.findings, asked.statements, strict=True):
            assert f"{statement}." in passages[title]
            assert statement.startswith(title) and statement.endswith(finding)
        if kind == "comparison":
            assert asked.answer == ("yes" if asked.findings[0] == asked.findings[1] else "no")
            assert asked.searches[0] != asked.searches[1]
            assert all(name in asked.text for name in asked.searches)
        else:
            assert asked.answer == asked.findings[-1]
            assert asked.searches[0] in asked.text
            assert asked.answer not in asked.text  # nobody is the answer to a question about himself
        if kind == "two_hop":
            assert asked.searches[1] == asked.findings[0]


def test_no_entity_occurs_twice(facts):
    for kind, names in facts.entities.items():
        assert len(names) == len(set(names)) == SIZES[kind]


@pytest.mark.parametrize("generator", [imperfect, lookups])
def test_careful_demonstration_quotes_shown_passages(generator):
    quotes = 0
    for demonstration in itertools.islice(generator(3, WorldConfig()), 1000):
        shown = None
        for turn in demonstration.turns:
            thought = turn.text.partition("<think> ")[2].partition(" </think>")[0]
            if shown is not None and " and " not in thought and not thought.startswith("find "):
                quotes += 1
                assert f"{thought}." in shown
            shown = turn.documents[0].text if turn.documents else None
            if turn.documents:
                title = turn.text.partition("<search> ")[2].partition(" </search>")[0]
                assert turn.documents[0].title == title
                assert len({document.title for document in turn.documents}) == len(turn.documents) == 3
        assert shown is None or generator is imperfect  # it ends with an answer, or was cut after a search
    assert quotes > 300


@pytest.mark.medium
def test_wrong_name_is_searched_before_the_right_one():
    detours = 0
    for demonstration in itertools.islice(imperfect(4, WorldConfig()), 2000):
        searches = [turn.documents[0] for turn in demonstration.turns if turn.documents]
        if demonstration.question.data_source == "one_hop" and len(searches) == 2:
            detours += 1
            assert (
                demonstration.turns[-1].text.startswith("<think> ") and not demonstration.turns[-1].documents
            )
            assert demonstration.question.golden_answers[0] in searches[1].text
            assert searches[1].title in demonstration.question.text
    assert detours > 10
