"""A language model as the judge of answers, behind any OpenAI-compatible endpoint.

The policy is rewarded for a good verdict on its answer, and so may try to give instructions to the judge.
Two measures prevent that:

- The judge gets the answer as JSON, in which brackets, quotes and line breaks of the text are escaped.
- A verdict counts only if it follows a random key, which stands in the instructions of this request.
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
from calibadv_jax.contrib.judge_request import REFUSALS, RequestForm
from calibadv_jax.core.answers import normalise_answer
from calibadv_jax.core.errors import RequestFailed, UserError
from calibadv_jax.core.tags import to_printable_line, well_formed
from calibadv_jax.core.trajectory import Question, Trajectory
from calibadv_jax.services import http_client
from calibadv_jax.services.http_client import BadReply, HttpReply, PerLoop, Unreachable, Warn

TOKEN_VARIABLE = "JUDGE_TOKEN"
REMEMBERED = 100_000  # Verdicts that are kept in memory.
LONGEST_ANSWER = 2000  # Characters of an answer that the judge sees.
# Bytes of a reply. The limit matters since `max_concurrency` replies are read at once.
LONGEST_REPLY = 2**22
_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
PROMPT = _TEXTS["prompt"]  # The built-in instructions.
VERDICT = _TEXTS["verdict"]  # How the reply must end; {key} is replaced.
EXPECTED = "the key of its prompt, a space, and yes, no or a number from 0 to 1, as '0123456789abcdef yes'"
_TOKEN_ADVICE = f"set the environment variable {TOKEN_VARIABLE} to its token"
_URL_ADVICE = "correct reward.judge.url (it ends with /v1 at most servers) and reward.judge.model"
# Status of a reply -> what to do about it.
ADVICE = {
    401: _TOKEN_ADVICE,
    403: _TOKEN_ADVICE,
    404: _URL_ADVICE,
    405: _URL_ADVICE,
}
_MARKUP = re.compile(r"[<>\[\]{}|`#]")  # Characters of chat templates and of Markdown.


# Beginning and end of a thought that a server leaves in the text.
_THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
}
# Values of finish_reason of a reply that reached its largest length.
_CUT = ("length", "max_tokens", "model_length")


class _Part(BaseModel):
    """A part of a message; parts of other types than text, such as thoughts, have no text."""

    type: str = "text"
    text: str | None = None


class _Message(BaseModel):
    """The part of a chat completion that is read: the text of a message."""

    content: str | list[_Part] | None = None

    @property
    def text(self) -> str:
        """The text, without parts of other types."""
        if isinstance(self.content, str):
            return self.content
        texts = [part.text or "" for part in self.content or () if part.type == "text"]
        return "".join(texts)


class _Choice(BaseModel):
    """One of the completion's alternatives."""

    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    """A chat completion."""

    choices: list[_Choice] = Field(min_length=1)


@dataclass
class _Connections:
    """The state of a client in one event loop."""

    http: aiohttp.ClientSession
    slots: asyncio.Semaphore  # limits the requests at the same time
    # Request data -> verdict, which may be under way; the oldest request comes first.
    verdicts: dict[str, asyncio.Task[float]] = field(default_factory=dict)


