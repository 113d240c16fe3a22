"""A teacher behind a vLLM server: log-probabilities of given tokens, through its completions of one token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
from pydantic import BaseModel, Field, ValidationError

from calibadv_jax.config import TeacherConfig
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.tags import TAGS
from calibadv_jax.services import http_client
from calibadv_jax.services.http_client import BadReply, HttpReply, Unreachable, Warn

TOKEN_VARIABLE = "TEACHER_TOKEN"
LONGEST_REPLY = 2**28  # bytes; a token of a prompt takes about a hundred
# Text whose tokens must have the same ids at the server as in the policy: several alphabets, and the tags.
VOCABULARY_PROBE = " ".join(
    (
        "Who wrote the novel in 1291, and 12345 other letters?",
        "Zürich café, naïve façade, Łódź",
        "北京 大学 東京",
        "Который час? ποιος έγραψε",
        "def f(x):\n    return x**2  # 3.14",
        *TAGS,
    )
)


class _Entry(BaseModel):
    """What vLLM says of a token of a prompt."""

    logprob: float


class _Choice(BaseModel):
    """A completion; `prompt_logprobs` has for each token of the prompt its entry by token id, or None."""

    prompt_logprobs: list[dict[str, _Entry] | None]


class _Completion(BaseModel):
    """The reply to a request for a completion."""

    choices: list[_Choice] = Field(min_length=1)


class _Model(BaseModel):
    """A model that the server offers; `root` is its folder there."""

    id: str
    root: str | None = None


class _Models(BaseModel):
    """The reply to a request for the server's models."""

    data: list[_Model]


class _Tokens(BaseModel):
    """The reply to a request to tokenize a text: ids, and the token of each id."""

    tokens: list[int]
    token_strs: list[str]


class TeacherServer:
    """A vLLM server that scores tokens.

    Args:
        config: the section `teacher`, with a URL and a model.
        warn: takes a line while the server is waited for.
    """

    def __init__(self, config: TeacherConfig, warn: Warn = lambda _: None):
        self.config = config
        self.warn = warn
        self.url = config.url.rstrip("/")

    def identity(self) -> dict[str, Any]:
        """Return the id of the server's model and its folder there, by which teachers are told apart.

        Raises:
            UserError: the server does not offer the model, or cannot be reached.
        """
        models = self._run(self._models)
        for model in models.data:
            if model.id == self.config.model:
                return model.model_dump()
        names = ", ".join(model.id for model in models.data) or "none"
        raise UserError(
            f"teacher.url={self.url} offers {names}, but teacher.model is {self.config.model}: correct it"
        )

    def check_vocabulary(self, tokenizer: Any) -> None:
        """Check that ids stand for the same tokens at the server and in the policy.

        The server may divide a text in another way, since it is never sent any. What counts are the ids.

        Args:
            tokenizer: the policy's, of transformers.

        Raises:
            UserError: a token of VOCABULARY_PROBE has another id, or the server cannot be asked.
        """
        reply = self._run(self._tokenize)
        for token_id, token in zip(reply.tokens, reply.token_strs, strict=True):
            (own,) = tokenizer.convert_ids_to_tokens([token_id])
            if own != token:
                raise UserError(
                    f"teacher.url={self.url}: its model {self.config.model} has another vocabulary than the"
                    f" policy: the id {token_id} is {token!r} there and {own!r} here; choose a teacher with"
                    " the policy's tokenizer"
                )

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-probabilities of tokens, at temperature 1.

        Args:
            sequences: token ids, T in each sequence.

        Returns:
            Nats, float32 [T] for each sequence, 0 at its first token.

        Raises:
            EnvironmentFailure: the server was away for `teacher.patience` seconds, or a reply is invalid.
            UserError: the server refuses a sequence, such as one that is longer than its model's limit.
        """

        async def ask_all(http: aiohttp.ClientSession) -> list[np.ndarray]:
            slots = asyncio.Semaphore(self.config.max_concurrency)

            async def ask(sequence: Sequence[int]) -> np.ndarray:
                async with slots:
                    return await self._score(http, sequence)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(sequence)) for sequence in sequences]
            return [task.result() for task in tasks]

        return self._run(ask_all)

    # --- Requests ---

    def _run(self, work: Any) -> Any:
        """Run a coroutine function of a session, and raise its first error as a UserError."""

        async def run() -> Any:
            async with http_client.open_session(self.config.timeout, TOKEN_VARIABLE) as http:
                return await work(http)

        try:
            return http_client.run_coroutine(run)
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    async def _models(self, http: aiohttp.ClientSession) -> _Models:
        return await self._ask(http, "GET", f"{self.url}/models", _Models)

    async def _tokenize(self, http: aiohttp.ClientSession) -> _Tokens:
        body = {
            "model": self.config.model,
            "prompt": VOCABULARY_PROBE,
            "add_special_tokens": False,
            "return_token_strs": True,
        }
        return await self._ask(http, "POST", f"{self.url.removesuffix('/v1')}/tokenize", _Tokens, body)

    async def _score(self, http: aiohttp.ClientSession, sequence: Sequence[int]) -> np.ndarray:
        """Return the log-probabilities of a sequence, float32 [T]."""
        body = {
            "model": self.config.model,
            "prompt": list(sequence),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        reply = await self._ask(http, "POST", f"{self.url}/completions", _Completion, body)
        entries = reply.choices[0].prompt_logprobs
        logprobs = np.zeros(len(sequence), np.float32)
        for place, (token, entry) in enumerate(zip(sequence, entries, strict=False)):
            if place and entry and str(token) in entry:
                logprobs[place] = entry[str(token)].logprob
            elif place:
                entries = []
                break
        if len(entries) != len(sequence) or not np.isfinite(logprobs).all():
            raise EnvironmentFailure(
                f"teacher {self.url}: the reply to {len(sequence)} tokens lacks the log-probability of one of"
                " them; teacher.url must be that of a vLLM server"
            )
        return logprobs

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        method: str,
        url: str,
        kind: type[Any],
        body: dict[str, Any] | None = None,
    ) -> Any:
        """Return the parsed reply to a request; repeat the request while the server is away."""

        async def attempt() -> Any:
            reply = await http_client.request(http, method, url, LONGEST_REPLY, json=body)
            return self._read(reply, kind)

        def on_unavailable(error: Unreachable) -> None:
            self.warn(f"waiting up to {self.config.patience:g} s for the teacher at {self.url} ({error})")

        try:
            return await http_client.retry(attempt, self.config.patience, on_unavailable)
        except BadReply as error:
            raise EnvironmentFailure(f"teacher {self.url}: no usable reply: {error}") from error
        except Unreachable as error:
            waited = http_client.describe_patience(self.config.patience)
            raise EnvironmentFailure(
                f"teacher {self.url}: {waited} ({error}); start it, or correct teacher.url"
            ) from error

    def _read(self, reply: HttpReply, kind: type[Any]) -> Any:
        if reply.is_unavailable:
            raise Unreachable(reply.excerpt, reply.retry_after)
        if reply.status != 200:
            raise UserError(
                f"teacher {self.url}: {reply.excerpt}; correct teacher.url (it ends with /v1) and"
                f" teacher.model, or set {TOKEN_VARIABLE} to the server's token"
            )
        try:
            return reply.parse(kind)
        except ValidationError as error:
            raise BadReply(http_client.excerpt(reply.body)) from error
