"""Health of a retrieval service: whether it answers, and which index it serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from calibadv_jax.core.tags import well_formed_json
from calibadv_jax.services.http_client import BadReply, Unreachable, request

# Fields of the health that are equal for services with equal answers.
INDEX_FIELDS = ("corpus_sha256", "encoder", "model", "reranker", "pages_sha256")
# Field of this project's services: index, reranker and pages in one string.
IDENTITY = "identity"
# Header with the same string, in every reply of POST /retrieve and POST /access.
IDENTITY_HEADER = "X-Index-Identity"


async def ask_health(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the reply of ``GET /health``; empty if the service has no such route.

    Raises:
        Unreachable: The service does not answer, or cannot answer now.
    """
    try:
        reply = await request(http, "GET", f"{url}/health")
    except BadReply as error:
        raise Unreachable(str(error)) from error
    if reply.is_unavailable:
        raise Unreachable(reply.excerpt)
    if reply.status != 200:
        return {}
    try:
        health = json.loads(well_formed_json(reply.body))
    except (ValueError, RecursionError):  # RecursionError: too many brackets
        return {}
    return health if isinstance(health, dict) else {}


def index_difference(agreed: Mapping[str, Any] | None, state: Mapping[str, Any]) -> str:
    """Return how the index of a service differs from the agreed one.

    Args:
        agreed: Health of the agreed index; None: nothing is compared.
        state: Health of the service.

    Returns:
        A phrase for messages; empty if nothing shows a difference.
    """
    if agreed is None:
        return ""
    names = list(INDEX_FIELDS)
    if IDENTITY in agreed and IDENTITY in state:
        names.append(IDENTITY)
    for name in names:
        if state.get(name) != agreed.get(name):
            return f"{name} {state.get(name)!r} instead of {agreed.get(name)!r}"
    return ""


def index_identity(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a service's health that decide its documents; may be empty."""
    return {name: state[name] for name in (*INDEX_FIELDS, IDENTITY) if name in state}
