"""A kept rollout that is selected for `calibadv sft` becomes the tokens that the agent loop wrote."""

import asyncio
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from loop_fakes import DOCUMENT, QUESTION, DictRetriever, ScriptedSampler

from calibadv_jax import Action, cli
from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.commands import sft
from calibadv_jax.config import Config, PromptConfig, RolloutConfig, ToolConfig
from calibadv_jax.core.errors import ActionRefused
from calibadv_jax.core.interfaces import Reply
from calibadv_jax.core.trajectory import Document, Group
from calibadv_jax.data.demonstrations import load_demonstrations
from calibadv_jax.record.writer import RolloutWriter
from calibadv_jax.rewards.score import score_groups
from calibadv_jax.rollout.agent import RolloutContext, run_trajectory
from calibadv_jax.rollout.observation import encode
from calibadv_jax.run.actions import make_actions

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
