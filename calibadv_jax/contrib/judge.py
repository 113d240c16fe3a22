"""A language model as the judge of answers, behind any OpenAI-compatible endpoint.

The policy, which is paid for the verdict, wrote the answer. So it reaches the judge as data only: as JSON
whose text has no bracket, quote or line of its own. The verdict counts only behind a key that the policy
cannot know.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml
from pydantic import BaseModel, Field, ValidationError

from calibadv_jax.config.sections.credit import JUDGE, JUDGE_AGREEMENT, JudgeConfig
from calibadv_jax.core.answers import normalise_answer
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.core.tags import well_formed
from calibadv_jax.core.trajectory import Question, Trajectory
from calibadv_jax.services import http_client
from calibadv_jax.services.http_client import BadReply, PerLoop, Unreachable

TOKEN_VARIABLE = "JUDGE_TOKEN"
REMEMBERED = 100_000  # verdicts
LONGEST_ANSWER = 2000  # letters that the judge sees
LONGEST_REPLY = 2**22  # bytes: up to `max_concurrency` of them are read at once
_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PROMPT, VERDICT = _TEXTS["prompt"], _TEXTS["verdict"]
EXPECTED = "the key of its prompt, a space, and yes, no or a number from 0 to 1, as '0123456789abcdef yes'"
_TOKEN = f"set the environment variable {TOKEN_VARIABLE} to its token"
_ADDRESS = "correct reward.judge.url (it ends with /v1 at most servers) and reward.judge.model"
ADVICE = {401: _TOKEN, 403: _TOKEN, 404: _ADDRESS, 405: _ADDRESS}  # by status
_MARKUP = re.compile(r"[<>\[\]{}|`#]")  # of chat templates and of Markdown


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


@dataclass
class _Connections:
    """Of an event loop."""

    http: aiohttp.ClientSession
    slots: asyncio.Semaphore
    verdicts: dict[str, asyncio.Task[float]] = field(default_factory=dict)  # under way or known


class JudgeClient:
    """Implements `interfaces.Judge`; the same answer to the same question is judged once."""

    def __init__(self, config: JudgeConfig):
        self.config, self.url = config, config.url.rstrip("/")
        self.prompt = read_prompt(config.prompt)
        self._connections = PerLoop(self._connect)

    def _connect(self) -> _Connections:
        slots = asyncio.Semaphore(self.config.max_concurrency)
        return _Connections(http_client.open_session(self.config.timeout, TOKEN_VARIABLE), slots)

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        """Return the verdict in [0, 1], and whether it agrees with exact match."""
        question, answer = trajectory.question, trajectory.answer or ""
        verdict = await self.verdict(question, answer)
        is_exact = normalise_answer(answer) in map(normalise_answer, question.golden_answers)
        agrees = (verdict >= 0.5) == is_exact
        return {JUDGE: verdict, JUDGE_AGREEMENT: float(agrees)}

    async def verdict(self, question: Question, answer: str) -> float:
        """Return the verdict on an answer, in [0, 1]; raises as `score`."""
        data = data_of(question.text, question.golden_answers, answer)
        verdicts = self._connections.get().verdicts
        task = verdicts.get(data)
        if task is None or (task.done() and task.exception()):
            task = verdicts[data] = asyncio.create_task(self._ask(data))
            if len(verdicts) > REMEMBERED:
                del verdicts[next(iter(verdicts))]
        return await asyncio.shield(task)  # others may wait for the same verdict

    async def close(self) -> None:
        if (connections := self._connections.take()) is not None:
            for task in connections.verdicts.values():
                task.cancel()
            await connections.http.close()

    async def _ask(self, data: str) -> float:
        connections = self._connections.get()

        async def attempt() -> float:
            async with connections.slots:
                return await self._request(connections.http, data)

        patience = self.config.patience
        try:
            return await http_client.retry(attempt, patience)
        except BadReply as error:
            raise RequestFailed(JUDGE, f"judge {self.url}: no verdict: {error}") from error
        except Unreachable as error:
            problem = f"{http_client.no_answer(patience)} ({error}); start it, or correct reward.judge.url"
            raise RequestFailed(JUDGE, f"judge {self.url}: {problem}") from error

    async def _request(self, http: aiohttp.ClientSession, data: str) -> float:
        key = secrets.token_hex(8)
        instructions = {"role": "system", "content": f"{self.prompt}\n\n{VERDICT.format(key=key)}"}
        messages = [instructions, {"role": "user", "content": data}]
        limits = {"temperature": 0, "max_tokens": self.config.max_tokens}
        body = {"model": self.config.model, "messages": messages, **limits}
        address = f"{self.url}/chat/completions"
        reply = await http_client.request(http, "POST", address, LONGEST_REPLY, json=body)
        if reply.is_away:
            raise Unreachable(reply.excerpt, reply.retry_after)
        if reply.status in ADVICE:
            raise UserError(f"judge {self.url}: {reply.excerpt}; {ADVICE[reply.status]}")
        if reply.status != 200:
            raise BadReply(reply.excerpt)
        try:
            choice = reply.parse(_Completion).choices[0]
        except ValidationError as error:
            problem = f"the reply is no chat completion ({http_client.excerpt(reply.body)})"
            raise BadReply(f"{problem}; correct reward.judge.url") from error
        return read_verdict(choice.message.content or "", key)


def data_of(question: str, golden_answers: tuple[str, ...], answer: str) -> str:
    """Return one line of JSON for the judge: no text in it can end its field, its line or its message."""
    golden, judged = ", ".join(map(_quoted, golden_answers)), _quoted(answer[:LONGEST_ANSWER])
    return f'{{"question": {_quoted(question)}, "golden_answers": [{golden}], "answer": {judged}}}'


def _quoted(text: str) -> str:
    # Letters outside ASCII are escaped too: some templates have marks that look like brackets.
    return _MARKUP.sub(lambda mark: f"\\u{ord(mark[0]):04x}", json.dumps(well_formed(text)))


def read_verdict(reply: str, key: str) -> float:
    """Return the verdict in the last line of a reply; raise BadReply if it holds anything else."""
    last = next(reversed(reply.strip().splitlines()), "").strip()
    match = re.fullmatch(rf"{key} (yes|no|0(?:\.\d+)?|1(?:\.0+)?)\.?", last, re.IGNORECASE)
    if match is None:
        advice = "raise reward.judge.max_tokens, choose another model, or say it again in reward.judge.prompt"
        raise BadReply(f"the last line is {last[:100]!r}, but must be {EXPECTED}; {advice}")
    return float({"yes": 1, "no": 0}.get(match[1].casefold(), match[1]))


def read_prompt(path: str) -> str:
    """Return the text of the judge's prompt file, or the built-in one where no path is given."""
    if not path:
        return PROMPT
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward.judge.prompt={path}: cannot be read ({error})") from error
    if not text:
        raise UserError(f"reward.judge.prompt={path}: is empty; write into it what the judge is to do")
    return text
