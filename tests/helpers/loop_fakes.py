"""Small fakes of the agent loop's neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from calibadv_jax.config import PromptConfig, RolloutConfig
from calibadv_jax.core.interfaces import Completion, SamplingParams
from calibadv_jax.core.trajectory import Document, Question, Trajectory
from calibadv_jax.rollout.agent import RolloutContext, run_trajectory

EOS = "<|endoftext|>"
CONTROL = "<|im_end|>"
QUESTION = Question("q7", "Who?", ("Ann",), "test")
DOCUMENT = Document("d1", "Ann", "Ann is a painter.")
PAGE = Document("page ann", "Ann", "Ann lives in Rome.")


@dataclass
class ScriptedSampler:
    """Says what `script(session, turn)` says, cut to the turn's limit; notes what it was asked.

    A script that ends in the end-of-text token stops there. Log-probabilities count down, so that no two
    positions of a session agree. `by_letter` writes tokens that encoding the text would not give.
    """

    tokenizer: object
    script: Callable[[str, int], str]
    delay: Callable[[str, int], float] | None = None
    version: int = 3
    by_letter: bool = False
    calls: list[tuple[str, tuple[int, ...], SamplingParams]] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    written: dict[str, list[Completion]] = field(default_factory=dict)

    async def generate(self, token_ids: Sequence[int], sampling: SamplingParams, session: str) -> Completion:
        self.calls.append((session, tuple(token_ids), sampling))
        turn = len(self.written.setdefault(session, []))
        if self.delay is not None:
            await asyncio.sleep(self.delay(session, turn))
        text = self.script(session, turn)
        pieces = list(text) if self.by_letter else [text]
        ids = [i for piece in pieces for i in self.tokenizer.encode(piece, add_special_tokens=False)]
        is_cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        reason = "length" if is_cut else "eos" if ids[-1:] == [self.tokenizer.eos_token_id] else "stop"
        logprobs = [-(turn + 1) - 0.001 * position for position in range(len(ids))]
        completion = Completion(ids, logprobs, reason, (self.version + turn,))
        self.written[session].append(completion)
        return completion

    def release(self, session: str) -> None:
        self.released.append(session)


@dataclass
class DictRetriever:
    """Finds what the dictionary holds; nothing for other queries."""

    documents: dict[str, list[Document]]
    pages: dict[str, Document] = field(default_factory=dict)
    queries: list[str] = field(default_factory=list)

    async def search(self, queries: Sequence[str]) -> list[list[Document]]:
        self.queries += queries
        return [list(self.documents.get(query, [])) for query in queries]

    async def access(self, addresses: Sequence[str]) -> list[Document | None]:
        return [self.pages.get(address) for address in addresses]


def context_of(sampler, tokenizer, retriever=None, actions=(), judge=None, template="short", **limits):
    """A context of these neighbours; `limits` are keys of the rollout."""
    return RolloutContext(
        sampler,
        retriever or DictRetriever({"ann": [DOCUMENT]}),
        tokenizer,
        RolloutConfig(**limits),
        PromptConfig(template=template),
        tuple(actions),
        judge,
    )


@dataclass
class Loop:
    """One trajectory at a time, from scripted turns, with the neighbours at hand afterwards."""

    tokenizer: object
    sampler: ScriptedSampler | None = None
    retriever: DictRetriever | None = None

    def __call__(
        self,
        *turns: str,
        documents: dict[str, list[Document]] | None = None,
        question: Question = QUESTION,
        seed: int = 0,
        index: int = 0,
        prompt: PromptConfig | None = None,
        by_letter: bool = False,
        **limits: object,
    ) -> Trajectory:
        self.sampler = ScriptedSampler(self.tokenizer, lambda _, turn: turns[turn], by_letter=by_letter)
        self.retriever = DictRetriever({"ann": [DOCUMENT]} if documents is None else documents, {"ann": PAGE})
        context = context_of(self.sampler, self.tokenizer, self.retriever, **limits)
        context = replace(context, prompt=prompt or context.prompt)
        return asyncio.run(run_trajectory(context, question, index, seed, session="s"))

    def text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class Watched:
    """A tokenizer that notes the texts it is given."""

    def __init__(self, inner):
        self.inner, self.texts = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, text, **options):
        self.texts.append(text)
        return self.inner.encode(text, **options)

    def __call__(self, texts, **options):
        self.texts += texts
        return self.inner(texts, **options)
