"""Runs for the trajectory page: one generated, one that a person could have tampered with."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from benchmarks.generated_run import answer_turn, make_tokenizer, make_turn, search_turn, write_run
from calibadv_jax.config import Config
from calibadv_jax.contrib.pages.page_server import make_server
from calibadv_jax.contrib.pages.site import Site
from calibadv_jax.core.trajectory import Document, Group, Question, Trajectory

MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"&amp;'
SHELF = {name: Document(name, f"title {name}", f"text of {name}", 1.0) for name in "abcdefgh"}


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def small_group(tokenizer):
    """Makes a group whose credit can be worked out by hand.

    Trajectory 0 is right and saw a, b, c. 1 is wrong, and its first search found a and b of three documents;
    its second one repeats them. 2 is wrong and found nothing. 3 ends in an invalid turn. 4 failed.
    """

    def make(source="two_hop", mark=""):
        question = Question(f"q{source}", f"who keeps it?{mark}", (f"ann{mark}",), source, ("a",))

        def search(think, documents):
            return search_turn(tokenizer, think + mark, f"query{mark}", [SHELF[name] for name in documents])

        hostile = Document("h", f"h{mark}", f"text{mark}")
        turns = [
            [search("first of all", "abc"), answer_turn(tokenizer, "so", f"ann{mark}")],
            [search("one", "abd"), search("two words here", "abe"), answer_turn(tokenizer, "so", "bob")],
            [search_turn(tokenizer, "three", f"query{mark}", [hostile]), answer_turn(tokenizer, "so", "bob")],
            [search("four", "a"), make_turn(tokenizer, f"rambling{mark}", kind="invalid")],
            [search("five", "a")],
        ]
        prompt = np.array(tokenizer.encode(question.text).ids, np.int32)
        errors = [None, None, None, None, f"retriever: gone{mark}"]
        trajectories = [
            Trajectory(question, prompt, each, index, 1.5, error)
            for index, (each, error) in enumerate(zip(turns, errors, strict=True))
        ]
        return Group.from_attempts(question, trajectories)

    return make


@pytest.fixture(scope="session")
def small_run(tmp_path_factory, tokenizer, small_group) -> Path:
    """Two steps: a plain group and a hostile one in the first, one of another source in the second."""
    folder = tmp_path_factory.mktemp("small") / "run"
    steps = [[small_group(), small_group(mark=MARKUP)], [small_group("one_hop")]]
    write_run(folder, steps, Config(), tokenizer)
    return folder


def evaluation_row(name: str, answer: str, em: float, source="nq", temperature="0", mark="") -> dict:
    """A line of an evaluation's file: one trajectory with a search and an answer."""
    scores = {"em": em, "f1": em, "answered": 1.0, "searches": 1.0}
    observation = f'<information>Doc 1(Title: "a{mark}") b{mark}\nDoc 2(Title: "c") d</information>'
    search = {"kind": "search", "text": f"<search> query{mark} </search>", "observation": observation}
    last = {"kind": "answer", "text": f"<answer> {answer} </answer>", "observation": ""}
    blank = {"stop_reason": "stop", "tokens": 5, "observation_tokens": 9, "document_ids": ["1", "2"]}
    trajectory = {"error": None, "answer": answer, "scores": scores, "prompt_tokens": 3}
    return {
        "temperature": temperature,
        "data_source": source,
        "id": name,
        "evaluation": "e",
        "content": "c",
        "question": f"who keeps {name}?{mark}",
        "golden_answers": ["ann"],
        "scores": scores,
        "trajectories": [trajectory | {"turns": [search | blank, last | blank]}],
    }


@pytest.fixture(scope="session")
def markup():
    """Text that would run a script if a page took it for markup."""
    return MARKUP


@pytest.fixture
def evaluated_run(tmp_path, small_run) -> Path:
    """The small run with evaluations before and after: one question is gained, one lost, one asked once."""
    folder = tmp_path / "evaluated"
    shutil.copytree(small_run, folder)
    before = [
        evaluation_row("q0", f"bob{MARKUP}", 0.0, mark=MARKUP),
        evaluation_row("q1", "bob", 0.0),
        evaluation_row("q2", "ann", 1.0, "two_hop"),
    ]
    after = [
        evaluation_row("q0", f"ann{MARKUP}", 1.0, mark=MARKUP),
        evaluation_row("q2", "bob", 0.0, "two_hop"),
        evaluation_row("q1", "bob", 0.0, temperature="1"),
    ]
    for name, rows in (("before", before), ("after", after)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"evaluation_{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def served():
    """A context: the page of a run's folder, at the address that it yields."""

    @contextmanager
    def serve(folder: Path) -> Iterator[str]:
        site = Site(folder)
        site.steps()  # as the command does before it says the address
        with make_server(site, 0) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    return serve
