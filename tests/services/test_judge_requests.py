"""Judges that refuse the usual request (OpenAI's new models, Gemma), and replies that are cut off."""

import asyncio
import json
import re

import pytest
from http_rig import Handler, serving

from calibadv_jax.config.sections.credit import JudgeConfig
from calibadv_jax.contrib.judge import JudgeClient
from calibadv_jax.contrib.judge_request import RequestForm
from calibadv_jax.core.errors import RequestFailed
from calibadv_jax.core.trajectory import Question

QUESTION = Question("q", "At which temperature does water boil?", ("100 °C",), "test")
NEW = RequestForm(length_key="max_completion_tokens")
COLD = RequestForm(has_temperature=False)
FOLDED = RequestForm(has_system_message=False)
USUAL = RequestForm()


def openai_error(message, param=None, code="unsupported_parameter"):
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return json.dumps({"error": error}).encode()


REFUSALS = [  # replies as servers write them, and the form that avoids the refusal
    (
        openai_error(
            "Unsupported parameter: 'max_tokens' is not supported with this model."
            " Use 'max_completion_tokens' instead.",
            "max_tokens",
        ),
        NEW,
    ),
    (b'{"detail":[{"loc":["body","max_tokens"],"msg":"Extra inputs are not permitted","input":512}]}', NEW),
    (
        openai_error(
            "Unsupported value: 'temperature' does not support 0 with this model."
            " Only the default (1) value is supported.",
            "temperature",
            "unsupported_value",
        ),
        COLD,
    ),
    (b'{"error":{"message":"Unsupported value: \'temperature\' must be 1."}}', COLD),
    (b'{"error":"Input validation error: `temperature` must be strictly positive"}', COLD),
    (
        openai_error("Unsupported value: 'messages[0].role' does not support 'system' with this model."),
        FOLDED,
    ),
    (b'{"error":{"message":"System role not supported"}}', FOLDED),
    (b"Conversation roles must alternate user/assistant/user/assistant/...", FOLDED),
    (b'{"error":{"message":"Developer instruction is not enabled for models/gemma-3-27b-it"}}', FOLDED),
    # Refusals of something else.
    (b'{"error":{"message":"maximum context length is 4096 tokens, but max_tokens is 5000"}}', USUAL),
    (b'{"error":{"message":"The model `m` is unknown"}}', USUAL),
    (
        b'{"detail":[{"msg":"Field required","input":{"temperature":0,"messages":"unknown system role"}}]}',
        USUAL,
    ),
    (b'{"error":{"message":"filtered: at which temperature does water boil?"}}', USUAL),
    (b"[" * 100_000, USUAL),
    (b"\xff", USUAL),
]


@pytest.mark.parametrize(("refusal", "form"), REFUSALS)
def test_refusal_names_the_form_that_avoids_it(refusal, form):
    assert USUAL.adapted(refusal) == form
    assert form.adapted(refusal) == form  # the same refusal again changes nothing more


def test_body_of_each_form():
    body = USUAL.body("m", "Judge.", "{}", 5)
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "{}"}]
    assert body == {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 5}
    other = RequestForm("max_completion_tokens", has_temperature=False, has_system_message=False)
    folded = [{"role": "user", "content": "Judge.\n\n{}"}]
    assert other.body("m", "Judge.", "{}", 5) == {
        "model": "m",
        "messages": folded,
        "max_completion_tokens": 5,
    }


class Strict(Handler):
    """A judge that refuses, one after the other, what `refuses` names, and then says yes."""

    refuses: tuple = ()
    bodies: list = []
    finish_reason: str | None = "stop"
    text = "It is.\n{key} yes"

    def do_POST(self):
        body = json.loads(self.body())
        self.bodies.append(body)
        for name, status, message in self.refuses:
            is_refused = {
                "max_tokens": "max_tokens" in body,
                "temperature": body.get("temperature", 1) != 1,
                "system": any(message["role"] == "system" for message in body["messages"]),
            }
            if is_refused[name]:
                self.reply(status, {"error": {"message": message}})
                return
        key = re.search(r"the key (\w+)", json.dumps(body["messages"]))[1]
        content = self.text
        if isinstance(content, str):
            content = content.format(key=key)
        else:
            content = [part | {"text": part["text"].format(key=key)} for part in content]
        choice = {"message": {"content": content}, "finish_reason": self.finish_reason}
        self.reply(200, {"choices": [choice]})


