"""The generated encyclopedia: disjoint splits, true answers, no unknown word, repeatable."""

import itertools
import json

import pytest

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.demonstrations import Flaws, imperfect, lookups
from calibadv_jax.contrib.worlds.words import POOLS, build_word_tokenizer
from calibadv_jax.contrib.worlds.world import generate_world, split_of, write_world
from calibadv_jax.core.errors import UserError
from calibadv_jax.data.demonstration_files import load_demonstrations
from calibadv_jax.data.demonstrations import DemoTurn
from calibadv_jax.data.questions import load_questions

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


def test_the_tokenizer_knows_every_word(world, tokenizer):
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


def test_the_tokenizer_survives_saving(tokenizer, tmp_path):
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


def test_world_folder_is_written_once_and_never_over_something_else(tmp_path):
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
def test_a_folder_with_a_manifest_of_something_else_is_left_alone(tmp_path, manifest):
    (tmp_path / "manifest.json").write_bytes(manifest.encode("latin-1"))
    with pytest.raises(UserError, match="holds something other than this world"):
        write_world(WorldConfig(**{**vars(SMALL), "dir": str(tmp_path)}))
    assert (tmp_path / "manifest.json").read_bytes() == manifest.encode("latin-1")


def test_too_many_entities_is_one_clear_line():
    with pytest.raises(UserError, match="5000 names of kind 'person' were asked for, but there are"):
        generate_world(WorldConfig(people=5000))


def test_own_demonstrations(tmp_path):
    path = tmp_path / "demos.jsonl"
    row = {
        "id": "a",
        "question": "q",
        "golden_answers": ["x"],
        "data_source": "mine",
        "turns": [
            {"text": "<search> q </search>", "documents": [{"title": "T", "text": "t"}]},
            {"text": "<answer> x </answer>"},
        ],
    }
    path.write_text(json.dumps(row) + "\n")
    (demonstration,) = load_demonstrations(path)
    assert demonstration.turns[1] == DemoTurn("<answer> x </answer>")
    assert demonstration.turns[0].documents[0].title == "T"
    path.write_text(json.dumps(row | {"turns": [{"text": ""}]}) + "\n")
    with pytest.raises(UserError, match=r"demos.jsonl:1: every turn needs a non-empty 'text'"):
        load_demonstrations(path)
    path.write_text(json.dumps(row | {"turns": [{"text": "<think> t </think> Rome"}]}) + "\n")
    with pytest.raises(UserError, match="demos.jsonl:1: a turn must hold <search> query </search> or"):
        load_demonstrations(path)