class JudgeClient:
    """A judge as `interfaces.Judge`, which judges the same answer to the same question once.

    Args:
        config: the section `reward.judge`, with a URL and a model.
        warn: takes a line when the endpoint takes requests in another form only.

    Raises:
        UserError: if the file with the instructions cannot be read, or is empty.
    """

    def __init__(self, config: JudgeConfig, warn: Warn = lambda _: None):
        self.config = config
        self.warn = warn
        self.form = RequestForm()
        self.url = config.url.rstrip("/")
        self.prompt = read_prompt(config.prompt)
        self._connections = PerLoop(self._connect)

    def _connect(self) -> _Connections:
        http = http_client.open_session(self.config.timeout, TOKEN_VARIABLE)
        slots = asyncio.Semaphore(self.config.max_concurrency)
        return _Connections(http, slots)

    async def score(self, trajectory: Trajectory) -> dict[str, float]:
        """Return the metrics "judge" and "judge_agreement" of a trajectory.

        Returns:
            The verdict in [0, 1], and 1 if it agrees with exact match, else 0.

        Raises:
            RequestFailed: if the endpoint gives no verdict.
            UserError: if the endpoint refuses all requests, such as without a token.
        """
        question = trajectory.question
        answer = trajectory.answer or ""
        verdict = await self.verdict(question, answer)
        golden_answers = [normalise_answer(golden) for golden in question.golden_answers]
        is_exact = normalise_answer(answer) in golden_answers
        agrees = (verdict >= 0.5) == is_exact
        return {JUDGE: verdict, JUDGE_AGREEMENT: float(agrees)}

    async def verdict(self, question: Question, answer: str) -> float:
        """Return the verdict on an answer, in [0, 1].

        Raises:
            RequestFailed: as `score`.
            UserError: as `score`.
        """
        data = user_message(question.text, question.golden_answers, answer)
        verdicts = self._connections.get().verdicts
        task = verdicts.get(data)
        if task is None or (task.done() and task.exception()):
            task = asyncio.create_task(self._ask(data))
            verdicts[data] = task
            if len(verdicts) > REMEMBERED:
                oldest = next(iter(verdicts))
                del verdicts[oldest]
        # Others may wait for the same verdict: if this call is cancelled, the task goes on.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        connections = self._connections.take()
        if connections is None:
            return
        for task in connections.verdicts.values():
            task.cancel()
        await connections.http.close()

    async def _ask(self, data: str) -> float:
        """Return the verdict on the data of a request; repeat the request while the endpoint is away."""
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
            raise RequestFailed(
                JUDGE,
                f"judge {self.url}: {http_client.describe_patience(patience)} ({error}); start it, or correct"
                " reward.judge.url",
            ) from error

    async def _request(self, http: aiohttp.ClientSession, data: str) -> float:
        """Send one request, and return the verdict in its reply."""
        key = secrets.token_hex(8)
        reply = await self._post(http, f"{self.prompt}\n\n{VERDICT.format(key=key)}", data)
        if reply.is_unavailable:
            raise Unreachable(reply.excerpt, reply.retry_after)
        if reply.status in ADVICE:
            raise UserError(f"judge {self.url}: {reply.excerpt}; {ADVICE[reply.status]}")
        if reply.status != 200:
            raise BadReply(reply.excerpt)
        try:
            choice = reply.parse(_Completion).choices[0]
        except ValidationError as error:
            raise BadReply(
                f"the reply is no chat completion ({http_client.excerpt(reply.body)}); correct"
                " reward.judge.url"
            ) from error
        text = choice.message.text
        if choice.finish_reason == "content_filter":
            raise BadReply("the endpoint withheld the reply (content_filter)")
        if choice.finish_reason in _CUT or is_cut_thought(text):
            raise BadReply(
                f"the reply was cut off after {len(text)} letters; raise"
                f" reward.judge.max_tokens={self.config.max_tokens}, within which the judge also thinks"
            )
        return read_verdict(text, key)

    async def _post(self, http: aiohttp.ClientSession, instructions: str, data: str) -> HttpReply:
        """Return the reply to a request, which is sent again in another form if its form is refused."""
        address = f"{self.url}/chat/completions"
        while True:
            form = self.form
            body = form.body(self.config.model, instructions, data, self.config.max_tokens)
            reply = await http_client.request(http, "POST", address, LONGEST_REPLY, json=body)
            if reply.status not in REFUSALS:
                return reply
            adapted = form.adapted(reply.body)
            if adapted == form:
                return reply
            if self.form == form:  # no other request has changed it meanwhile
                self.form = adapted
                refusal = to_printable_line(reply.excerpt)
                self.warn(f"judge {self.url} is asked with {adapted.differences()}; it refused: {refusal}")


def is_cut_thought(text: str) -> bool:
    """Return whether a reply consists of a thought without an end.

    Args:
        text: text of the reply, which begins with its thought if the server has left that in.
    """
    stripped = text.lstrip()
    for opening, closing in _THOUGHTS.items():
        if stripped.startswith(opening):
            return closing not in stripped
    return False


def user_message(question: str, golden_answers: tuple[str, ...], answer: str) -> str:
    """Return the user's message of a request: one line of JSON.

    No text in it can end its field, the line or the message.

    Args:
        question: text of the question.
        golden_answers: the accepted answers.
        answer: the policy's answer; its first LONGEST_ANSWER characters are used.
    """
    golden = ", ".join(_quoted(golden_answer) for golden_answer in golden_answers)
    judged = _quoted(answer[:LONGEST_ANSWER])
    return f'{{"question": {_quoted(question)}, "golden_answers": [{golden}], "answer": {judged}}}'


def _quoted(text: str) -> str:
    """Return a text as a JSON string without markup."""
    # json.dumps also escapes letters outside ASCII. Some chat templates have marks among them that look like
    # brackets.
    return _MARKUP.sub(_escaped, json.dumps(well_formed(text)))


def _escaped(mark: re.Match[str]) -> str:
    return f"\\u{ord(mark[0]):04x}"


def read_verdict(reply: str, key: str) -> float:
    """Return the verdict in the last line of a reply.

    Args:
        reply: text of the judge.
        key: the key of the request.

    Returns:
        1 for yes, 0 for no, or the number that is written.

    Raises:
        BadReply: if the last line is not the key and a verdict.
    """
    lines = reply.strip().splitlines()
    last = lines[-1].strip() if lines else ""
    match = re.fullmatch(rf"{key} (yes|no|0(?:\.\d+)?|1(?:\.0+)?)\.?", last, re.IGNORECASE)
    if match is None:
        raise BadReply(
            f"the last line is {last[:100]!r}, but must be {EXPECTED}; raise reward.judge.max_tokens, choose"
            " another model, or say it again in reward.judge.prompt"
        )
    verdict = match[1].casefold()
    if verdict == "yes":
        return 1.0
    if verdict == "no":
        return 0.0
    return float(verdict)


def read_prompt(path: str) -> str:
    """Return the judge's instructions.

    Args:
        path: a text file, in UTF-8; "": the built-in instructions.

    Raises:
        UserError: if the file cannot be read, or is empty.
    """
    if not path:
        return PROMPT
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward.judge.prompt={path}: cannot be read ({error})") from error
    if not text:
        raise UserError(f"reward.judge.prompt={path}: is empty; write into it what the judge is to do")
    return text
