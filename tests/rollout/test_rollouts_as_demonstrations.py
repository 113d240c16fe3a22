"""Kept rollouts to demonstrations: the best of each question, once, as the agent loop wrote them."""

from __future__ import annotations

import asyncio
import json
import re
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loop_fakes import DOCUMENT, QUESTION, DictRetriever, ScriptedSampler
from tools_rig import END, call_text, chat_tokenizer

from calibadv_jax import Action, cli
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.commands import sft
from calibadv_jax.config import Config, PromptConfig, RolloutConfig, ToolConfig
from calibadv_jax.core.errors import ActionRefused
from calibadv_jax.core.interfaces import Reply
from calibadv_jax.core.tokens import encode
from calibadv_jax.core.trajectory import Document, Group, Question
from calibadv_jax.data.demonstrations import load_demonstrations
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.agent import RolloutContext, run_trajectory
from calibadv_jax.rollout_store.schema import VERSION
from calibadv_jax.rollout_store.writer import RolloutWriter
from calibadv_jax.run.configured_actions import make_actions

SHELVED = {"id": "d1", "title": "Title", "text": "Text.", "score": 0.5}


def turn(text, length, documents=(), observation=""):
    columns = {"text": f"<think> t </think> {text}", "token_ids": [1] * length, "documents": list(documents)}
    return columns | {"observation_text": observation}


def trajectory(question, answer, score=1.0, length=5, **fields):
    """A row in the columns that select-rollouts reads, and one that it does not."""
    shown = '\n\n<information>Doc 1(Title: "Title") Text.</information>\n\n'
    search = turn(f"<search> {question} </search>", 3, [SHELVED], shown)
    return {
        **{"step": 1, "group": 0, "index": 0, "question_id": question, "question": f"Who is {question}?"},
        **{"data_source": "nq", "golden_answers": ["Ann"], "supporting_ids": ["d1"], "error": None},
        **{"answer_score": score, "format_valid": True, "seconds": 0.5},
        "turns": [search, turn(f"<answer> {answer} </answer>", length)],
        **fields,
    }


def write(folder, step, rows, config=None):
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    kept = {} if config is None else {"config": json.dumps(config)}
    schema = pa.Table.from_pylist([trajectory("q", "a") | {"error": "e"}]).schema
    schema = schema.with_metadata({"schema_version": VERSION} | kept)
    table = pa.Table.from_pylist([row | {"step": step} for row in rows], schema=schema)
    pq.write_table(table, folder / f"rollouts/step_{step}.parquet", compression="zstd")


@pytest.fixture
def select(tmp_path, capsys):
    """Runs the command; gives its status, output, errors, and the last texts of the demonstrations."""

    def select(*argv, output="d.jsonl"):
        file = tmp_path / output
        file.unlink(missing_ok=True)
        with pytest.raises(SystemExit) as stop:
            cli.calibadv(["select-rollouts", *map(str, argv), "--output", str(file)])
        last = [each.turns[-1].text for each in load_demonstrations(file)] if file.exists() else []
        answers = [text.partition("<answer> ")[2].partition(" <")[0] for text in last]
        return stop.value.code, *capsys.readouterr(), answers

    return select


def test_good_ones_become_demonstrations(tmp_path, select):
    rows = [
        trajectory("q1", "right"),
        trajectory("q2", "half", score=0.5),
        trajectory("q3", "unformed", format_valid=False),
        trajectory("q4", "gone", error="retriever: gone"),
    ]
    write(tmp_path / "run", 3, rows)
    status, out, *_ = select(tmp_path / "run")
    (each,) = load_demonstrations(tmp_path / "d.jsonl")
    assert status == 0 and each.question == Question("q1", "Who is q1?", ("Ann",), "nq", ("d1",))
    assert [turn.text for turn in each.turns] == [turn["text"] for turn in rows[0]["turns"]]
    assert each.turns[0].documents == (Document("d1", "Title", "Text."),)
    counts = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[2:])
    assert (counts.pop("all"), counts.pop("repeated or beyond --per-question")) == ("4", "0")
    assert counts == dict.fromkeys(("score too low", "format invalid", "failed", "written", "questions"), "1")


