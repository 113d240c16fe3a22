"""The agent for others: ``calibadv serve --policy D [--port N] [--token-file FILE] [key.path=value …]``.

A web page at /, and OpenAI's chat completions at /v1. One question gives one trajectory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from calibadv_jax.config import Config
from calibadv_jax.contrib.arguments import number
from calibadv_jax.contrib.cli import ask
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.signals import Stop
from calibadv_jax.core.tags import to_printable_line
from calibadv_jax.core.user_functions import load_optional
from calibadv_jax.metrics.console import Console
from calibadv_jax.rollout.runner import Rollouts
from calibadv_jax.rollout_store.schema import run_name
from calibadv_jax.services.retriever_client import RetrieverClient

# Hosts that only this machine reaches.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEALTH_SECONDS = 2.0  # in which the retriever must answer for GET /health to say "ready"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    ask.add_policy_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=number(int, least=0, below=65536),
        default=8421,
        help="port; 0: any free port (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token that clients must send; or set CALIBADV_TOKEN",
    )
    parser.add_argument(
        "--slots",
        type=number(int, least=1),
        default=4,
        metavar="N",
        help="questions that are answered together (default: %(default)s)",
    )
    parser.add_argument(
        "--queue",
        type=number(int, least=0),
        default=16,
        metavar="N",
        help="questions that wait; further ones are refused (default: %(default)s)",
    )
    parser.add_argument(
        "--time-limit",
        type=number(float, least=1),
        default=120.0,
        metavar="SECONDS",
        help="for one question, without its waiting (default: %(default)g)",
    )
    parser.add_argument(
        "words", nargs="*", metavar="key.path=value", help="values that replace those of the config"
    )


def run(arguments: argparse.Namespace) -> None:
    """Answer questions over HTTP until the command is interrupted.

    Raises:
        UserError: a package is missing, the network is not protected by a token, or the policy, sampler or
            retriever cannot be used.
        EnvironmentFailure: the port is in use, or the first question failed.
    """
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed; pip install 'calibadv-jax[retriever]'")
    token = read_token(arguments.token_file)
    if arguments.host not in LOOPBACK and not token:
        raise UserError(f"--host {arguments.host} is open to the network: protect it with --token-file FILE")
    config, source = ask.read_policy(arguments, arguments.words)
    console = Console()
    with bind(arguments.host, arguments.port) as listener, Stop():
        console.note(f"opening {source}, the sampler and the retriever")
        with ask.open_policy(config, source, arguments.slots) as rollouts:
            app = load_optional("serving.app")
            _warm_up(rollouts)
            service = app.Service(
                rollouts,
                model=to_printable_line(run_name(arguments.policy)),
                slots=arguments.slots,
                queue=arguments.queue,
                seconds=arguments.time_limit,
                examples=_examples(arguments.policy, console),
                retriever_fault=_retriever_check(config, rollouts),
            )
            with app.serving(service, listener, token) as ended:
                host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
                console.say(f"http://{host}:{listener.getsockname()[1]}/")
                console.note(f"model {service.model!r} at /v1 for OpenAI's clients; Ctrl-C ends")
                ended.result()


def _warm_up(rollouts: Rollouts) -> None:
    """Ask a question before the first client, who would wait for compilers otherwise."""
    context = rollouts.context
    question = ask.run_question(rollouts, "warm-up", "who?", context.watch, context.rollout)
    trajectory = rollouts.run(question)
    if trajectory.error:
        raise EnvironmentFailure(trajectory.error)


def _examples(policy: Path, console: Console) -> list[str]:
    """Return example questions for the page; none, with a warning, if kept trajectories are damaged."""
    try:
        return load_optional("serving.examples").example_questions(policy)  # type: ignore[no-any-return]
    except UserError as error:
        console.warn(f"the page has no example questions: {error}")
        return []


def _retriever_check(config: Config, rollouts: Rollouts) -> Callable[[], Awaitable[str]] | None:
    """Return the function that says why the retriever does not answer; None without a retriever."""
    retriever = rollouts.context.retriever
    if not config.has_retriever or not isinstance(retriever, RetrieverClient):
        return None
    return partial(retriever.unreachable_reason, HEALTH_SECONDS)


def read_token(path: Path | None) -> str:
    """Return the token that clients must send, or ""; raise UserError for a missing or empty file."""
    if path is None:
        return os.environ.get("CALIBADV_TOKEN", "").strip()
    token = ""
    if path.is_file():
        token = path.read_text(encoding="utf-8", errors="replace").strip()
    if not token:
        raise UserError(f"--token-file {path}: no such file, or an empty one; write a token into it")
    return token


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens later; raise EnvironmentFailure for a port in use."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise EnvironmentFailure(
            f"cannot listen on {host}:{port} ({reason}); choose another one with --port or --host"
        ) from error
    return listener
