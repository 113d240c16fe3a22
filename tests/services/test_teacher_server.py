"""The teacher behind a vLLM server: its replies, its refusals, its vocabulary."""

from __future__ import annotations

import json

import numpy as np
import pytest
from http_rig import Handler, serving
from tiny_policy import Letters

from calibadv_jax.config import TeacherConfig
from calibadv_jax.contrib.teacher_server import TeacherServer
from calibadv_jax.core.errors import EnvironmentFailure, UserError

MODELS = {"object": "list", "data": [{"id": "m", "root": "/models/m"}, {"id": "n"}]}


class FakeVllm(Handler):
    """Gives token t the log-probability -t / 10; `replies` come first."""

    def do_GET(self):
        self.bodies.append((self.path, self.headers.get("Authorization")))
        self.reply(200, MODELS)

    def do_POST(self):
        body = json.loads(self.body())
        self.bodies.append((self.path, body))
        if self.replies:
            self.reply(*self.replies.pop(0))
        elif self.path == "/tokenize":
            assert body["return_token_strs"] and not body["add_special_tokens"]
            letters = list(body["prompt"])
            self.reply(200, {"tokens": [ord(letter) for letter in letters], "token_strs": letters})
        else:
            entries = [None, *({str(token): {"logprob": -token / 10}} for token in body["prompt"][1:])]
            self.reply(200, {"choices": [{"prompt_logprobs": entries}]})


class Named(Letters):
    """A tokenizer that names its tokens."""

    def convert_ids_to_tokens(self, ids):
        return [chr(token_id) for token_id in ids]


@pytest.fixture
def endpoint():
    """A class of handlers of its own, and the teacher behind it."""
    handler = type("OwnVllm", (FakeVllm,), {"replies": [], "bodies": []})
    with serving(handler) as url:
        yield handler, TeacherServer(TeacherConfig(url=f"{url}/v1", model="m", timeout=5, patience=0.5))


def test_logprobs_come_in_order_with_one_request_a_sequence(endpoint, monkeypatch):
    monkeypatch.setenv("TEACHER_TOKEN", "secret")
    handler, server = endpoint
    values = server.logprobs([[7, 1, 2], [5], [3, 9]])
    assert [value.dtype for value in values] == [np.float32] * 3
    np.testing.assert_allclose(np.concatenate(values), [0, -0.1, -0.2, 0, 0, -0.9], rtol=1e-6)
    bodies = sorted((body for _, body in handler.bodies), key=lambda body: body["prompt"])
    assert [path for path, _ in handler.bodies] == ["/v1/completions"] * 3
    assert bodies[1] == {
        "model": "m",
        "prompt": [5],
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
    }
    assert server.identity() == {"id": "m", "root": "/models/m"}
    assert handler.bodies[-1] == ("/v1/models", "Bearer secret")


def test_server_that_is_away_for_a_moment_is_asked_again(endpoint):
    handler, server = endpoint
    lines = []
    server.warn = lines.append
    handler.replies += [(503, {}), (200, {"choices": []})]
    (values,) = server.logprobs([[7, 1]])
    (line,) = lines
    assert line.startswith(f"waiting up to 0.5 s for the teacher at {server.url} (")
    assert values[1] == pytest.approx(-0.1) and len(handler.bodies) == 3


@pytest.mark.parametrize(
    "entries",
    [
        [None, {"2": {"logprob": -1.0}}],
        [None],
        [None, None],
        [None, {"1": {"logprob": -1.0}}, {"1": {"logprob": -1.0}}],
    ],
    ids=["another token", "too few", "none", "too many"],
)
def test_reply_without_every_token_is_refused(endpoint, entries):
    handler, server = endpoint
    handler.replies += [(200, {"choices": [{"prompt_logprobs": entries}]})]
    with pytest.raises(EnvironmentFailure, match="to 2 tokens lacks the log-probability"):
        server.logprobs([[7, 1]])


def test_refused_request_is_one_line(endpoint):
    handler, server = endpoint
    handler.replies += [(400, {"message": "maximum context length is 8"})]
    with pytest.raises(UserError, match=r"status 400: .*context length is 8.*correct teacher.url"):
        server.logprobs([[7, 1]])
    gone = TeacherServer(TeacherConfig(url="http://127.0.0.1:1/v1", model="m", patience=0.001))
    with pytest.raises(EnvironmentFailure, match=r"no answer .*; start it, or correct teacher.url"):
        gone.logprobs([[7, 1]])


def test_other_model_and_other_vocabulary_are_refused(endpoint):
    handler, server = endpoint
    server.check_vocabulary(Named())
    handler.replies += [(200, {"tokens": [97, 98], "token_strs": ["a", "c"]})]
    with pytest.raises(UserError, match=r"another vocabulary .* the id 98 is 'c' there and 'b' here"):
        server.check_vocabulary(Named())
    other = TeacherServer(TeacherConfig(url=server.url, model="lost", patience=0.5))
    with pytest.raises(UserError, match="offers m, n, but teacher.model is lost"):
        other.identity()