def verdicts(handler, count=1):
    """Verdicts on several answers that are judged together, or the errors, and the warnings."""
    warnings = []
    with serving(handler) as url:
        config = JudgeConfig(url=f"{url}/v1", model="m", timeout=5, patience=0.5)

        async def judge_all():
            client = JudgeClient(config, warnings.append)
            work = [client.verdict(QUESTION, f"answer {number}") for number in range(count)]
            try:
                return await asyncio.gather(*work, return_exceptions=True)
            finally:
                await client.close()

        return asyncio.run(judge_all()), warnings


NO_LENGTH = ("max_tokens", 400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'.")
NO_TEMPERATURE = ("temperature", 400, "Unsupported value: 'temperature' must be 1.")
NO_SYSTEM = ("system", 500, "jinja2 TemplateError: System role not supported")


def strict(**members):
    return type("OwnStrict", (Strict,), {"bodies": []} | members)


def test_new_models_are_asked_in_the_form_that_they_take():
    handler = strict(refuses=(NO_LENGTH, NO_TEMPERATURE, NO_SYSTEM))
    replies, warnings = verdicts(handler, 5)
    assert replies == [1.0] * 5
    last = handler.bodies[-1]
    assert last["max_completion_tokens"] == 512 and not {"max_tokens", "temperature"} & set(last)
    assert [message["role"] for message in last["messages"]] == ["user"]
    assert "answer" in last["messages"][0]["content"]
    assert len(warnings) == 3  # once each, not for each answer
    assert "max_completion_tokens for max_tokens, no temperature" in warnings[1]
    assert "Unsupported value" in warnings[1] and warnings[1].startswith("judge http")


def test_refusal_that_no_form_avoids_is_told():
    handler = strict(refuses=(NO_LENGTH, ("system", 400, "this model is not supported here")))
    (failure,), _ = verdicts(handler)
    assert isinstance(failure, RequestFailed)
    assert "status 400" in str(failure) and "not supported here" in str(failure)


@pytest.mark.parametrize(
    ("text", "finish_reason"),
    [
        ("<think>\nThe last line of a right answer would be\n{key} yes", "length"),
        ("The last line of a right answer would be\n{key} yes", "length"),  # the template opens the thought
        ("{key} 0", "length"),  # of 0.9
        ("<think>\nIt would be\n{key} yes", "stop"),
        ("\n<think>\nIt would be\n{key} yes", None),
        ("[THINK]It would be\n{key} yes", None),
        ("", "length"),  # the server keeps thoughts to itself
    ],
)
def test_reply_that_is_cut_off_gives_no_verdict(text, finish_reason):
    (failure,), _ = verdicts(strict(text=text, finish_reason=finish_reason))
    assert isinstance(failure, RequestFailed)
    assert "was cut off after" in str(failure) and "raise reward.judge.max_tokens=512" in str(failure)


def test_withheld_reply_is_told_apart():
    (failure,), _ = verdicts(strict(text="", finish_reason="content_filter"))
    assert "withheld the reply (content_filter)" in str(failure)


@pytest.mark.parametrize(
    "text",
    [
        "<think>\nhm\n{key} no\n</think>\n\n{key} yes",
        "hm\n{key} no\n</think>\n{key} yes",
        "The answer quotes <think> and is right.\n{key} yes",
        [{"type": "thinking", "text": "{key} no"}, {"type": "text", "text": "{key} yes"}],
    ],
    ids=["whole thought", "thought of the template", "quoted tag", "parts"],
)
def test_whole_reply_gives_its_last_line(text):
    assert verdicts(strict(text=text)) == ([1.0], [])


@pytest.mark.parametrize("kind", ["new", "cut", "system"])
def test_shared_case(shared, kind, monkeypatch):
    """`../shared/cases/judge_new_openai_models`: its server, without its last line, which starts it."""
    source = (shared / "cases/judge_new_openai_models/judge.py").read_text()
    members = {}
    exec(source.rpartition("http.server.ThreadingHTTPServer(")[0], members)
    monkeypatch.setitem(members, "KIND", kind)
    ((verdict,), warnings) = verdicts(members["H"])
    if kind == "cut":
        assert "cut off" in str(verdict)
    else:
        assert verdict == 1.0 and warnings