def test_best_shortest_earliest_trajectory_is_chosen(tmp_path, select):
    """Of equal texts the better one stays; a data source has questions of its own."""
    rows = [trajectory("q", "long", length=9), trajectory("q", "worse", score=0.9, length=1)]
    write(tmp_path / "a", 2, rows)
    rows = [trajectory("q", "late"), trajectory("q", "short", length=4), trajectory("q", "SHORT ", length=7)]
    write(tmp_path / "a", 10, rows)
    write(tmp_path / "b", 1, [trajectory("q", "other run"), trajectory("q", "Ann", data_source="hotpotqa")])
    order = ["short", "late", "other run", "long", "worse"]
    for count, left_out in ((1, 5), (3, 3), (9, 1)):
        options = ["--min-score", "0.8", "--per-question", count]
        _, out, _, answers = select(tmp_path / "a", tmp_path / "b", *options)
        assert answers == ["Ann", *order[:count]]
        assert re.search(rf"repeated or beyond --per-question +{left_out}\n", out)


def test_lowest_score_defaults_to_the_largest_reward(tmp_path, select):
    rows = [trajectory("q1", "half", score=1.0), trajectory("q2", "right", score=2.0)]
    config = {"reward": {"answer": {"f1": 1, "em": 1}, "judge": {"max_answer": 2000}}}  # a key of 0.1.0
    write(tmp_path / "run", 1, rows, config)
    assert select(tmp_path / "run")[-1] == ["right"]
    write(tmp_path / "run", 1, rows[:1], config)
    status, _, error, _ = select(tmp_path / "run")
    assert status == 2 and "no trajectory with a score of the largest reward among 1; lower" in error


def test_lines_of_a_new_folders_file_are_rows(tmp_path, select):
    write(tmp_path / "run", 1, [trajectory("q", "Ann"), trajectory("q2", "Ann\u2028Bob")])
    select(tmp_path / "run", output="new/d.jsonl")
    lines = (tmp_path / "new/d.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert [json.loads(line)["id"] for line in lines] == ["q", "q2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("run --min-score 2", "no trajectory with a score of 2 or more among 1"),
        ("run --per-question 0", "argument --per-question: 0: give 1 or more"),
        ("run/none", "none: no rollouts/step_N.parquet"),
        ("damaged", "step_1.parquet: cannot be read"),
        ("run shuffled", "shuffled/rollouts/step_1.parquet: its scores were permuted"),  # those of others
        ("", "required: RUN"),
    ],
)
def test_mistake_is_one_line_and_writes_nothing(tmp_path, monkeypatch, select, argv, words):
    monkeypatch.chdir(tmp_path)
    for name, shuffle in (("run", False), ("damaged", False), ("shuffled", True)):
        write(tmp_path / name, 1, [trajectory("q", "Ann")], {"reward": {"shuffle": shuffle}})
    (tmp_path / "damaged/rollouts/step_1.parquet").write_bytes(b"PAR1")
    status, _, error, _ = select(*argv.split())
    assert status == 2 and error.count("\n") == 1 and words in error
    assert not (tmp_path / "d.jsonl").exists()


LONG = Document("d2", "Bob", "Bob is a baker. " * 40)


class Both(Action):
    """Replies with words and documents, with words alone to "x", refuses an empty body."""

    name, purpose, may_be_empty = "both", "have both", True

    async def call(self, argument):
        if not argument:
            raise ActionRefused(f"{argument!r} are no <numbers>")
        return Reply(() if argument == "x" else (DOCUMENT, LONG), "two lines\nof words")


class Own(Both):
    """Lists documents in its own way."""

    name = "own"

    def render(self, reply):
        return "- " + reply.documents[0].title


