"""A generated encyclopedia: fictional people, cities, companies and books, and questions about them.

Every name is two words. Which split a name belongs to is decided by a hash of the whole name, so that
train, eval and cold-start entities never share a name while every single word occurs in all splits:
words can be learned, facts cannot be memorised and must be searched.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calibadv_jax.config import WorldConfig
from calibadv_jax.contrib.worlds.articles import Page, Passage, summarise, write_pages, write_passages
from calibadv_jax.contrib.worlds.asking import ask, draw_kinds
from calibadv_jax.contrib.worlds.facts import Facts, facts_of
from calibadv_jax.contrib.worlds.word_tokenizer import build_word_tokenizer
from calibadv_jax.core.errors import UserError
from calibadv_jax.core.files import replacing_folder, write_jsonl
from calibadv_jax.core.trajectory import Question
from calibadv_jax.data.questions import write_questions


@dataclass(frozen=True)
class World:
    """One corpus for both splits, and the questions of each."""

    passages: list[Passage]
    train: list[Question]
    eval: list[Question]
    pages: list[Page] = field(default_factory=list)


def generate_world(config: WorldConfig) -> World:
    """Both splits' facts in one shuffled corpus, and their questions. A function of the config alone."""
    rng = np.random.default_rng(config.seed)
    counts = {
        "person": config.people,
        "city": config.cities,
        "company": config.companies,
        "work": config.works,
    }
    splits = {split: facts_of(config, rng, counts, split) for split in ("train", "eval")}
    texts = [text for facts in splits.values() for text in write_passages(facts, rng)]
    pages = write_pages(texts, rng) if config.pages else []
    texts = [summarise(page) for page in pages] or texts
    order = rng.permutation(len(texts))
    passages = [Passage(str(number), *texts[index]) for number, index in enumerate(order)]
    ids = {passage.title: [passage.id] for passage in passages}
    for page in pages:
        ids[page.title].append(page.id)
    return World(
        passages,
        _questions(splits["train"], config, config.train_questions, "train", ids, rng),
        _questions(splits["eval"], config, config.eval_questions, "eval", ids, rng),
        pages,
    )


def _questions(
    facts: Facts,
    config: WorldConfig,
    count: int,
    split: str,
    ids: dict[str, list[str]],
    rng: np.random.Generator,
) -> list[Question]:
    kinds = draw_kinds(config, count, rng)
    questions = []
    for number, kind in enumerate(kinds):
        asked = ask(facts, kind, rng)
        supporting = tuple(one for title in asked.searches for one in ids[title])
        questions.append(Question(f"{split}_{number}", asked.text, (asked.answer,), asked.kind, supporting))
    return questions


def write_world(config: WorldConfig) -> Path:
    """Writes corpus.jsonl (wiki-18 format), train.jsonl, eval.jsonl, tokenizer/ and manifest.json.

    A world with pages has pages.jsonl too.

    A folder that already holds exactly this world is left unchanged.

    Raises:
        UserError: the folder holds something else.
    """
    folder = Path(config.dir)
    manifest = dataclasses.asdict(config) | {"dir": ""}
    if _manifest(folder) == manifest:
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: holds something other than this world; remove it or change world.dir")
    world = generate_world(config)
    with replacing_folder(folder) as partial:
        write_corpus(partial / "corpus.jsonl", world.passages)
        write_questions(partial / "train.jsonl", world.train)
        write_questions(partial / "eval.jsonl", world.eval)
        if config.pages:
            rows = ({"url": page.address, "contents": _contents(page)} for page in world.pages)
            write_jsonl(partial / "pages.jsonl", rows)
        build_word_tokenizer(config.pages, config.age > 0).save_pretrained(partial / "tokenizer")
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    return folder


def _manifest(folder: Path) -> dict[str, Any] | None:
    """What the folder says that it holds; a key that is newer than the folder has its default there."""
    try:
        known = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return dataclasses.asdict(WorldConfig()) | known if isinstance(known, dict) else None


def write_corpus(path: Path, passages: Sequence[Passage]) -> None:
    """One ``{"id", "contents"}`` row a passage; contents is the quoted title, a newline, the text."""
    write_jsonl(path, ({"id": one.id, "contents": _contents(one)} for one in passages))


def _contents(one: Passage | Page) -> str:
    return f'"{one.title}"\n{one.text}'
