"""The request to a judge, in a form that the endpoint takes.

Models differ in what they refuse: OpenAI's o and gpt-5 models take `max_completion_tokens` for `max_tokens`,
and no temperature but 1; Gemma and o1-mini take no system message. The endpoint says so in its refusal, and
the request is sent again in another form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

# Statuses of a refusal that another form of the request may avoid. Servers answer 500 to a chat template that
# refuses the system role.
REFUSALS = (400, 404, 422, 500)
# Keys of an error's JSON that repeat the request.
_ECHOES = ("input", "ctx", "url")
_UNSUPPORTED = re.compile(
    r"unsupported|not supported|not support|unknown|unrecogni[sz]ed|unexpected|not permitted|not allowed|"
    r"not enabled|not available|deprecated|extra (?:fields|inputs)|must alternate|not compatible"
)
_TEMPERATURE = re.compile(
    r"temperature\W.{0,60}(?:must|only|strictly|positive|should)|invalid.{0,40}temperature"
)
_SYSTEM = re.compile(
    r"system.?(?:role|message|prompt|instruction)|role.{0,40}system|developer instruction|roles? must"
)


@dataclass(frozen=True)
class RequestForm:
    """What a request to a judge contains.

    Attributes:
        length_key: name of the field that limits the tokens of the reply.
        has_temperature: whether temperature 0 is asked for; otherwise the endpoint's default holds.
        has_system_message: whether the instructions are a system message; otherwise they precede the data in
            the user's message.
    """

    length_key: str = "max_tokens"
    has_temperature: bool = True
    has_system_message: bool = True

    def body(self, model: str, instructions: str, data: str, max_tokens: int) -> dict[str, Any]:
        """Return the body of a request for chat completions.

        Args:
            model: name of the model.
            instructions: what the judge is to do.
            data: question, golden answers and answer: one line of JSON.
            max_tokens: largest number of tokens of the reply.
        """
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": data}]
        if not self.has_system_message:
            messages = [{"role": "user", "content": f"{instructions}\n\n{data}"}]
        body = {"model": model, "messages": messages, self.length_key: max_tokens}
        if self.has_temperature:
            body["temperature"] = 0
        return body

    def adapted(self, refusal: bytes) -> RequestForm:
        """Return the form that avoids what a refusal names; an equal one if it names nothing of the request.

        Args:
            refusal: body of the reply.
        """
        text = _message(refusal)
        is_unsupported = bool(_UNSUPPORTED.search(text))
        form = self
        has_other_key = "max_completion_tokens" in text
        if self.length_key == "max_tokens" and "max_tokens" in text and (has_other_key or is_unsupported):
            form = replace(form, length_key="max_completion_tokens")
        if "temperature" in text and (is_unsupported or _TEMPERATURE.search(text)):
            form = replace(form, has_temperature=False)
        if is_unsupported and _SYSTEM.search(text):
            form = replace(form, has_system_message=False)
        return form

    def differences(self) -> str:
        """Return in words how this form differs from the usual one; empty if it does not."""
        words = []
        if self.length_key != "max_tokens":
            words.append(f"{self.length_key} for max_tokens")
        if not self.has_temperature:
            words.append("no temperature, so that verdicts may vary")
        if not self.has_system_message:
            words.append("its instructions in the user's message")
        return ", ".join(words)


def _message(body: bytes) -> str:
    """Return the texts of an error in lower case, without those that repeat the request."""
    try:
        return " ".join(_texts(json.loads(body))).lower()
    except (ValueError, RecursionError):
        return body.decode(errors="replace").lower()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _ECHOES:
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