TURNS = {
    "documents": ["<search> ann </search>"],
    "a document that is cut": ["<search> bob </search>"],
    "nothing found": ["<search> nobody </search>"],
    "a page, with the action's own limit": ["<access> bob </access>"],
    "no page": ["<access> nobody </access>"],
    "words": ["<both> x </both>", "<search> ann </search>"],
    "a refusal": ["<both></both>"],
    "words and documents": ["<both> y </both>"],
    "documents in its own way": ["<own> y </own>"],
}


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}<think>"])
@pytest.mark.parametrize("prepend_think", [False, True])
@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
def test_selected_rollout_is_shown_as_it_was(tmp_path, byte_tokenizer, turns, prepend_think, template):
    byte_tokenizer = deepcopy(byte_tokenizer)
    byte_tokenizer.chat_template = template
    own = [ToolConfig(f"{__name__}:{name}") for name in ("Both", "Own")]
    config = Config(
        prompt=PromptConfig(template="short", prepend_think=prepend_think),
        rollout=RolloutConfig(max_observation_length=300, max_searches=3),
        tools=[ToolConfig("search"), ToolConfig("access", max_length=150), *own],
    )
    opening = "" if prepend_think else "<think>"
    texts = [f"{opening} t </think>{body}" for body in (*turns, "<answer> Ann </answer>")]
    if template:
        texts[0] = texts[0].removeprefix("<think>")
    context = RolloutContext(
        ScriptedSampler(byte_tokenizer, lambda _, turn: texts[turn]),
        DictRetriever({"ann": [DOCUMENT], "bob": [DOCUMENT, LONG]}, {"bob": replace(LONG, id="page bob")}),
        byte_tokenizer,
        config.rollout,
        config.prompt,
        make_actions(config),
    )
    written = asyncio.run(run_trajectory(context, QUESTION, 0, 0, session="s"))
    assert written.answer == "Ann" and len(written.turns) == len(texts)
    groups = score_groups([Group(QUESTION, [written])], config.reward, np.random.default_rng(0))
    credits = compute_advantages(groups, config.advantage).credits
    RolloutWriter(tmp_path / "run", config, 1).write(1, groups, credits, [[None]], 0)
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(["select-rollouts", str(tmp_path / "run"), "--output", str(tmp_path / "d.jsonl")])
    assert stop.value.code in (0, None)

    (demonstration,) = load_demonstrations(tmp_path / "d.jsonl", context.grammar)
    learned = sft.encode_demonstration(demonstration, config, byte_tokenizer, "sampled")
    parts = [part for turn in written.turns for part in (turn.token_ids, turn.observation_ids)]
    whole = np.concatenate([written.prompt_ids, *parts])
    assert byte_tokenizer.decode(learned.tokens) == byte_tokenizer.decode(whole)
    sampled = [len(encode(byte_tokenizer, text)) for text in texts]
    assert int(np.sum(learned.mask)) == sum(sampled)


def tool_trajectory(tokenizer, config, question, *texts):
    """A trajectory with tool calls, scored."""
    context = RolloutContext(
        ScriptedSampler(tokenizer, lambda _, turn: texts[turn]),
        DictRetriever({"ann": [DOCUMENT]}),
        tokenizer,
        config.rollout,
        config.prompt,
        tool_calls=config.tool_calls,
        answer_from=config.answer_from,
    )
    return asyncio.run(run_trajectory(context, question, 0, 0, session="s"))


def test_tool_calls_become_turns_in_tags(tmp_path, capsys):
    """They serve both protocols; what tags cannot say is left out, and counted."""
    tokenizer = chat_tokenizer()
    config = Config(rollout=RolloutConfig(protocol="tool_calls"))
    ann, nobody = call_text(query="ann"), call_text(query="nobody")
    answer = f"<think>\nso\n</think>\n\nAnn{END}"
    other = replace(QUESTION, id="2")
    looks = f"<think>\nlook\n</think>\n\n{ann}{END}"
    written = tool_trajectory(tokenizer, config, QUESTION, looks, nobody + END, answer)
    several = tool_trajectory(tokenizer, config, other, f"{ann}\n{nobody}{END}", answer)
    groups = [Group(QUESTION, [written]), Group(other, [several])]
    groups = score_groups(groups, config.reward, np.random.default_rng(0))
    credits = compute_advantages(groups, config.advantage).credits
    RolloutWriter(tmp_path / "run", config, 1).write(1, groups, credits, [[None], [None]], 0)
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(["select-rollouts", str(tmp_path / "run"), "--output", str(tmp_path / "d.jsonl")])
    assert stop.value.code in (0, None)
    assert re.search(r"calls that turns in tags cannot say +1\n", capsys.readouterr().out)
    (demonstration,) = load_demonstrations(tmp_path / "d.jsonl")
    assert [turn.text for turn in demonstration.turns] == [
        "<think> look </think>\n<search> ann </search>",
        "<search> nobody </search>",
        "<think> so </think>\n<answer> Ann </answer>",
    ]
    learned = sft.encode_demonstration(demonstration, config, tokenizer, "sampled")
    parts = [part for turn in written.turns for part in (turn.token_ids, turn.observation_ids)]
    assert learned.tokens.tolist() == np.concatenate([written.prompt_ids, *parts]).tolist()


def test_output_must_be_named(tmp_path, capsys):
    write(tmp_path / "run", 1, [trajectory("q", "Ann")])
    with pytest.raises(SystemExit) as stop:
        cli.calibadv(["select-rollouts", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "required: --output" in error
