"""What a retrieval service says of itself, and whether two of them give the same documents."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

from calibadv_jax.core.tags import well_formed_json
from calibadv_jax.services.http_client import BadReply, Unreachable, request
from calibadv_jax.services.retriever_replies import TOKEN_VARIABLE, excerpt

SAME = ("corpus_sha256", "encoder", "model", "reranker", "pages_sha256")  # of services that answer alike
IDENTITY = "identity"  # of this project's services: index, reranker and pages in one string
IDENTITY_HEADER = "X-Index-Identity"  # the same string, on every reply of POST /retrieve and POST /access


def token() -> str:
    """What is sent to the services; empty where they ask for none."""
    return os.environ.get(TOKEN_VARIABLE, "").strip()


async def ask_health(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The reply of ``GET /health``; empty where a service has no such route.

    Raises:
        Unreachable: it does not answer, is loading or is broken.
        UserError: this is no URL.
    """
    try:
        reply = await request(http, "GET", f"{url}/health")
    except BadReply as error:
        raise Unreachable(str(error)) from error
    if reply.is_away:
        raise Unreachable(f"status {reply.status}: {excerpt(reply.body)}")
    if reply.status != 200:
        return {}
    try:
        state = json.loads(well_formed_json(reply.body))
    except (ValueError, RecursionError):  # one of too many brackets
        return {}
    return state if isinstance(state, dict) else {}


def difference(agreed: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Why a service gives other documents than was agreed on, in words; empty: nothing shows that it does."""
    names = [*SAME, IDENTITY] if IDENTITY in agreed and IDENTITY in state else SAME
    for name in names:
        if state.get(name) != agreed.get(name):
            return f"{name} {state.get(name)!r} instead of {agreed.get(name)!r}"
    return ""


def identity(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a service's state that decides which documents it gives; empty: it says nothing of that."""
    return {name: state[name] for name in (*SAME, IDENTITY) if name in state}
