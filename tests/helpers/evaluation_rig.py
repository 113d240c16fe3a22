"""Evaluations with a scripted policy and retriever; everything between them is the program's own."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from config_rig import changed
from tiny_policy import Letters

from calibadv_jax.commands import evaluate
from calibadv_jax.config import Config, ToolConfig
from calibadv_jax.core.interfaces import Completion
from calibadv_jax.core.trajectory import Document, Question
from calibadv_jax.data.questions import write_questions
from calibadv_jax.metrics.console import Console
from calibadv_jax.rollout.agent import RolloutContext
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.run.model import PolicySource

QUESTIONS = [Question(f"{source}{n}", f"{source} {n}", ("yes",), source) for source in "ab" for n in range(4)]
SEARCH, ANSWER = "<think>t</think><search>{}</search>", "<think>t</think><answer>{}</answer>"


class Stopped(Exception):
    """The evaluation is interrupted."""


class Scripted:
    """Searches once for its question, if it `searches`, then answers with `reply(prompt, seed)`.

    By default it is right for questions of source a and wrong for those of b. After `stop_after` completions
    it raises Stopped.
    """

    def __init__(self, reply=None, searches=True, stop_after=None):
        self.reply = reply or (lambda prompt, seed: "yes" if "Question: a" in prompt else "no")
        self.searches, self.stop_after = searches, stop_after
        self.asked, self.prompts, self.loaded = [], [], []

    async def generate(self, token_ids, sampling, session):
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise Stopped
        text = "".join(map(chr, token_ids))
        self.asked.append((session, sampling))
        self.prompts.append(text)
        does_search = self.searches and "information" not in text
        question = text.strip().rpartition("Question: ")[2]
        reply = SEARCH.format(question) if does_search else ANSWER.format(self.reply(text, sampling.seed))
        return Completion(list(map(ord, reply)), [-1.0] * len(reply), "stop", (0,))

    async def load(self, version, params):
        self.loaded.append(version)

    def release(self, session):
        pass

    def metrics(self):
        return {}

    async def close(self):
        pass


class Shelf:
    """Two documents for every query, which tell it, or `documents`; `raises` holds exceptions by query."""

    documents = None

    def __init__(self, raises=None):
        self.queries, self.raises, self.closed = [], raises or {}, 0

    async def search(self, queries):
        self.queries += queries
        for query in queries:
            if query in self.raises:
                raise self.raises[query]
        if self.documents is not None:
            return [list(self.documents) for _ in queries]
        return [[Document(f"{q}/{n}", f"title {q}", f"text {q} {n}") for n in range(2)] for q in queries]

    async def close(self):
        self.closed += 1


class ScriptedSource(PolicySource):
    """A policy that needs no weights."""

    def params(self, policy, mesh):
        return {}


class Rig:
    """Evaluates in `folder` with changed sections of the config."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        (folder / "policy").mkdir()
        self.source = ScriptedSource(folder / "policy", "huggingface")
        self.shelf = Shelf()
        self.questions = {"eval.jsonl": QUESTIONS}

    def config(self, tools=("search",), **sections):
        for name, questions in self.questions.items():
            write_questions(self.folder / name, questions)
        files = [str(self.folder / name) for name in self.questions]
        values = {
            "run": {"dir": str(self.folder)},
            "data": {"eval": files[0] if len(files) == 1 else files},
            "evaluate": {"output": str(self.folder / "evaluation.json"), "resamples": 200},
            "log": {"progress": False},
            "prompt": {"template": "short", "chat": "off"},
        }
        plain = changed(Config(tools=[ToolConfig(name) for name in tools]), **values)
        return changed(plain, **sections)

    def rollouts(self, config, sampler):
        context = RolloutContext(sampler, self.shelf, Letters(), config.rollout, config.prompt)
        return Rollouts(context, config.run.seed)

    def __call__(self, sampler=None, **sections):
        """Evaluates; returns the report and the sampler."""
        sampler = sampler or Scripted()

        @contextmanager
        def opened(config, model, folder, snapshots):
            with self.rollouts(config, sampler) as rollouts:
                yield rollouts

        class NoModel:
            policy = mesh = None
            tokenizer = Letters()

        self.patch.setattr(evaluate, "open_rollouts", opened)
        self.patch.setattr(evaluate, "build_model", lambda *_: NoModel())
        return evaluate.evaluate_policy(self.config(**sections), self.source, Console(False)), sampler

    def validate(self, sampler=None, **sections):
        """The evaluation during training."""
        sampler, config = sampler or Scripted(), self.config(**sections)
        with self.rollouts(config, sampler) as rollouts:
            return evaluate.validate(config, rollouts), sampler

    def file(self, suffix):
        return self.folder / f"evaluation{suffix}"
